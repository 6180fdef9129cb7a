"""A sentence-transformers CrossEncoder as judge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from probe_service.errors import RequestError, ServiceError
from probe_service.judges.protocol import Judgement
from probe_service.judges.sheet import Answer, Question

__all__ = ["DEFAULT_THRESHOLD", "CrossEncoderJudge"]

DEFAULT_THRESHOLD = 0.5
_PAIRS_AT_ONCE = 32


class CrossEncoderJudge:
    """Says yes where the model's score of (A, B) reaches a threshold; the threshold is part of the judge's name.

    There is no universal threshold, as there is none for similarities: the hidden checks measure what this one does.

    Args:
        model: Name or path of a CrossEncoder with one output; safetensors only, no remote code.
        threshold: Least score for yes, on the scale that the model gives (0–1 where it ends in a sigmoid).
        device: torch device; None: chosen by sentence-transformers.
    """

    def __init__(
        self, model: str, *, threshold: float = DEFAULT_THRESHOLD, device: str | None = None
    ) -> None:
        if not math.isfinite(threshold):
            raise RequestError(
                "request_invalid", f"the threshold must be a number, not {threshold}", column="threshold"
            )
        self._name, self._threshold, self._device = model, threshold, device

    @property
    def name(self) -> str:
        """``cross-encoder:NAME≥threshold``."""
        return f"cross-encoder:{self._name}≥{self._threshold:g}"

    def judge(self, questions: Sequence[Question]) -> Iterator[Judgement]:
        """Yield answers in order; a score that is not finite counts as unsure.

        Raises:
            ServiceError: judge_unavailable where the model cannot be loaded; extra_not_installed.
        """
        for start in range(0, len(questions), _PAIRS_AT_ONCE):
            part = questions[start : start + _PAIRS_AT_ONCE]
            pairs = [(question.anchor, question.candidate) for question in part]
            scores = self._model.predict(pairs, batch_size=_PAIRS_AT_ONCE, show_progress_bar=False)
            for question, score in zip(part, scores, strict=True):
                yield Judgement(question.id, self._answer(float(score)))

    def _answer(self, score: float) -> Answer:
        if not math.isfinite(score):
            return Answer.UNSURE
        return Answer.YES if score >= self._threshold else Answer.NO

    @cached_property
    def _model(self) -> Any:
        try:
            from sentence_transformers import CrossEncoder
        except ModuleNotFoundError as error:
            raise ServiceError(
                "extra_not_installed",
                f"{error.name} is not installed; pip install 'probe-service[cpu]'",
            ) from error
        try:
            model = CrossEncoder(
                self._name,
                device=self._device,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ServiceError(
                "judge_unavailable", f"The cross-encoder {self._name!r} cannot be loaded: {error}"
            ) from error
        if model.num_labels != 1:
            raise ServiceError(
                "judge_unavailable",
                f"{self._name!r} has {model.num_labels} outputs; a judge needs a cross-encoder with one, the score of a pair.",
            )
        return model
