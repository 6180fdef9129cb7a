"""The most similar pairs of a population, and how all similarities are spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import WHOLE
from probe_service.schemas import Histogram, SimilarPair
from probe_service.scratch import Scratch
from probe_service.similarity import top_pairs
from probe_service.workspace import DEFAULT_LARGEST_SIZE, Population, Workspace

__all__ = ["Histograms", "SimilarPairs"]

KEPT_PAIRS = 1000
HISTOGRAM_BINS = 100
HISTOGRAM_ORDERS = 10


class SimilarPairs:
    """The most similar negative pairs of all encoded rows, with their texts.

    Args:
        work: The rows.
    """

    def __init__(self, work: Workspace) -> None:
        self._work = work
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
        found = top_pairs(
            work.anchors,
            work.positives,
            k=KEPT_PAIRS,
            on_block=lambda _done, _total: work.scratch.checkpoint(),
        )
        corpus, rows = work.corpus, work.kept_rows
        known = _known_flags(work, found.anchor, found.candidate)
        lines = []
        for rank, (similarity, i, j) in enumerate(
            zip(found.similarity, rows[found.anchor], rows[found.candidate], strict=True)
        ):
            others = corpus.positives if corpus.positives is not None else corpus.anchors
            pair = SimilarPair(
                rank=rank + 1,
                similarity=float(similarity),
                row=int(corpus.row_numbers[i]),
                other_row=int(corpus.row_numbers[j]),
                text=None if corpus.anchors is None else corpus.anchors[i],
                other_text=None if others is None else others[j],
                known_false_negative=known[rank],
                source=None if corpus.sources is None else corpus.sources[i],
                other_source=None if corpus.sources is None else corpus.sources[j],
            )
            lines.append(pair.model_dump_json())
        work.scratch.save_text(self.file.name, "".join(line + "\n" for line in lines))

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
