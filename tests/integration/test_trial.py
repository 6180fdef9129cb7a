"""Trials of heads at the command line: tables, predicted shares, what is held out, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from probe_service.cli import _run
from probe_service.schemas import TrialReport

ROWS, GROUPS, DIMENSION = 600, 20, 12
SHORT = "--batch-sizes 4,64 --losses infonce,oracle_masking --steps 40 --num-seeds 3 --learning-rates 0.03 --recall-at 3"
QUICK = SHORT.split()


@pytest.fixture(scope="module")
def world():
    """(group of each row, unit vectors): rows of one group lie close to each other, among much noise."""
    rng = np.random.default_rng(4)
    group = rng.permutation(np.repeat(np.arange(GROUPS), ROWS // GROUPS))
    centres = np.concatenate(
        [rng.standard_normal((GROUPS, DIMENSION)), np.zeros((GROUPS, DIMENSION))], axis=1
    )
    vectors = centres[group] + rng.standard_normal((ROWS, 2 * DIMENSION))
    return group, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).round(5)


@pytest.fixture(scope="module")
def corpus(world, tmp_path_factory):
    group, vectors = world
    file = tmp_path_factory.mktemp("trial") / "rows.jsonl"
    with file.open("w") as lines:
        for row in range(ROWS):
            fields = {
                "embedding": vectors[row].tolist(),
                "group": f"g{group[row]}",
                "split": "train" if row % 4 else "test",
            }
            lines.write(json.dumps(fields) + "\n")
    return str(file)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBE_HOME", str(tmp_path / "home"))


SPLIT = ["--where", "split=train", "--held-out-where", "split=test"]


def report_of(capsys, *arguments) -> TrialReport:
    assert _run(["trial", *arguments, "--json", "-"]) == 0
    return TrialReport.model_validate_json(capsys.readouterr().out)


def share_of_batches(group, vectors, size):
    """S(N) from its definition, on random batches, and its standard error."""
    rng = np.random.default_rng(1)
    shares = []
    for _ in range(600):
        rows = rng.choice(len(vectors), size, replace=False)
        weights = np.exp(vectors[rows] @ vectors[rows].T / 0.05)
        np.fill_diagonal(weights, 0.0)
        same = group[rows][:, None] == group[rows][None, :]
        shares.append(((weights * same).sum(axis=1) / weights.sum(axis=1)).mean())
    return np.mean(shares), np.std(shares) / len(shares) ** 0.5


def test_masking_gains_where_the_probe_predicts_harm(corpus, world, capsys):
    report = report_of(capsys, corpus, *SPLIT, *QUICK)
    group, vectors = world
    train = np.arange(ROWS) % 4 > 0
    assert report.complete
    assert report.num_cells == len(report.cells) == 2 * 2 * 3
    assert (report.training_rows, report.training_rows_left_out) == (train.sum(), 0)
    assert (report.held_out.rows, report.held_out.queries) == ((~train).sum(), (~train).sum())
    assert report.held_out.description == "rows with split = test"
    figures = {(row.loss, row.batch_size): row for row in report.table}
    for (loss, size), figure in figures.items():
        scores = [each.scores["map"] for each in report.cells if (each.loss, each.batch_size) == (loss, size)]
        assert len(scores) == figure.num_seeds == 3
        assert figure.scores["map"].value == pytest.approx(np.mean(scores))
    small, large = report.masking
    for gain, size in ((small, 4), (large, 64)):
        mean, error = share_of_batches(group[train], vectors[train], size)
        assert abs(gain.predicted_share.value - mean) < 4 * error + 2e-3
    assert large.predicted_share.value > small.predicted_share.value + 0.1
    assert large.gain.value > small.gain.value
    assert large.gain.low > 0
    assert figures["infonce", 64].scores["map"].value > report.before["map"]
    curves = {(each.loss, each.batch_size, each.seed): each.curve for each in report.cells}
    assert all([point.step for point in curve] == [8, 16, 24, 32, 40] for curve in curves.values())


def test_the_same_seed_gives_the_same_table_and_another_another(corpus, capsys):
    quick = [*SPLIT, *QUICK, "--num-seeds", "2", "--batch-sizes", "8", "--steps", "10"]
    first, again = report_of(capsys, corpus, *quick), report_of(capsys, corpus, *quick)
    assert first == again
    other = report_of(capsys, corpus, *quick, "--seed", "1")
    assert other.table != first.table
    assert len({json.dumps(cell.scores) for cell in first.cells}) == len(first.cells)


def test_what_is_printed(corpus, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "report.json"
    command = [
        "trial",
        corpus,
        *QUICK,
        "--num-seeds",
        "2",
        "--steps",
        "5",
        "--learning-rates",
        "0.003,0.01,0.03",
    ]
    assert _run([*command, "--out", str(out), "--json", str(file)]) == 0
    printed = capsys.readouterr()
    report = TrialReport.model_validate_json(file.read_text("utf-8"))
    assert "After 1 of 2 seeds:" in printed.err
    assert "After 2" not in printed.err
    table = [line.split() for line in printed.out.splitlines()]
    head = table.index(["N", "infonce", "oracle_masking"])
    shown = {row[0]: row[1::3] for row in table[head + 1 : head + 3]}
    assert set(shown) == {"4", "64"}
    for figure in report.table:
        column = ["infonce", "oracle_masking"].index(figure.loss)
        assert float(shown[str(figure.batch_size)][column]) == pytest.approx(
            figure.scores["map"].value, abs=6e-4
        )
    assert "Every cell takes 5 steps" in printed.out
    assert "rows of every group drawn at random with about 0.2 of the rows" in printed.out
    assert len(report.tuned) == 2 * 2
    for tuned in report.tuned:
        assert set(tuned.scores) == {"0.003", "0.01", "0.03"}
        assert tuned.scores[f"{tuned.chosen:g}"] == max(tuned.scores.values())
        cells = [c for c in report.cells if (c.loss, c.batch_size) == (tuned.loss, tuned.batch_size)]
        assert {cell.learning_rate for cell in cells} == {tuned.chosen}
    assert not (out / "scratch").exists()
    # The same again trains nothing, and another request does not overwrite it.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.json")}
    assert report_of(capsys, *command[1:], "--out", str(out)) == report
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.json")} == before
    assert _run([*command, "--seed", "9", "--out", str(out)]) == 2
    assert "[trial_folder_in_use]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--batch-sizes", "4,1024"], "batch_size_too_large"),
        (["--held-out-where", "split=nowhere"], "corpus_no_usable_rows"),
        (["--losses", "infonce,hinge"], "request_invalid"),
        (["--losses", "gs_infonce:-1"], "request_invalid"),
        (["--steps", "5", "--examples", "5"], "request_invalid"),
        (["--group-column", "split", "--where", "split=train"], "trial_nothing_held_out"),
    ],
)
def test_what_cannot_be_tried(corpus, capsys, arguments, code):
    assert _run(["trial", corpus, *arguments]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_rows_without_positives_and_missing_files(tmp_path, capsys):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32))
    assert _run(["trial", str(tmp_path / "rows.npy")]) == 2
    assert "[trial_needs_positives]" in capsys.readouterr().err
    assert _run(["trial", str(tmp_path / "missing.jsonl")]) == 2
    assert _run(["trial"]) == 2
    assert "[trial_needs_corpus]" in capsys.readouterr().err


def test_images_need_no_corpus(corpus, capsys):
    quick = [
        "--mode",
        "images",
        "--batch-sizes",
        "8",
        "--steps",
        "3",
        "--num-seeds",
        "2",
        "--learning-rates",
        "0.003",
    ]
    report = report_of(capsys, *quick)
    assert [(row.loss, row.num_seeds) for row in report.table] == [("infonce", 2), ("flatnce", 2)]
    assert report.corpus is None
    assert report == report_of(capsys, *quick)
    assert _run(["trial", corpus, *quick]) == 2
    assert "[trial_takes_no_corpus]" in capsys.readouterr().err


def test_a_killed_trial_goes_on_with_the_same_command(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [
        "trial",
        corpus,
        *SPLIT,
        *QUICK,
        "--batch-sizes",
        "4,16",
        "--steps",
        "120",
        "--num-seeds",
        "2",
    ]
    command = [sys.executable, "-m", "probe_service.cli", *arguments, "--out", str(out)]
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(finished := list(out.glob("cells/*.json"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    finished = list(out.glob("cells/*.json"))
    assert 2 <= len(finished) < 8
    partial = TrialReport.model_validate_json((out / "report.json").read_text("utf-8"))
    assert not partial.complete
    assert 1 <= len(partial.cells) <= len(finished)
    written = {file: file.stat().st_mtime_ns for file in finished}
    whole = report_of(capsys, *arguments[1:], "--out", str(out))
    assert whole.complete
    assert {file: file.stat().st_mtime_ns for file in finished} == written, (
        "a finished cell was trained again"
    )
    assert whole == report_of(capsys, *arguments[1:]), "not what an undisturbed trial gives"
