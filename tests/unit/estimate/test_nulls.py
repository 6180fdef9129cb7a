from __future__ import annotations

import numpy as np
import pytest
import torch

from probe_service.estimate import MatchedGaussian, isotropic
from probe_service.similarity import batch_top_k


@pytest.mark.parametrize(("size", "expected"), [(16, 0.07), (64, 0.10), (256, 0.12)])
def test_random_directions_give_the_footnotes_curve(size, expected):
    """Directions at random in 1024 dimensions: .07, .10, .12 at N = 16, 64, 256 (mean of the four best pairs)."""
    rng = np.random.default_rng(1)
    tops = [
        batch_top_k(torch.from_numpy(isotropic(rng, size, 1024))[None], None, k=4).mean() for _ in range(20)
    ]
    assert np.mean(tops) == pytest.approx(expected, abs=0.006)


def test_matched_gaussian_has_the_corpus_mean_and_covariance():
    rng = np.random.default_rng(2)
    mixing = rng.standard_normal((5, 5))
    corpus = (rng.standard_normal((4000, 5)) @ mixing + [3.0, 0, 0, 1.0, 0]).astype(np.float32)
    fitted = MatchedGaussian.fit(corpus)
    np.testing.assert_allclose(fitted.mean, corpus.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(fitted.factor @ fitted.factor.T, np.cov(corpus.T), rtol=1e-3, atol=1e-3)
    drawn = fitted.draw(rng, 50_000)
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), 1.0, atol=1e-6)
    unit = corpus / np.linalg.norm(corpus, axis=1, keepdims=True)
    np.testing.assert_allclose(drawn.mean(axis=0), unit.mean(axis=0), atol=0.02)


def test_a_singular_covariance_is_drawn_within_its_span():
    corpus = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]], dtype=np.float32)
    drawn = MatchedGaussian.fit(corpus).draw(np.random.default_rng(3), 100)
    assert np.abs(drawn[:, 2]).max() < 1e-6
