"""The effect of masks, against every batch of a tiny corpus and against simulation."""

from __future__ import annotations

import numpy as np
import pytest

from probe_service.estimate.limit import exact_scan
from probe_service.estimate.masking import Mask, MaskAccumulator, MaskEffect
from tests.unit.estimate.all_batches import (
    CENTRES,
    histogram,
    others,
    push_of_all_batches,
    shares_of_random_batches,
    small_corpus,
)

# On the edges of the bins' grid, where masks are exact.
MASKS = (Mask(0.0625, True), Mask(0.0, True), Mask(0.5, False))


def effects(s, known, worst, masks, *, largest, temperature, blocks=2, paired=True):
    sums = 0.0
    for rows in np.array_split(np.arange(len(s)), blocks):
        accumulator = MaskAccumulator(CENTRES, largest=largest, temperature=temperature, masks=masks)
        accumulator.add(
            histogram(s, others(s))[rows],
            histogram(s, known)[rows],
            None if worst is None else histogram(s, worst)[rows],
            np.diag(s)[rows] if paired else None,
        )
        sums = sums + accumulator.sums
    return [MaskEffect.from_sums(mask, sums[m], rows=len(s)) for m, mask in enumerate(masks)]


def kept_by(mask, s):
    return s <= np.diag(s)[:, None] - mask.value if mask.relative_to_positive else s < mask.value


@pytest.mark.parametrize("temperature", [0.02, 0.2])
@pytest.mark.parametrize("which", range(len(MASKS)))
def test_masks_against_all_batches(which, temperature):
    mask = MASKS[which]
    s, known = small_corpus(which, 8, paired=True)
    worst = known | (s > 0.4) & others(s)
    (found,) = effects(s, known, worst, [mask], largest=3, temperature=temperature)
    kept = kept_by(mask, s) & others(s)
    assert found.masked_candidates == pytest.approx(1 - kept.sum() / (8 * 7))
    for size in (2, 3):
        before, _ = push_of_all_batches(s, size, temperature)
        after, pushing = push_of_all_batches(s, size, temperature, kept)
        at = size - 2
        expected = {
            "share": after[known].sum() / pushing,
            "worst": after[worst].sum() / pushing,
            "without": 1 - pushing,
            "lost": before[~known & ~kept].sum() / before[~known].sum(),
            "caught": before[known & ~kept].sum() / before[known].sum(),
        }
        assert {
            "share": found.shares.known[at],
            "worst": found.shares.worst[at],
            "without": found.anchors_without_push[at],
            "lost": found.true_push_lost[at],
            "caught": found.false_push_caught[at],
        } == pytest.approx(expected, abs=2e-6)


def test_masks_against_simulation():
    rng = np.random.default_rng(2)
    n, size, temperature = 300, 15, 0.05
    labels = rng.integers(0, 30, n)
    known = (labels[:, None] == labels[None, :]) & others(np.eye(n))
    s = np.where(known, rng.normal(0.6, 0.12, (n, n)), rng.normal(0.25, 0.18, (n, n)))
    s = np.rint(np.clip(s, -1, 1) * 1024) / 1024
    s[np.diag_indices(n)] = np.rint(rng.normal(0.75, 0.1, n).clip(-1, 1) * 1024) / 1024
    masks = [Mask(0.5, True), Mask(0.5, False)]
    found = effects(s, known, None, masks, largest=size, temperature=temperature)
    for mask, effect in zip(masks, found, strict=True):
        runs = shares_of_random_batches(s, known, size, temperature, rng, batches=4000, kept=kept_by(mask, s))
        hits, pushing = runs[:, 0], runs[:, 1]
        truth = hits.mean() / pushing.mean()
        error = (hits - truth * pushing).std() / pushing.mean() / len(runs) ** 0.5
        assert abs(effect.shares.known[-1] - truth) < 4 * error
        assert effect.shares.worst is not None
        np.testing.assert_array_equal(effect.shares.worst, effect.shares.known)
        error = pushing.std() / len(runs) ** 0.5
        assert abs(1 - effect.anchors_without_push[-1] - pushing.mean()) < 4 * error + 1e-5
    # Masks lower S here, so n_max rises; both come out of the same scan.
    none = effects(s, known, None, [Mask(1.5, False)], largest=size, temperature=temperature)[0]
    assert none.masked_candidates == 0.0
    assert none.false_push_caught[0] == 0.0
    budget = float(none.shares.known[5])
    before, after = (
        exact_scan(each.shares, complete=True).limit(budget, assumption="") for each in (none, found[1])
    )
    assert before.value == 7
    assert after.value is not None
    assert after.value > 7


def test_a_mask_of_everything_leaves_no_push():
    s, known = small_corpus(3, 7, paired=True)
    (found,) = effects(s, known, None, [Mask(-1.0, False)], largest=3, temperature=0.05)
    assert found.masked_candidates == 1.0
    np.testing.assert_array_equal(found.anchors_without_push, 1.0)
    np.testing.assert_array_equal(found.shares.known, 0.0)
    assert found.true_push_lost == pytest.approx([1.0, 1.0])
    assert found.false_push_caught == pytest.approx([1.0, 1.0])


def test_without_false_negatives_nothing_can_be_caught():
    s, known = small_corpus(3, 7, paired=True)
    (found,) = effects(s, known & False, None, [Mask(0.4, False)], largest=2, temperature=0.05)
    assert np.isnan(found.false_push_caught).all()


def test_a_margin_needs_positives():
    s, known = small_corpus(3, 7)
    with pytest.raises(ValueError, match="needs positives"):
        effects(s, known, None, [Mask(0.1, True)], largest=2, temperature=0.05, paired=False)


def test_without_a_margin_copies_of_the_positive_stay():
    """The positive's similarity lies beside its bin's centre; two candidates are as similar, one is a bin above."""
    own = 700.3 / 1024
    counts = np.zeros((1, len(CENTRES)), dtype=np.float32)
    counts[0, [1024 + 500, 1024 + 701]] = 1
    counts[0, 1024 + 700] = 2
    accumulator = MaskAccumulator(CENTRES, largest=2, temperature=0.05, masks=[Mask(0.0, True)])
    accumulator.add(counts, counts, None, np.array([own]))
    assert accumulator.sums[0, 6].tolist() == [1.0]
