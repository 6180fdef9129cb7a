"""What all tests share: no network, the labelled corpora, the browser.

Labelled corpora lie outside the repository, since their licences do not allow copies here; PROBE_TEST_DATA
names their folder. Where they or Chromium are missing, tests that need them are skipped with the reason,
unless PROBE_TEST_REQUIRE lists ``data`` or ``browser``: then they fail, so that CI cannot pass by skipping.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before anything imports huggingface_hub, which reads it once: no test may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton decides when it is imported whether its kernels are compiled for a GPU (0) or run here.
os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes share the cores: threads of each that wait for one another would take turns with the others'.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PROBE_HOME" not in os.environ:
    # Which encoders passed their check is kept there, and is not to be kept in the home of whoever runs the tests.
    os.environ["PROBE_HOME"] = tempfile.mkdtemp(prefix="probe-home-")
    atexit.register(shutil.rmtree, os.environ["PROBE_HOME"], ignore_errors=True)

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

MARKER_BY_FIXTURE = {"labelled_corpora": "labelled", "chromium": "browser"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they ask for, so that ``-m "not browser"`` never misses one."""
    for item in items:
        for fixture, marker in MARKER_BY_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)


def skip_unless_required(requirement: str, reason: str) -> None:
    """Skip the test with the reason, or fail it where PROBE_TEST_REQUIRE lists the requirement."""
    required = {name.strip() for name in os.environ.get("PROBE_TEST_REQUIRE", "").split(",")}
    if requirement in required:
        pytest.fail(f"{reason} (required by PROBE_TEST_REQUIRE)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def labelled_corpora() -> Path:
    """The folder of labelled corpora that PROBE_TEST_DATA names."""
    named = os.environ.get("PROBE_TEST_DATA")
    if not named:
        skip_unless_required("data", "PROBE_TEST_DATA names no folder of labelled corpora")
    folder = Path(named or "")
    if not folder.is_dir():
        skip_unless_required("data", f"PROBE_TEST_DATA names {folder}, which is not a folder")
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless Chromium, for one module: its event loop would be in the way of tests that run one of their own.

    PROBE_TEST_CHROMIUM names another executable than the distribution's.
    """
    executable = Path(os.environ.get("PROBE_TEST_CHROMIUM", "/usr/bin/chromium"))
    if not executable.is_file():
        skip_unless_required("browser", f"no Chromium at {executable}; PROBE_TEST_CHROMIUM may name another")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(executable), args=CHROMIUM_FLAGS)
        yield browser
        browser.close()
