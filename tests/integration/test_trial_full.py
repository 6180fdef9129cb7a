"""Trials of a whole encoder with a tiny checkpoint: unsup-SimCSE and pairs, STS, and a process that is killed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from probe_service.cli import _run
from probe_service.schemas import TrialReport
from tests.unit.encode.checkpoints import save_sentence_model

WORDS = ["the", "a", "cat", "sat", "on", "mat", "dogs", "run", "in", "park", "words", "and", "rest"]
TASKS = ["sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick"]
QUICK = "--mode full --batch-sizes 8 --steps 10 --num-seeds 1 --learning-rates 0.003".split()  # noqa: SIM905

MARK = 0.125

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


def sentence(rng, length=5) -> str:
    return " ".join(rng.choice(WORDS, length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random BERT, sentences, pairs with groups, and STS tasks in which shared words make pairs alike."""
    folder = tmp_path_factory.mktemp("full")
    save_sentence_model(folder)
    rng = np.random.default_rng(0)
    with (folder / "sentences.jsonl").open("w") as lines:
        lines.writelines(json.dumps({"text": sentence(rng)}) + "\n" for _ in range(64))
    with (folder / "pairs.jsonl").open("w") as lines, (folder / "tuples.jsonl").open("w") as triples:
        for row in range(80):
            text = sentence(rng)
            pair = {
                "anchor": text,
                "positive": " ".join(rng.permutation(text.split())),
                "group": f"g{row % 30}",
            }
            lines.write(json.dumps(pair) + "\n")
            triples.write(json.dumps(pair | {"negative": sentence(rng)}) + "\n")
    (folder / "sts").mkdir()
    for name in TASKS:
        with gzip.open(folder / "sts" / f"{name}.jsonl.gz", "wt") as lines:
            for split in ["test"] * 12 + ["dev"] * 12:
                first, second = sentence(rng), sentence(rng)
                shared = len(set(first.split()) & set(second.split()))
                lines.write(
                    json.dumps({"split": split, "score": shared, "sentence1": first, "sentence2": second})
                    + "\n"
                )
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PROBE_DEVICE", "cpu")


def command(folder, corpus, *arguments) -> list[str]:
    return ["trial", str(folder / corpus), *QUICK, "--encoder", str(folder / "model"), *arguments]


def whole_states(out) -> dict[int, Path]:
    """The last file of each checkpoint that is written to its end, by the step."""
    found = {}
    for state in out.glob("scratch/runs/*/checkpoint-*/trainer_state.json"):
        with contextlib.suppress(ValueError, FileNotFoundError):
            json.loads(state.read_text("utf-8"))
            found[int(state.parent.name.split("-")[1])] = state
    return found


def report_of(capsys, arguments) -> TrialReport:
    assert _run([*arguments, "--json", "-"]) == 0
    return TrialReport.model_validate_json(capsys.readouterr().out)


def test_sentences_with_dropout_are_judged_by_sts(folder, capsys):
    losses = ["--losses", "infonce,gs_infonce,flatnce"]
    arguments = command(folder, "sentences.jsonl", "--sts", str(folder / "sts"), *losses)
    report = report_of(capsys, arguments)
    assert [row.loss for row in report.table] == ["infonce", "gs_infonce", "flatnce"]
    for scores in [report.before, *(cell.scores for cell in report.cells)]:
        assert list(scores) == [*TASKS, "sts_average"]
        assert scores["sts_average"] == pytest.approx(np.mean([round(scores[name], 4) for name in TASKS]))
    assert report.training_rows == 64
    assert report.held_out.rows == 0
    for cell in report.cells:
        assert [point.step for point in cell.curve] == [2, 4, 6, 8, 10]
        assert cell.scores != report.before
    assert len({json.dumps(cell.scores) for cell in report.cells}) == 3
    assert "at most 32 tokens" in " ".join(report.protocol)
    assert report_of(capsys, arguments) == report


def test_pairs_are_judged_by_held_out_pairs(folder, capsys):
    arguments = command(
        folder, "pairs.jsonl", "--losses", "infonce,oracle_masking,gs_infonce_control", "--recall-at", "3"
    )
    report = report_of(capsys, arguments)
    assert report.metric == "map"
    assert set(report.before) == {"map", "recall_at_3", "accuracy"}
    assert report.held_out.rows + report.training_rows < 80, "pairs to choose checkpoints by are kept apart"
    assert len(report.masking) == 1
    curve = report.cells[0].curve
    assert curve[-1].loss < curve[0].loss
    both = report_of(capsys, [*arguments, "--sts", str(folder / "sts"), "--losses", "infonce"])
    assert both.metric == "sts_average"
    assert set(both.before) == {*TASKS, "sts_average", "map", "recall_at_3", "accuracy"}
    assert both.training_rows + both.held_out.rows == 80


def test_a_head_learns_from_pairs(folder, capsys):
    arguments = command(
        folder, "pairs.jsonl", "--mode", "head", "--losses", "infonce,oracle_masking", "--num-seeds", "2"
    )
    report = report_of(capsys, arguments)
    assert report.held_out.description == "pairs drawn at random with about 0.2 of the rows"
    assert report.training_rows + report.held_out.rows == 80
    assert report.masking[0].predicted_share.value > 0
    assert report.warnings == []
    tuples = report_of(capsys, [*arguments[:1], str(folder / "tuples.jsonl"), *arguments[2:]])
    assert tuples.table == report.table
    assert [warning.code for warning in tuples.warnings] == ["hard_negatives_unused"]


def test_what_a_whole_encoder_needs(folder, tmp_path, capsys):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32))
    for arguments, code in (
        (command(folder, "sentences.jsonl"), "trial_needs_sts"),
        (["trial", str(tmp_path / "rows.npy"), *QUICK], "trial_needs_texts"),
        (
            [*command(folder, "pairs.jsonl"), "--encoder", "openai:m@http://localhost:1/v1"],
            "encoder_not_trainable",
        ),
        ([*command(folder, "pairs.jsonl"), "--batch-sizes", "64"], "batch_size_too_large"),
    ):
        assert _run(arguments) == (4 if code.startswith("encoder") else 2)
        assert f"[{code}]" in capsys.readouterr().err


def test_a_killed_run_goes_on_from_its_checkpoint(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = command(
        folder, "sentences.jsonl", "--sts", str(folder / "sts"), "--losses", "infonce", "--steps", "60"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "probe_service.cli", *arguments, "--out", str(out)],
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 90
    while not whole_states(out):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(out.glob("cells/*.json"))
    states = whole_states(out)
    reached = max(states)
    assert 12 <= reached < 60
    # What was cut off in the middle of being written is no checkpoint.
    broken = states[reached].parents[1] / "checkpoint-59"
    broken.mkdir()
    (broken / "trainer_state.json").write_text("{")
    # A mark in what the first process wrote down: whoever begins anew does not have it.
    newest = states[reached]
    state = json.loads(newest.read_text("utf-8"))
    next(entry for entry in state["log_history"] if "eval_dev" in entry)["eval_dev"] = MARK
    newest.write_text(json.dumps(state), "utf-8")

    resumed = report_of(capsys, [*arguments, "--out", str(out)])
    undisturbed = report_of(capsys, arguments)
    (cell,), (expected,) = resumed.cells, undisturbed.cells
    assert cell.curve[0].score == MARK
    assert cell.curve[1:] == expected.curve[1:]
    assert cell.scores == expected.scores
    assert not (out / "scratch").exists()
