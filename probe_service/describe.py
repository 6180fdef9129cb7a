"""From what was laid out and measured to the blocks of a report that say so in words."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from dataclasses import asdict

import numpy as np

from probe_service.estimate import TEMPERATURES, BatchUnits, BorrowedCurve
from probe_service.measure import AllPairsInDetail, EpochDraws, Shares
from probe_service.schemas import (
    CONFIDENCE_LEVEL,
    Chains,
    CorpusKind,
    Direction,
    EvidenceInfo,
    Harm,
    ProbeRequest,
    ReportWarning,
    RowHarm,
    SamplerKind,
    SamplerShortfall,
    SamplingInfo,
    SharesByTemperature,
    SourceCell,
)
from probe_service.workspace import Workspace

__all__ = [
    "describe_evidence",
    "describe_harm",
    "describe_sampling",
    "describe_temperatures",
    "versions",
    "warnings",
]

SHOWN_ROWS = 20


def describe_evidence(work: Workspace, shares: Shares, borrowed: BorrowedCurve | None) -> EvidenceInfo:
    """What is known about the pairs, and where it comes from."""
    complete = shares.setting.complete
    rows = len(work.anchors)
    known = int(work.evidence.false_negative_counts().sum())
    labelled = work.evidence.group is not None
    if labelled and work.evidence.unjudged_rows is None:
        description = (
            "Every row has a group, which is taken as a complete judgement: rows of one group mean the same, rows of "
            "different groups do not."
        )
        if not complete:
            description += " Hard negatives whose text no row has are unjudged."
    elif labelled:
        description = "Rows with a group are judged; pairs with a row without a group are unjudged, unless their texts are equal."
    else:
        description = (
            "Nothing is known about the rows but their texts: equal texts certainly mean the same, all other pairs are "
            "unjudged."
        )
    return EvidenceInfo(
        tier="labelled" if labelled else "certain",
        description=description,
        known_false_negative_pairs=known,
        ordered_pairs=rows * (rows - 1),
        unjudged_pair_share=work.evidence.unjudged_pair_share(),
        worst_case_similarity=work.floor["similarity"],
        worst_case_source=work.floor["source"],
        chains=_chains(work) if shares.setting.inferred else None,
        borrowed_source=None if borrowed is None or complete else borrowed.source,
    )


def _chains(work: Workspace) -> Chains:
    found = work.evidence.chain_info()
    positions = np.array(found.largest_component_row_positions, dtype=np.int64)
    return Chains(
        components=found.components,
        largest_component_rows=found.largest_component_rows,
        largest_component=work.row_numbers(positions),
        inferred_pairs=found.added_ordered_pairs,
    )


def describe_temperatures(shares: Shares) -> SharesByTemperature | None:
    """S over sizes and temperatures, where it comes from all pairs."""
    detail = shares.all_pairs
    if not isinstance(detail, AllPairsInDetail) or not detail.sizes:
        return None
    known, worst = detail.by_temperature.tolist()
    return SharesByTemperature(
        temperatures=list(TEMPERATURES),
        batch_sizes=detail.sizes,
        share=known,
        worst_case=None if shares.setting.complete else worst,
    )


def describe_harm(work: Workspace, shares: Shares) -> Harm | None:
    """Who brings the harm, where S comes from all pairs."""
    detail = shares.all_pairs
    if not isinstance(detail, AllPairsInDetail) or detail.decomposition is None:
        return None
    parts = detail.decomposition
    _, names = detail.sources
    both = parts.by_anchor + parts.by_candidate
    worst = np.argsort(-both, kind="stable")[:SHOWN_ROWS]
    received = np.cumsum(np.sort(parts.by_candidate)[::-1])
    texts, sources = work.corpus.anchors, shares.population.sources
    return Harm(
        batch_size=parts.batch_size,
        share=min(1.0, parts.share),
        sources=[
            SourceCell(
                anchor_source=names[a],
                candidate_source=names[c],
                push_share=min(1.0, float(parts.push[a, c])),
                false_push_share=min(1.0, float(parts.false[a, c])),
            )
            for a in range(len(names))
            for c in range(len(names))
        ],
        rows_with_half=int(np.searchsorted(received, received[-1] / 2) + 1) if received[-1] > 0 else 0,
        rows=[
            RowHarm(
                row=number,
                text=None if texts is None else texts[int(work.kept_rows[place])],
                source=None if sources is None else sources[place],
                as_anchor=float(parts.by_anchor[place]),
                as_candidate=float(parts.by_candidate[place]),
            )
            for place, number in zip(worst.tolist(), work.row_numbers(worst), strict=True)
            if both[place] > 0
        ],
    )


def describe_sampling(work: Workspace, shares: Shares, request: ProbeRequest) -> SamplingInfo:
    """How batches were drawn and intervals made."""
    plan = work.plan
    exact_up_to = 0 if shares.all_pairs is None else shares.all_pairs.largest
    return SamplingInfo(
        method="exact" if exact_up_to else "sampled",
        exact_up_to=exact_up_to or None,
        sampler=request.sampler.kind,
        shortfall=_shortfall(work, shares),
        confidence_level=CONFIDENCE_LEVEL,
        seed=request.seed,
        num_repeats=request.num_repeats,
        top_k=request.top_k,
        temperature=request.temperature,
        sub_pools=None if plan.whole_corpus else 20,
        interval=_interval_in_words(shares, exact_up_to=exact_up_to),
        largest_size_with_interval=plan.largest_size_with_interval,
        stopped=work.stopped,
    )


def _shortfall(work: Workspace, shares: Shares) -> list[SamplerShortfall]:
    draws = shares.draws
    if not isinstance(draws, EpochDraws):
        return []
    return [
        SamplerShortfall.model_validate({"batch_size": size} | asdict(draws.epoch(size, 0).shortfall))
        for size in work.sizes
    ]


def _interval_in_words(shares: Shares, *, exact_up_to: int) -> str:
    if shares.draws.units is BatchUnits.EVERY_BATCH:
        return "The batches are those of the file's order, all of them: there is no error of drawing."
    if shares.draws.units is BatchUnits.EPOCHS:
        return (
            "Intervals come from the means of 20 independent epochs: batches of one epoch depend on each other. They hold the "
            "error of drawing epochs of these rows."
        )
    if not shares.population.plan.whole_corpus:
        drawn = "A sample of the rows is encoded: intervals come from 20 disjoint random sub-pools of it."
        if not exact_up_to:
            return drawn
        return (
            f"{drawn} Up to N = {exact_up_to} the values of the shares S and G, the hardest negative and the expected pairs "
            "above a similarity come from all pairs of that sample."
        )
    sampled = "Every usable row is encoded: intervals hold the Monte Carlo error of drawing batches."
    if not exact_up_to:
        return sampled
    return (
        f"{sampled} Up to N = {exact_up_to} the shares S and G, the hardest negative and the expected pairs above a similarity "
        "come from all pairs of the corpus and have no such error."
    )


def warnings(work: Workspace, shares: Shares, request: ProbeRequest) -> list[ReportWarning]:
    """What the reader should know before trusting a figure."""
    complete = shares.setting.complete
    said: list[ReportWarning] = []

    def warn(code: str, message: str) -> None:
        said.append(ReportWarning(code=code, message=message))

    corpus, encoder = work.corpus_info, work.encoder_info
    if encoder.backend != "none" and encoder.revision is not None and not encoder.revision_pinned:
        warn(
            "revision_not_pinned",
            f"{encoder.name} was loaded at commit {encoder.revision}, which is not pinned here; name it to repeat this.",
        )
    negatives = work.hard_negatives
    if corpus.kind is CorpusKind.TUPLES and negatives is None and request.loss.train_group_size is None:
        warn(
            "hard_negatives_not_counted",
            "Some rows have no hard negative, so none are candidates here; give train_group_size, and leave those rows out.",
        )
    if negatives is not None and int(negatives.count.max()) > negatives.per_row:
        warn(
            "hard_negatives_chosen",
            f"Rows have up to {negatives.count.max()} hard negatives; each brings {negatives.per_row} of them, chosen at random "
            "for each batch.",
        )
    if negatives is not None and int(negatives.count.min()) < negatives.per_row:
        warn(
            "hard_negatives_repeated",
            f"{int((negatives.count < negatives.per_row).sum())} rows have fewer than {negatives.per_row} hard negatives and "
            "repeat theirs.",
        )
    if negatives is not None and not complete:
        warn(
            "hard_negatives_unjudged",
            "Hard negatives are unjudged unless their text stands elsewhere in the corpus; they are often mined from what is "
            "most similar, so audit them apart.",
        )
    if Direction.DOC_TO_DOC in request.loss.directions and negatives is not None:
        warn(
            "own_hard_negatives_left_out",
            "In doc_to_doc a positive is not compared with its own row's hard negatives, as in sentence-transformers.",
        )
    if work.dropout_rates:
        warn(
            "positives_from_dropout",
            f"A sentence's positive is itself under another dropout (rates {', '.join(f'{r:g}' for r in work.dropout_rates)}): "
            "G, ξ and the effective anchors are those of unsupervised SimCSE.",
        )
    if request.dropout_views and not work.dropout_rates:
        warn(
            "dropout_views_not_used",
            "Rows have positives or vectors of their own, so dropout views were not made.",
        )
    sampler = request.sampler
    within = sampler.within_source if sampler.kind is SamplerKind.GROUPED else sampler.kind
    if within is SamplerKind.NO_DUPLICATES and sampler.gather and sampler.world_size > 1:
        warn(
            "duplicates_across_devices",
            "no_duplicates keeps equal texts out of one device's batch only; gathering brings those of other devices together.",
        )
    if within is SamplerKind.NO_DUPLICATES and work.corpus.anchors is None:
        warn(
            "no_texts_to_keep_apart",
            "no_duplicates compares texts, of which the corpus has none: here no row waits for another batch.",
        )
    if corpus.columns.label is not None and work.evidence.group is None:
        warn(
            "label_not_used",
            f"The column {corpus.columns.label!r} was not taken as meaning: a topic is no meaning. Set label_is_meaning if "
            "rows with one label mean the same.",
        )
    contradictions = work.evidence.contradictions()
    if contradictions:
        warn(
            "groups_contradict_texts",
            f"{contradictions} ordered pairs have equal texts but different groups; they are counted as false negatives.",
        )
    if not complete:
        warn(
            "unjudged_pairs",
            "Most pairs are unjudged: S is given as a lower bound (certain pairs) and a worst case, not as an estimate.",
        )
    if corpus.truncated is not None and corpus.truncated.collisions:
        warn(
            "truncation_collisions",
            f"{corpus.truncated.collisions} rows equal another only after the tokenizer cut them; they are not counted as "
            "false negatives.",
        )
    beyond = [size for size in work.sizes if size > work.plan.largest_size_with_interval]
    if beyond:
        warn(
            "no_interval",
            f"Sizes {beyond} are above {work.plan.largest_size_with_interval} (a twentieth of the encoded rows): their values "
            "stand without an interval, and no verdict rests on them.",
        )
    return said


def versions() -> dict[str, str]:
    """Of the packages that the figures rest on."""
    names = (
        "probe-service",
        "numpy",
        "scipy",
        "torch",
        "faiss-cpu",
        "faiss-gpu",
        "sentence-transformers",
        "transformers",
    )
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(
            importlib.metadata.PackageNotFoundError
        ):  # e.g. run from a checkout on the path
            found[name] = importlib.metadata.version(name)
    return found
