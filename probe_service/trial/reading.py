"""The rows that a trial reads: those to train on and, where the request says which, those to evaluate on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from probe_service.errors import RequestError
from probe_service.schemas import CorpusInfo, HeldOutRows, Phase, ProbeRequest, ReportWarning, TrialRequest
from probe_service.settings import Settings
from probe_service.trial.rows import TrialRows
from probe_service.workspace import Workspace

__all__ = ["Step", "TrialCorpus", "check_sides", "describe_held_out", "unused_hard_negatives"]

Step = Callable[..., Any]
"""Runs one step: ``step(phase, name, function, *json_arguments)``."""

MOST_HELD_OUT = 5000
"""Held-out rows that are read, where they are read apart: evaluation compares all with all."""


class TrialCorpus:
    """A corpus that is read once, or twice where held-out rows are named.

    Args:
        request: Of the trial.
        source: Path of the corpus, or a Hugging Face name (``hf:…``).
        name: Name of the corpus in the report.
        folder: Where intermediate results go.
        settings: Of the service.
        checkpoint: Called often in long steps; may raise to cancel.
    """

    def __init__(
        self,
        request: TrialRequest,
        source: Path | str,
        name: str,
        folder: Path,
        settings: Settings,
        checkpoint: Callable[[], None],
    ) -> None:
        self.asked = ProbeRequest(encoder=request.encoder, corpus=request.corpus, seed=request.seed)
        self.training = Workspace(self.asked, source, name, folder / "training", settings, checkpoint)
        self.held_out: Workspace | None = None
        if request.held_out_where:
            changed = {"where": request.held_out_where, "max_rows": MOST_HELD_OUT}
            options = request.corpus.model_copy(update=changed)
            apart = self.asked.model_copy(update={"corpus": options})
            self.held_out = Workspace(apart, source, name, folder / "held-out", settings, checkpoint)
        self.parts: dict[str, int] = {}

    @property
    def sides(self) -> dict[str, Workspace]:
        """What is read, by name."""
        sides = {"training": self.training}
        return sides if self.held_out is None else sides | {"held-out": self.held_out}

    def read(self, step: Step) -> list[str]:
        """Read the rows and return the content hashes of what was read; `parts` then says how much there is to encode."""
        hashes = []
        for side, work in self.sides.items():

            def read(work: Workspace = work) -> dict[str, Any]:
                return {**work.read(), "sha256": work.corpus.info.sha256}

            found = step(Phase.READING, f"read the {side} rows", read)
            self.parts[side] = found["parts"]
            hashes.append(found["sha256"])
        return hashes


def check_sides(training: TrialRows, held_out: TrialRows) -> None:
    """Refuse rows that nothing can be learnt from, or evaluated on.

    Raises:
        RequestError: ``trial_nothing_held_out``.
    """
    answerable = len(held_out.relevance().answerable)
    if min(training.num_units, held_out.num_units) < 2 or not answerable:
        kind = "anchors" if held_out.own_positives else "groups"
        raise RequestError(
            "trial_nothing_held_out",
            f"{len(training)} rows of {training.num_units} {kind} are there to train on, and {len(held_out)} of "
            f"{held_out.num_units} to evaluate on, of which {answerable} have an answer among the others; at least 2 {kind} "
            "each and one answer are needed.",
            column="held_out_share",
        )


def describe_held_out(request: TrialRequest, held_out: TrialRows, *, split_whole: bool) -> HeldOutRows:
    """What is held out, in words and numbers.

    Args:
        request: Of the trial.
        held_out: The rows.
        split_whole: Whether whole groups were held out, where the request names no rows.
    """
    queries = len(held_out.relevance().answerable)
    if request.held_out_where:
        where = " and ".join(f"{column} = {value}" for column, value in request.held_out_where.items())
        description = f"rows with {where}"
    else:
        kind = "whole groups" if split_whole else "rows of every group"
        kind = "pairs" if held_out.own_positives else kind
        description = f"{kind} drawn at random with about {request.held_out_share:g} of the rows"
    return HeldOutRows(
        description=description,
        rows=len(held_out),
        queries=queries,
        queries_left_out=len(held_out) - queries,
    )


def unused_hard_negatives(corpus: CorpusInfo) -> list[ReportWarning]:
    """Say that hard negatives take no part, where there are any."""
    if not corpus.hard_negatives:
        return []
    return [
        ReportWarning(
            code="hard_negatives_unused",
            message=f"The {corpus.hard_negatives:,} hard negatives take no part: losses compare a batch's rows alone.",
        )
    ]
