"""The command line as a person or a CI job calls it: exit codes, streams, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from probe_service.cli import _run
from tests.oracles import unit_rows


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBE_HOME", str(tmp_path / "home"))
    return tmp_path


def vectors(file, rows, groups=None):
    with file.open("w") as lines:
        for i, row in enumerate(rows):
            lines.write(
                json.dumps({"embedding": [float(x) for x in row], "group": groups[i] if groups else f"g{i}"})
                + "\n"
            )
    return str(file)


EMBEDDINGS = ["--kind", "embeddings", "--embedding-column", "embedding"]
GROUPED = [*EMBEDDINGS, "--group-column", "group"]


@pytest.fixture
def clean(home):
    return vectors(home / "clean.jsonl", unit_rows(np.random.default_rng(0), 200, 16))


@pytest.fixture
def unlabelled(home):
    np.save(home / "rows.npy", unit_rows(np.random.default_rng(0), 200, 16))
    return str(home / "rows.npy")


@pytest.fixture
def planted(home):
    """200 rows of which each stands four times: copies under the same group."""
    rows = np.tile(unit_rows(np.random.default_rng(1), 50, 16), (4, 1))
    return vectors(home / "planted.jsonl", rows, [f"g{i % 50}" for i in range(200)])


def test_check_passes_a_clean_corpus(clean, capsys):
    assert _run(["check", clean, "--batch-size", "64", *GROUPED]) == 0
    assert capsys.readouterr().out.startswith("pass: at a batch size of 64")


def test_check_fails_a_planted_corpus_and_lists_rows_to_drop(planted, capsys):
    assert _run(["check", planted, "--batch-size", "128", *GROUPED]) == 1
    said = capsys.readouterr().out
    assert said.startswith("fail: ")
    assert "150 rows repeat an earlier one" in said
    # Row 51 is the first copy of row 1.
    assert "[51, 52, 53" in said


@pytest.mark.parametrize(("policy", "status"), [([], 3), (["exit3"], 3), (["pass"], 0), (["fail"], 1)])
def test_check_follows_the_policy_where_evidence_does_not_decide(unlabelled, policy, status):
    flags = ["--on-inconclusive", *policy] if policy else []
    assert _run(["check", unlabelled, "--batch-size", "64", *flags]) == status


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", "{clean}", "--batch-size", "201"], "batch_size_too_large"),
        (["check", "{clean}", "--batch-size", "1"], "batch_size_too_small"),
        (["check", "{clean}", "--batch-size", "8", "--temperature", "0"], "temperature_not_positive"),
        (["check", "{clean}", "--batch-size", "8", "--text-column", "nope"], "corpus_column_missing"),
        (["check", "missing.jsonl", "--batch-size", "8"], "no file"),
        (["check", "{clean}", "--batch-size", "x"], "--batch-size"),
        (["check", "{clean}"], "--batch-size"),
        (["run", "{clean}", "--chart", "chart.gif"], ".svg or .png"),
        (["run", "{clean}", "--where", "split"], "COLUMN=VALUE"),
        (["run", "{clean}", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_input_exits_2_and_says_why(clean, capsys, arguments, code):
    arguments = [clean if a == "{clean}" else a for a in arguments]
    if "--text-column" not in arguments:
        arguments += EMBEDDINGS if arguments[0] == "run" else []
    assert _run(arguments) == 2
    assert code in capsys.readouterr().err


def test_an_unknown_encoder_is_bad_usage_and_an_unreachable_one_is_not(home, capsys):
    texts = home / "texts.txt"
    texts.write_text("one text\nanother text\nthird text\n")
    assert _run(["run", str(texts), "--encoder", "no-such-encoder"]) == 2
    assert "encoder_unknown" in capsys.readouterr().err
    assert _run(["run", str(texts), "--encoder", "simcse-bert-base"]) == 4
    assert "encoder_unavailable" in capsys.readouterr().err


def test_a_service_that_is_not_there_exits_4(clean, capsys):
    assert _run(["check", clean, "--batch-size", "8", *GROUPED, "--url", "http://127.0.0.1:9"]) == 4
    assert "service_unreachable" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_exits_4(clean, home, monkeypatch, capsys):
    blocked = home / "file"
    blocked.write_text("not a folder")
    assert _run(["run", clean, *GROUPED, "--batch-sizes", "8", "--json", str(blocked / "x.json")]) == 4
    assert "storage_failed" in capsys.readouterr().err


def test_run_writes_report_html_and_charts_and_json_alone_on_stdout(planted, home, capsys):
    arguments = [
        "run", planted, "--batch-sizes", "16,64", "--num-repeats", "50", "--top-k", "4",
        "--temperature", "0.05", "--seed", "0", *GROUPED, "--max-rows", "200", "--json", "-",
        "--html", str(home / "r.html"), "--chart", str(home / "c.svg"),
    ]  # fmt: skip
    assert _run(arguments) == 0
    streams = capsys.readouterr()
    report = json.loads(streams.out)
    assert [point["batch_size"] for point in report["curve"]] == [16, 64]
    assert streams.err == ""
    assert (home / "r.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in (home / "c.svg").read_text()
    assert _run([*arguments[:-1], str(home / "c.png")]) == 0
    assert (home / "c.png").read_bytes().startswith(b"\x89PNG")


def test_run_probes_as_training_draws_batches(planted, capsys):
    training = ["--sampler", "sequential", "--world-size", "2", "--gather"]
    assert _run(["run", planted, *GROUPED, *training, "--batch-sizes", "50,100", "--num-repeats", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sampler sequential" in said
    # In file order the copies stand 50 rows apart: none meet within 50 rows, all pairwise within 100.
    assert "a device on 2 devices" in said
    assert "50 0.000 0.000 to 0.000" in said


def test_environment_twins(planted, home, monkeypatch, capsys):
    monkeypatch.setenv("PROBE_BATCH_SIZES", "8,32")
    monkeypatch.setenv("PROBE_KIND", "embeddings")
    monkeypatch.setenv("PROBE_EMBEDDING_COLUMN", "embedding")
    assert _run(["run", planted, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["batch_sizes"] == [8, 32]


def test_through_a_service(service, planted, capsys):
    arguments = [
        "check",
        planted,
        "--batch-size",
        "128",
        *GROUPED,
        "--url",
        f"http://127.0.0.1:{service.port}",
    ]
    assert _run(arguments) == 1
    assert capsys.readouterr().out.startswith("fail: ")
    assert (
        _run(["check", planted, "--batch-size", "999", *GROUPED, "--url", f"http://127.0.0.1:{service.port}"])
        == 2
    )
    assert "batch_size_too_large" in capsys.readouterr().err


def test_a_service_lists_the_pairs_that_this_process_lists(service, planted, home, capsys):
    arguments = ["run", planted, "--batch-sizes", "8", *GROUPED, "--pairs-above", "0.5", "--json", "-"]
    reports = []
    for name, place in (("here", []), ("there", ["--url", f"http://127.0.0.1:{service.port}"])):
        assert _run([*arguments, "--pairs", str(home / name), *place]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert (home / "here").read_bytes() == (home / "there").read_bytes()
    assert reports[0]["pair_search"] == reports[1]["pair_search"]
    assert len((home / "here").read_text().splitlines()) == reports[0]["pair_search"]["pairs"] >= 300


def test_known_encoders_are_listed(capsys):
    assert _run(["encoders"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "cls_dense_tanh" in listed["simcse-roberta-large"]
    assert " mean " in listed["minilm"]


def test_help_is_light():
    script = (
        "import sys; from probe_service.cli import _run; _run(['run', '--help']); "
        "print(*[m for m in ('torch', 'numpy', 'fastapi', 'pyarrow', 'altair') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert "--batch-sizes" in done.stdout


@pytest.mark.parametrize(("extra", "status"), [(GROUPED, 1), (["--kind", "embeddings", "--seed", "x"], 2)])
def test_exit_status_of_the_real_process(planted, home, extra, status):
    done = subprocess.run(
        [sys.executable, "-m", "probe_service.cli", "check", planted, "--batch-size", "128", *extra],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == status, done.stderr
