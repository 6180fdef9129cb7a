"""Figures that independent scripts gave for MiniLM on Banking77 (train split, intents as groups, T = .05)."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe_service.probe import run_probe
from probe_service.schemas import ProbeReport, ProbeRequest
from probe_service.settings import Settings

SHARE = {2: (0.014, 0.001), 16: (0.129, 0.001), 64: (0.31, 0.01), 256: (0.54, 0.01), 1024: (0.68, 0.01)}
TOP_K_MEAN = {16: (0.608, 0.001), 64: (0.836, 0.001), 256: (0.951, 0.001), 1024: (0.988, 0.001)}
ANY = {2: (0.014, 0.001), 16: (0.186, 0.001), 64: (0.574, 0.001), 256: (0.961, 0.001)}
COUNT = {16: (0.21, 0.01), 64: (0.86, 0.01), 256: (3.5, 0.1), 1024: (14.0, 0.1)}


@pytest.fixture(scope="module")
def banking77(labelled_corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> ProbeReport:
    folder = tmp_path_factory.mktemp("banking77")
    return run_probe(
        ProbeRequest.model_validate(
            {
                "encoder": "minilm",
                "batch_sizes": [2, 16, 64, 256, 1024],
                "corpus": {
                    "columns": {"text": "text", "group": "label"},
                    "where": {"split": "train"},
                    "max_rows": 20_000,
                },
            }
        ),
        labelled_corpora / "labels" / "banking77.jsonl.gz",
        folder / "work",
        settings=Settings(home=folder / "home"),
        job_id="banking77",
        name="banking77.jsonl.gz",
    )


def close(estimate, expected):
    """Within the last digit that the reference states, plus the run's own interval."""
    value, digit = expected
    return abs(estimate.value - value) <= digit + (estimate.high - estimate.low) / 2


@pytest.mark.timeout(900)
def test_reference_values(banking77):
    assert banking77.corpus.rows_usable == banking77.corpus.rows_encoded == 10_003
    points = {point.batch_size: point for point in banking77.curve}
    for size, expected in SHARE.items():
        assert close(points[size].false_negative_softmax_share, expected), (size, points[size])
    for size, expected in TOP_K_MEAN.items():
        assert close(points[size].top_k_mean, expected), (size, points[size].top_k_mean)
    for size, expected in ANY.items():
        assert close(points[size].anchors_with_false_negative, expected)
    for size, expected in COUNT.items():
        assert close(points[size].false_negatives_per_anchor, expected)


def test_the_masked_curve_rises_as_well(banking77):
    masked = [
        point.nulls.false_negatives_masked.value
        for point in banking77.curve
        if point.nulls.false_negatives_masked
    ]
    assert masked == sorted(masked)
    assert masked[-1] > 0.85


def test_the_safe_window_ends_between_16_and_64(banking77):
    n_max = banking77.advice.n_max
    assert 16 < n_max.value < 64
    verdicts = {v.batch_size: v.verdict.value for v in banking77.advice.verdicts}
    assert verdicts == {2: "pass", 16: "pass", 64: "fail", 256: "fail", 1024: "fail"}
