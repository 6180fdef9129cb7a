"""Trials of a whole encoder: sentence-transformers' trainer with one of our losses, judged by STS and by held-out pairs."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
from transformers import PrinterCallback, TrainerCallback

from probe_service.encode.protocol import to_unit_length
from probe_service.losses import FlatNCELoss, GSInfoNCELoss, InfoNCELoss
from probe_service.schemas import TrialCell, TrialCurvePoint, TrialLossKind, TrialRequest
from probe_service.trial.plan import Run
from probe_service.trial.retrieval import retrieval_scores
from probe_service.trial.sts import Sts, embed, sts_correlation, sts_scores
from probe_service.trial.texts import TextRows

__all__ = ["FullTrial"]

CURVE_POINTS = 5
UNSUPERVISED_LENGTH = 32
"""Tokens of a sentence in training, as in SimCSE."""


class FullTrial:
    """Trains an encoder with the trainer of sentence-transformers.

    Args:
        base: The encoder to begin with; it is copied for each run.
        training: What it learns from.
        dev: Pairs that checkpoints and learning rates are chosen by where there is no STS.
        held_out: Pairs to evaluate on; None for sentences.
        sts: None where there is none.
        request: Of the trial.
        folder: Where checkpoints lie until their run has ended.
    """

    def __init__(
        self,
        base: SentenceTransformer,
        training: TextRows,
        dev: TextRows | None,
        held_out: TextRows | None,
        sts: Sts | None,
        request: TrialRequest,
        folder: Path,
    ) -> None:
        self._base, self._training, self._dev, self._held_out = base, training, dev, held_out
        self._sts, self._request, self._folder = sts, request, folder
        self.metric = "map" if sts is None else "sts_average"

    @property
    def unsupervised(self) -> bool:
        """Whether dropout makes the positives."""
        return self._training.positives is None

    @property
    def max_length(self) -> int | None:
        """Tokens of a text in training."""
        own: int | None = self._base.max_seq_length
        if self._request.max_length is not None or not self.unsupervised:
            return self._request.max_length or own
        return UNSUPERVISED_LENGTH if own is None else min(own, UNSUPERVISED_LENGTH)

    def protocol(self) -> list[str]:
        """How the encoder is trained and evaluated, in sentences."""
        chosen = "MAP on pairs kept apart" if self._sts is None else "Spearman's correlation on STS-B dev"
        kind = (
            "A sentence's positive is itself under another dropout, with an MLP head in training only (unsup-SimCSE)."
            if self.unsupervised
            else "A row's positive is the one it brings."
        )
        return [
            f"The whole encoder is trained by sentence-transformers' trainer, with AdamW at a rate that falls to 0 in a straight"
            f" line and texts of at most {self.max_length} tokens. {kind}",
            f"It is evaluated {CURVE_POINTS} times by {chosen}, which learning curves show and learning rates are chosen by; the"
            " best checkpoint is scored.",
        ]

    def before(self, checkpoint: Callable[[], None]) -> dict[str, float]:
        """The scores of the encoder as it is."""
        return self._scores(self._base, checkpoint)

    def tuning_score(self, run: Run, checkpoint: Callable[[], None]) -> float:
        """Train, and return the best figure on the dev rows."""
        _, curve = self._fit(run, checkpoint)
        return max(point.score for point in curve)

    def train(self, run: Run, checkpoint: Callable[[], None]) -> TrialCell:
        """Train, and score the best checkpoint."""
        model, curve = self._fit(run, checkpoint)
        return run.finished(self._scores(model, checkpoint), curve)

    def _fit(
        self, run: Run, checkpoint: Callable[[], None]
    ) -> tuple[SentenceTransformer, list[TrialCurvePoint]]:
        """Train one copy, from its last checkpoint if an earlier process left one; return the best it was."""
        folder = self._folder / f"{run.name}-lr{run.learning_rate:g}"
        with torch.random.fork_rng():  # the trainer seeds torch's generator, which is not ours
            model, trained = self._models(run)
            trainer = SentenceTransformerTrainer(
                model=trained,
                args=self._arguments(run, folder),
                train_dataset=self._dataset(run),
                evaluator=_DevScore(lambda: self._dev_score(model, checkpoint)),
                loss=self._loss(run, trained),
                callbacks=[_Checkpoint(checkpoint)],
            )
            trainer.remove_callback(PrinterCallback)  # stdout is for the report
            trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
        shutil.rmtree(folder)
        model.max_seq_length = self._base.max_seq_length
        return model, _curve(trainer.state.log_history)

    def _models(self, run: Run) -> tuple[SentenceTransformer, SentenceTransformer]:
        """A copy of the encoder, and what is trained: it without the last normalisation, for sentences with a head on top."""
        model = copy.deepcopy(self._base)
        modules = [module for module in model if not isinstance(module, Normalize)]
        if self.unsupervised:
            width = int(model.get_embedding_dimension() or 0)
            torch.manual_seed(run.streams(self._request.seed).weights())
            modules.append(Dense(width, width))
        trained = SentenceTransformer(modules=modules, device=str(model.device))
        trained.max_seq_length = self.max_length
        trained.model_card_data.generate_widget_examples = (
            False  # no checkpoint is kept, and it shows a bar of its own
        )
        return model, trained

    def _dataset(self, run: Run) -> Dataset:
        columns: dict[str, Any] = {
            "anchor": list(self._training.anchors),
            "positive": list(self._training.positives or self._training.anchors),
        }
        if run.loss.kind is TrialLossKind.ORACLE_MASKING:
            group = self._training.rows.evidence.group
            assert group is not None
            columns["label"] = group.tolist()
        return Dataset.from_dict(columns)

    def _loss(self, run: Run, model: SentenceTransformer) -> torch.nn.Module:
        kind, scale = run.loss.kind, 1 / run.temperature
        if kind is TrialLossKind.FLATNCE:
            return FlatNCELoss(model, scale=scale)
        if kind in (TrialLossKind.GS_INFONCE, TrialLossKind.GS_INFONCE_CONTROL):
            return GSInfoNCELoss(
                model,
                scale=scale,
                noise_per_anchor=run.loss.noise_per_anchor,
                noise="gaussian" if kind is TrialLossKind.GS_INFONCE else "expected",
            )
        return InfoNCELoss(model, scale=scale, mask_same_label=kind is TrialLossKind.ORACLE_MASKING)

    def _arguments(self, run: Run, folder: Path) -> SentenceTransformerTrainingArguments:
        every = -(-run.steps // CURVE_POINTS)
        seed = int(run.streams(self._request.seed).batches().integers(2**31))
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            max_steps=run.steps,
            per_device_train_batch_size=run.batch_size,
            learning_rate=run.learning_rate,
            dataloader_drop_last=True,
            eval_strategy="steps",
            eval_steps=every,
            save_strategy="steps",
            save_steps=every,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_dev",
            greater_is_better=True,
            logging_steps=every,
            seed=seed,
            use_cpu=self._base.device.type == "cpu",
            dataloader_pin_memory=self._base.device.type != "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        # More devices would each take N rows and compare them among themselves: the batch size would not be N.
        arguments._n_gpu = min(1, arguments.n_gpu)
        return arguments

    def _dev_score(self, model: SentenceTransformer, checkpoint: Callable[[], None]) -> float:
        """What checkpoints and learning rates are chosen by; texts are read whole."""
        in_training, model.max_seq_length = model.max_seq_length, self._base.max_seq_length
        try:
            if self._sts is not None:
                return sts_correlation(model, self._sts.dev, checkpoint=checkpoint)
            assert self._dev is not None
            return self._retrieval(model, self._dev, checkpoint)["map"]
        finally:
            model.max_seq_length = in_training

    def _scores(self, model: SentenceTransformer, checkpoint: Callable[[], None]) -> dict[str, float]:
        scores: dict[str, float] = {}
        if self._sts is not None:
            found = sts_scores(model, self._sts.test, checkpoint=checkpoint)
            scores |= found.by_task | {"sts_average": found.average}
        if self._held_out is not None:
            scores |= self._retrieval(model, self._held_out, checkpoint)
        return scores

    def _retrieval(
        self, model: SentenceTransformer, asked: TextRows, checkpoint: Callable[[], None]
    ) -> dict[str, float]:
        assert asked.positives is not None
        queries, candidates = (
            to_unit_length(embed(model, side, checkpoint=checkpoint))
            for side in (asked.anchors, asked.positives)
        )
        return retrieval_scores(
            queries, candidates, asked.rows.relevance(), recall_at=self._request.recall_at
        )


class _DevScore(SentenceEvaluator):  # type: ignore[misc]  # sentence-transformers is not typed for mypy
    """Tells the trainer how good the encoder is as it stands."""

    def __init__(self, score: Callable[[], float]) -> None:
        super().__init__()
        self._score = score
        self.primary_metric = "dev"

    def __call__(self, *_given: Any, **_named: Any) -> dict[str, float]:
        """Return the figure; the trainer's own model, which it gives, has one layer more than the one that is meant."""
        return {"dev": self._score()}


class _Checkpoint(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy
    """Lets a trial be cancelled between steps."""

    def __init__(self, checkpoint: Callable[[], None]) -> None:
        self._checkpoint = checkpoint

    def on_step_end(self, *_given: Any, **_named: Any) -> None:
        """Called by the trainer."""
        self._checkpoint()


def _last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint: the trainer writes its state last, so one without it was cut off, and is removed."""
    found: dict[int, Path] = {}
    for saved in folder.glob("checkpoint-*"):
        try:
            found[int(json.loads((saved / "trainer_state.json").read_text("utf-8"))["global_step"])] = saved
        except (OSError, ValueError):
            shutil.rmtree(saved)
    return str(found[max(found)]) if found else None


def _curve(history: Sequence[dict[str, Any]]) -> list[TrialCurvePoint]:
    """The trainer's records, which hold the mean loss since the last one and the figure on the dev rows apart."""
    losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    return [
        TrialCurvePoint(step=entry["step"], loss=losses[entry["step"]], score=entry["eval_dev"])
        for entry in history
        if "eval_dev" in entry
    ]
