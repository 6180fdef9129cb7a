"""Reports made by hand, for what draws them: every kind of evidence, every null, and texts that mean harm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from probe_service.schemas import (
    SIMILARITY_THRESHOLDS,
    Advice,
    BatchSizeLimit,
    ColumnRoles,
    CorpusInfo,
    CorpusKind,
    CorpusOptions,
    CurvePoint,
    DropEffect,
    DuplicateCounts,
    EncoderInfo,
    Estimate,
    EvidenceInfo,
    ExcludedRows,
    GaussianSimilarity,
    GradientError,
    Histogram,
    Nulls,
    PairsAbove,
    PaperRule,
    ProbeReport,
    ProbeRequest,
    ReportWarning,
    RunInfo,
    SamplerKind,
    SamplingInfo,
    SharePoint,
    SimilarPair,
    TruncatedRows,
    Verdict,
    VerdictKind,
    Xi,
)

T_METHOD = "t interval over batch values"
CP_METHOD = "Clopper–Pearson over batches"
LOWER_BOUND_METHOD = "lower bound from equal texts; high is the worst case"
TOO_LARGE = "no interval: N is above a 20th of the encoded rows"

HOSTILE_TEXTS = (
    "<script>window.__hacked = true; alert(1)</script>",
    '</script><img src=x onerror="window.__hacked = true">',
    "\u202eright to left override\u202c and \u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\U0001f469\u200d\U0001f680 \U0001f1f3\U0001f1f1 emoji \u2764\ufe0f",
    "</title></style></textarea><!-- <script>",
    "bell \x07 escape \x1b[31mred\x1b[0m null \x00 return \r newline \n tab \t end",
    "${alert(1)} {{ 7 * 7 }} {% raw %} javascript:alert(1)",
    "long " * 1000,
)

_S = {
    2: 0.014,
    4: 0.034,
    8: 0.072,
    16: 0.129,
    32: 0.212,
    64: 0.310,
    128: 0.425,
    256: 0.540,
    512: 0.615,
    1024: 0.680,
}
_TOP = {4: 0.42, 8: 0.51, 16: 0.608, 32: 0.72, 64: 0.836, 128: 0.905, 256: 0.951, 512: 0.975, 1024: 0.988}


def estimate(
    value: float, half: float, method: str = T_METHOD, *, floor: float = 0.0, ceiling: float = math.inf
) -> Estimate:
    return Estimate(
        value=round(value, 9),
        low=round(max(floor, value - half), 9),
        high=round(min(ceiling, value + half), 9),
        method=method,
    )


def _interpolated(table: dict[int, float], size: int) -> float:
    known = sorted(table)
    if size <= known[0]:
        return table[known[0]]
    for left, right in pairwise(known):
        if left <= size <= right:
            weight = math.log(size / left) / math.log(right / left)
            return table[left] * (1 - weight) + table[right] * weight
    return table[known[-1]]


def curve_point(
    size: int,
    *,
    share: Estimate | None = None,
    worst_case: Estimate | None = None,
    labelled: bool = True,
    positives: bool = False,
    top_k: int = 4,
    kind: CorpusKind = CorpusKind.SENTENCES,
) -> CurvePoint:
    pairs = size * (size - 1) // (1 if kind is CorpusKind.PAIRS else 2)
    middle = _interpolated(_TOP, size)
    ranks: list[Estimate | None] = [
        estimate(middle + 0.04 * (1 - middle) * (2.5 - rank), 0.008, ceiling=1.0, floor=-1.0)
        if rank <= pairs
        else None
        for rank in range(1, top_k + 1)
    ]
    mean = estimate(middle, 0.007, ceiling=1.0) if pairs >= top_k else None
    root = math.log2(size)
    xi_value = size / 200
    return CurvePoint(
        batch_size=size,
        per_device_batch_size=size,
        candidates_per_anchor=size - 1,
        num_batches=max(100, math.ceil(20_000 / size)),
        negative_pairs_per_batch=pairs,
        top_k=ranks,
        top_k_mean=mean,
        hardest_negative=estimate(0.2 + 0.06 * root, 0.004),
        pairs_above=[
            PairsAbove(
                threshold=threshold,
                expected_pairs=estimate(pairs * (1 - threshold) / 40, pairs / 4000),
                at_least_one=estimate(
                    min(1.0, root / 10 * (1.2 - threshold) * 2), 0.03, CP_METHOD, ceiling=1.0
                ),
            )
            for threshold in SIMILARITY_THRESHOLDS
        ],
        false_negatives_per_anchor=estimate(0.0137 * (size - 1), 0.0005 * size)
        if labelled
        else estimate(1e-5 * size, 1e-6 * size),
        anchors_with_false_negative=estimate(1 - (1 - 0.0137) ** (size - 1), 0.004, ceiling=1.0),
        false_negative_softmax_share=share,
        false_negative_gradient_share=estimate(
            _interpolated(_S, size) * 1.1, 0.01, "jackknife over batches", ceiling=1.0
        )
        if positives
        else None,
        inferred_share=None,
        borrowed_share=None,
        hard_negatives=None,
        worst_case=worst_case,
        gaussian_similarity=GaussianSimilarity(
            mean=estimate(0.0002, 0.0004, floor=-1.0),
            max=estimate(0.08 + 0.02 * root, 0.003),
            vectors_per_batch=size,
        ),
        xi=Xi(
            p10=estimate(xi_value / 9, xi_value / 90),
            p50=estimate(xi_value, xi_value / 20),
            p90=estimate(xi_value * 7, xi_value),
        )
        if positives
        else None,
        effective_anchors=estimate(0.62, 0.02, "jackknife over batches", ceiling=1.0) if positives else None,
        effective_negatives=estimate(1 + size**0.55, 0.05 * size**0.5),
        gradient_error={
            dtype: GradientError(
                infonce=estimate(error, error / 10),
                flatnce=estimate(error / 3, error / 30),
                zero_loss_share=estimate(0.01, 0.004),
            )
            for dtype, error in (("float32", 2e-7), ("bfloat16", 8e-3), ("float16", 1.1e-3))
        }
        if positives
        else None,
        nulls=Nulls(
            gaussian_matched=estimate(0.28 + 0.025 * root, 0.005) if pairs >= top_k else None,
            false_negatives_masked=estimate(middle * 0.86, 0.009) if labelled and pairs >= top_k else None,
            isotropic=estimate(0.02 + 0.017 * root, 0.002) if pairs >= top_k else None,
        ),
    )


def labelled_share(size: int) -> Estimate:
    return estimate(_interpolated(_S, size), 0.004 + 0.02 / size, ceiling=1.0)


def certain_share(size: int) -> Estimate:
    value = 0.0004 * math.log2(size)
    return Estimate(
        value=value,
        low=value * 0.8,
        high=min(1.0, 0.038 + 0.074 * math.log2(size)),
        method=LOWER_BOUND_METHOD,
    )


def certain_worst_case(size: int) -> Estimate:
    return estimate(0.03 + 0.074 * math.log2(size), 0.008, ceiling=1.0)


def scan_sizes(largest: int) -> list[int]:
    """All small integers, then ever wider steps, as a thinned scan has them."""
    sizes = list(range(2, min(largest, 64) + 1))
    while sizes[-1] < largest:
        sizes.append(min(largest, math.ceil(sizes[-1] * 1.06)))
    return sizes


def histogram(centre: float = 0.18, width: float = 0.13, *, known: bool = True) -> Histogram:
    bins = 200
    edges = [-1 + 2 * i / bins for i in range(bins + 1)]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    counts = [round(40_000 * math.exp(-(((middle - centre) / width) ** 2) / 2)) for middle in middles]
    false = [
        round(500 * math.exp(-(((middle - 0.55) / 0.17) ** 2) / 2)) if known else 0 for middle in middles
    ]
    false[-1] = 40 if known else 3
    counts = [max(count, part) for count, part in zip(counts, false, strict=True)]
    return Histogram(
        bin_edges=edges, all_pairs=counts, known_false_negatives=false, pairs_counted=sum(counts)
    )


def similar_pairs(texts: Sequence[str]) -> list[SimilarPair]:
    return [
        SimilarPair(
            rank=rank,
            similarity=round(1.0 - 0.004 * (rank - 1), 4),
            row=17 * rank,
            other_row=17 * rank + 5,
            text=texts[rank % len(texts)],
            other_text=texts[(rank + 1) % len(texts)],
            known_false_negative=(True, None, False)[rank % 3],
            source="faq",
            other_source="tickets",
        )
        for rank in range(1, 21)
    ]


_PLAIN_TEXTS = (
    "How do I reset the password of my e-mail account?",
    "I forgot my mail password, how can I set a new one?",
    "The printer on the third floor shows a paper jam that is not there",
    "Printer 3rd floor: phantom paper jam",
    "Can I get a second monitor for working from home?",
)


def full_report(
    *,
    sizes: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024),
    texts: Sequence[str] = _PLAIN_TEXTS,
    name: str = "helpdesk.jsonl",
    group_column: str = "group",
    source_names: Sequence[str] = ("faq", "tickets"),
    positives: bool = True,
    top_k: int = 4,
    budget: float = 0.20,
) -> ProbeReport:
    """A labelled corpus: groups of the same meaning, a complete judgement."""
    curve = [
        curve_point(size, share=labelled_share(size), positives=positives, top_k=top_k) for size in sizes
    ]
    scan = [
        SharePoint(batch_size=size, estimate=labelled_share(size), worst_case=None)
        for size in scan_sizes(max(sizes))
    ]
    n_max_value = 1
    for point in scan:
        assert point.estimate.high is not None
        if point.estimate.high > budget:
            break
        n_max_value = point.batch_size
    n_max = BatchSizeLimit(
        value=n_max_value if n_max_value > 1 else None,
        tested_up_to=max(sizes),
        exceeded=n_max_value < max(sizes),
        reason=f"At N = {n_max_value + 1} the upper limit rises above the budget of {budget:.2f}.",
    )
    verdicts = []
    for point in curve:
        share = point.false_negative_softmax_share
        assert share is not None
        assert share.low is not None
        assert share.high is not None
        kind = (
            VerdictKind.PASS
            if share.high <= budget
            else VerdictKind.FAIL
            if share.low > budget
            else VerdictKind.INCONCLUSIVE
        )
        verdicts.append(
            Verdict(
                batch_size=point.batch_size,
                verdict=kind,
                reason=f"The share is {share.value:.3f}, between {share.low:.3f} and {share.high:.3f}.",
            )
        )
    return ProbeReport(
        run=RunInfo(
            id="01J8Z6Q3R7",
            created_at="2025-01-31T09:15:02Z",
            finished_at="2025-01-31T09:15:44Z",
            host="laptop",
            versions={"probe_service": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        ),
        request=ProbeRequest(
            batch_sizes=tuple(sizes),
            top_k=top_k,
            budget=budget,
            corpus=CorpusOptions(columns=ColumnRoles(group=group_column)),
        ),
        corpus=CorpusInfo(
            sha256="9f2c" * 16,
            name=name,
            format="jsonl",
            kind=CorpusKind.SENTENCES,
            columns=ColumnRoles(text="text", group=group_column, source="source"),
            columns_inferred=True,
            rows_read=1620,
            rows_filtered_out=0,
            rows_usable=1612,
            rows_encoded=1612,
            excluded=[
                ExcludedRows(reason="blank", count=5, rows=[12, 77, 301, 302, 900]),
                ExcludedRows(reason="not_a_string", count=3, rows=[41, 42, 1500]),
            ],
            duplicates=DuplicateCounts(
                exact=14, normalized=19, case_folded=23, rows=[55, 81, 130, 200, 201, 404]
            ),
            truncated=TruncatedRows(count=2, rows=[610, 1001], collisions=0, collision_rows=[]),
            groups=334,
            rows_without_group=0,
            sources={source_names[0]: 900, source_names[1]: 712},
            hard_negatives=None,
        ),
        encoder=EncoderInfo(
            name="minilm",
            backend="sentence-transformers",
            location="sentence-transformers/all-MiniLM-L6-v2",
            revision="1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
            revision_pinned=True,
            weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            pooling="mean",
            normalized=True,
            max_length=256,
            dimension=384,
            dtype="float32",
            device="cpu",
            prompt=None,
            check="6 canary cosines within 1e-4",
            fingerprint="a1b2c3d4e5f6",
        ),
        evidence=EvidenceInfo(
            tier="labelled",
            description="Rows of one group mean the same, rows of different groups do not.",
            known_false_negative_pairs=35_518,
            ordered_pairs=1612 * 1611,
            unjudged_pair_share=0.0,
            worst_case_similarity=None,
            worst_case_source="not needed: every pair is judged",
            chains=None,
            borrowed_source=None,
        ),
        sampling=SamplingInfo(
            method="sampled",
            exact_up_to=None,
            sampler=SamplerKind.RANDOM,
            shortfall=[],
            confidence_level=0.95,
            seed=0,
            num_repeats=100,
            top_k=top_k,
            temperature=0.05,
            sub_pools=None,
            interval="All rows were encoded: intervals hold only the error of drawing batches.",
            largest_size_with_interval=max(sizes),
        ),
        curve=curve,
        scan=scan,
        shares_by_temperature=None,
        harm=None,
        histogram=histogram(),
        pairs=similar_pairs(texts),
        advice=Advice(
            budget=budget,
            budget_is_provisional=True,
            headline=f"Up to {n_max.value} rows in a batch are safe on this corpus.",
            explanation=[
                "In a larger batch more than a fifth of each anchor's push lands on rows that mean the same.",
                "Dropping the 19 repeated rows moves the limit to 31.",
            ],
            n_max=n_max,
            verdicts=verdicts,
            drop_duplicates=DropEffect(
                rows_to_drop=[55, 81, 130, 200, 201, 404],
                rows_remaining=1606,
                n_max_after=BatchSizeLimit(
                    value=31, tested_up_to=max(sizes), exceeded=True, reason="At N = 32 the limit is passed."
                ),
                share_after=[
                    SharePoint(
                        batch_size=size,
                        estimate=estimate(_interpolated(_S, size) * 0.93, 0.005),
                        worst_case=None,
                    )
                    for size in sizes
                ],
                snippet="rows = rows.select(kept)\n",
            ),
            remedies=[],
            starvation_floor=None,
            trade_off=[],
            snippet=None,
            paper_rule=[PaperRule(threshold=0.7, batch_size=16), PaperRule(threshold=0.3, batch_size=None)],
        ),
        warnings=[
            ReportWarning(
                code="budget_provisional", message="The budget of 0.20 is provisional until trials fix it."
            ),
        ],
        timings={"reading": 0.12, "loading": 3.4, "encoding": 21.8, "measuring": 15.1, "advising": 1.3},
    )


def certain_report(sizes: Sequence[int] = (16, 64, 256, 1024)) -> ProbeReport:
    """No labels: only equal texts are known, so S is a lower bound and the worst case is high."""
    base = full_report(sizes=sizes, positives=False)
    curve = [
        curve_point(
            size, share=certain_share(size), worst_case=certain_worst_case(size), labelled=False
        ).model_copy(update={"anchors_with_false_negative": estimate(0.001 * size / 16, 0.0002)})
        for size in sizes
    ]
    return base.model_copy(
        update={
            "curve": curve,
            "scan": [
                SharePoint(batch_size=size, estimate=certain_share(size), worst_case=certain_worst_case(size))
                for size in scan_sizes(max(sizes))
            ],
            "histogram": histogram(known=False),
            "pairs": [
                pair.model_copy(update={"known_false_negative": True if pair.rank < 3 else None})
                for pair in base.pairs
            ],
            "corpus": base.corpus.model_copy(
                update={
                    "groups": None,
                    "rows_without_group": None,
                    "columns": ColumnRoles(text="text"),
                    "sources": None,
                    "excluded": [],
                }
            ),
            "evidence": EvidenceInfo(
                tier="certain",
                description="Only equal texts are known to mean the same; the other pairs are unjudged.",
                known_false_negative_pairs=38,
                ordered_pairs=1612 * 1611,
                unjudged_pair_share=0.99998,
                worst_case_similarity=0.47,
                worst_case_source="2nd percentile of bundled same-meaning pairs under minilm",
                chains=None,
                borrowed_source=None,
            ),
            "advice": Advice(
                budget=0.2,
                budget_is_provisional=True,
                headline="Without labels, up to 4 rows in a batch are safe; larger batches cannot be judged.",
                explanation=[
                    "Equal texts alone take at most 0.004 of the push, far below the budget.",
                    "If every pair at least as similar as 0.47 meant the same, the limit would be 4 rows.",
                    "Label a few groups, or add a group column, for a firm answer.",
                ],
                n_max=BatchSizeLimit(
                    value=4,
                    tested_up_to=max(sizes),
                    exceeded=True,
                    reason="At N = 5 the worst case rises above the budget of 0.20.",
                    assumption="No pair with a similarity below 0.47 means the same.",
                ),
                verdicts=[
                    Verdict(
                        batch_size=size,
                        verdict=VerdictKind.INCONCLUSIVE,
                        reason="The budget lies between the lower bound and the worst case.",
                    )
                    for size in sizes
                ],
                drop_duplicates=None,
                remedies=[],
                starvation_floor=None,
                trade_off=[],
                snippet=None,
                paper_rule=[PaperRule(threshold=0.7, batch_size=16)],
            ),
        }
    )


def single_size_report() -> ProbeReport:
    return full_report(sizes=(64,))


def null_ranks_report() -> ProbeReport:
    """k above the pairs of the small batches, and sizes too large for an interval."""
    sizes = (2, 3, 4, 16, 64)
    base = full_report(sizes=sizes, positives=False)
    curve = [curve_point(size, share=labelled_share(size), top_k=4, positives=False) for size in sizes]
    last = curve[-1]
    assert last.top_k_mean is not None
    without = {"low": None, "high": None, "method": TOO_LARGE}
    curve[-1] = last.model_copy(
        update={
            "top_k_mean": last.top_k_mean.model_copy(update=without),
            "top_k": [rank.model_copy(update=without) for rank in last.top_k if rank is not None],
            "false_negative_softmax_share": Estimate(value=0.31, low=None, high=None, method=TOO_LARGE),
        }
    )
    return base.model_copy(update={"curve": curve})


def all_equal_report() -> ProbeReport:
    """Every row the same text: S = 1 at every size, a plain fail, no safe size."""
    sizes = (2, 8, 32)
    base = full_report(sizes=sizes, positives=False)
    one = Estimate(value=1.0, low=1.0, high=1.0, method=T_METHOD)
    zero = Estimate(value=0.0, low=0.0, high=0.0, method=T_METHOD)
    curve = []
    for size in sizes:
        pairs = size * (size - 1) // 2
        enough = pairs >= 4
        curve.append(
            curve_point(size, share=one).model_copy(
                update={
                    "top_k": [one if rank <= pairs else None for rank in range(1, 5)],
                    "top_k_mean": one if enough else None,
                    "hardest_negative": one,
                    "false_negatives_per_anchor": one.model_copy(
                        update={"value": size - 1.0, "low": size - 1.0, "high": size - 1.0}
                    ),
                    "anchors_with_false_negative": one,
                    "gaussian_similarity": GaussianSimilarity(
                        mean=zero, max=estimate(0.09, 0.01), vectors_per_batch=size
                    ),
                    "nulls": Nulls(
                        gaussian_matched=one if enough else None,
                        false_negatives_masked=None,
                        isotropic=estimate(0.1, 0.01) if enough else None,
                    ),
                }
            )
        )
    bins = 200
    counts = [0] * (bins - 1) + [496]
    return base.model_copy(
        update={
            "curve": curve,
            "scan": [SharePoint(batch_size=size, estimate=one, worst_case=None) for size in range(2, 33)],
            "histogram": Histogram(
                bin_edges=[-1 + 2 * i / bins for i in range(bins + 1)],
                all_pairs=counts,
                known_false_negatives=counts,
                pairs_counted=496,
            ),
            "advice": Advice(
                budget=0.2,
                budget_is_provisional=True,
                headline="No batch size is safe: every row means the same.",
                explanation=[
                    "All of the push on negatives lands on rows that mean the same, even in a batch of two."
                ],
                n_max=BatchSizeLimit(
                    value=None, tested_up_to=32, exceeded=True, reason="At N = 2 the share is 1.00 already."
                ),
                verdicts=[
                    Verdict(
                        batch_size=size,
                        verdict=VerdictKind.FAIL,
                        reason="The share is 1.000; the budget is 0.20.",
                    )
                    for size in sizes
                ],
                drop_duplicates=DropEffect(
                    rows_to_drop=list(range(2, 33)),
                    rows_remaining=1,
                    n_max_after=None,
                    share_after=[],
                    snippet="rows = rows.select([0])\n",
                ),
                remedies=[],
                starvation_floor=None,
                trade_off=[],
                snippet=None,
                paper_rule=[PaperRule(threshold=0.7, batch_size=None)],
            ),
        }
    )


def hostile_report() -> ProbeReport:
    """Harmful texts wherever a corpus can put text."""
    base = full_report(
        sizes=(16, 64, 256),
        texts=HOSTILE_TEXTS,
        name="<script>alert(1)</script>\u202e.jsonl",
        group_column="</script><script>alert(2)</script>",
        source_names=("<b>bold</b>", "\x1b[2Jclear"),
    )
    return base.model_copy(
        update={
            "advice": base.advice.model_copy(
                update={
                    "headline": "</script><script>alert(3)</script> is safe up to \u202e16",
                    "explanation": [HOSTILE_TEXTS[0]],
                }
            ),
            "warnings": [ReportWarning(code="odd_texts", message=HOSTILE_TEXTS[1])],
            "encoder": base.encoder.model_copy(
                update={"name": "<img src=x onerror=alert(4)>", "prompt": "\x1b]0;title\x07 </script>"}
            ),
        }
    )


REPORTS = {
    "full": full_report,
    "certain": certain_report,
    "single": single_size_report,
    "null_ranks": null_ranks_report,
    "all_equal": all_equal_report,
    "hostile": hostile_report,
}
