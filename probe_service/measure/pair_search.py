"""The search for the most similar pairs of all encoded rows: of all pairs, or through an index and with its recall."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate.intervals import Interval, clopper_pearson, share_mean_interval
from probe_service.schemas import CONFIDENCE_LEVEL, Estimate, PairRecall, PairSearch
from probe_service.similarity import TopPairs, top_pairs

__all__ = ["search_pairs"]

MOST_SIMILAR = 1_000
"""Pairs that are listed where no similarity is asked for."""
MOST_PAIRS = 1_000_000
"""Pairs that are listed at most."""

_NAMES = {"flat": "flat", "ivf": "IVF", "hnsw": "HNSW"}


def search_pairs(
    anchors: NDArray[np.float32],
    positives: NDArray[np.float32] | None,
    *,
    at_least: float | None,
    exact_up_to: int,
    seed: int,
    checkpoint: Callable[[], None],
) -> tuple[TopPairs, PairSearch]:
    """Find the most similar negative pairs, or all that are at least so similar, and say how.

    Args:
        anchors: (m, d) float32 unit rows.
        positives: (m, d); None for sentences.
        at_least: θ; None: the `MOST_SIMILAR` most similar ones.
        exact_up_to: Rows up to which each is compared with each; the cost grows with their square.
        seed: Of the index, and of the rows drawn to measure its recall.
        checkpoint: Called often; may raise to abandon the search.
    """
    count, lowest = (MOST_SIMILAR, -1.0) if at_least is None else (MOST_PAIRS, at_least)
    if len(anchors) <= exact_up_to:
        found = top_pairs(anchors, positives, k=count + 1, on_block=lambda _done, _rows: checkpoint())
        similar = int(np.searchsorted(-found.similarity, -lowest, side="right"))
        kept = slice(0, min(count, similar))
        pairs = TopPairs(found.similarity[kept], found.anchor[kept], found.candidate[kept])
        more, index, recall = similar > count, None, None
        how = f"Each of the {len(anchors):,} encoded rows was compared with every other one."
    else:
        # Imported where it is needed: FAISS brings an OpenMP runtime of its own.
        from probe_service.similarity.indexed_pairs import indexed_pairs

        result = indexed_pairs(
            anchors, positives, count=count, at_least=lowest, seed=seed, checkpoint=checkpoint
        )
        assert result.sample is not None  # what is exact has its place below `exact_up_to`
        recall = _recall(result.sample.nearest_found, result.sample.pairs, result.sample.found)
        pairs, more, index = result.pairs, result.truncated, result.kind
        name = f"A FAISS index ({_NAMES[index]}, on the {'GPU' if result.on_gpu else 'CPU'})"
        how = f"{name} of the {len(anchors):,} encoded rows was searched. {_recall_in_words(recall)}"
    truncated = at_least is not None and more
    return pairs, PairSearch(
        index=index,
        rows=len(anchors),
        at_least=at_least,
        pairs=len(pairs.similarity),
        truncated=truncated,
        recall=recall,
        description=f"{_list_in_words(pairs, at_least, truncated)} {how}",
    )


def _list_in_words(pairs: TopPairs, at_least: float | None, truncated: bool) -> str:
    listed = f"{len(pairs.similarity):,}"
    if at_least is None:
        return f"The {listed} most similar pairs are listed."
    if truncated:
        return (
            f"More than {listed} pairs have a similarity of {at_least:g} or more: only the {listed} most similar are listed, "
            f"down to {pairs.similarity[-1]:.4f}."
        )
    return f"Listed are all pairs that were found with a similarity of {at_least:g} or more: {listed}."


def _recall(
    nearest_found: NDArray[np.bool_], pairs: NDArray[np.int64], found: NDArray[np.int64]
) -> PairRecall:
    """Rows are the units: the pairs of one row are found or missed together."""
    rows = len(nearest_found)
    nearest = clopper_pearson(int(nearest_found.sum()), rows, CONFIDENCE_LEVEL)
    having = pairs > 0
    shares = found[having] / pairs[having]
    listed = None
    if len(shares) == 1:
        listed = Estimate(value=float(shares[0]), low=None, high=None, method="no interval: one row")
    elif len(shares) > 1:
        # Of the shares that are missed, most of which are 0: what that interval is made for.
        missed = share_mean_interval(1.0 - shares, CONFIDENCE_LEVEL)
        listed = _over_rows(Interval(1 - missed.value, 1 - missed.high, 1 - missed.low, missed.method))
    return PairRecall(
        rows=rows,
        nearest=_over_rows(nearest),
        rows_with_pairs=len(shares),
        pairs=int(pairs.sum()),
        pairs_listed=int(found.sum()),
        listed=listed,
    )


def _over_rows(interval: Interval) -> Estimate:
    return Estimate(
        value=interval.value,
        low=min(interval.low, interval.value),
        high=max(interval.high, interval.value),
        method=interval.method.replace("batches", "rows"),
    )


def _recall_in_words(recall: PairRecall) -> str:
    said = (
        f"It may miss some: of {recall.rows:,} rows drawn at random and compared with all, the share whose most similar "
        f"negative it found is {_in_words(recall.nearest)}."
    )
    if recall.listed is None:
        return f"{said} None of them has a pair that belongs in the list."
    having = (
        "One of them has pairs"
        if recall.rows_with_pairs == 1
        else f"{recall.rows_with_pairs:,} of them have pairs"
    )
    return (
        f"{said} {having} that belong in the list; on average the share of a row's that is listed is "
        f"{_in_words(recall.listed)}, {recall.pairs_listed:,} of {recall.pairs:,} in all."
    )


def _in_words(share: Estimate) -> str:
    if share.low is None or share.high is None:
        return f"{share.value:.3f}"
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"
