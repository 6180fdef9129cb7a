"""What remedies are said to do, who is said to bring the harm, and S at other temperatures, against simulation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.measure.probing import probe_in
from tests.unit.measure.test_draws import meanings

SIZE, T, BUDGET = 16, 0.1, 0.02
VECTORS = {"kind": "embeddings"}
TEXTS, GROUPS, UNIT = meanings(5, rows=400, distinct=260)
SOURCES = [f"source {row % 3}" for row in range(400)]
ROWS = [
    {"text": text, "group": group, "source": source, "embedding": vector.tolist()}
    for text, group, source, vector in zip(TEXTS, GROUPS, SOURCES, UNIT, strict=True)
]
FALSE = np.array(GROUPS)[:, None] == np.array(GROUPS)[None, :]
S = UNIT.astype(np.float64) @ UNIT.T.astype(np.float64)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return probe_in(
        tmp_path_factory.mktemp("remedies"),
        ROWS,
        corpus=VECTORS,
        batch_sizes=(4, SIZE),
        temperature=T,
        budget=BUDGET,
    )


def remedies(report, kind):
    return [remedy for remedy in report.advice.remedies if remedy.kind == kind]


def simulate(batches, *, kept=lambda s: np.ones_like(s, dtype=bool)):
    """S over batches with some candidates masked: Σ shares over Σ anchors that push; with its standard error.

    Returns:
        S, its error, and the share of the push on true negatives that masking takes away.
    """
    rows = np.asarray(batches)
    s = S[rows[:, :, None], rows[:, None, :]]
    false = FALSE[rows[:, :, None], rows[:, None, :]]
    own = np.eye(rows.shape[1], dtype=bool)
    x = np.where(own, 0.0, np.exp(s / T))
    left = np.where(kept(s), x, 0.0)
    total = left.sum(axis=2)
    share = np.divide((left * false).sum(axis=2), total, out=np.zeros_like(total), where=total > 0)
    shares, pushing = share.sum(axis=1), (total > 0).sum(axis=1)
    value = shares.sum() / pushing.sum()
    error = np.std(shares - value * pushing, ddof=1) / pushing.mean() / len(rows) ** 0.5
    push = x / x.sum(axis=2, keepdims=True)
    return value, error, (push * ~false * ~kept(s)).sum() / (push * ~false).sum()


def random_batches(rows, size, count, seed):
    rng = np.random.default_rng(seed)
    return [rng.choice(rows, size, replace=False) for _ in range(count)]


def test_without_the_most_harmful_rows(report):
    (remedy,) = remedies(report, "drop_harmful_rows")
    assert len(remedy.rows) == 4
    rest = np.setdiff1d(np.arange(400), np.array(remedy.rows) - 1)
    value, error, _ = simulate(random_batches(rest, SIZE, 4000, 0))
    after = remedy.share_after
    assert abs(after.value - value) < 4 * error
    assert after.low == after.value == after.high
    assert after.value < remedy.share_before.value
    check_limit(remedy.n_max_after, rest)
    assert remedy.share_before == report.curve[1].false_negative_softmax_share


def test_with_equal_texts_kept_apart(report):
    theirs = pytest.importorskip("sentence_transformers.base.sampler")
    datasets = pytest.importorskip("datasets")
    torch = pytest.importorskip("torch")
    sampler = theirs.NoDuplicatesBatchSampler(
        datasets.Dataset.from_dict({"text": TEXTS}), SIZE, True, generator=torch.Generator(), seed=0
    )
    means = []
    for epoch in range(40):
        sampler.set_epoch(epoch)
        means.append(simulate([list(batch) for batch in sampler])[0])
    (remedy,) = remedies(report, "no_duplicates")
    after = remedy.share_after
    error = np.hypot(np.std(means, ddof=1) / 40**0.5, (after.high - after.low) / 4)
    assert abs(after.value - np.mean(means)) < 4 * error
    assert after.value < remedy.share_before.value - 4 * error


def test_with_similar_candidates_masked(report):
    masks = remedies(report, "mask")
    batches = random_batches(400, SIZE, 4000, 1)
    for remedy, limit in zip(masks, (0.95, 0.9, 0.8), strict=True):
        value, error, lost = simulate(batches, kept=lambda s, limit=limit: s < limit)
        # Similarities are binned by .001.
        assert abs(remedy.share_after.value - value) < 4 * error + 5e-4, limit
        assert remedy.true_push_lost == pytest.approx(lost, abs=0.003)
        assert f"similarity {limit:g} or more" in remedy.title


def check_limit(found, rows, **masked):
    """n_max against a simulation at every integer up to it and at the one after it."""
    assert found.tested_up_to == 20  # a twentieth of the rows
    last = found.value or 1
    assert found.exceeded == (last < 20)
    for size in range(2, min(last + 1, 20) + 1):
        value, error, _ = simulate(random_batches(rows, size, 2000, size), **masked)
        if size <= last:
            assert value < BUDGET + 4 * error, size
        else:
            assert value > BUDGET - 4 * error, size


def test_n_max_with_a_mask_against_every_integer(report):
    masks = remedies(report, "mask")
    for remedy, limit in zip(masks, (0.95, 0.9, 0.8), strict=True):
        check_limit(remedy.n_max_after, 400, kept=lambda s, limit=limit: s < limit)
    assert {remedy.n_max_after.exceeded for remedy in masks} == {False, True}


def test_keeping_groups_apart_leaves_nothing(report):
    (remedy,) = remedies(report, "group_aware")
    assert remedy.share_after.value == 0.0


def test_dropping_repeats(report):
    drop = report.advice.drop_duplicates
    seen = {}
    repeats = [row + 1 for row, text in enumerate(TEXTS) if seen.setdefault(text, row) != row]
    assert drop.rows_to_drop == repeats
    rest = np.setdiff1d(np.arange(400), np.array(repeats) - 1)
    for point in drop.share_after:
        value, error, _ = simulate(random_batches(rest, point.batch_size, 4000, 2))
        after = point.estimate
        assert abs(after.value - value) < 4 * np.hypot(error, (after.high - after.low) / 4)


def test_harm_adds_up_and_is_where_simulation_finds_it(report):
    harm = report.harm
    share = report.curve[1].false_negative_softmax_share.value
    assert harm.batch_size == SIZE
    assert harm.share == pytest.approx(share, abs=1e-6)
    assert sum(cell.false_push_share for cell in harm.sources) == pytest.approx(share, abs=1e-6)
    assert sum(cell.push_share for cell in harm.sources) == pytest.approx(1.0, abs=1e-9)
    rows = np.array(random_batches(400, SIZE, 20_000, 3))
    s = S[rows[:, :, None], rows[:, None, :]]
    x = np.where(np.eye(SIZE, dtype=bool), 0.0, np.exp(s / T))
    push = x / x.sum(axis=2, keepdims=True) / SIZE / len(rows)
    false = push * FALSE[rows[:, :, None], rows[:, None, :]]
    anchors = np.broadcast_to(rows[:, :, None], push.shape)
    candidates = np.broadcast_to(rows[:, None, :], push.shape)
    for cell in harm.sources:
        here = (anchors % 3 == int(cell.anchor_source[-1])) & (
            candidates % 3 == int(cell.candidate_source[-1])
        )
        assert cell.push_share == pytest.approx(push[here].sum(), rel=0.03)
        assert cell.false_push_share == pytest.approx(false[here].sum(), rel=0.1)
    as_anchor = np.bincount(anchors.ravel(), false.ravel(), minlength=400)
    as_candidate = np.bincount(candidates.ravel(), false.ravel(), minlength=400)
    shown = np.array([row.row for row in harm.rows]) - 1
    assert len(shown) == 20
    np.testing.assert_allclose([row.as_anchor for row in harm.rows], as_anchor[shown], rtol=0.25)
    np.testing.assert_allclose([row.as_candidate for row in harm.rows], as_candidate[shown], rtol=0.25)
    both = as_anchor + as_candidate
    assert both[shown].min() > np.quantile(both, 0.8)
    half = np.searchsorted(np.cumsum(np.sort(as_candidate)[::-1]), as_candidate.sum() / 2) + 1
    assert harm.rows_with_half == pytest.approx(half, rel=0.1)


def test_rows_add_up_to_the_whole(tmp_path):
    """Few enough rows with false negatives that all are shown."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((100, 6))
    groups = [f"group {row // 3 if row < 18 else row}" for row in range(100)]
    rows = [{"group": g, "embedding": v.tolist()} for g, v in zip(groups, vectors, strict=True)]
    harm = probe_in(tmp_path, rows, corpus=VECTORS, batch_sizes=(5,)).harm
    assert {row.row for row in harm.rows} == set(range(1, 19))
    assert sum(row.as_anchor for row in harm.rows) == pytest.approx(harm.share, abs=1e-9)
    assert sum(row.as_candidate for row in harm.rows) == pytest.approx(harm.share, abs=1e-9)
    assert all(row.text is None and row.source is None for row in harm.rows)


def test_other_temperatures_are_what_a_probe_at_them_finds(report, tmp_path):
    table = report.shares_by_temperature
    assert table.batch_sizes == [4, SIZE]
    assert table.worst_case is None
    for place in (0, 13):
        at = probe_in(
            tmp_path,
            ROWS,
            name=f"at-{place}",
            corpus=VECTORS,
            batch_sizes=(4, SIZE),
            temperature=table.temperatures[place],
            budget=0.075,
        )
        found = [point.false_negative_softmax_share.value for point in at.curve]
        np.testing.assert_allclose(table.share[place], found, atol=2e-5)
        within = [t for t, shares in zip(table.temperatures, table.share, strict=True) if shares[1] <= 0.075]
        (advised,) = remedies(at, "temperature")
        assert f"{min(within):.3g}" in advised.title
        assert advised.share_after.value == table.share[table.temperatures.index(min(within))][1]
    # No temperature of the table keeps within the smaller budget.
    assert remedies(report, "temperature") == []


def test_of_a_sample_only_the_values_are_given(tmp_path):
    sampled = probe_in(
        tmp_path,
        ROWS,
        corpus=VECTORS | {"max_rows": 240},
        batch_sizes=(8,),
        temperature=T,
        budget=BUDGET,
    )
    for kind in ("drop_harmful_rows", "mask", "no_duplicates"):
        for remedy in remedies(sampled, kind):
            assert (remedy.share_after.low, remedy.n_max_after) == (None, None)
            assert "goes from" in remedy.effect
    assert remedies(sampled, "mask")
