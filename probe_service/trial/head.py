"""Trials of a head on frozen vectors: cheap enough for a whole matrix on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from probe_service.schemas import TrialCell, TrialCurvePoint, TrialLossKind, TrialRequest
from probe_service.trial.plan import TUNING_SHARE, Run
from probe_service.trial.retrieval import Relevance, retrieval_scores
from probe_service.trial.rows import Rows, TrialRows
from probe_service.trial.training import objective, optimize

__all__ = ["FrozenRows", "HeadTrial"]

CURVE_QUERIES = 500
"""Held-out queries behind a point of a learning curve; the final scores use all."""


@dataclass(frozen=True)
class FrozenRows:
    """Rows with their vectors.

    Args:
        rows: Which of them mean the same.
        anchors: (n, d) float32 unit rows.
        positives: (n, d) where rows bring their own, else the anchors again.
    """

    rows: TrialRows
    anchors: NDArray[np.float32]
    positives: NDArray[np.float32]

    def subset(self, places: Rows) -> FrozenRows:
        """Some of the rows."""
        return FrozenRows(self.rows.subset(places), self.anchors[places], self.positives[places])


class HeadTrial:
    """Trains heads on some frozen vectors and evaluates them on others.

    Args:
        training: What heads learn from.
        held_out: What they are evaluated on.
        request: Of the trial.
        groups_shared: Whether the held-out rows are of the groups that are trained on, as they are where a corpus was divided
            by rows. Learning rates are then found on rows of these groups as well.
    """

    def __init__(
        self, training: FrozenRows, held_out: FrozenRows, request: TrialRequest, *, groups_shared: bool
    ) -> None:
        self._training, self._request = training, request
        self._held_out = _Evaluation(held_out, request.recall_at)
        rng = np.random.default_rng([request.seed, 4])
        self._tuned_in_groups = groups_shared and not training.rows.own_positives
        rest, part = training.rows.split(TUNING_SHARE, rng, whole=not self._tuned_in_groups)
        if self._tuned_in_groups and 2 * len(training.rows.subset(part).relevance().answerable) < len(part):
            # Small groups: a share of each leaves its rows alone.
            self._tuned_in_groups = False
            rest, part = training.rows.split(TUNING_SHARE, rng, whole=True)
        self._tuning_rest, self._tuning_part = rest, part

    metric = "map"

    @property
    def rows(self) -> int:
        """Rows that a batch can always be drawn from."""
        return len(self._tuning_rest)

    @property
    def queries(self) -> int:
        """Held-out rows that have a right answer among the candidates."""
        return len(self._held_out.relevance.answerable)

    def protocol(self) -> list[str]:
        """How heads are trained and evaluated, in sentences."""
        kind = "A linear map" if self._request.head == "linear" else "Two layers with a ReLU between them"
        return [
            f"{kind} to {self._request.head_width} numbers is trained on frozen vectors, with Adam at a constant learning"
            " rate; batches are drawn at random without replacement.",
            "A row's positive is the one it brings."
            if self._training.rows.own_positives
            else "A row's positive is another row of its group, drawn anew each time.",
            "The rows that learning rates are found on are of every group, as the held-out rows are."
            if self._tuned_in_groups
            else "The rows that learning rates are found on share no group or anchor with those trained on.",
            f"Learning curves show the metric on at most {CURVE_QUERIES} of the held-out queries, among all candidates.",
        ]

    def before(self, checkpoint: Callable[[], None]) -> dict[str, float]:  # noqa: ARG002
        """The scores of the frozen vectors themselves."""
        return self._held_out.scores(nn.Identity())

    def train(self, run: Run, checkpoint: Callable[[], None]) -> TrialCell:
        """Train one head on all training rows and evaluate it on the held-out ones."""
        head, curve = self._fit(self._training, run, checkpoint, self._held_out)
        return run.finished(self._held_out.scores(head), curve)

    def tuning_score(self, run: Run, checkpoint: Callable[[], None]) -> float:
        """Train on most of the training rows and return the metric on the others."""
        head, _ = self._fit(self._training.subset(self._tuning_rest), run, checkpoint, None)
        part = _Evaluation(self._training.subset(self._tuning_part), self._request.recall_at)
        return part.scores(head)[self.metric]

    def _fit(
        self, frozen: FrozenRows, run: Run, checkpoint: Callable[[], None], curve_on: _Evaluation | None
    ) -> tuple[nn.Module, list[TrialCurvePoint]]:
        """Train a head; return it with its learning curve, where there are rows to draw it on."""
        streams = run.streams(self._request.seed)
        rng, loss_of = streams.batches(), objective(run, streams.noise())
        anchors, positives = torch.from_numpy(frozen.anchors), torch.from_numpy(frozen.positives)
        head = _head(self._request, anchors.shape[1], streams.weights())

        def loss_of_batch() -> Tensor:
            batch = frozen.rows.draw(run.batch_size, rng)
            mask: Tensor | None = None
            if run.loss.kind is TrialLossKind.ORACLE_MASKING:
                mask = torch.from_numpy(frozen.rows.negatives(batch))
            return loss_of(head(anchors[batch.anchors]), head(positives[batch.positives]), mask)

        def score() -> float:
            assert curve_on is not None
            return curve_on.scores(head, few=True)[self.metric]

        curve = optimize(
            head.parameters(),
            loss_of_batch,
            run,
            score=None if curve_on is None else score,
            checkpoint=checkpoint,
        )
        return head, curve


class _Evaluation:
    """Scores heads on some rows."""

    def __init__(self, frozen: FrozenRows, recall_at: int) -> None:
        self._frozen, self._recall_at = frozen, recall_at
        self.relevance: Relevance = frozen.rows.relevance()

    def scores(self, head: nn.Module, *, few: bool = False) -> dict[str, float]:
        """The figures of `retrieval_scores`; of `few` queries, evenly spread over all."""
        asked = self.relevance.answerable
        if few and len(asked) > CURVE_QUERIES:
            asked = asked[np.linspace(0, len(asked) - 1, CURVE_QUERIES).astype(np.int64)]
        queries = _vectors(head, self._frozen.anchors)
        among = self.relevance.among_themselves
        candidates = queries if among else _vectors(head, self._frozen.positives)
        return retrieval_scores(queries, candidates, self.relevance, recall_at=self._recall_at, asked=asked)


def _vectors(head: nn.Module, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    with torch.inference_mode():
        found: NDArray[np.float32] = normalize(head(torch.from_numpy(vectors)), dim=1).numpy()
    return found


def _head(request: TrialRequest, dimension: int, seed: int) -> nn.Module:
    """A head with weights drawn under the seed: normal, with variance 1 over the number of inputs; no offset at first."""
    generator = torch.Generator().manual_seed(seed)
    widths = [dimension, request.head_width]
    if request.head == "mlp":
        widths.insert(1, dimension)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
