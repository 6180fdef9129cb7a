"""What a dead worker leaves behind, and what is made of it."""

from __future__ import annotations

import json
import time
import uuid

import pytest

from probe_service.jobs.heartbeat import (
    Heartbeat,
    exit_cause,
    last_exit_cause,
    live_heartbeats,
    read_heartbeat,
    record_death,
    write_heartbeat,
)
from probe_service.store import CorpusStore

JOB = str(uuid.UUID(int=7))


def beat(home, *, job_id=JOB, at=None, executor_id="worker-1"):
    now = time.time() if at is None else at
    write_heartbeat(
        home,
        Heartbeat(
            executor_id=executor_id,
            pid=4242,
            started_at=now,
            beat_at=now,
            job_id=job_id,
            device="cpu",
            default_encoder="minilm",
            oom_kills=0,
        ),
    )


@pytest.mark.parametrize(
    ("return_code", "before", "now", "cause"),
    [
        (-9, 3, 4, "worker_out_of_memory"),
        (-9, 3, 3, "worker_killed"),
        (-11, 3, 4, "worker_killed"),
        (None, 3, 4, "worker_out_of_memory"),
        (None, 3, 3, "worker_killed"),
        (1, 3, 4, "worker_crashed"),
        (0, 3, 3, "worker_crashed"),
    ],
)
def test_the_cause_follows_from_exit_and_kernel(return_code, before, now, cause):
    assert exit_cause(return_code, before, now) == cause


def test_a_death_is_recorded_once_in_the_job_that_was_held(tmp_path):
    store = CorpusStore(tmp_path, 1)
    beat(tmp_path)
    assert record_death(store, tmp_path, "worker-1", -11) == JOB
    assert record_death(store, tmp_path, "worker-1", None) is None
    lines = (store.job_folder(JOB) / "worker_exits.jsonl").read_text().splitlines()
    assert len(lines) == 1
    recorded = json.loads(lines[0])
    assert (recorded["return_code"], recorded["cause"], recorded["pid"]) == (-11, "worker_killed", 4242)
    assert last_exit_cause(store.job_folder(JOB)) == "worker_killed"
    assert read_heartbeat(tmp_path, "worker-1") is None


def test_a_death_between_jobs_is_nobodys(tmp_path):
    beat(tmp_path, job_id=None)
    assert record_death(CorpusStore(tmp_path, 1), tmp_path, "worker-1", -9) is None
    assert not (tmp_path / "jobs").exists()


def test_only_those_who_wrote_lately_are_alive(tmp_path):
    beat(tmp_path, executor_id="quick")
    beat(tmp_path, executor_id="dead", at=time.time() - 11)
    (tmp_path / "workers" / "torn.json").write_text('{"executor_id": "to')
    assert [alive.executor_id for alive in live_heartbeats(tmp_path)] == ["quick"]


def test_an_executor_id_cannot_leave_its_folder(tmp_path):
    beat(tmp_path, executor_id="../../escape")
    assert [path.name for path in (tmp_path / "workers").iterdir()] == [".._.._escape.json"]
