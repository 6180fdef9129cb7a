"""What the first rows say while the others are still being encoded, and whether they say enough."""

from __future__ import annotations

import datetime as dt
import shutil
import time
from dataclasses import replace

from pydantic import TypeAdapter

from probe_service.errors import CorpusError
from probe_service.estimate import SUB_POOLS, borrowed_curve
from probe_service.measure import LARGEST_EXACT_CORPUS, Shares, run_all
from probe_service.reporting import at_sizes
from probe_service.schemas import CurvePoint, EarlyStop, Estimate, ProbeRequest, SamplerKind
from probe_service.workspace import DEFAULT_LARGEST_SIZE, Wave, Workspace

__all__ = ["EarlyLooks"]

_REPEATS, _REFERENCES = 20, 4
"""Batches of each size in a look that decides nothing: it is to cost little beside encoding the next rows."""
_SHOWN = frozenset(512 * 4**k for k in range(10))
"""Rows after which there is something new to show."""
_WORTH_A_LOOK = 0.5
"""Seconds of encoding since the last look, at least: rows whose vectors are kept already need no curve of their own."""
_CURVE = TypeAdapter(list[CurvePoint])


class EarlyLooks:
    """Looks at the rows encoded so far, which are a random sample of all.

    Args:
        work: The rows.
        request: What was asked.
        started: When the probe started, in ISO 8601.
        seconds_before: What reading and loading took since then.
    """

    def __init__(self, work: Workspace, request: ProbeRequest, started: str, seconds_before: float) -> None:
        self._seconds_before = seconds_before
        self._work, self._request = work, request
        self._started = dt.datetime.fromisoformat(started)
        self._looked_at = time.monotonic()

    def due(self, wave: Wave) -> bool:
        """Whether to look after a wave: at four times as many rows each time, and where one may stop after any wave."""
        request = self._request
        return wave.rows in _SHOWN or request.target_width is not None or request.max_seconds is not None

    def look(self, rows: int, following: int) -> bool:
        """Measure the first rows, and tell whether to stop after them.

        Args:
            rows: How many are encoded.
            following: How many will be after the next wave.
        """
        request, scratch = self._request, self._work.scratch
        waited = time.monotonic() - self._looked_at >= _WORTH_A_LOOK
        wanted = request.target_width is not None or (rows in _SHOWN and waited)
        curve = self._measure(rows) if wanted else []
        self._looked_at = time.monotonic()
        scratch.save_text(_file(rows), _CURVE.dump_json(curve).decode())
        widest = self._widest(curve, rows)
        reason = None
        if request.target_width is not None and widest is not None and widest <= request.target_width:
            reason = "target_width"
        elif request.max_seconds is not None and self._too_late_for(following, rows):
            reason = "max_seconds"
        if reason is None or rows < max(request.batch_sizes or (2,)):
            return False
        left_out = len(self._work.corpus) - rows
        if reason == "target_width":
            why = f"intervals are at most {widest:.3f} wide, and {request.target_width:g} was asked for"
        else:
            why = f"{request.max_seconds:g} seconds would not have been enough for more"
        stop = EarlyStop.model_validate(
            {
                "reason": reason,
                "rows_left_out": left_out,
                "widest_interval": widest,
                "description": f"Encoding stopped after {rows:,} rows, {left_out:,} before the end: {why}.",
            }
        )
        scratch.save_text("stopped.json", stop.model_dump_json())
        return True

    def curve(self, rows: int) -> list[CurvePoint]:
        """What a look at so many rows found; empty where they are too few for any interval."""
        return _CURVE.validate_json(self._work.scratch.file(_file(rows)).read_bytes())

    def _measure(self, rows: int) -> list[CurvePoint]:
        request = self._request
        sampler = request.sampler
        sizes = request.batch_sizes and tuple(
            size for size in request.batch_sizes if size <= rows // SUB_POOLS
        )
        # Another sampler's batches depend on all rows.
        if sampler.kind is not SamplerKind.RANDOM or sizes == () or rows // SUB_POOLS < 2 * sampler.devices:
            return []
        changes: dict[str, object] = {"batch_sizes": sizes, "method": "sampled", "dropout_views": False}
        if request.target_width is None:
            changes["num_repeats"] = min(request.num_repeats, _REPEATS)
        asked = request.model_copy(update=changes)
        try:
            work = self._work.begin(rows, asked)
        except CorpusError:
            return []  # hardly a usable row among the first ones; all of them may yet be enough
        population = work.population
        if request.target_width is None:
            population = replace(population, plan=replace(population.plan, min_anchors=0))
        borrowed = borrowed_curve(work.encoder_info.name, work.encoder_info.revision)
        shares = Shares(population, work.sizes, asked, work.training_rows, borrowed, work.scratch)
        points = []
        for at_size in at_sizes(shares, work.sizes, asked, work.scratch, most_batches=_REFERENCES):
            run_all(at_size.tasks)
            points.append(at_size.point())
        shutil.rmtree(work.scratch.folder)
        return points

    @property
    def _largest(self) -> int:
        return max(self._request.batch_sizes or (DEFAULT_LARGEST_SIZE,))

    def _widest(self, curve: list[CurvePoint], rows: int) -> float | None:
        """The widest interval of the similarity curve and S; None unless every size wanted has one."""
        if not curve or self._largest > rows // SUB_POOLS:
            return None
        widths = [
            estimate.high - estimate.low
            for point in curve
            for estimate in _deciding(point)
            if estimate.low is not None and estimate.high is not None
        ]
        return max(widths)

    def _too_late_for(self, rows: int, encoded: int) -> bool:
        """Whether encoding up to `rows` rows and measuring them would take too long."""
        elapsed = (dt.datetime.now(dt.UTC) - self._started).total_seconds()
        assert self._request.max_seconds is not None
        before = min(self._seconds_before, elapsed)
        encoding = (elapsed - before) * rows / encoded
        return before + encoding + _measuring_seconds(rows, self._largest) > self._request.max_seconds


def _deciding(point: CurvePoint) -> list[Estimate]:
    # Where candidates are unjudged, S has bounds: each has an interval of its own that more rows narrow.
    shares = [point.false_negative_softmax_share]
    if point.worst_case is not None:
        shares = [point.certain_share, point.worst_case]
    return [estimate for estimate in (*shares, point.top_k_mean) if estimate is not None]


def _measuring_seconds(rows: int, largest_size: int) -> float:
    """A guess of what measuring so many rows takes on two cores (benchmarks/scaling.py)."""
    compared = min(rows, LARGEST_EXACT_CORPUS)
    return 2.0 + 1.5e-4 * rows + 1.5e-8 * compared**2 + 2e-3 * largest_size


def _file(rows: int) -> str:
    return f"first-{rows}.json"
