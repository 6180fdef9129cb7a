"""Missing corpora or a missing browser skip with a reason, and fail where they are required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = """
def test_corpora(labelled_corpora):
    assert labelled_corpora.is_dir()

def test_browser(chromium):
    page = chromium.new_page()
    page.set_content("<p>curve</p>")
    assert page.inner_text("p") == "curve"
"""


def run_planted(tmp_path: Path, repository: Path, *, require: str = "", corpora: str = "") -> str:
    (tmp_path / "conftest.py").write_text((repository / "tests" / "conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "test_planted.py").write_text(PLANTED, "utf-8")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROBE_TEST_")}
    named = {
        "PROBE_TEST_REQUIRE": require,
        "PROBE_TEST_DATA": corpora,
        "PROBE_TEST_CHROMIUM": "/nowhere/chromium",
    }
    project = ["-c", str(repository / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *project, str(tmp_path)]
    return subprocess.run(
        command, cwd=tmp_path, env=inherited | named, capture_output=True, text=True, timeout=120
    ).stdout


def test_what_is_missing_skips_with_a_printed_reason(tmp_path, repository):
    printed = run_planted(tmp_path, repository)
    assert "2 skipped" in printed
    assert "PROBE_TEST_DATA names no folder" in printed
    assert "no Chromium at /nowhere/chromium" in printed


@pytest.mark.parametrize(
    ("require", "failed"), [("data", "test_corpora"), ("browser", "test_browser")], ids=["data", "browser"]
)
def test_what_is_missing_but_required_fails(tmp_path, repository, require, failed):
    printed = run_planted(tmp_path, repository, require=require, corpora="/nowhere/corpora")
    assert f"ERROR test_planted.py::{failed}" in printed
    assert "1 skipped, 1 error" in printed


def test_the_browser_draws_a_page(chromium):
    page = chromium.new_page()
    page.set_content("<p>curve</p>")
    assert page.inner_text("p") == "curve"
    page.close()
