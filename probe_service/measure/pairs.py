"""The most similar pairs of a population, and how all similarities are spread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import WHOLE
from probe_service.measure.pair_search import search_pairs
from probe_service.schemas import Histogram, PairSearch, ProbeRequest, SimilarPair
from probe_service.scratch import Scratch
from probe_service.similarity import TopPairs
from probe_service.workspace import DEFAULT_LARGEST_SIZE, Population, Workspace

__all__ = ["Histograms", "SimilarPairs"]

HISTOGRAM_BINS = 100
HISTOGRAM_ORDERS = 10
_PAIRS_AT_ONCE = 8_192


class SimilarPairs:
    """The most similar negative pairs of all encoded rows, with their texts.

    Args:
        work: The rows.
        request: Says from which similarity on all pairs are wanted.
    """

    def __init__(self, work: Workspace, request: ProbeRequest) -> None:
        self._work, self._request = work, request
        self.file = work.scratch.file("pairs.jsonl")

    @property
    def name(self) -> str:
        """Of the one there is."""
        return "similar-pairs"

    def parts(self) -> list[str]:
        """One."""
        return ["all"]

    def run(self, part: str) -> None:  # noqa: ARG002 - there is one
        """Find them, and write them as JSON lines."""
        work = self._work
        pairs, search = search_pairs(
            work.anchors,
            work.positives,
            at_least=self._request.pairs_above,
            exact_up_to=work.exact_pairs_up_to,
            seed=self._request.seed,
            checkpoint=work.scratch.checkpoint,
        )
        lines = (pair.model_dump_json() for pair in _with_texts(work, pairs))
        work.scratch.save_lines(self.file.name, lines)
        work.scratch.save_text("pair_search.json", search.model_dump_json())

    @property
    def search(self) -> PairSearch:
        """How they were found."""
        return PairSearch.model_validate_json(self._work.scratch.file("pair_search.json").read_bytes())

    def result(self, count: int) -> list[SimilarPair]:
        """The first `count` of them."""
        with self.file.open(encoding="utf-8") as lines:
            return [
                SimilarPair.model_validate_json(line) for line, _ in zip(lines, range(count), strict=False)
            ]


class Histograms:
    """How the similarities of random negative pairs are spread.

    Args:
        population: The rows.
        scratch: Where the result goes.
    """

    def __init__(self, population: Population, scratch: Scratch) -> None:
        self._population, self._scratch = population, scratch

    @property
    def name(self) -> str:
        """Of the one there is."""
        return "histogram"

    def parts(self) -> list[str]:
        """One."""
        return ["all"]

    def run(self, part: str) -> None:  # noqa: ARG002 - there is one
        """Count."""
        population = self._population
        edges = np.linspace(-1.0, 1.0, HISTOGRAM_BINS + 1)
        total, known = np.zeros(HISTOGRAM_BINS), np.zeros(HISTOGRAM_BINS)
        length = min(DEFAULT_LARGEST_SIZE, len(population))
        for number in range(HISTOGRAM_ORDERS):
            self._scratch.checkpoint()
            order = population.plan.order(length, WHOLE, number)
            right = population.anchors if population.positives is None else population.positives
            similarities = np.clip(population.anchors[order] @ right[order].T, -1.0, 1.0)
            pairs = population.evidence.known_pairs(order[None, :])
            negative = np.triu(np.ones_like(similarities, dtype=bool), 1)
            if population.positives is not None:
                negative |= negative.T
            total += np.histogram(similarities[negative], edges)[0]
            counted = negative[pairs.anchor, pairs.candidate]
            known += np.histogram(similarities[pairs.anchor[counted], pairs.candidate[counted]], edges)[0]
        histogram = Histogram(
            bin_edges=[round(float(edge), 10) for edge in edges],
            all_pairs=[int(count) for count in total],
            known_false_negatives=[int(count) for count in known],
            pairs_counted=int(total.sum()),
        )
        self._scratch.save_text("histogram.json", histogram.model_dump_json())

    def result(self) -> Histogram:
        """The counts."""
        return Histogram.model_validate_json(self._scratch.file("histogram.json").read_bytes())


def _with_texts(work: Workspace, pairs: TopPairs) -> Iterator[SimilarPair]:
    corpus, rows = work.corpus, work.kept_rows
    others = corpus.positives if corpus.positives is not None else corpus.anchors
    for first in range(0, len(pairs.similarity), _PAIRS_AT_ONCE):
        work.scratch.checkpoint()
        part = slice(first, first + _PAIRS_AT_ONCE)
        anchor, candidate = pairs.anchor[part], pairs.candidate[part]
        known = _known_flags(work, anchor, candidate)
        for place, (similarity, i, j) in enumerate(
            zip(pairs.similarity[part], rows[anchor], rows[candidate], strict=True)
        ):
            yield SimilarPair(
                rank=first + place + 1,
                similarity=float(similarity),
                row=int(corpus.row_numbers[i]),
                other_row=int(corpus.row_numbers[j]),
                text=None if corpus.anchors is None else corpus.anchors[i],
                other_text=None if others is None else others[j],
                known_false_negative=known[place],
                source=None if corpus.sources is None else corpus.sources[i],
                other_source=None if corpus.sources is None else corpus.sources[j],
            )


def _known_flags(work: Workspace, i: NDArray[np.int64], j: NDArray[np.int64]) -> list[bool | None]:
    """True, False or unjudged (None) for each pair of encoded rows."""
    unjudged = work.evidence.unjudged_rows
    pairs = np.stack([i, j], axis=1)
    flags: list[bool | None] = [False] * len(pairs)
    if unjudged is not None:
        for place in np.flatnonzero(unjudged[i] | unjudged[j]):
            flags[place] = None
    for place in work.evidence.known_pairs(pairs, slice(0, 1)).batch:
        flags[place] = True
    return flags
