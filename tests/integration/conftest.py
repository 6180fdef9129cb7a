"""The services that integration tests talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.service_process import ServiceProcess


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One service for all tests that leave it alive."""
    running = ServiceProcess(
        tmp_path_factory.mktemp("service"),
        max_upload_bytes=str(40 * 1024 * 1024),
        max_inline_bytes=str(256 * 1024),
        max_row_bytes=str(64 * 1024),
    )
    try:
        yield running.start()
    finally:
        running.stop()
