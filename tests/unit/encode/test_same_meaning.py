"""The similarity floor: bundled pairs, and their 2nd percentile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from probe_service.encode import VectorCache, load_encoder, same_meaning_similarity_floor
from probe_service.encode.same_meaning import same_meaning_pairs
from probe_service.settings import Settings
from tests.unit.encode.test_cache import WIDTH, HashEncoder, loaded_hash_encoder


def test_pairs_are_two_hundred_different_texts() -> None:
    pairs = same_meaning_pairs()

    assert len(pairs) == 200
    assert len({text for pair in pairs for text in pair}) == 400


def test_floor_is_the_second_percentile_of_the_pairs(tmp_path: Path) -> None:
    loaded, _ = loaded_hash_encoder()

    floor = same_meaning_similarity_floor(loaded, VectorCache(tmp_path, "f", WIDTH))

    cosines = sorted(
        float(np.dot(*HashEncoder().encode(list(pair)).vectors.astype(np.float64)))
        for pair in same_meaning_pairs()
    )
    # Position .02 × 199 = 3.98 between the fourth and the fifth smallest.
    assert floor.similarity == pytest.approx(cosines[3] + 0.98 * (cosines[4] - cosines[3]), abs=1e-6)
    assert "200 bundled pairs" in floor.source


def test_minilm_floor_lies_above_unrelated_texts(tmp_path: Path) -> None:
    minilm = load_encoder("minilm", Settings(device="cpu"))
    cache = VectorCache(tmp_path, minilm.info.fingerprint, minilm.info.dimension)

    floor = same_meaning_similarity_floor(minilm, cache)

    assert floor.similarity == pytest.approx(0.313, abs=2e-3)
    vectors = cache.get([pair[0] for pair in same_meaning_pairs()]).encoded.vectors
    unrelated = (vectors @ vectors.T)[np.triu_indices(200, 1)]
    assert (unrelated >= floor.similarity).mean() < 0.02
