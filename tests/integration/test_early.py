"""A probe while its rows are still being encoded: what the first ones say, and when they are enough."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pytest

from probe_service import early as early_module
from probe_service.probe import probe
from probe_service.settings import Settings
from tests.unit.encode.checkpoints import save_sentence_model

ROWS = 6000
WORDS = "the a cat sat on mat dogs run in park words and rest".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sentences of a tiny random BERT's words, each with the group of its first two words: 13² meanings."""
    folder = tmp_path_factory.mktemp("early")
    save_sentence_model(folder)
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as lines:
        for row in range(ROWS):
            words = rng.choice(WORDS, 8)
            lines.write(json.dumps({"text": f"{' '.join(words)} {row}", "group": " ".join(words[:2])}) + "\n")
    return folder


def run(folder, home, **request):
    seen = []

    def note(progress):
        shown = progress.curve_rows, [point.batch_size for point in progress.curve]
        if progress.curve and (not seen or seen[-1][:2] != shown):
            seen.append((*shown, progress.curve, progress.fraction))

    report = probe(
        folder / "rows.jsonl",
        settings=Settings(home=home, device="cpu"),
        on_progress=note,
        encoder=str(folder / "model"),
        **request,
    )
    return report, seen


def vectors_stored(home) -> int:
    (file,) = (home / "vectors").glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        return connection.execute("SELECT count(*) FROM vectors").fetchone()[0]


def test_the_first_rows_tell_what_all_rows_will(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(early_module, "_WORTH_A_LOOK", 0.0)  # this encoder takes no time
    report, seen = run(corpus, tmp_path / "home", batch_sizes=(8, 16, 32, 64), corpus={"max_rows": ROWS})
    early = [(rows, sizes, curve) for rows, sizes, curve, _ in seen if rows is not None]
    # Sizes up to a twentieth of the rows have intervals.
    assert [(rows, sizes) for rows, sizes, _ in early] == [
        (512, [8, 16]),
        (2048, [8, 16, 32, 64]),
    ]
    assert report.sampling.stopped is None
    assert report.corpus.rows_encoded == ROWS
    truth = {point.batch_size: point for point in report.curve}
    held = widths = 0
    for _, _, curve in early:
        for point in curve:
            for name in ("false_negative_softmax_share", "top_k_mean"):
                estimate, true = getattr(point, name), getattr(truth[point.batch_size], name)
                held += estimate.low <= true.value <= estimate.high
                widths += 1
    assert held >= widths - 2, "95% intervals of correlated looks"
    # Where the vectors are there already, nobody waits for them, and there is nothing to show meanwhile.
    monkeypatch.undo()
    again, seen_again = run(corpus, tmp_path / "home", batch_sizes=(8, 16, 32, 64), corpus={"max_rows": ROWS})
    assert all(rows is None for rows, *_ in seen_again)
    assert again.curve == report.curve
    # The finished report does not depend on having been watched: each point is the last that was told.
    assert [curve for rows, _, curve, _ in seen if rows is None][-1] == report.curve


def test_encoding_stops_at_the_width_that_was_asked_for(corpus, tmp_path):
    whole, _ = run(corpus, tmp_path / "whole", batch_sizes=(8, 32), corpus={"max_rows": ROWS})
    report, seen = run(corpus, tmp_path / "home", batch_sizes=(8, 32), target_width=0.06)
    stopped = report.sampling.stopped
    assert stopped.reason == "target_width"
    assert stopped.widest_interval <= 0.06
    last_rows, _, last, _ = [look for look in seen if look[0] is not None][-1]
    widths = [
        estimate.high - estimate.low
        for point in last
        for estimate in (point.false_negative_softmax_share, point.top_k_mean)
    ]
    assert stopped.widest_interval == pytest.approx(max(widths))
    before = [look[2] for look in seen if look[0] is not None][:-1]
    assert all(
        len(curve) < 2
        or max(
            estimate.high - estimate.low
            for point in curve
            for estimate in (point.false_negative_softmax_share, point.top_k_mean)
        )
        > 0.06
        for curve in before
    )
    assert report.corpus.rows_encoded == last_rows == ROWS - stopped.rows_left_out
    assert last_rows < ROWS
    # What was left out was not encoded; the same-meaning pairs of the worst case are not needed here.
    assert vectors_stored(tmp_path / "home") == last_rows
    for point, true in zip(report.curve, whole.curve, strict=True):
        share = point.false_negative_softmax_share
        assert share.low <= true.false_negative_softmax_share.value <= share.high
        assert share.low < share.high, "a sample of the rows leaves something open"


def test_encoding_stops_when_time_is_short_but_never_below_the_largest_batch(corpus, tmp_path):
    report, _ = run(corpus, tmp_path / "home", batch_sizes=(8, 600), max_seconds=0.001)
    assert report.sampling.stopped.reason == "max_seconds"
    assert report.corpus.rows_encoded == 1024
    assert report.sampling.stopped.rows_left_out == ROWS - 1024
    shares = {point.batch_size: point.false_negative_softmax_share for point in report.curve}
    assert shares[8].low is not None
    assert shares[600].low is None, "a thousand rows cannot tell how batches of 600 vary"


def test_time_enough_leaves_nothing_out(corpus, tmp_path):
    report, _ = run(corpus, tmp_path / "home", batch_sizes=(8,), max_seconds=3600, corpus={"max_rows": ROWS})
    assert report.sampling.stopped is None
    assert report.corpus.rows_encoded == ROWS
