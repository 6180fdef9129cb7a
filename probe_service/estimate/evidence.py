"""What is known about which pairs are false negatives: certain (equal texts), labelled (groups), inferred (chains).

A pair (anchor i, candidate j ≠ i) is a *known* false negative if the candidate's text equals the anchor's, or equals
a positive that is listed for an anchor with the same text, or if both rows are in one group. It is *judged* if it is
known or if both rows have a group. "Unjudged" is never "not".

It is *inferred* to be one if it is not judged and a chain of known links leads from the one row to the other: each row
links its anchor's text to its positive's, and a group links its rows. Chains run away, since "means the same" does not
carry over without end; so they are kept apart, and `ChainInfo` says how far they reach.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

__all__ = ["BatchPairs", "ChainInfo", "Evidence"]

UNJUDGED = -1
_LISTED_ROWS = 1000


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
class ChainInfo:
    """How far chains of known links reach.

    Args:
        components: Sets of at least two rows that chains join.
        largest_component_rows: Rows of the largest such set, by its first row where several are; 0 if there is none.
        added_ordered_pairs: Pairs (anchor, candidate) that are inferred: joined, and not judged.
        largest_component_row_positions: Rows of the largest set, ascending, the first 1000 of them.
    """

    components: int
    largest_component_rows: int
    added_ordered_pairs: int
    largest_component_row_positions: tuple[int, ...]


@dataclass(frozen=True)
class Evidence:
    """Which of m rows are known to mean the same.

    Args:
        anchor_text: (m,) int64, number of each anchor's normalised text; None where there are no texts.
        candidate_text: (m,) int64, the same numbering for the candidates (the anchors themselves for sentences).
        accepted_start: (t + 1,) int64; accepted texts of anchor text t are `accepted[accepted_start[t]:…[t + 1]]`.
        accepted: Candidate texts that an anchor text accepts: itself and its listed positives.
        group: (m,) int64, number of each row's group, or `UNJUDGED`; None where there are no groups.
        component: (m,) int64, number of the set of rows that chains join each row to; its unjudged pairs then count as
            known. None unless inferred.
    """

    anchor_text: NDArray[np.int64] | None
    candidate_text: NDArray[np.int64] | None
    accepted_start: NDArray[np.int64] | None
    accepted: NDArray[np.int64] | None
    group: NDArray[np.int64] | None
    component: NDArray[np.int64] | None = None

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
            take(self.component),
        )

    def texts_only(self) -> Evidence:
        """The certain tier alone: without groups."""
        return Evidence(self.anchor_text, self.candidate_text, self.accepted_start, self.accepted, None)

    def inferred(self) -> Evidence | None:
        """This evidence with the inferred pairs among the known ones; None where chains add no pair.

        Rows, texts and groups are nodes. A row is joined to its anchor's text and to its group, and a text to those that
        it accepts, the row's positive among them. Candidate j counts as a false negative of anchor i if the positive of j
        and the anchor of i hang together, unless the rows were judged different: by a group each, and not the same one.
        """
        chained = self._chained()
        return chained if chained._added_pairs() else None

    def chain_info(self) -> ChainInfo:
        """How far chains reach among these rows, whether or not their pairs are among the known ones."""
        chained = self._chained()
        assert chained.component is not None
        component, sizes = chained.component, np.bincount(chained.component)
        largest = component[:0]
        if (sizes > 1).any():
            largest = np.flatnonzero(component == component[np.argmax(sizes[component])])
        return ChainInfo(
            components=int((sizes > 1).sum()),
            largest_component_rows=len(largest),
            added_ordered_pairs=chained._added_pairs(),
            largest_component_row_positions=tuple(largest[:_LISTED_ROWS].tolist()),
        )

    def _chained(self) -> Evidence:
        """This evidence with `component`."""
        if self.component is not None:
            return self
        row = np.arange(self._rows)
        joined, to, nodes = [row], [row], self._rows
        if self.anchor_text is not None:
            assert self.accepted_start is not None
            assert self.accepted is not None
            texts = len(self.accepted_start) - 1
            joined += [row, nodes + np.repeat(np.arange(texts), np.diff(self.accepted_start))]
            to += [nodes + self.anchor_text, nodes + self.accepted]
            nodes += texts
        if self.group is not None:
            judged = self.group != UNJUDGED
            joined.append(row[judged])
            to.append(nodes + self.group[judged])
            nodes += int(self.group.max(initial=UNJUDGED)) + 1
        ends = np.concatenate(joined), np.concatenate(to)
        links = coo_array((np.ones(len(ends[0]), dtype=np.int8), ends), shape=(nodes, nodes))
        _, component = connected_components(links, directed=False)
        return replace(self, component=component[: self._rows].astype(np.int64))

    def _added_pairs(self) -> int:
        known = replace(self, component=None).false_negative_counts()
        return int(self.false_negative_counts().sum() - known.sum())

    @property
    def unjudged_rows(self) -> NDArray[np.bool_] | None:
        """(m,) rows whose pairs are unjudged unless known; None if every pair is judged."""
        if self.group is None:
            rows = self.anchor_text
            return None if rows is None else np.ones(len(rows), dtype=bool)
        unjudged = self.group == UNJUDGED
        return unjudged if unjudged.any() else None

    def known_pairs(self, rows: NDArray[np.int64], block: slice | None = None) -> BatchPairs:
        """Known false negatives among drawn rows; with `component`, also the inferred ones.

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
        if self.component is not None:
            found.append(self._chain_matches(anchors, rows, position))
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

    def _chain_matches(
        self, anchors: NDArray[np.int64], rows: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        assert self.component is not None
        batch = np.broadcast_to(np.arange(len(rows))[:, None], anchors.shape).ravel()
        flat = _matches(batch, self.component[anchors].ravel(), position.ravel(), self.component[rows])
        if self.group is None:
            return flat
        at, candidate = np.divmod(flat, rows.shape[1])
        group = self.group[rows]
        unjudged = (group.ravel()[at] == UNJUDGED) | (group[at // rows.shape[1], candidate] == UNJUDGED)
        matches: NDArray[np.int64] = flat[unjudged]
        return matches

    def false_negative_counts(self) -> NDArray[np.int64]:
        """(m,) known false negatives of each anchor among all other candidates; with `component`, also the inferred ones."""
        if self.component is not None:
            return self._joined_counts(self.component)
        rows = self._rows
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

    def _joined_counts(self, component: NDArray[np.int64]) -> NDArray[np.int64]:
        """All other rows of the component; of those that were judged, only the known ones."""
        sizes = np.bincount(component)
        counts: NDArray[np.int64] = sizes[component] - 1
        if self.group is not None:
            judged = np.flatnonzero(self.group != UNJUDGED)
            judged_sizes = np.bincount(component[judged], minlength=len(sizes))
            known = replace(self, component=None).subset(judged).false_negative_counts()
            counts[judged] += known - (judged_sizes[component[judged]] - 1)
        return counts

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
        # Known pairs that touch a row without group are known by their texts, or inferred.
        inside = self.subset(np.flatnonzero(self.group != UNJUDGED)).false_negative_counts()
        return float((total - judged - (known.sum() - inside.sum())) / total)

    def contradictions(self) -> int:
        """Ordered pairs that the texts accept although both rows have a group, and not the same one."""
        if self.group is None or self.anchor_text is None:
            return 0
        judged = np.flatnonzero(self.group != UNJUDGED)
        inside = self.subset(judged)
        union = int(inside.false_negative_counts().sum())
        groups = Evidence(None, None, None, None, inside.group)
        return union - int(groups.false_negative_counts().sum())

    @property
    def _rows(self) -> int:
        column = self.anchor_text if self.anchor_text is not None else self.group
        return 0 if column is None else len(column)


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
