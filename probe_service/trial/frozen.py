"""From a corpus to rows with frozen vectors; and what the probe predicts for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe_service.errors import RequestError
from probe_service.estimate import Evidence
from probe_service.measure import Shares, run_all
from probe_service.schemas import Estimate, HeldOutRows, Phase, ReportWarning, TrialRequest
from probe_service.scratch import Scratch
from probe_service.trial.head import FrozenRows
from probe_service.trial.reading import Step, TrialCorpus, check_sides, describe_held_out
from probe_service.trial.rows import Rows, TrialRows
from probe_service.workspace import Workspace

__all__ = ["FrozenCorpus"]


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
    def group_names(self) -> list[str | None]:
        groups = self.work.population.groups
        return [] if groups is None else [groups[place] for place in self.places]

    @property
    def keys(self) -> list[Any]:
        keys = self.work.population.anchor_keys
        return [keys[place] for place in self.places]


class FrozenCorpus:
    """The rows of a trial of heads, encoded and divided.

    Args:
        corpus: What was read.
        request: Of the trial.
        step: Runs one step.

    Raises:
        RequestError: ``trial_needs_positives``; ``trial_nothing_held_out``.
        ProbeError: An encoder that cannot be used, storage that fails.
    """

    def __init__(self, corpus: TrialCorpus, request: TrialRequest, step: Step) -> None:
        self._corpus, self._request = corpus, request
        if any(corpus.parts.values()):
            step(Phase.LOADING, "load the encoder", corpus.training.load)
        for side, work in corpus.sides.items():
            for part in range(corpus.parts[side]):
                step(Phase.ENCODING, f"encode {side} part {part}", work.encode, part)
            step(Phase.ENCODING, f"gather the {side} vectors", work.gather)
            step(Phase.ENCODING, f"find the {side} floor", work.find_floor)
        training, self._split_whole = _Side.of(corpus.training), True
        without_group = corpus.training.corpus_info.rows_encoded - len(training.places)
        if corpus.held_out is not None:
            self._held_out = _Side.of(corpus.held_out)
        else:
            share, rng = request.held_out_share, np.random.default_rng([request.seed, 5])
            self._split_whole = training.rows.many_units(share)
            rest, apart = training.rows.split(share, rng, whole=self._split_whole)
            training, self._held_out = training.subset(rest), training.subset(apart)
        self._training = training.subset(training.with_company)
        alone = len(training.places) - len(self._training.places)
        self.rows_left_out = without_group + alone
        check_sides(self._training.rows, self._held_out.rows)

    @property
    def training(self) -> FrozenRows:
        """The rows to train on."""
        return self._training.frozen()

    @property
    def held_out(self) -> FrozenRows:
        """The rows to evaluate on."""
        return self._held_out.frozen()

    @property
    def groups_shared(self) -> bool:
        """Whether most held-out rows are in a group that is trained on."""
        sides = [side.group_names for side in (self._training, self._held_out)]
        trained = set(sides[0])
        return sum(name in trained for name in sides[1]) > len(sides[1]) / 2

    def describe_held_out(self) -> HeldOutRows:
        """What is held out, in words and numbers."""
        return describe_held_out(self._request, self._held_out.rows, split_whole=self._split_whole)

    def predicted(self, sizes: list[int], temperature: float) -> dict[int, Estimate]:
        """S of the training rows at some batch sizes, before any training; sizes too large for an interval are left out."""
        work, rows = self._corpus.training, self._training.places
        population = work.population.subset("training", rows, self._request.seed)
        # Whatever the file holds besides, batches are drawn from these rows and no others.
        plan = replace(population.plan, rows_usable=population.plan.rows_encoded)
        shares = Shares(
            replace(population, plan=plan),
            sizes,
            self._corpus.asked.model_copy(update={"temperature": temperature}),
            lambda: work.training_rows(rows),
            None,
            Scratch(work.scratch.file(f"shares-T{temperature:g}"), work.scratch.checkpoint),
        )
        run_all(shares.tasks())
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
