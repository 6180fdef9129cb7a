"""How well queries find their answers among candidates: mean average precision, recall@k, accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import Evidence

__all__ = ["Relevance", "retrieval_scores"]

_BLOCK_QUERIES = 512


@dataclass(frozen=True)
class Relevance:
    """Which candidates are right answers.

    Args:
        first: (n + 1,) int64; the answers to query i are `candidates[first[i]:first[i + 1]]`.
        candidates: Numbers of candidates, those of one query after those of another.
        among_themselves: The candidates are the queries; none is a candidate of itself.
    """

    first: NDArray[np.int64]
    candidates: NDArray[np.int64]
    among_themselves: bool

    @classmethod
    def from_evidence(cls, evidence: Evidence, rows: int, *, among_themselves: bool) -> Relevance:
        """Take the known pairs as right answers, and for pairs the row's own positive as well."""
        known = evidence.known_pairs(np.arange(rows, dtype=np.int64)[None, :])
        query, candidate = known.anchor, known.candidate
        if not among_themselves:
            own = np.arange(rows, dtype=np.int64)
            query, candidate = np.concatenate([query, own]), np.concatenate([candidate, own])
        order = np.lexsort((candidate, query))
        first = np.searchsorted(query[order], np.arange(rows + 1))
        return cls(first.astype(np.int64), candidate[order], among_themselves)

    @property
    def answerable(self) -> NDArray[np.int64]:
        """Queries that have an answer."""
        return np.flatnonzero(np.diff(self.first)).astype(np.int64)


def retrieval_scores(
    queries: NDArray[np.float32],
    candidates: NDArray[np.float32],
    relevance: Relevance,
    *,
    recall_at: int,
    asked: NDArray[np.int64] | None = None,
) -> dict[str, float]:
    """Mean over the answerable queries of three figures, each 0–1.

    ``map``: the mean over a query's answers of the precision among the candidates that are at least as similar as that answer
    (average precision; ties count against it). ``recall_at_k``: whether one of the k most similar candidates is an answer.
    ``accuracy``: the same for k = 1.

    Args:
        queries: (n, d) unit rows.
        candidates: (c, d) unit rows.
        relevance: The right answers.
        recall_at: k.
        asked: Answerable queries to look at; None: all.
    """
    asked = relevance.answerable if asked is None else asked
    precision = np.zeros(len(asked))
    best = np.zeros(len(asked), dtype=np.int64)
    for start in range(0, len(asked), _BLOCK_QUERIES):
        rows = asked[start : start + _BLOCK_QUERIES]
        similar = queries[rows] @ candidates.T
        if relevance.among_themselves:
            similar[np.arange(len(rows)), rows] = -np.inf
        ascending = np.sort(similar, axis=1)
        for at, row in enumerate(rows.tolist()):
            answers = relevance.candidates[relevance.first[row] : relevance.first[row + 1]]
            values = np.sort(similar[at, answers])
            found = len(candidates) - np.searchsorted(ascending[at], values, side="left")
            right = len(values) - np.searchsorted(values, values, side="left")
            precision[start + at] = (right / found).mean()
            best[start + at] = found.min()
    return {
        "map": float(precision.mean()),
        f"recall_at_{recall_at}": float((best <= recall_at).mean()),
        "accuracy": float((best <= 1).mean()),
    }
