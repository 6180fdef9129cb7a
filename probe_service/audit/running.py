"""The drawing of an audit from end to end: read, encode, draw, keep."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probe_service.audit.drawing import draw_audit
from probe_service.audit.folder import AuditFolder
from probe_service.errors import InputError
from probe_service.schemas import AuditRequest, Phase, ProbeRequest, Progress
from probe_service.settings import Settings
from probe_service.workspace import Workspace

__all__ = ["run_draw"]

Json = Any

_DRAWING_FROM = 0.4
"""Guessed share of the work that is done when the drawing begins; the vectors are in the cache, as a rule."""


def _call(_name: str, function: Callable[..., Json], *arguments: Json) -> Json:
    return function(*arguments)


def run_draw(
    request: ProbeRequest,
    source: Path | str,
    kept: AuditFolder,
    wanted: AuditRequest,
    *,
    settings: Settings,
    name: str,
    corpus_sha256: str | None = None,
    execute: Callable[..., Json] = _call,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    checkpoint: Callable[[], None] = lambda: None,
) -> None:
    """Draw an audit as a sequence of short steps.

    Args:
        request: How the corpus is read and encoded, the seed of the draws, the budget.
        source: Path of the corpus, or a Hugging Face data set (``hf:…``).
        kept: Takes the audit; what the steps leave lies in its folder until they are done.
        wanted: How much is asked.
        settings: Of the service.
        name: Name of the corpus.
        corpus_sha256: Content hash of the corpus that is meant; None: whatever is there.
        execute: Runs one step, ``execute(name, function, *json_arguments)``; one that it remembers is not repeated after a
            crash.
        on_progress: Told before every step how far the drawing is.
        checkpoint: Called often inside long steps; may raise to cancel.

    Raises:
        InputError: audit_corpus_changed; as of `draw_audit`.
        ProbeError: Bad input, an encoder that cannot be used, storage that fails.
    """
    if kept.is_drawn:
        return  # a crash after the last step: what the steps left may be gone already, and is not needed
    if wanted.batch_size is not None:
        request = request.model_copy(update={"batch_sizes": (wanted.batch_size,)})
    scratch = kept.folder / "scratch"
    work = Workspace(request, source, name, scratch, settings, checkpoint)
    done, parts = 0, 0

    def step(phase: Phase, step_name: str, function: Callable[..., Json], *arguments: Json) -> Json:
        nonlocal done
        total = parts + 4
        fraction = _DRAWING_FROM * done / (total - 1)
        on_progress(Progress(phase=phase, fraction=fraction, done=done, total=total, unit="steps"))
        done += 1
        return execute(step_name, function, *arguments)

    def draw() -> Json:
        if corpus_sha256 not in (None, work.corpus_info.sha256):
            raise InputError(
                "audit_corpus_changed", "The corpus is not the one that was probed any more; probe it again."
            )
        drawn = draw_audit(
            work, scratch, request, labels=wanted.labels, checks=wanted.checks, checkpoint=checkpoint
        )
        kept.put(drawn.audit, drawn.questions, judge=wanted.judge)
        return {}

    parts = step(Phase.READING, "read the corpus", work.read)["parts"]
    if parts:
        step(Phase.LOADING, "load the encoder", work.load)
    for part in range(parts):
        step(Phase.ENCODING, f"encode part {part}", work.encode, part)
    step(Phase.ENCODING, "gather the vectors", work.gather)
    step(Phase.DRAWING, "draw the pairs", draw)
    shutil.rmtree(scratch)
