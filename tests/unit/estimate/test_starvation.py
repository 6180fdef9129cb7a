from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from probe_service.estimate.starvation import starvation_floor
from probe_service.losses.numerics import gradient_errors
from probe_service.schemas import Estimate, GradientError

SIZES = [8, 16, 32, 64]
ZERO = Estimate(value=0.0, low=0.0, high=0.0, method="by hand")


def estimate(value, high=None):
    if high is None:
        return Estimate(value=value, low=None, high=None, method="no interval here")
    return Estimate(value=value, low=0.0, high=high, method="by hand")


def column(infonce, flatnce=None):
    flatnce = [ZERO] * len(infonce) if flatnce is None else flatnce
    return [
        GradientError(infonce=one, flatnce=other, zero_loss_share=ZERO)
        for one, other in zip(infonce, flatnce, strict=True)
    ]


def floor(errors, dtype="bfloat16", sizes=SIZES):
    return starvation_floor(
        sizes,
        errors,
        dtype=dtype,
        temperature=0.05,
        positive_similarity=0.8,
        positives="given",
    )


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.2), st.booleans()), min_size=1, max_size=7))
def test_smallest_size_from_which_on_all_are_within(drawn):
    sizes = [2 * (place + 1) for place in range(len(drawn))]
    limits = [value + more if has_interval else value for value, more, has_interval in drawn]
    errors = column(
        [estimate(value, value + more if has_interval else None) for value, more, has_interval in drawn]
    )
    candidates = [
        size
        for size in sizes
        if all(limit <= 0.1 for s, limit in zip(sizes, limits, strict=True) if s >= size)
    ]
    found = floor({"bfloat16": errors}, sizes=sizes)
    assert found.batch_size == min(candidates, default=None)
    assert (found.remedies == []) == (found.batch_size == sizes[0])
    assert (found.tested_from, found.tested_up_to) == (sizes[0], sizes[-1])


def test_a_floor_in_words():
    # 16 is within, but 32 is not: what counts is 64 alone.
    bfloat16 = column([estimate(e, e) for e in (0.9, 0.05, 0.3, 0.08)], [estimate(0.02, 0.03)] * 4)
    float32 = column([estimate(0.5, 0.6), *[estimate(0.01, 0.02)] * 3])
    found = floor({"bfloat16": bfloat16, "float32": float32})
    assert found.batch_size == 64
    assert found.reason == (
        "the relative error of the InfoNCE gradient in bfloat16 is at most 0.08 at 64 rows, the largest size measured,"
        " and up to 0.3 at 32; at most 0.1 is asked for"
    )
    assert found.remedies == [
        "FlatNCE in bfloat16 would keep the error within 0.1 at every measured size.",
        "InfoNCE with the logits in float32, the model as it is, would keep the error within 0.1 at every measured size"
        " from 16 rows on.",
        "A temperature above 0.05 gives the negatives more weight; probe again at it, since S changes too.",
    ]
    assert (found.dtype, found.temperature, found.positive_similarity, found.positives) == (
        "bfloat16",
        0.05,
        0.8,
        "given",
    )


def test_no_floor_and_no_interval_in_words():
    errors = column([estimate(0.2, 0.25)] * 3 + [estimate(0.15)], [estimate(0.2, 0.3)] * 4)
    found = floor({"float32": errors}, dtype="float32")
    assert found.batch_size is None
    assert found.reason == (
        "the relative error of the InfoNCE gradient in float32 is up to 0.15 at 64 rows still, the largest size measured;"
        " at most 0.1 is asked for (no interval at 64: there the value itself was held against it)"
    )
    assert found.remedies[0] == ("FlatNCE in float32 would not be enough: its error is up to 0.3 at 64 rows.")
    assert len(found.remedies) == 2  # float32 logits are what it has


def test_an_error_that_is_no_number_starves():
    errors = column([ZERO, ZERO, ZERO, Estimate(value=math.nan, low=None, high=None, method="overflow")])
    assert floor({"float16": errors}, dtype="float16").batch_size is None


def test_good_positives_starve_every_small_batch():
    """63 negatives at cosine 0: ξ = 63·exp(−s⁺/T) is 9e-10 at s⁺ = 1 and T = .04, and .16 at s⁺ = .3 and T = .05."""

    def errors_at(similarity, temperature):
        by_size = []
        for size in (16, 64):
            anchors = torch.eye(2 * size)[:size]
            positives = similarity * anchors + math.sqrt(1 - similarity**2) * torch.eye(2 * size)[size:]
            by_size.append(gradient_errors(anchors, positives, temperature=temperature))
        return {
            name: column(
                [estimate(e[name].infonce, e[name].infonce) for e in by_size],
                [estimate(e[name].flatnce, e[name].flatnce) for e in by_size],
            )
            for name in by_size[0]
        }

    good, poor = errors_at(1.0, 0.04), errors_at(0.3, 0.05)
    for dtype in good:
        starved = floor(good, dtype, sizes=[16, 64])
        assert starved.batch_size is None
        assert "would keep the error within 0.1 at every measured size." in starved.remedies[0]
        assert floor(poor, dtype, sizes=[16, 64]).batch_size == 16
