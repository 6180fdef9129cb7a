"""The control: Quora questions of which no two are marked as duplicates. Their curve rises, and nothing follows from that."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe_service.probe import run_probe
from probe_service.schemas import ProbeReport, ProbeRequest, VerdictKind
from probe_service.settings import Settings

SIZES = [4, 16, 32, 128]
"""Intervals reach 32, a twentieth of the rows that are encoded."""


@pytest.fixture(scope="module")
def control(labelled_corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> ProbeReport:
    folder = tmp_path_factory.mktemp("control")
    return run_probe(
        ProbeRequest.model_validate(
            {
                "encoder": "minilm",
                "batch_sizes": SIZES,
                "corpus": {"columns": {"text": "text"}, "where": {"source": "quora"}, "max_rows": 640},
            }
        ),
        labelled_corpora / "corpora" / "questions.jsonl.gz",
        folder / "work",
        settings=Settings(home=folder / "home"),
        job_id="control",
        name="questions.jsonl.gz",
    )


def test_without_labels_only_certain_pairs_fail(control):
    assert control.evidence.tier == "certain"
    assert control.corpus.rows_usable == 10_000
    certain = {point.batch_size: point.certain_share for point in control.curve}
    for verdict in control.advice.verdicts:
        if verdict.verdict is VerdictKind.FAIL:
            assert certain[verdict.batch_size].low > control.advice.budget
    # The sample holds no text twice, so here none fails at all; the worst case lets the small sizes pass.
    assert all(share.value == 0.0 for share in certain.values())
    kinds = {verdict.batch_size: verdict.verdict.value for verdict in control.advice.verdicts}
    assert kinds == {4: "pass", 16: "pass", 32: "inconclusive", 128: "inconclusive"}
    assert all(
        verdict.assumption for verdict in control.advice.verdicts if verdict.verdict is VerdictKind.PASS
    )


def test_the_worst_case_stands_beside_every_size(control):
    assert [point.batch_size for point in control.curve] == SIZES
    shares = [(point.false_negative_softmax_share, point.worst_case) for point in control.curve]
    for share, worst in shares:
        assert worst.value > share.value
        assert (worst.low is None) == (share.low is None)
        assert share.high == worst.high
    assert shares[-1][1].low is None
    assert control.evidence.worst_case_similarity == pytest.approx(0.31, abs=0.01)
    assert "2nd percentile" in control.evidence.worst_case_source


def test_the_similarity_curve_rises_all_the_same(control):
    rises = [point.top_k_mean.value for point in control.curve]
    assert rises == sorted(rises)
    assert rises[0] < 0.2
    assert rises[-1] > 0.5
