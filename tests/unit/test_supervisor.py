"""The worker gets the settings of the process that supervises it."""

from __future__ import annotations

import os

from probe_service.jobs.supervisor import settings_environment
from probe_service.settings import Settings


def test_settings_survive_the_way_through_the_environment(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PROBE_")]:
        monkeypatch.delenv(name)
    given = Settings(
        home=tmp_path,
        port=1234,
        api_keys=('with "quotes"', "and, comma"),
        allowed_encoders=("minilm",),
        device="cpu",
        executor_id="worker-7",
    )
    for name, text in settings_environment(given).items():
        monkeypatch.setenv(name, text)
    assert Settings() == given
    assert Settings().encoder is None
