"""From a corpus to the rows of a trial: read, encode, hold some out; and what the probe predicts for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe_service.errors import RequestError
from probe_service.estimate import Evidence
from probe_service.measure import Shares
from probe_service.schemas import Estimate, HeldOutRows, Phase, ProbeRequest, ReportWarning, TrialRequest
from probe_service.scratch import Scratch
from probe_service.settings import Settings
from probe_service.trial.head import FrozenRows
from probe_service.trial.rows import Rows, TrialRows
from probe_service.workspace import Workspace

__all__ = ["FrozenCorpus", "Step"]

Step = Callable[..., Any]
"""Runs one step: ``step(phase, name, function, *json_arguments)``."""

MOST_HELD_OUT = 5000
"""Held-out rows that are read, where they are read apart: evaluation compares all with all."""


@dataclass(frozen=True)
class _Side:
    """Rows that were laid out, and which of them can take part.

    Args:
        work: Where they lie.
        places: Those with a positive of their own or a group.
        rows: What is known about them.
    """

    work: Workspace
    places: Rows
    rows: TrialRows

    @classmethod
    def of(cls, work: Workspace) -> _Side:
        evidence = work.evidence
        if work.positives is not None:
            places = np.arange(len(work.anchors), dtype=np.int64)
            return cls(work, places, TrialRows(evidence, own_positives=True))
        if evidence.group is None:
            raise RequestError(
                "trial_needs_positives",
                "A head learns from pairs, or from groups of rows that mean the same; this corpus has neither. Name a group "
                "column, or a label column with label_is_meaning.",
                column="corpus.columns",
            )
        places = np.flatnonzero(evidence.group >= 0).astype(np.int64)
        _, group = np.unique(evidence.group[places], return_inverse=True)
        return cls(work, places, TrialRows(Evidence(None, None, None, None, group), own_positives=False))

    def subset(self, rows: Rows) -> _Side:
        return _Side(self.work, self.places[rows], self.rows.subset(rows))

    def frozen(self) -> FrozenRows:
        anchors = self.work.anchors[self.places]
        positives = self.work.positives
        return FrozenRows(self.rows, anchors, anchors if positives is None else positives[self.places])

    @property
    def with_company(self) -> Rows:
        """Rows that have a positive: one of their own, or another row in their group."""
        if self.rows.own_positives:
            return np.arange(len(self.rows), dtype=np.int64)
        group = self.rows.evidence.group
        assert group is not None
        return np.flatnonzero(np.bincount(group)[group] > 1).astype(np.int64)

    @property
    def keys(self) -> list[Any]:
        keys = self.work.population.anchor_keys
        return [keys[place] for place in self.places]


class FrozenCorpus:
    """A corpus as a trial needs it.

    Args:
        request: Of the trial.
        source: Path of the corpus, or a Hugging Face name (``hf:…``).
        name: Name of the corpus in the report.
        folder: Where intermediate results go.
        settings: Of the service.
        step: Runs one step.
        checkpoint: Called often in long steps; may raise to cancel.
    """

    def __init__(
        self,
        request: TrialRequest,
        source: Path | str,
        name: str,
        folder: Path,
        settings: Settings,
        step: Step,
        checkpoint: Callable[[], None],
    ) -> None:
        self._request, self._step = request, step
        asked = ProbeRequest(encoder=request.encoder, corpus=request.corpus, seed=request.seed)
        self._works = [Workspace(asked, source, name, folder / "training", settings, checkpoint)]
        if request.held_out_where:
            changed = {"where": request.held_out_where, "max_rows": MOST_HELD_OUT}
            apart = asked.model_copy(update={"corpus": request.corpus.model_copy(update=changed)})
            self._works.append(Workspace(apart, source, name, folder / "held-out", settings, checkpoint))
        self._asked = asked
        self._parts: list[int] = []
        self._split_whole = True

    def read(self) -> list[str]:
        """Read the rows and return the content hashes of what was read."""

        def read(work: Workspace) -> dict[str, Any]:
            return {**work.read(), "sha256": work.corpus.info.sha256}

        found = [
            self._step(Phase.READING, f"read the {side} rows", read, work)
            for side, work in zip(("training", "held-out"), self._works, strict=False)
        ]
        self._parts = [each["parts"] for each in found]
        return [each["sha256"] for each in found]

    def encode(self) -> None:
        """Lay out the vectors of all rows, and divide them.

        Raises:
            RequestError: ``trial_needs_positives``; ``trial_nothing_held_out``.
        """
        if any(self._parts):
            self._step(Phase.LOADING, "load the encoder", self._works[0].load)
        for side, work, parts in zip(("training", "held-out"), self._works, self._parts, strict=False):
            for part in range(parts):
                self._step(Phase.ENCODING, f"encode {side} part {part}", work.encode, part)
            self._step(Phase.ENCODING, f"gather the {side} vectors", work.gather)
            self._step(Phase.ENCODING, f"find the {side} floor", work.find_floor)
        training = _Side.of(self._works[0])
        if len(self._works) == 2:
            held_out = _Side.of(self._works[1])
        else:
            share, rng = self._request.held_out_share, np.random.default_rng([self._request.seed, 5])
            self._split_whole = training.rows.splits_whole(share)
            rest, apart_rows = training.rows.split(share, rng)
            training, held_out = training.subset(rest), training.subset(apart_rows)
        company = training.with_company
        self.rows_left_out = self.work.corpus_info.rows_encoded - len(company)
        if len(self._works) == 1:
            self.rows_left_out -= len(held_out.places)
        self._training, self._held_out = training.subset(company), held_out
        answerable = len(held_out.rows.relevance().answerable)
        if min(self._training.rows.num_units, held_out.rows.num_units) < 2 or not answerable:
            kind = "anchors" if held_out.rows.own_positives else "groups"
            raise RequestError(
                "trial_nothing_held_out",
                f"{len(company)} rows of {self._training.rows.num_units} {kind} are there to train on, and {len(held_out.rows)} "
                f"of {held_out.rows.num_units} to evaluate on, of which {answerable} have an answer among the others; at "
                f"least 2 {kind} each and one answer are needed.",
                column="held_out_share",
            )

    @property
    def work(self) -> Workspace:
        """The workspace of the training rows."""
        return self._works[0]

    @property
    def training(self) -> FrozenRows:
        """The rows to train on."""
        return self._training.frozen()

    @property
    def held_out(self) -> FrozenRows:
        """The rows to evaluate on."""
        return self._held_out.frozen()

    def describe_held_out(self) -> HeldOutRows:
        """What is held out, in words and numbers."""
        rows = len(self._held_out.rows)
        queries = len(self._held_out.rows.relevance().answerable)
        kind = "pairs" if self._held_out.rows.own_positives else "whole groups"
        if not self._split_whole:
            kind = "rows of every group"
        where = " and ".join(f"{column} = {value}" for column, value in self._request.held_out_where.items())
        return HeldOutRows(
            description=f"rows with {where}"
            if where
            else f"{kind} drawn at random with about {self._request.held_out_share:g} of the rows",
            rows=rows,
            queries=queries,
            queries_left_out=rows - queries,
        )

    def predicted(self, sizes: list[int], temperature: float) -> dict[int, Estimate]:
        """S of the training rows at some batch sizes, before any training; sizes too large for an interval are left out."""
        rows = self._training.places
        request = self._asked.model_copy(update={"temperature": temperature})
        shares = Shares(
            self.work.population.subset("training", rows, self._request.seed),
            sizes,
            request,
            lambda: self.work.training_rows(rows),
            None,
            Scratch(self.work.scratch.file(f"shares-T{temperature:g}"), self.work.scratch.checkpoint),
        )
        for task in shares.tasks():
            for part in task.parts():
                task.run(part)
        scan = shares.scan
        if scan is None:
            return {}
        return {size: scan.point(size).estimate for size in sizes if size <= scan.largest}

    def warnings(self) -> list[ReportWarning]:
        """What the reader should know about the rows."""
        seen = set(self._training.keys)
        again = sum(key in seen for key in self._held_out.keys)
        if not again:
            return []
        return [
            ReportWarning(
                code="held_out_seen",
                message=f"{again} of {len(self._held_out.rows)} held-out rows have the text of a training row.",
            )
        ]
