"""A page of the real service in a real browser, which reports everything that it should not do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.integration.service_process import ServiceProcess

PATIENCE_MS = 60_000
"""A test waits for what it expects to see; only a busy machine needs as long as this."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One service for all tests of the page; it has a small limit, so that a file above it is quickly made."""
    running = ServiceProcess(tmp_path_factory.mktemp("service"), max_upload_bytes=str(2 * 1024**2))
    try:
        yield running.start()
    finally:
        running.stop()


@dataclass
class Watched:
    """What a page did that a test should know of."""

    console_errors: list[str] = field(default_factory=list)
    page_errors: list[str] = field(default_factory=list)
    outside_requests: list[str] = field(default_factory=list)

    def expect_refusal(self, status: int) -> None:
        """Chromium itself notes each refused request on the console; take one such note away."""
        (note,) = [each for each in self.console_errors if f"status of {status} " in each]
        self.console_errors.remove(note)

    def expect_outage(self) -> None:
        """Take the notes on refused and broken connections away."""
        self.console_errors[:] = [each for each in self.console_errors if "net::ERR_" not in each]


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def page(chromium: Any, service: ServiceProcess, watched: Watched) -> Iterator[Any]:
    """An empty tab. Errors on its console or requests to anywhere else fail the test at its end."""
    origin = f"http://127.0.0.1:{service.port}"
    context = chromium.new_context(base_url=origin, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    tab = context.new_page()
    tab.on("console", lambda note: watched.console_errors.append(note.text) if note.type == "error" else None)
    tab.on("pageerror", lambda error: watched.page_errors.append(str(error)))
    tab.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((f"{origin}/", "data:"))
            else watched.outside_requests.append(request.url)
        ),
    )
    try:
        yield tab
        assert watched == Watched()
    finally:
        context.close()
