"""What is known about which pairs are false negatives: certain (equal texts) and labelled (groups).

A pair (anchor i, candidate j ≠ i) is a *known* false negative if the candidate's text equals the anchor's, or equals
a positive that is listed for an anchor with the same text, or if both rows are in one group. It is *judged* if it is
known or if both rows have a group. "Unjudged" is never "not".
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BatchPairs", "Evidence"]

UNJUDGED = -1


@dataclass(frozen=True)
class BatchPairs:
    """Known false negatives within a stack of batches, as coordinates.

    Args:
        batch: (p,) int64, which batch of the stack.
        anchor: (p,) int64, position of the anchor in its batch.
        candidate: (p,) int64, position of the candidate in its batch.
    """

    batch: NDArray[np.int64]
    anchor: NDArray[np.int64]
    candidate: NDArray[np.int64]


@dataclass(frozen=True)
class Evidence:
    """Which of m rows are known to mean the same.

    Args:
        anchor_text: (m,) int64, number of each anchor's normalised text; None where there are no texts.
        candidate_text: (m,) int64, the same numbering for the candidates (the anchors themselves for sentences).
        accepted_start: (t + 1,) int64; accepted texts of anchor text t are `accepted[accepted_start[t]:…[t + 1]]`.
        accepted: Candidate texts that an anchor text accepts: itself and its listed positives.
        group: (m,) int64, number of each row's group, or `UNJUDGED`; None where there are no groups.
    """

    anchor_text: NDArray[np.int64] | None
    candidate_text: NDArray[np.int64] | None
    accepted_start: NDArray[np.int64] | None
    accepted: NDArray[np.int64] | None
    group: NDArray[np.int64] | None

    @classmethod
    def from_keys(
        cls,
        anchors: Sequence[Hashable] | None,
        positives: Sequence[Hashable] | None,
        groups: Sequence[str | None] | None,
    ) -> Evidence:
        """Number the texts and groups.

        Args:
            anchors: Normalised texts (or any keys that are equal where texts are); None if there are none.
            positives: The same for listed positives, in one name space with the anchors; None for sentences.
            groups: Group of each row, None where unjudged; None if the corpus has no groups.
        """
        numbers: dict[Hashable, int] = {}
        anchor_text = candidate_text = start = accepted = None
        if anchors is not None:
            anchor_text = np.array([numbers.setdefault(key, len(numbers)) for key in anchors], dtype=np.int64)
            candidate_text = anchor_text
            if positives is not None:
                candidate_text = np.array(
                    [numbers.setdefault(key, len(numbers)) for key in positives], dtype=np.int64
                )
            texts = len(numbers)
            itself = np.unique(anchor_text)
            listed = np.concatenate([anchor_text * texts + candidate_text, itself * texts + itself])
            links = np.unique(listed)
            start = np.searchsorted(links, np.arange(texts + 1) * texts)
            accepted = links % texts
        group = None
        if groups is not None:
            names: dict[str, int] = {}
            group = np.array(
                [UNJUDGED if name is None else names.setdefault(name, len(names)) for name in groups],
                dtype=np.int64,
            )
        return cls(anchor_text, candidate_text, start, accepted, group)

    def subset(self, rows: NDArray[np.int64]) -> Evidence:
        """The evidence among some of the rows; what anchors accept stays as learnt from all."""

        def take(column: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
            return None if column is None else column[rows]

        return Evidence(
            take(self.anchor_text),
            take(self.candidate_text),
            self.accepted_start,
            self.accepted,
            take(self.group),
        )

    def texts_only(self) -> Evidence:
        """The certain tier alone: without groups."""
        return Evidence(self.anchor_text, self.candidate_text, self.accepted_start, self.accepted, None)

    @property
    def unjudged_rows(self) -> NDArray[np.bool_] | None:
        """(m,) rows whose pairs are unjudged unless known; None if every pair is judged."""
        if self.group is None:
            rows = self.anchor_text
            return None if rows is None else np.ones(len(rows), dtype=bool)
        unjudged = self.group == UNJUDGED
        return unjudged if unjudged.any() else None

    def known_pairs(self, rows: NDArray[np.int64], block: slice | None = None) -> BatchPairs:
        """Known false negatives among drawn rows.

        Args:
            rows: (b, N) int64, the rows of b batches.
            block: Positions of the anchors to look at; None: all.

        Returns:
            Each known (batch, anchor, candidate) once, without the anchor's own positive.
        """
        batches, size = rows.shape
        block = slice(0, size) if block is None else block
        anchors = rows[:, block]
        position = np.arange(batches)[:, None] * size + np.arange(size)[block][None, :]
        found = []
        if self.anchor_text is not None:
            found.append(self._text_matches(anchors, rows, position))
        if self.group is not None:
            judged = self.group[anchors] != UNJUDGED
            found.append(
                _matches(
                    np.broadcast_to(np.arange(batches)[:, None], anchors.shape)[judged],
                    self.group[anchors][judged],
                    position[judged],
                    self.group[rows],
                )
            )
        if not found:
            empty = np.empty(0, dtype=np.int64)
            return BatchPairs(empty, empty, empty)
        flat = found[0] if len(found) == 1 else np.unique(np.concatenate(found))
        anchor, candidate = np.divmod(flat, size)
        batch, anchor = np.divmod(anchor, size)
        negative = anchor != candidate
        return BatchPairs(batch[negative], anchor[negative], candidate[negative])

    def _text_matches(
        self, anchors: NDArray[np.int64], rows: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        assert self.anchor_text is not None
        assert self.candidate_text is not None
        assert self.accepted_start is not None
        assert self.accepted is not None
        text = self.anchor_text[anchors].ravel()
        first, last = self.accepted_start[text], self.accepted_start[text + 1]
        which, entry = _expand(first, last)
        batch = np.broadcast_to(np.arange(len(rows))[:, None], anchors.shape).ravel()
        return _matches(
            batch[which], self.accepted[entry], position.ravel()[which], self.candidate_text[rows]
        )

    def false_negative_counts(self) -> NDArray[np.int64]:
        """(m,) known false negatives of each anchor among all other candidates."""
        rows = len(self.anchor_text) if self.anchor_text is not None else len(self._groups())
        counts = np.zeros(rows, dtype=np.int64)
        if self.anchor_text is not None:
            assert self.candidate_text is not None
            assert self.accepted_start is not None
            assert self.accepted is not None
            of_text = np.bincount(self.candidate_text, minlength=len(self.accepted_start) - 1)
            anchor, entry = _expand(
                self.accepted_start[self.anchor_text], self.accepted_start[self.anchor_text + 1]
            )
            counts += np.bincount(anchor, of_text[self.accepted[entry]], minlength=rows).astype(np.int64)
        if self.group is not None:
            judged = self.group != UNJUDGED
            sizes = np.bincount(self.group[judged], minlength=1)
            counts[judged] += sizes[self.group[judged]]
            if self.anchor_text is not None:
                assert self.candidate_text is not None
                assert self.accepted is not None
                # Pairs that both the text and the group accept were counted twice.
                texts = len(self.accepted_start) - 1 if self.accepted_start is not None else 0
                both, how_many = np.unique(
                    self.group[judged] * texts + self.candidate_text[judged], return_counts=True
                )
                here = judged[anchor]
                wanted = self.group[anchor[here]] * texts + self.accepted[entry[here]]
                at = np.minimum(np.searchsorted(both, wanted), len(both) - 1)
                twice = np.where(both[at] == wanted, how_many[at], 0) if len(both) else np.zeros(len(wanted))
                counts -= np.bincount(anchor[here], twice, minlength=rows).astype(np.int64)
        # The row itself was counted once wherever anything accepts it.
        own = np.zeros(rows, dtype=bool)
        if self.anchor_text is not None:
            own[:] = True
        if self.group is not None:
            own |= self.group != UNJUDGED
        return counts - own

    def unjudged_pair_share(self) -> float:
        """Share of ordered pairs (i, j ≠ i) about which nothing is known, 0–1."""
        known = self.false_negative_counts()
        rows = len(known)
        if rows < 2:
            return 0.0
        total = rows * (rows - 1)
        if self.group is None:
            return float((total - known.sum()) / total)
        judged_rows = int((self.group != UNJUDGED).sum())
        judged = judged_rows * (judged_rows - 1)
        # Known pairs that touch a row without group are judged by their texts.
        outside = self.known_outside_groups()
        return float((total - judged - outside) / total)

    def known_outside_groups(self) -> int:
        """Ordered pairs known by their texts of which at least one row has no group."""
        if self.group is None or self.anchor_text is None:
            return 0
        whole = int(self.texts_only().false_negative_counts().sum())
        inside = self.texts_only().subset(np.flatnonzero(self.group != UNJUDGED))
        return whole - int(inside.false_negative_counts().sum())

    def contradictions(self) -> int:
        """Ordered pairs that the texts accept although both rows have a group, and not the same one."""
        if self.group is None or self.anchor_text is None:
            return 0
        judged = np.flatnonzero(self.group != UNJUDGED)
        inside = self.subset(judged)
        union = int(inside.false_negative_counts().sum())
        groups = Evidence(None, None, None, None, inside.group)
        return union - int(groups.false_negative_counts().sum())

    def _groups(self) -> NDArray[np.int64]:
        return self.group if self.group is not None else np.empty(0, dtype=np.int64)


def _expand(first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All (q, e) with first[q] ≤ e < last[q], as two columns."""
    lengths = last - first
    which = np.repeat(np.arange(len(first)), lengths)
    entry = (
        np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(first, lengths)
    )
    return which, entry


def _matches(
    batch: NDArray[np.int64],
    key: NDArray[np.int64],
    position: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Find, for each query (batch, key), the columns of that batch with that key.

    Args:
        batch: (q,) batch of each query.
        key: (q,) key of each query, ≥ 0.
        position: (q,) flat position batch·N + i that the query belongs to.
        columns: (b, N) key of each column; negative keys match nothing.

    Returns:
        Flat positions position·N + j of the matches.
    """
    batches, size = columns.shape
    span = int(max(columns.max(initial=0), key.max(initial=0))) + 1
    flat = np.where(columns >= 0, np.arange(batches)[:, None] * span + columns, -1).ravel()
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    wanted = batch * span + key
    which, entry = _expand(
        np.searchsorted(ordered, wanted, "left"), np.searchsorted(ordered, wanted, "right")
    )
    matches: NDArray[np.int64] = position[which] * size + order[entry] % size
    return matches
