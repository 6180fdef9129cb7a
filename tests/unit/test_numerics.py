"""Gradients in low precision, against DESIGN's table and a plain float64 loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from probe_service.losses.numerics import gradient_errors
from tests.oracles import cosine, unit_rows


def test_float32_against_a_plain_loop():
    rng = np.random.default_rng(0)
    anchors = unit_rows(rng, 12, 6)
    positives = anchors + 0.1 * unit_rows(rng, 12, 6)
    positives = (positives / np.linalg.norm(positives, axis=1, keepdims=True)).astype(np.float32)
    temperature = 0.2
    truth = np.zeros((12, 12))
    for i in range(12):
        x = [math.exp(cosine(anchors[i], positives[j]) / temperature) for j in range(12)]
        for j in range(12):
            truth[i, j] = x[j] / math.fsum(x) - (i == j)
    logits = torch.from_numpy(anchors) @ torch.from_numpy(positives).T / temperature
    half = torch.softmax(logits.to(torch.bfloat16), dim=1) - torch.eye(12, dtype=torch.bfloat16)
    expected = np.linalg.norm(half.double().numpy() - truth) / np.linalg.norm(truth)
    found = gradient_errors(torch.from_numpy(anchors), torch.from_numpy(positives), temperature=temperature)
    assert found["bfloat16"].infonce == pytest.approx(expected, rel=0.02)
    assert found["float32"].infonce < 1e-5


def test_float16_loses_infonce_but_not_flatnce_where_positives_are_far_above():
    """64 orthogonal anchors with themselves as positives at T = .05: ξ = 63·exp(−20) ≈ 1.3e-7.

    The positive's gradient is ξ/(1 + ξ), which float16 rounds to 0: half of the squared gradient is lost or more.
    """
    eye = torch.eye(64)
    found = gradient_errors(eye, eye, temperature=0.05)
    assert found["float16"].infonce > 0.5
    assert found["float16"].flatnce < 1e-2
    assert found["float16"].zero_loss_share == 1.0
    assert found["float32"].zero_loss_share in (0.0, 1.0)
