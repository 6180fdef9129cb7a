"""The softmaxes of a training step, against lists of their terms and against the loss that trains with them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from probe_service.corpus import draw_hard_negatives
from probe_service.estimate import BorrowedCurve, Evidence, SamplingPlan
from probe_service.measure.terms import Softmaxes
from probe_service.schemas import LossOptions
from probe_service.workspace import HardNegatives, Population
from tests.unit.measure.corpora import Judgement, figures_of, make_rows

FLOOR, TEMPERATURE = 0.3, 0.15
DIRECTIONS = [
    ("query_to_doc", *more)
    for length in range(4)
    for more in itertools.combinations(("query_to_query", "doc_to_query", "doc_to_doc"), length)
]
LOSSES = [(directions, "joint") for directions in DIRECTIONS]
LOSSES += [(DIRECTIONS[0], "per_direction"), (("query_to_doc", "doc_to_query"), "per_direction")]


def nothing():
    pass


def lay_out(rows, per_row):
    anchors = [row.anchor for row in rows]
    positives = [row.positive for row in rows]
    negatives = [negative for row in rows for negative in row.negatives]
    groups = [item.group for item in anchors] if any(item.group for item in anchors) else None
    count = np.array([len(row.negatives) for row in rows])
    keys = [[item.text for item in side] for side in (anchors, positives)]
    return Population(
        name="all",
        anchors=np.array([item.vector for item in anchors]),
        positives=np.array([item.vector for item in positives]),
        own_similarity=None,
        anchor_keys=keys[0],
        positive_keys=keys[1],
        groups=groups,
        sources=None,
        evidence=Evidence.from_keys(*keys, groups),
        hard_negatives=HardNegatives(
            vectors=np.array([item.vector for item in negatives]),
            first=np.cumsum(count) - count,
            count=count,
            per_row=per_row,
            keys=tuple(item.text for item in negatives),
            groups=tuple(item.group for item in negatives),
        )
        if per_row
        else None,
        plan=SamplingPlan(len(rows), len(rows), 2, 0),
        floor=FLOOR,
    )


def softmaxes(population, directions, mode):
    loss = LossOptions(directions=directions, partition_mode=mode)
    borrowed = BorrowedCurve(np.array([0.0, 0.0, 0.0, 0.5, 1.0]), "")
    return Softmaxes(population, loss, temperature=TEMPERATURE, k=2, borrowed=borrowed)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("negatives", "per_row"),
    [((0, 0), 0), ((2, 2), 2), ((1, 4), 2)],
    ids=["pairs", "two hard negatives", "one to four"],
)
@pytest.mark.parametrize(
    ("directions", "mode"), LOSSES, ids=lambda value: "+".join(value) if isinstance(value, tuple) else value
)
def test_every_figure_follows_its_definition(directions, mode, negatives, per_row, grouped):
    rows = make_rows(5, grouped=grouped, negatives=negatives)
    judgement = Judgement(rows)
    stack = np.array([np.random.default_rng(b).choice(len(rows), 7, replace=False) for b in range(2)])
    found = softmaxes(lay_out(rows, per_row), directions, mode).measure(
        stack, np.random.default_rng(9), nothing
    )
    places = np.zeros((stack.size, 0), dtype=int)
    if per_row:
        places = np.tile(np.arange(per_row), (stack.size, 1))
    if negatives[0] != negatives[1]:
        counts = [len(rows[row].negatives) for row in stack.ravel()]
        places = draw_hard_negatives(counts, per_row + 1, np.random.default_rng(9)).places
    places = places.reshape(*stack.shape, -1)
    for b, batch in enumerate(stack):
        brought = [
            dataclasses.replace(
                rows[row], negatives=tuple(rows[row].negatives[place] for place in places[b, at])
            )
            for at, row in enumerate(batch)
        ]
        expected = figures_of(
            brought,
            directions,
            mode,
            judgement,
            temperature=TEMPERATURE,
            floor=FLOOR,
            borrowed=lambda s: max(0.0, s),
        )
        for name, value in expected.items():
            # Borrowed probabilities are looked up at the nearest of 2,049 cosines.
            tolerance = 6e-4 if name == "borrowed_share" else 1e-5
            assert getattr(found, name)[b] == pytest.approx(value, abs=tolerance, rel=1e-5), name


class Table(torch.nn.Module):
    """Looks its rows up: the smallest model that the losses can train."""

    def __init__(self, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(rows))

    def forward(self, features):
        return {"sentence_embedding": self.weight[features["input_ids"][:, 0]]}

    def __getitem__(self, _place):
        return self


def pushes_in_training(batch, directions, mode):
    """What the loss of sentence-transformers pushes on each similarity of a training step: its gradient, N times.

    Returns:
        (direction, gradient) each; gradient (N, columns), NaN where a similarity is no term.
    """
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    columns = [[row.anchor for row in batch], [row.positive for row in batch]]
    columns += [[row.negatives[h] for row in batch] for h in range(len(batch[0].negatives))]
    table = Table(np.array([item.vector for column in columns for item in column], dtype=np.float64))
    size, seen = len(batch), []

    def spied(left, right):
        similarity = left @ right.T
        similarity.retain_grad()
        seen.append(similarity)
        return similarity * 1.0  # the loss writes −inf into what it gets

    loss = losses.MultipleNegativesRankingLoss(
        table, scale=1 / TEMPERATURE, similarity_fct=spied, directions=directions, partition_mode=mode
    )
    features = [
        {"input_ids": torch.arange(first, first + size)[:, None], "attention_mask": torch.ones(size, 1)}
        for first in range(0, size * len(columns), size)
    ]
    loss(features, None).backward()
    # The loss computes its directions in this order, those from documents with rows and columns exchanged.
    order = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    computed = [direction for direction in order if direction in directions]
    return [
        (direction, (push.grad.T if direction.startswith("doc") else push.grad).numpy() * size * TEMPERATURE)
        for direction, push in zip(computed, seen, strict=True)
    ]


@pytest.mark.parametrize(
    ("directions", "mode"),
    [(DIRECTIONS[-1], "joint"), (("query_to_doc", "doc_to_query"), "per_direction")],
    ids=["joint", "per_direction"],
)
def test_the_weights_are_those_that_training_uses(directions, mode):
    rows = make_rows(8, negatives=(2, 2))
    judgement = Judgement(rows)
    stack = np.random.default_rng(4).choice(len(rows), 9, replace=False)[None, :]
    batch = [rows[row] for row in stack[0]]
    found = softmaxes(lay_out(rows, 2), directions, mode).measure(stack, np.random.default_rng(0), nothing)

    # By softmax: for each row the push on each negative, and whether it is known to be false.
    by_direction = []
    for direction, gradient in pushes_in_training(batch, directions, mode):
        pushes = []
        for place in range(len(batch)):
            side = "anchor" if direction.endswith("query") else "positive"
            candidates = [getattr(row, side) for row in batch]
            if side == "positive":
                candidates += [row.negatives[h] for h in range(2) for row in batch]
            left = batch[place].anchor if direction.startswith("query") else batch[place].positive
            terms = [
                (
                    gradient[place, column],
                    judgement.term(
                        left,
                        right,
                        either_way=direction != "query_to_doc",
                        own_hard=False,
                        other_hard=False,
                    ).known,
                )
                for column, right in enumerate(candidates)
                # Its own pair is no negative; what is no term has no gradient.
                if column != place and gradient[place, column] > 0
            ]
            pushes.append(terms)
        by_direction.append(pushes)
    groups = [by_direction] if mode == "joint" else [[pushes] for pushes in by_direction]
    shares, updates, false_updates = [], [], []
    for group in groups:
        of_rows = [[term for pushes in group for term in pushes[place]] for place in range(len(batch))]
        totals = [sum(push for push, _ in terms) for terms in of_rows]
        false = [sum(push for push, known in terms if known) for terms in of_rows]
        shares.append(np.mean(np.divide(false, totals)))
        # Averaged losses push half as much each.
        updates.append(sum(totals) * len(groups))
        false_updates.append(sum(false) * len(groups))
    assert 0.05 < np.mean(shares) < 0.95
    assert found.false_share[0] == pytest.approx(np.mean(shares), abs=1e-5)
    assert found.update_weight[0] == pytest.approx(np.mean(updates), rel=1e-5)
    assert found.false_update[0] == pytest.approx(np.mean(false_updates), rel=1e-5)
