"""Trials on images: SimCLR on scikit-learn's digits, 1,797 grey pictures of 8 × 8 pixels that need no download."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from probe_service.schemas import HeldOutRows, TrialCell, TrialCurvePoint, TrialLossKind, TrialRequest
from probe_service.trial.plan import TUNING_SHARE, Run
from probe_service.trial.training import objective, optimize

__all__ = ["ImageTrial"]

HELD_OUT = 500
LABELS_PER_DIGIT = 10
"""Labelled pictures of each digit that the linear probe learns from; with all labels even an untrained network does well."""
FEATURES, PROJECTED = 128, 64

_TURN, _SCALE, _SHIFT, _BRIGHTNESS, _NOISE = 0.35, 0.25, 0.25, 0.3, 0.1

Places = NDArray[np.int64]


class ImageTrial:
    """Trains a small CNN without labels and judges its features by a linear probe.

    Args:
        request: Of the trial; its seed divides the pictures.
    """

    metric = "accuracy"

    def __init__(self, request: TrialRequest) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self._root = request.seed
        self._pictures = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
        self._labels: NDArray[np.int64] = digits.target.astype(np.int64)
        rng = np.random.default_rng([request.seed, 6])
        order = rng.permutation(len(self._labels))
        self._held_out, self._training = order[:HELD_OUT], order[HELD_OUT:]
        tuning = round(TUNING_SHARE * len(self._training))
        self._tuning_part, self._tuning_rest = self._training[:tuning], self._training[tuning:]

    @property
    def rows(self) -> int:
        """Pictures that a batch can always be drawn from."""
        return len(self._tuning_rest)

    @property
    def training_rows(self) -> int:
        """Pictures that the cells train on."""
        return len(self._training)

    def describe_held_out(self) -> HeldOutRows:
        """What is held out."""
        return HeldOutRows(
            description="digits drawn at random", rows=HELD_OUT, queries=HELD_OUT, queries_left_out=0
        )

    def protocol(self) -> list[str]:
        """How it trains and evaluates, in sentences."""
        return [
            "A CNN of two convolutions and a layer of 128 features, with a projection to 64 numbers in training only, sees two"
            " views of each picture (turned, scaled, shifted, lighter or darker, with noise); the 2N views of a batch are"
            " compared with each other as in SimCLR, with Adam at a constant learning rate.",
            f"Accuracy is that of a logistic regression on the features, learnt from {LABELS_PER_DIGIT} labelled training"
            " pictures of each digit.",
        ]

    def before(self, checkpoint: Callable[[], None]) -> dict[str, float]:  # noqa: ARG002
        """The scores of an untrained network."""
        features, _ = _networks(0)
        return self._scores(features, self._training, self._held_out)

    def train(self, run: Run, checkpoint: Callable[[], None]) -> TrialCell:
        """Train on all training pictures and probe the features on the held-out ones."""
        features, curve = self._fit(self._training, run, checkpoint, self._held_out)
        return run.finished(self._scores(features, self._training, self._held_out), curve)

    def tuning_score(self, run: Run, checkpoint: Callable[[], None]) -> float:
        """Train on most of the training pictures and return the accuracy on the others."""
        features, _ = self._fit(self._tuning_rest, run, checkpoint, None)
        return self._scores(features, self._tuning_rest, self._tuning_part)[self.metric]

    def _fit(
        self, places: Places, run: Run, checkpoint: Callable[[], None], curve_on: Places | None
    ) -> tuple[nn.Module, list[TrialCurvePoint]]:
        """Train a network on some pictures; return it with its learning curve, where there are others to draw it on."""
        streams = run.streams(self._root)
        rng, loss_of = streams.batches(), objective(run, streams.noise())
        views = torch.Generator().manual_seed(int(rng.integers(2**62)))
        features, projection = _networks(streams.weights())

        def loss_of_batch() -> Tensor:
            drawn = rng.choice(places, run.batch_size, replace=False)
            pictures = self._pictures[drawn]
            vectors = projection(features(torch.cat([_view(pictures, views), _view(pictures, views)])))
            masked = run.loss.kind is TrialLossKind.ORACLE_MASKING
            mask = _negatives(run.batch_size, torch.from_numpy(self._labels[drawn]) if masked else None)
            return loss_of(vectors, vectors.roll(run.batch_size, dims=0), mask)

        def score() -> float:
            assert curve_on is not None
            return self._scores(features, places, curve_on)[self.metric]

        curve = optimize(
            [*features.parameters(), *projection.parameters()],
            loss_of_batch,
            run,
            score=None if curve_on is None else score,
            checkpoint=checkpoint,
        )
        return features, curve

    def _scores(self, features: nn.Module, known: Places, asked: Places) -> dict[str, float]:
        """Accuracy on the pictures asked for, of a linear probe that learns from the first few known ones of each digit."""
        from sklearn.linear_model import LogisticRegression

        labelled = np.concatenate(
            [known[self._labels[known] == digit][:LABELS_PER_DIGIT] for digit in range(10)]
        )
        with torch.inference_mode():
            found = features(self._pictures).double().numpy()
        mean, spread = found[labelled].mean(axis=0), found[labelled].std(axis=0) + 1e-6
        scaled = (found - mean) / spread
        probe = LogisticRegression(max_iter=2000).fit(scaled[labelled], self._labels[labelled])
        return {"accuracy": float(probe.score(scaled[asked], self._labels[asked]))}


def _networks(seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """The CNN that gives features, and the projection of SimCLR, under a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, FEATURES),
            nn.ReLU(),
        )
        projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, PROJECTED))
    return features, projection


def _view(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """(N, 1, 8, 8) pictures, each turned, scaled, shifted, made lighter or darker, and with noise, at random."""

    def evenly(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 2 - 1

    count = len(pictures)
    turn, scale = _TURN * evenly(count), 1 + _SCALE * evenly(count)
    shift = _SHIFT * evenly(count, 2)
    cosine, sine = scale * turn.cos(), scale * turn.sin()
    rows = [
        torch.stack([cosine, -sine, shift[:, 0]], dim=1),
        torch.stack([sine, cosine, shift[:, 1]], dim=1),
    ]
    grid = nn.functional.affine_grid(torch.stack(rows, dim=1), list(pictures.shape), align_corners=False)
    moved = nn.functional.grid_sample(pictures, grid, align_corners=False)
    brightness = 1 + _BRIGHTNESS * evenly(count, 1, 1, 1)
    return moved * brightness + _NOISE * torch.randn(pictures.shape, generator=generator)


def _negatives(size: int, labels: Tensor | None) -> Tensor:
    """(2N, 2N) which candidates are negatives of which views; candidate j is the other view of view j.

    A view is no negative of itself; with labels, nor are the views of pictures with its label.
    """
    views = torch.arange(2 * size)
    other = views.roll(size)
    mask = other[None, :] != views[:, None]
    if labels is not None:
        of_view = labels[views % size]
        mask = mask & (of_view[:, None] != of_view[other][None, :])
    return mask
