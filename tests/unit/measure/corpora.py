"""Small corpora of texts with vectors, and the loss's softmaxes over them, spelt out as lists of terms.

Written from docs/samplers.md and the definitions of the figures; shares nothing with the package.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from tests.oracles import cosine, unit_rows


@dataclass(frozen=True)
class Item:
    """One text of a row."""

    text: str
    vector: np.ndarray
    group: str | None


@dataclass(frozen=True)
class Row:
    """An anchor, its positive and its own hard negatives."""

    anchor: Item
    positive: Item
    negatives: tuple[Item, ...]


def make_rows(seed, *, count=24, dimension=6, grouped=False, negatives=(0, 0)):
    """Rows among whose texts repeats are common, within a column and across.

    With `grouped`, a third of the rows has no group; a hard negative has that of a row which has its text.
    """
    rng = np.random.default_rng(seed)
    pool = [f"text {number}" for number in range(count)]
    vectors = dict(zip(pool, unit_rows(rng, count, dimension), strict=True))
    group_of_text = {text: f"group {rng.integers(8)}" for text in pool}
    names = rng.choice(pool, (count, 2))
    groups = [group_of_text[a] if grouped and rng.random() < 0.67 else None for a, _ in names]
    known_group = {}
    for column in range(2):
        for pair, group in zip(names, groups, strict=True):
            if group is not None:
                known_group.setdefault(str(pair[column]), group)
    rows = []
    for (anchor, positive), group in zip(names, groups, strict=True):
        own = rng.choice(pool, rng.integers(negatives[0], negatives[1] + 1), replace=False)
        rows.append(
            Row(
                Item(str(anchor), vectors[anchor], group),
                Item(str(positive), vectors[positive], group),
                tuple(Item(str(text), vectors[text], known_group.get(str(text))) for text in own),
            )
        )
    return rows


@dataclass(frozen=True)
class Term:
    """One negative in the softmax of a row."""

    similarity: float
    known: bool
    certain: bool
    inferred: bool
    judged: bool
    own_hard: bool
    other_hard: bool


class Judgement:
    """What is known about two texts, from all rows."""

    def __init__(self, rows):
        self._listed = {(row.anchor.text, row.positive.text) for row in rows}
        # Chains: texts listed together, and texts of one group, by repeated merging.
        self._sets = []
        for row in rows:
            links = {("text", row.anchor.text), ("text", row.positive.text)}
            if row.anchor.group is not None:
                links.add(("group", row.anchor.group))
            touching = [each for each in self._sets if each & links]
            self._sets = [each for each in self._sets if not each & links] + [links.union(*touching)]

    def term(self, left, right, *, either_way, own_hard, other_hard):
        certain = left.text == right.text or (left.text, right.text) in self._listed
        certain = certain or (either_way and (right.text, left.text) in self._listed)
        both = left.group is not None and right.group is not None
        known = certain or (both and left.group == right.group)
        chained = any(
            ("text", left.text) in each and (("text", right.text) in each or ("group", right.group) in each)
            for each in self._sets
        )
        return Term(
            similarity=cosine(left.vector, right.vector),
            known=known,
            certain=certain,
            inferred=known or (chained and not both),
            judged=known or both,
            own_hard=own_hard,
            other_hard=other_hard,
        )


def softmaxes_of(batch, place, directions, mode, judgement):
    """The softmaxes of one row of a batch: for each its own similarity, how often that stands in it, and the negatives.

    Args:
        batch: Rows, each with the hard negatives that it brings.
        place: Which of them.
    """
    row = batch[place]
    others = [other for at, other in enumerate(batch) if at != place]
    own = cosine(row.anchor.vector, row.positive.vector)
    each = []
    for direction in directions:
        left = row.anchor if direction.startswith("query") else row.positive
        terms = []

        def add(right, *, own_hard=False, other_hard=False, left=left, terms=terms, direction=direction):
            either_way = direction != "query_to_doc"
            terms.append(
                judgement.term(left, right, either_way=either_way, own_hard=own_hard, other_hard=other_hard)
            )

        for other in others:
            if direction.endswith("query"):
                add(other.anchor)
            else:
                add(other.positive)
                for negative in other.negatives:
                    add(negative, other_hard=True)
        if direction == "query_to_doc":
            for negative in row.negatives:
                add(negative, own_hard=True)
        each.append((int(direction in ("query_to_doc", "doc_to_query")), terms))
    if mode == "joint":
        times = sum(times for times, _ in each)
        return [(own, times, list(itertools.chain(*(terms for _, terms in each))))]
    return [(own, times, terms) for times, terms in each]


def figures_of(batch, directions, mode, judgement, *, temperature, floor, borrowed):
    """Every figure of one batch, by the definitions; shares are means over anchors, then over softmaxes."""
    by_place = [softmaxes_of(batch, place, directions, mode, judgement) for place in range(len(batch))]
    found = []
    for softmax in zip(*by_place, strict=True):
        found.append(_figures(softmax, temperature, floor, borrowed))
    mean = {name: sum(each[name] for each in found) / len(found) for name in found[0] if name != "log_xi"}
    return mean | {"log_xi": [value for each in found for value in each["log_xi"]]}


def _figures(softmax, temperature, floor, borrowed):
    size = len(softmax)
    sums = dict.fromkeys(
        (
            "false_count",
            "false_any_share",
            "false_share",
            "certain_share",
            "inferred_share",
            "borrowed_share",
            "own_push",
            "own_false",
            "other_push",
            "other_false",
            "worst_count",
            "worst_any_share",
            "worst_share",
            "effective_negatives",
        ),
        0.0,
    )
    updates, log_xi = [], []
    for own, times, terms in softmax:
        weights = [math.exp(term.similarity / temperature) for term in terms]
        total = math.fsum(weights)
        shares = [weight / total for weight in weights]

        def share(chosen, terms=terms, shares=shares):
            return math.fsum(w * chosen(term) for term, w in zip(terms, shares, strict=True))

        def worst(term):
            return term.known or (not term.judged and term.similarity >= floor)

        def chance(term):
            if term.known or term.judged or term.own_hard:
                return float(term.known)
            return borrowed(term.similarity)

        known = share(lambda term: term.known)
        sums["false_count"] += sum(term.known for term in terms) / size
        sums["false_any_share"] += any(term.known for term in terms) / size
        sums["worst_count"] += sum(map(worst, terms)) / size
        sums["worst_any_share"] += any(map(worst, terms)) / size
        sums["false_share"] += known / size
        sums["certain_share"] += share(lambda term: term.certain) / size
        sums["inferred_share"] += share(lambda term: term.inferred) / size
        sums["borrowed_share"] += share(chance) / size
        sums["worst_share"] += share(worst) / size
        sums["own_push"] += share(lambda term: term.own_hard) / size
        sums["own_false"] += share(lambda term: term.own_hard and term.known) / size
        sums["other_push"] += share(lambda term: term.other_hard) / size
        sums["other_false"] += share(lambda term: term.other_hard and term.known) / size
        sums["effective_negatives"] += 1 / math.fsum(w**2 for w in shares) / size
        xi = total / math.exp(own / temperature)
        log_xi.append(math.log(xi))
        # The loss's gradient puts ξ / (times + ξ) on the negatives together.
        updates.append((xi / (times + xi), known, share(worst)))
    weight = math.fsum(v for v, _, _ in updates)
    return sums | {
        "update_weight": weight,
        "false_update": math.fsum(v * known for v, known, _ in updates),
        "worst_update": math.fsum(v * worst for v, _, worst in updates),
        "effective_anchors_share": weight**2 / (size * math.fsum(v**2 for v, _, _ in updates)),
        "log_xi": log_xi,
    }
