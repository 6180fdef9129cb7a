"""Histograms of all pairs against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from probe_service.estimate import Evidence
from probe_service.similarity import BIN_CENTRES, row_histograms
from tests.oracles import similarity_rows, unit_rows

THRESHOLDS = (0.2, 0.9)


def nearest_bin(similarity):
    return min(range(len(BIN_CENTRES)), key=lambda b: abs(BIN_CENTRES[b] - similarity))


@pytest.mark.parametrize("floor", [0.3, None])
@pytest.mark.parametrize("source_count", [None, 3, 700])
@pytest.mark.parametrize("paired", [False, True])
def test_histograms_against_loops(paired, source_count, floor):
    """With 700 sources a block holds two anchors."""
    rng = np.random.default_rng(5)
    n, block = 14, slice(3, 12)
    anchors = unit_rows(rng, n, 3)
    anchors[5] = anchors[4]
    candidates = unit_rows(rng, n, 3) if paired else None
    if candidates is not None:
        candidates[6] = -anchors[6]
    groups = ["a", "b", None, "a", "a", None, "b", "b", "c", "a", None, "b", "d", "a"]
    evidence = Evidence.from_keys(None, None, groups)
    sources = (
        None if source_count is None else np.append(rng.integers(0, source_count, n - 1), source_count - 1)
    )
    parts = list(
        row_histograms(
            anchors,
            candidates,
            block=block,
            thresholds=THRESHOLDS,
            known=lambda rows: evidence.known_pairs(np.arange(n)[None, :], rows),
            unjudged=evidence.unjudged_rows,
            worst_case_similarity=floor,
            sources=sources,
        )
    )
    assert [part.rows.start for part in parts] == (list(range(3, 12, 2)) if source_count == 700 else [3])
    s = similarity_rows(anchors, anchors if candidates is None else candidates)
    above = [0.0, 0.0]
    for part in parts:
        assert part.worst is not None
        for at, i in enumerate(range(part.rows.start, part.rows.stop)):
            expected = np.zeros((3, len(BIN_CENTRES)))
            by_source = np.zeros((source_count or 1, len(BIN_CENTRES)))
            known = {}
            for j in range(n):
                if j == i:
                    continue
                b = nearest_bin(s[i][j])
                same = groups[i] is not None and groups[i] == groups[j]
                unjudged = groups[i] is None or groups[j] is None
                expected[0, b] += 1
                expected[1, b] += same
                expected[2, b] += same or (unjudged and (floor is None or s[i][j] >= floor))
                by_source[0 if sources is None else sources[j], b] += 1
                for t, threshold in enumerate(THRESHOLDS):
                    above[t] += s[i][j] >= threshold
                if same:
                    known[j] = b
            np.testing.assert_array_equal(part.candidates[at], expected[0])
            np.testing.assert_array_equal(part.known[at], expected[1])
            np.testing.assert_array_equal(part.worst[at], expected[2])
            mine = part.known_anchor == i
            found = dict(zip(part.known_candidate[mine].tolist(), part.known_bin[mine].tolist(), strict=True))
            assert found == known
            if sources is None:
                assert part.by_source is None
            else:
                np.testing.assert_array_equal(part.by_source[at], by_source)
            if candidates is None:
                assert part.own is None
            else:
                assert part.own[at] == pytest.approx(s[i][i], abs=1e-6)
    assert np.sum([part.above for part in parts], axis=0).tolist() == above


def test_no_worst_case_where_all_is_judged():
    rows = unit_rows(np.random.default_rng(1), 4, 3)
    evidence = Evidence.from_keys(None, None, list("aabb"))
    (part,) = row_histograms(
        rows,
        None,
        block=slice(0, 4),
        thresholds=(),
        known=lambda block: evidence.known_pairs(np.arange(4)[None, :], block),
        unjudged=evidence.unjudged_rows,
        worst_case_similarity=None,
    )
    assert part.worst is None
    assert part.known.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert part.candidates.sum(axis=1).tolist() == [3, 3, 3, 3]
