"""The audit: pairs drawn in proportion to the push that they receive, and from their labels S(N) for every N.

S(N) is the mean of p, the probability that a pair is a false negative, under the known distribution q_N (`push`). So
pairs are drawn from q_N, someone says of each whether it is a false negative, and the share of yes estimates S(N),
whatever the base rate. To serve several N at once the pairs are drawn from the mixture q_mix, the mean of q_N over a
grid, without the pairs about which something is known, and each counts with weight q_N/q_mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.special import betaincinv, ndtri

from probe_service.estimate.intervals import Interval, clopper_pearson
from probe_service.estimate.push import push_of_row
from probe_service.schemas import AuditedShare, BatchSizeLimit, Estimate

__all__ = [
    "MIN_EFFECTIVE_LABELS",
    "MOST_ATTEMPTS_PER_PAIR",
    "AuditDesign",
    "CheckCounts",
    "DrawnPair",
    "JudgedShares",
    "audited_limit",
    "audited_share",
    "draw_pairs",
    "judged_between",
    "weighted_share_interval",
]

Floats = NDArray[np.float64]
IsJudged = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]

MIN_EFFECTIVE_LABELS = 50.0
"""Below this effective sample size no estimate is given (STATISTICS §6)."""
_FEW_ANSWERS = 15
_MELDED_DRAWS = 20_000
_DRAWS_AT_ONCE = 256
MOST_ATTEMPTS_PER_PAIR = 10_000


@dataclass(frozen=True)
class DrawnPair:
    """One drawn pair; the same pair may be drawn more than once, and then counts as often.

    Args:
        anchor, candidate: Rows of the encoded corpus.
        push: q_N(i, j) at each of the design's sizes; q_N(i, j) + q_N(j, i) where pairs are unordered.
        mixture: Mean of that push over the sizes that pairs were drawn at: q_mix, not normalised.
    """

    anchor: int
    candidate: int
    push: tuple[float, ...]
    mixture: float


@dataclass(frozen=True)
class AuditDesign:
    """How pairs were drawn: all that the estimate needs beside the labels.

    Args:
        sizes: Batch sizes at which S can be estimated.
        drawn_sizes: Those of them whose q_N were mixed.
        temperature: T.
        rows: m, rows of the encoded corpus.
        ordered_pairs: Whether (i, j) and (j, i) are two pairs.
        pairs: The drawn pairs, in the order in which they were drawn.
    """

    sizes: tuple[int, ...]
    drawn_sizes: tuple[int, ...]
    temperature: float
    rows: int
    ordered_pairs: bool
    pairs: tuple[DrawnPair, ...]

    def weights(self, size: int) -> Floats:
        """Return (L,) q_N/q_mix, at most the number of mixed sizes if N is one of them.

        Between the design's sizes log q_N is interpolated over log N by a cubic spline: q_N is smooth in N.

        Raises:
            ValueError: N lies outside the design's sizes.
        """
        if not self.sizes[0] <= size <= self.sizes[-1]:
            raise ValueError(f"the audit covers batch sizes from {self.sizes[0]} to {self.sizes[-1]}")
        known = size in self.sizes
        push = self._push[:, self.sizes.index(size)] if known else np.exp(self._log_push(np.log(size)))
        weights: Floats = push / self._mixtures
        return weights

    @cached_property
    def _push(self) -> Floats:
        return np.array([pair.push for pair in self.pairs])

    @cached_property
    def _mixtures(self) -> Floats:
        return np.array([pair.mixture for pair in self.pairs])

    @cached_property
    def _log_push(self) -> CubicSpline[np.float64]:
        # A push that underflows (a tiny temperature) has weight 0 wherever it stands.
        return CubicSpline(np.log(self.sizes), np.log(np.maximum(self._push, 1e-300)), axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> AuditDesign:
        """Rebuild a design from `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: The fields are not those of a design.
        """
        return cls(
            sizes=tuple(int(size) for size in fields["sizes"]),
            drawn_sizes=tuple(int(size) for size in fields["drawn_sizes"]),
            temperature=float(fields["temperature"]),
            rows=int(fields["rows"]),
            ordered_pairs=bool(fields["ordered_pairs"]),
            pairs=tuple(
                DrawnPair(
                    int(pair["anchor"]),
                    int(pair["candidate"]),
                    tuple(float(push) for push in pair["push"]),
                    float(pair["mixture"]),
                )
                for pair in fields["pairs"]
            ),
        )


@dataclass(frozen=True)
class JudgedShares:
    """What batches say of the pairs that need no label, at one batch size.

    Args:
        known: Expected share of the push that lands on known false negatives, 0–1.
        unjudged: Expected share that lands on pairs about which nothing is known, 0–1.
        known_variance, unjudged_variance, covariance: Of these two means.
    """

    known: float
    unjudged: float
    known_variance: float
    unjudged_variance: float
    covariance: float

    @classmethod
    def from_batches(
        cls, known: Floats, unjudged: Floats, pools: Sequence[tuple[float, float]] = ()
    ) -> JudgedShares:
        """Average over batches.

        Args:
            known: (b,) share of the push of each batch that lands on known false negatives, b ≥ 2.
            unjudged: (b,) share that lands on unjudged pairs.
            pools: The two means within each disjoint sub-pool of the encoded rows, where only a sample of the corpus is
                encoded: their spread adds the error of that sample (STATISTICS §4).
        """
        spread = np.cov(np.stack([known, unjudged])) / len(known)
        if pools:
            spread = spread + np.cov(np.array(pools).T) / len(pools)
        return cls(
            known=min(float(known.mean()), 1.0),
            unjudged=min(float(unjudged.mean()), 1.0),
            known_variance=float(spread[0, 0]),
            unjudged_variance=float(spread[1, 1]),
            covariance=float(spread[0, 1]),
        )

    @classmethod
    def nothing_known(cls) -> JudgedShares:
        """No pair is known: all of the push lands on unjudged ones."""
        return cls(0.0, 1.0, 0.0, 0.0, 0.0)

    def mixed_with(self, other: JudgedShares, share: float) -> JudgedShares:
        """Interpolate linearly: `share` of the other, the rest of this."""
        return JudgedShares(
            *(
                (1 - share) * mine + share * its
                for mine, its in zip(astuple(self), astuple(other), strict=True)
            )
        )

    def standard_error(self, share: float) -> float:
        """Of known + unjudged · share, for a fixed share."""
        variance = self.known_variance + share**2 * self.unjudged_variance + 2 * share * self.covariance
        return float(np.sqrt(max(variance, 0.0)))


@dataclass(frozen=True)
class CheckCounts:
    """How a judge answered hidden pairs whose truth is certain.

    Args:
        duplicates: Certain false negatives asked; `duplicates_accepted` of them answered yes.
        others: Certain non-duplicates asked; `others_accepted` of them answered yes.
        duplicates_unsure, others_unsure: Answered unsure.
    """

    duplicates: int
    duplicates_accepted: int
    duplicates_unsure: int
    others: int
    others_accepted: int
    others_unsure: int

    @property
    def any_wrong(self) -> bool:
        """Whether any of them was not answered as is certain."""
        return self.duplicates_accepted < self.duplicates or self.others_accepted + self.others_unsure > 0


def draw_pairs(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32] | None,
    *,
    drawn_sizes: Sequence[int],
    sizes: Sequence[int],
    temperature: float,
    is_judged: IsJudged,
    count: int,
    rng: np.random.Generator,
    checkpoint: Callable[[], None] = lambda: None,
) -> AuditDesign | None:
    """Draw pairs independently from the mean of q_N over `drawn_sizes`, without the pairs that are judged.

    A draw is what happens in training: one of the sizes at random, a random batch of N rows, a random anchor in it, and
    one of its negatives with probability w_ij = exp(s_ij/T) / Σ_j' exp(s_ij'/T). A judged pair is put back, and the
    whole draw is made again, size included. So the pairs follow q_mix without any approximation; only the weights
    q_N/q_mix are computed (`push_of_row`).

    Args:
        anchors: (m, d) float32 unit vectors.
        candidates: (m, d) unit vectors of the positives; None for sentences, whose pairs are unordered.
        drawn_sizes: The grid of N to mix, each from 2 to m.
        sizes: All N at which the weights are wanted; the drawn ones are added.
        temperature: T > 0.
        is_judged: Tells of (k,) anchors and candidates which pairs need no label.
        count: L, pairs to draw.
        rng: Draws.
        checkpoint: Called often; may raise.

    Returns:
        The design; None if hardly any of the push lands on unjudged pairs (less than one draw in 10,000).
    """
    right = anchors if candidates is None else candidates
    mixed = sorted(set(drawn_sizes))
    rows = len(anchors)
    found: list[NDArray[np.int64]] = []
    accepted = attempts = 0
    while accepted < count:
        if attempts >= MOST_ATTEMPTS_PER_PAIR * (accepted + 1):
            return None
        drawn = np.empty((_DRAWS_AT_ONCE, 2), dtype=np.int64)
        for place in range(_DRAWS_AT_ONCE):
            batch = rng.choice(rows, mixed[int(rng.integers(len(mixed)))], replace=False)
            similarities = np.clip((right[batch[1:]] @ anchors[batch[0]]).astype(np.float64), -1.0, 1.0)
            # The largest of s/T plus Gumbel noise is each candidate's with its softmax probability.
            keys = similarities / temperature + rng.gumbel(size=len(similarities))
            drawn[place] = batch[0], batch[1 + int(keys.argmax())]
        checkpoint()
        attempts += _DRAWS_AT_ONCE
        kept = drawn[~is_judged(drawn[:, 0], drawn[:, 1])]
        found.append(kept)
        accepted += len(kept)
    pairs = np.concatenate(found)[:count]
    all_sizes = sorted({*sizes, *mixed})
    push = _push_of_pairs(anchors, right, pairs, all_sizes, temperature, checkpoint)
    if candidates is None:
        push += _push_of_pairs(anchors, right, pairs[:, ::-1], all_sizes, temperature, checkpoint)
    mixture = push[:, [all_sizes.index(size) for size in mixed]].mean(axis=1)
    return AuditDesign(
        sizes=tuple(all_sizes),
        drawn_sizes=tuple(mixed),
        temperature=temperature,
        rows=rows,
        ordered_pairs=candidates is not None,
        pairs=tuple(
            DrawnPair(int(i), int(j), tuple(float(q) for q in shares), float(mean))
            for (i, j), shares, mean in zip(pairs, push, mixture, strict=True)
        ),
    )


def _push_of_pairs(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32],
    pairs: NDArray[np.int64],
    sizes: Sequence[int],
    temperature: float,
    checkpoint: Callable[[], None],
) -> Floats:
    """(L, sizes) q_N of ordered pairs, each anchor's row of similarities computed once."""
    push = np.empty((len(pairs), len(sizes)))
    for anchor in np.unique(pairs[:, 0]).tolist():
        checkpoint()
        here = np.flatnonzero(pairs[:, 0] == anchor)
        row = candidates @ anchors[anchor]
        push[here] = push_of_row(row, anchor, sizes, temperature).of(row[pairs[here, 1]])
    return push


def audited_share(
    design: AuditDesign,
    size: int,
    answers: Floats,
    judged: JudgedShares,
    checks: CheckCounts,
    *,
    level: float,
    rng: np.random.Generator,
) -> AuditedShare:
    """Estimate S(N) = Σ_known q_N p + Q_unknown(N) · Σ w y / Σ w,  w = q_N/q_mix.

    Known part and Q_unknown come from batches, the mean of the labels y from the audit (Hájek). Its interval is
    `weighted_share_interval`. Unsure answers widen it to [all no, all yes]. If the judge answered any hidden check
    wrongly, the share of yes is corrected (`_corrected_share`). At last the Monte Carlo error of the known part is
    added: the distance of each limit from the value is the root of the sum of squares (MOVER; Zou and Donner 2008).

    Args:
        design: How the pairs were drawn.
        size: N, one of the design's sizes.
        answers: (L,) 1 yes, 0 no, NaN unsure, for each drawn pair.
        judged: From batches of N rows.
        checks: The judge's answers to hidden checks.
        level: Confidence level.
        rng: Draws of the melded interval; untouched where nothing has to be corrected.

    Returns:
        S(N); its `estimate` is None, with the reason, where the effective sample size is below `MIN_EFFECTIVE_LABELS`
        or the judge cannot tell duplicates from others.
    """
    weights = design.weights(size)
    effective = float(weights.sum() ** 2 / (weights**2).sum())

    def outcome(estimate: Estimate | None, reason: str | None) -> AuditedShare:
        return AuditedShare(
            batch_size=size,
            estimate=estimate,
            reason=reason,
            effective_labels=effective,
            known_share=judged.known,
            unjudged_share=judged.unjudged,
        )

    if effective < MIN_EFFECTIVE_LABELS:
        return outcome(
            None,
            f"{len(answers)} labels are worth {effective:.0f} at this size, below {MIN_EFFECTIVE_LABELS:.0f}; draw more, "
            "or nearer to it",
        )
    unsure = np.isnan(answers)
    scenarios = [
        _scenario(weights, np.where(unsure, filled, answers), checks, filled, level=level, rng=rng)
        for filled in (
            (0.0, 1.0) if unsure.any() or checks.duplicates_unsure + checks.others_unsure else (0.0,)
        )
    ]
    found = [interval for interval in scenarios if interval is not None]
    if len(found) < len(scenarios):
        return outcome(
            None,
            "the judge accepts certain non-duplicates as often as certain duplicates: its labels say nothing",
        )
    low, high = min(i.low for i in found), max(i.high for i in found)
    share = float(np.mean([i.value for i in found]))
    method = found[0].method
    if len(found) > 1:
        method += (
            f"; {int(unsure.sum())} unsure answers counted as no for the lower and as yes for the upper limit"
        )
    value = judged.known + judged.unjudged * share
    monte_carlo = float(ndtri(0.5 + level / 2)) * judged.standard_error(share)
    below = float(np.hypot(judged.unjudged * (share - low), monte_carlo))
    above = float(np.hypot(judged.unjudged * (high - share), monte_carlo))
    return outcome(
        Estimate(
            value=min(max(value, 0.0), 1.0),
            low=max(value - below, 0.0),
            high=min(value + above, 1.0),
            method=f"audit of {len(answers)} pairs, {method}",
        ),
        None,
    )


def audited_limit(
    design: AuditDesign,
    answers: Floats,
    judged: Mapping[int, JudgedShares],
    checks: CheckCounts,
    *,
    budget: float,
    level: float,
    rng: np.random.Generator,
) -> BatchSizeLimit:
    """Return n_max: the largest N whose upper limit keeps within the budget at every integer from 2 to N.

    A fixed-sequence test (STATISTICS §7): the integers are tested in order, each at the one-sided (1 + level)/2 limit of
    `audited_share`, and the first that is above the budget ends the sequence; one without an estimate does, too.

    Args:
        design: How the pairs were drawn; covers N from 2.
        answers: (L,) 1 yes, 0 no, NaN unsure.
        judged: By size of the design; between the sizes they are interpolated over log N.
        checks: The judge's answers to hidden checks.
        budget: Largest acceptable S.
        level: Confidence level.
        rng: Of melded intervals.
    """
    largest = design.sizes[-1]
    value, reason = None, ""
    for size in range(2, largest + 1):
        found = audited_share(
            design, size, answers, judged_between(judged, size), checks, level=level, rng=rng
        )
        if found.estimate is None:
            reason = f"at {size}, {found.reason}"
            break
        assert found.estimate.high is not None
        if found.estimate.high > budget:
            reason = f"the audit's upper limit of S at {size} is {found.estimate.high:.4f}, above the budget of {budget:g}"
            break
        value = size
    exceeded = bool(reason)
    return BatchSizeLimit(
        value=value,
        tested_up_to=value + 1 if exceeded and value is not None else 2 if exceeded else largest,
        exceeded=exceeded,
        reason=reason
        or f"the audit's upper limit of S is at most {budget:g} at every batch size tested, from 2 to {largest}",
    )


def judged_between(judged: Mapping[int, JudgedShares], size: int) -> JudgedShares:
    """Return what batches say at one size, interpolated over log N between those measured."""
    if size in judged:
        return judged[size]
    below, above = max(s for s in judged if s < size), min(s for s in judged if s > size)
    share = float(np.log(size / below) / np.log(above / below))
    return judged[below].mixed_with(judged[above], share)


def weighted_share_interval(values: Floats, weights: Floats, level: float) -> Interval:
    """Interval for Σ w y / Σ w of independent draws, y ∈ {0, 1}.

    Equal weights: Clopper–Pearson. Else Korn and Graubard (1998): with v the linearised variance of the ratio,
    n* = p(1 − p)/v draws (Kish's (Σ w)²/Σ w² where p is 0 or 1), at most L, and Clopper–Pearson for n*·p successes of n*.

    With fewer than `_FEW_ANSWERS` yes, v says little: an audit that happens to see none of a few yes that weigh more than
    no tells less than its effective size says (coverage fell to .89 with 100 labels). Then the upper limit is at
    least that of Fay and Feuer (1997), with a Beta law in place of the Gamma: one more yes is imagined, of the
    largest weight w*. With A = Σ w y + w* and B = Σ w² y + w*², x' = A²/B and n' = (Σ w + w*)·A/B, it is the quantile of
    Beta(x', n' − x'). With few no the lower limit is, likewise, at most one minus that of 1 − y. All reduce to
    Clopper–Pearson where weights are equal.

    Args:
        values: (L,) 0 or 1.
        weights: (L,) above 0.
        level: Confidence level.
    """
    count = len(values)
    if np.ptp(weights) <= 1e-9 * weights.max():
        found = clopper_pearson(int(values.sum()), count, level)
        return Interval(found.value, found.low, found.high, "Clopper–Pearson")
    law = _ShareLaw.of(values, weights, level)
    tail = (1 - level) / 2
    return Interval(
        law.share,
        min(_beta_quantile(tail, law.lower), law.share),
        max(_beta_quantile(1 - tail, law.upper), law.share),
        law.method,
    )


Beta = tuple[float, float]
"""Parameters of a Beta law; all its mass is at 0 where the first is 0, and at 1 where the second is."""


@dataclass(frozen=True)
class _ShareLaw:
    """A weighted share of yes, with the Beta laws whose quantiles are its limits."""

    share: float
    lower: Beta
    upper: Beta
    method: str

    @classmethod
    def of(cls, values: Floats, weights: Floats, level: float) -> _ShareLaw:
        count, total = len(values), float(weights.sum())
        share = float((weights * values).sum()) / total
        variance = count / (count - 1) * float((weights**2 * (values - share) ** 2).sum()) / total**2
        kish = total**2 / float((weights**2).sum())
        effective = share * (1 - share) / variance if variance > 0 and 0 < share < 1 else kish
        effective = min(effective, float(count))
        yes, no = share * effective, (1 - share) * effective
        uppers, lowers = [(yes + 1, no)], [(yes, no + 1)]
        method = f"Korn–Graubard with {effective:.0f} effective labels"
        if values.sum() < _FEW_ANSWERS:
            uppers.append(_with_one_more(values, weights))
            method += ", upper limit Fay–Feuer"
        if count - values.sum() < _FEW_ANSWERS:
            lowers.append(_with_one_more(1.0 - values, weights)[::-1])
            method += ", lower limit Fay–Feuer"
        tail = (1 - level) / 2
        return cls(
            share,
            min(lowers, key=lambda law: _beta_quantile(tail, law)),
            max(uppers, key=lambda law: _beta_quantile(1 - tail, law)),
            method,
        )


def _with_one_more(values: Floats, weights: Floats) -> Beta:
    """The upper law of the share once a yes of the largest weight is added (Fay and Feuer)."""
    largest = float(weights.max())
    summed = float((weights * values).sum()) + largest
    squared = float((weights**2 * values).sum()) + largest**2
    scale = summed / squared
    return summed * scale, max((float(weights.sum()) + largest - summed) * scale, 0.0)


def _beta_quantile(probability: float, law: Beta) -> float:
    first, second = law
    if first <= 0 or second <= 1e-12:
        return 0.0 if first <= 0 else 1.0
    return float(betaincinv(first, second, probability))


def _beta_draws(rng: np.random.Generator, law: Beta) -> Floats:
    first, second = law
    if first <= 0 or second <= 1e-12:
        return np.full(_MELDED_DRAWS, 0.0 if first <= 0 else 1.0)
    return rng.beta(first, second, _MELDED_DRAWS)


def _scenario(
    weights: Floats,
    values: Floats,
    checks: CheckCounts,
    unsure_is: float,
    *,
    level: float,
    rng: np.random.Generator,
) -> Interval | None:
    """The share of false negatives among the unjudged pairs, with every unsure answer counted as `unsure_is`."""
    if not checks.any_wrong:
        return weighted_share_interval(values, weights, level)
    accepted = (
        checks.duplicates_accepted + round(unsure_is) * checks.duplicates_unsure,
        checks.others_accepted + round(unsure_is) * checks.others_unsure,
    )
    return _corrected_share(values, weights, checks, accepted, level=level, rng=rng)


def _corrected_share(
    values: Floats,
    weights: Floats,
    checks: CheckCounts,
    accepted: tuple[int, int],
    *,
    level: float,
    rng: np.random.Generator,
) -> Interval | None:
    """The share of yes corrected for the judge's errors, the errors' own uncertainty included.

    With sensitivity a and false alarms b (one minus specificity), the share of yes is a·π + b·(1 − π), so
    π = (share − b)/(a − b), kept within 0–1 (Rogan and Gladen 1978). Its limits are melded (Fay, Proschan and Brittain
    2015; for weighted samples and tests with errors Bayer, Fay and Graubard 2023): a lower limit is the quantile of π
    when the share is drawn from its lower confidence distribution Beta(x, n − x + 1), and a and b from their upper ones
    Beta(k + 1, m − k); the upper limit the other way round. The checks are easier than the pairs that training meets, so
    the correction removes what is certain to be wrong, and perhaps not all.

    Args:
        values: (L,) 0 or 1.
        weights: (L,) above 0.
        checks: How many hidden pairs were asked.
        accepted: Of the duplicates and of the others, how many count as yes.
        level: Confidence level.
        rng: Draws.

    Returns:
        None if no more duplicates than others are accepted.
    """
    hits, alarms = accepted
    sensitivity = hits / checks.duplicates if checks.duplicates else 1.0
    alarm_rate = alarms / checks.others if checks.others else 0.0
    if sensitivity <= alarm_rate:
        return None
    law = _ShareLaw.of(values, weights, level)
    misses, passes = checks.duplicates - hits, checks.others - alarms
    # Without checks of a kind the judge is taken to make no mistake of that kind.
    sure, none = (1.0, 0.0), (0.0, 1.0)

    def draws(*laws: Beta, chance: float) -> Floats:
        return _rogan_gladen(*(_beta_draws(rng, law) for law in laws), chance=chance)

    tail = (1 - level) / 2
    lowest = draws(
        law.lower,
        (hits + 1, misses) if checks.duplicates else sure,
        (alarms + 1, passes) if checks.others else none,
        chance=0.0,
    )
    highest = draws(
        law.upper,
        (hits, misses + 1) if checks.duplicates else sure,
        (alarms, passes + 1) if checks.others else none,
        chance=1.0,
    )
    value = min(max((law.share - alarm_rate) / (sensitivity - alarm_rate), 0.0), 1.0)
    return Interval(
        value,
        min(float(np.quantile(lowest, tail)), value),
        max(float(np.quantile(highest, 1 - tail)), value),
        f"{law.method}, corrected for a judge that accepts {hits} of {checks.duplicates} certain duplicates and {alarms} "
        f"of {checks.others} others (Rogan–Gladen, melded)",
    )


def _rogan_gladen(share: Floats, sensitivity: Floats, alarm_rate: Floats, *, chance: float) -> Floats:
    """π for each draw; `chance` where the judge would be no better than chance."""
    gap = sensitivity - alarm_rate
    sound = gap > 1e-9
    return np.where(sound, np.clip((share - alarm_rate) / np.where(sound, gap, 1.0), 0.0, 1.0), chance)
