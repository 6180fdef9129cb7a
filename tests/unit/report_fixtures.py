"""Reports made by hand, for what draws them: every kind of evidence, every null, and texts that mean harm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from probe_service.schemas import (
    SIMILARITY_THRESHOLDS,
    Advice,
    BatchSizeLimit,
    Chains,
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
    HardNegativeShares,
    Harm,
    Histogram,
    Nulls,
    PairRecall,
    PairsAbove,
    PairSearch,
    PaperRule,
    ProbeReport,
    ProbeRequest,
    Remedy,
    RemedyKind,
    ReportWarning,
    RowHarm,
    RunInfo,
    SamplerKind,
    SamplerOptions,
    SamplerShortfall,
    SamplingInfo,
    SharePoint,
    SharesByTemperature,
    SimilarPair,
    SourceCell,
    StarvationFloor,
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
            stopped=None,
        ),
        curve=curve,
        scan=scan,
        shares_by_temperature=None,
        harm=None,
        histogram=histogram(),
        pairs=similar_pairs(texts),
        pair_search=PairSearch(
            index="ivf",
            rows=1612,
            at_least=0.9,
            pairs=41,
            truncated=False,
            recall=PairRecall(
                rows=1000,
                nearest=estimate(0.973, 0.01, "Clopper–Pearson over 1000 rows", ceiling=1.0),
                rows_with_pairs=21,
                pairs=30,
                pairs_listed=30,
                listed=None,
            ),
            description="All pairs found with a similarity of 0.9 or more are listed: 41. A FAISS index was searched.",
        ),
        advice=Advice(
            budget=budget,
            budget_basis="given with the request",
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
                code="temperature_edge", message="At this temperature two rows decide every softmax."
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
                budget_basis="given with the request",
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
                budget_basis="given with the request",
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


EXACT_METHOD = "exact over all pairs of the corpus"
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2)


def exactly(value: float, method: str = EXACT_METHOD) -> Estimate:
    return Estimate(value=value, low=value, high=value, method=method)


def harm(texts: Sequence[str], sources: Sequence[str], size: int = 64) -> Harm:
    """False push of two thirds of .03 within each source and one third between them, in equal parts."""
    cells = len(sources) ** 2
    inside, between = 0.02 / len(sources), 0.01 / max(1, cells - len(sources))
    return Harm(
        batch_size=size,
        share=0.03,
        sources=[
            SourceCell(
                anchor_source=anchor,
                candidate_source=candidate,
                push_share=1 / cells,
                false_push_share=inside if anchor == candidate else between,
            )
            for anchor in sources
            for candidate in sources
        ],
        rows_with_half=37,
        rows=[
            RowHarm(
                row=11 * rank,
                text=None if rank == 3 else texts[rank % len(texts)],
                source=sources[rank % len(sources)] if len(sources) > 1 else None,
                as_anchor=0.0004 / rank,
                as_candidate=0.0006 / rank,
            )
            for rank in range(1, 6)
        ],
    )


def remedies(before: Estimate, column: str, size: int = 64) -> list[Remedy]:
    """One of each kind: measured with an interval, exact, with a list of rows, and without any effect on S."""

    def remedy(kind: RemedyKind, title: str, after: Estimate | None, effect: str, **rest: object) -> Remedy:
        known = {"n_max_after": None, "true_push_lost": None, "rows": [], "snippet": None}
        fields = {"kind": kind, "title": title, "batch_size": size, "effect": effect}
        return Remedy(**fields, share_before=before, share_after=after, **(known | rest))

    def code(sampler: str) -> str:
        return (
            f"train_dataset = rows.select_columns([{column!r}])\nargs = Arguments(batch_sampler={sampler})\n"
        )

    limit = BatchSizeLimit(value=61, tested_up_to=96, exceeded=True, reason="at most 0.2 up to 61")
    return [
        remedy(
            RemedyKind.NO_DUPLICATES,
            "Keep equal texts out of one batch",
            estimate(before.value * 0.95, 0.001, "t over 20 epochs"),
            "With the sampler no_duplicates S falls a little.",
            snippet=code("BatchSamplers.NO_DUPLICATES"),
        ),
        remedy(
            RemedyKind.GROUP_AWARE,
            "Never put two rows of one group into a batch",
            exactly(0.0, "by construction: rows of one group never meet"),
            "With a group-aware sampler no known false negative is left in a batch.",
            snippet=code("GroupAwareBatchSampler"),
        ),
        remedy(
            RemedyKind.DROP_HARMFUL_ROWS,
            "Drop the 3 rows that bring most of the harm",
            estimate(before.value * 0.9, 0.0012, "t over 313 batches"),
            "Without 3 of 1612 rows S falls.",
            rows=[11, 22, 33],
            snippet="dropped = {11, 22, 33}\n",
        ),
        remedy(
            RemedyKind.MASK,
            "Mask candidates of similarity 0.9 or more",
            exactly(before.value / 2),
            "It takes away 50% of the push on known false negatives and 1.3% of the other push.",
            n_max_after=limit,
            true_push_lost=0.0127,
        ),
        remedy(
            RemedyKind.TEMPERATURE,
            "Train at a temperature of 0.108",
            exactly(before.value * 0.8),
            "At T = 0.108 S falls; what that costs, a trial tells.",
        ),
        remedy(
            RemedyKind.FLATNCE, "FlatNCE in place of InfoNCE", None, "All anchors weigh the same; S stays."
        ),
    ]


def with_details(report: ProbeReport, *, texts: Sequence[str], sources: Sequence[str]) -> ProbeReport:
    """Fill every block that is empty in the other reports."""
    share = next(point for point in report.curve if point.batch_size == 64).false_negative_softmax_share
    assert share is not None
    curve = []
    for point in report.curve:
        known, size = point.false_negative_softmax_share, point.batch_size
        assert known is not None
        detail = {
            "per_device_batch_size": size // 2,
            "candidates_per_anchor": 3 * size - 1,
            "inferred_share": estimate(known.value + 0.04, 0.004, ceiling=1.0),
            "borrowed_share": min(1.0, known.value + 0.08 + size / 4000),
            "hard_negatives": HardNegativeShares(
                own_push=estimate(0.5 / math.log2(size), 0.002),
                own_false=exactly(0.0),
                other_push=estimate(0.1 * math.log2(size), 0.003, ceiling=1.0),
                other_false=estimate(known.value / 3, known.value / 60, ceiling=1.0),
            ),
        }
        curve.append(point.model_copy(update=detail))
    sizes = [point.batch_size for point in curve]
    judged = report.evidence.tier == "labelled"
    return report.model_copy(
        update={
            "request": report.request.model_copy(
                update={"sampler": SamplerOptions(kind=SamplerKind.NO_DUPLICATES, world_size=2, gather=True)}
            ),
            "corpus": report.corpus.model_copy(
                update={
                    "kind": CorpusKind.TUPLES,
                    "sources": {source: 1612 // len(sources) for source in sources},
                    "hard_negatives": 3224,
                }
            ),
            "evidence": report.evidence.model_copy(
                update={
                    "chains": Chains(
                        components=12,
                        largest_component_rows=553,
                        largest_component=[3, 14, 15, 92],
                        inferred_pairs=7310,
                    ),
                    "borrowed_source": "a curve of STS-B scores of at least 4 under minilm",
                }
            ),
            "sampling": report.sampling.model_copy(
                update={
                    "sampler": SamplerKind.NO_DUPLICATES,
                    "shortfall": [
                        SamplerShortfall(
                            batch_size=size,
                            rows=1612,
                            rows_left_out=1612 % size,
                            rows_repeated=0,
                            remainder_rows=1612 % size,
                            rows_delayed=19,
                            short_batches=0,
                            batches_expected=1612 // size,
                            batches_resampled=0,
                            batches_missing=0,
                            batches_not_dealt=0,
                            small_sources=[sources[0]] if size == sizes[-1] else [],
                        )
                        for size in sizes
                    ],
                }
            ),
            "curve": curve,
            "shares_by_temperature": SharesByTemperature(
                temperatures=list(TEMPERATURES),
                batch_sizes=sizes,
                share=[
                    [_interpolated(_S, size) * (1 - 3 * temperature) for size in sizes]
                    for temperature in TEMPERATURES
                ],
                worst_case=None
                if judged
                else [
                    [min(1.0, _interpolated(_S, size) * (1.3 - temperature)) for size in sizes]
                    for temperature in TEMPERATURES
                ],
            ),
            "harm": harm(texts, sources),
            "advice": report.advice.model_copy(
                update={
                    "n_max": BatchSizeLimit(
                        value=4,
                        per_device=2,
                        tested_up_to=max(sizes),
                        every_integer=False,
                        exceeded=True,
                        reason="the upper limit of S is at most 0.2 at 4 rows, and 0.21 at 5",
                    ),
                    "remedies": remedies(share, report.corpus.columns.group or "text"),
                    "starvation_floor": StarvationFloor(
                        batch_size=32,
                        dtype="float16",
                        temperature=0.05,
                        positive_similarity=0.83,
                        positives="given",
                        largest_error=0.1,
                        tested_from=min(sizes),
                        tested_up_to=max(sizes),
                        reason="below 32 rows a tenth of the gradient is lost in float16",
                        remedies=["Compute the loss in float32.", "Use FlatNCE."],
                    ),
                    "trade_off": [
                        "Cost: from 16 to 256 rows the share goes up.",
                        "Gain: the negatives that an anchor effectively learns from go from 5.6 to 22.1.",
                    ],
                    "snippet": "args = Arguments(per_device_train_batch_size=2)\n",
                }
            ),
        }
    )


def detailed_report() -> ProbeReport:
    """Everything that a report may hold, where most pairs are unjudged."""
    return with_details(
        certain_report(sizes=(16, 64, 256)), texts=_PLAIN_TEXTS, sources=("chat", "email", "web-form")
    )


def hostile_report() -> ProbeReport:
    """Harmful texts wherever a corpus can put text."""
    sources = ("<b>bold</b>", '"><img src=x onerror=alert(5)>\x1b[2Jclear')
    base = with_details(
        full_report(
            sizes=(16, 64, 256),
            texts=HOSTILE_TEXTS,
            name="<script>alert(1)</script>\u202e.jsonl",
            group_column="</script><script>alert(2)</script>",
            source_names=sources,
        ),
        texts=HOSTILE_TEXTS,
        sources=sources,
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
    "detailed": detailed_report,
    "hostile": hostile_report,
}
