"""What a worker says about itself, in one small file: that it lives, and which job it holds.

``home/workers/<executor id>.json`` is replaced every second, and at once when a job begins or ends. The API
reads from it whether a worker is alive and whether a cancelled job's last step has ended; whoever finds the
file of a dead worker learns from it which job died with it.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from probe_service.schemas import Noun
from probe_service.store import CorpusStore, storage_errors

__all__ = [
    "ALIVE_WITHIN_SECONDS",
    "EXITS_FILE",
    "Heartbeat",
    "exit_cause",
    "heartbeat_path",
    "last_exit_cause",
    "live_heartbeats",
    "oom_kills",
    "read_heartbeat",
    "record_death",
    "write_heartbeat",
]

ALIVE_WITHIN_SECONDS = 10.0
"""A worker that has not written for longer counts as dead. Loading a model may hold Python's lock for
seconds.
"""

EXITS_FILE = "worker_exits.jsonl"


class Heartbeat(Noun):
    """One worker at one moment."""

    executor_id: str
    pid: int
    started_at: float
    beat_at: float
    job_id: str | None
    device: str
    default_encoder: str
    oom_kills: int


def heartbeat_path(home: Path, executor_id: str) -> Path:
    """Return the file of one worker."""
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in executor_id)
    return home / "workers" / f"{safe}.json"


def write_heartbeat(home: Path, heartbeat: Heartbeat) -> None:
    """Replace a worker's file."""
    path = heartbeat_path(home, heartbeat.executor_id)
    with storage_errors("Writing the worker's heartbeat"):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(heartbeat.model_dump_json(), encoding="utf-8")
        fresh.replace(path)


def read_heartbeat(home: Path, executor_id: str) -> Heartbeat | None:
    """Return a worker's last word, or None if there is none."""
    return _read(heartbeat_path(home, executor_id))


def _read(path: Path) -> Heartbeat | None:
    try:
        return Heartbeat.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def live_heartbeats(home: Path) -> list[Heartbeat]:
    """Return the workers that wrote lately."""
    folder = home / "workers"
    if not folder.is_dir():
        return []
    found = (_read(path) for path in sorted(folder.glob("*.json")))
    return [beat for beat in found if beat is not None and time.time() - beat.beat_at < ALIVE_WITHIN_SECONDS]


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory, as far as this machine tells.

    Compared before and after a worker's death it tells an out-of-memory kill from another SIGKILL.
    """
    total = 0
    for path, field in (
        (Path("/sys/fs/cgroup/memory.events"), "oom_kill"),
        (Path("/sys/fs/cgroup/memory/memory.oom_control"), "oom_kill"),
        (Path("/proc/vmstat"), "oom_kill"),
    ):
        try:
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == field:
                    total += int(value)
        except (OSError, ValueError):
            continue
    return total


def exit_cause(return_code: int | None, oom_kills_before: int, oom_kills_now: int) -> str:
    """Name how a worker died.

    Args:
        return_code: As `subprocess` gives it, negative for a signal; None where nobody saw it.
        oom_kills_before: `oom_kills` while it lived.
        oom_kills_now: `oom_kills` after its death.

    Returns:
        `worker_out_of_memory`, `worker_killed` (a signal, or unseen) or `worker_crashed` (an exit code).
    """
    if return_code in (None, -9) and oom_kills_now > oom_kills_before:
        return "worker_out_of_memory"
    if return_code is None or return_code < 0:
        return "worker_killed"
    return "worker_crashed"


def record_death(store: CorpusStore, home: Path, executor_id: str, return_code: int | None) -> str | None:
    """Note in the job that a dead worker held how it died, once; return the job's id.

    The worker's file is removed, so that the same death is not recorded twice and nobody waits for its step
    to end.
    """
    last_word = read_heartbeat(home, executor_id)
    if last_word is None:
        return None
    if last_word.job_id is not None:
        store.append_to_job(
            last_word.job_id,
            EXITS_FILE,
            {
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "executor_id": executor_id,
                "pid": last_word.pid,
                "return_code": return_code,
                "cause": exit_cause(return_code, last_word.oom_kills, oom_kills()),
            },
        )
    heartbeat_path(home, executor_id).unlink(missing_ok=True)
    return last_word.job_id


def last_exit_cause(job_folder: Path) -> str:
    """Return how the last worker died that held the job; `worker_killed` where nothing is known."""
    try:
        lines = (job_folder / EXITS_FILE).read_text(encoding="utf-8").splitlines()
        return str(json.loads(lines[-1])["cause"])
    except (OSError, ValueError, IndexError, KeyError):
        return "worker_killed"
