"""From a corpus to the texts that a whole encoder is trained on and evaluated with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probe_service.corpus import Corpus, normalize_text
from probe_service.errors import RequestError
from probe_service.estimate import Evidence
from probe_service.schemas import HeldOutRows, TrialRequest
from probe_service.trial.plan import TUNING_SHARE
from probe_service.trial.reading import TrialCorpus, check_sides, describe_held_out
from probe_service.trial.rows import Rows, TrialRows

__all__ = ["TextCorpus", "TextRows"]


@dataclass(frozen=True)
class TextRows:
    """Rows with their texts.

    Args:
        rows: Which of them mean the same.
        anchors: (n,) texts.
        positives: (n,) texts; None for sentences, whose positive is themselves under another dropout.
    """

    rows: TrialRows
    anchors: Sequence[str]
    positives: Sequence[str] | None

    def subset(self, places: Rows) -> TextRows:
        """Some of the rows."""
        positives = None if self.positives is None else [self.positives[place] for place in places]
        return TextRows(self.rows.subset(places), [self.anchors[place] for place in places], positives)


class TextCorpus:
    """The rows of a trial of a whole encoder, divided.

    Args:
        corpus: What was read.
        request: Of the trial.
        with_sts: Whether STS judges the encoder. Without it pairs are kept apart to choose checkpoints by.

    Raises:
        RequestError: ``trial_needs_texts``; ``trial_needs_sts`` for sentences without it; ``trial_nothing_held_out``.
    """

    def __init__(self, corpus: TrialCorpus, request: TrialRequest, *, with_sts: bool) -> None:
        self._request = request
        training = _text_rows(corpus.training.corpus, case_fold=request.corpus.case_fold)
        self.dev: TextRows | None = None
        self.held_out: TextRows | None = None
        if training.positives is None:
            if not with_sts:
                raise RequestError(
                    "trial_needs_sts",
                    "An encoder that is trained on sentences is judged by STS alone; name the folder of its tasks (PROBE_STS).",
                    column="mode",
                )
            self.training = training
            return
        if corpus.held_out is not None:
            self.held_out = _text_rows(corpus.held_out.corpus, case_fold=request.corpus.case_fold)
        else:
            training, self.held_out = _divide(training, request.held_out_share, [request.seed, 5])
        if not with_sts:
            training, self.dev = _divide(training, TUNING_SHARE, [request.seed, 4])
        self.training = training
        check_sides(training.rows, self.held_out.rows)

    def describe_held_out(self) -> HeldOutRows:
        """What is held out, in words and numbers."""
        if self.held_out is None:
            return HeldOutRows(
                description="none of the corpus: STS tasks alone", rows=0, queries=0, queries_left_out=0
            )
        return describe_held_out(self._request, self.held_out.rows, split_whole=True)


def _divide(texts: TextRows, share: float, seed: list[int]) -> tuple[TextRows, TextRows]:
    rest, part = texts.rows.split(share, np.random.default_rng(seed), whole=True)
    return texts.subset(rest), texts.subset(part)


def _text_rows(corpus: Corpus, *, case_fold: bool) -> TextRows:
    if corpus.anchors is None:
        raise RequestError(
            "trial_needs_texts",
            "A whole encoder is trained on texts; this corpus has vectors alone.",
            column="mode",
        )
    anchors = [normalize_text(text, case_fold=case_fold) for text in corpus.anchors]
    positives = None
    if corpus.positives is not None:
        positives = [normalize_text(text, case_fold=case_fold) for text in corpus.positives]
    evidence = Evidence.from_keys(anchors, positives, corpus.groups)
    return TextRows(TrialRows(evidence, own_positives=True), corpus.anchors, corpus.positives)
