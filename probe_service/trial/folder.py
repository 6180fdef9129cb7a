"""A trial's folder: one file a finished run, so that a trial that was killed goes on where it was. Light: no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from probe_service.errors import RequestError, ServiceError
from probe_service.schemas import TrialReport, TrialRequest
from probe_service.scratch import Scratch

__all__ = ["TrialFolder"]

Json = Any


class TrialFolder:
    """What a trial leaves: ``trial.json`` (what was asked), ``report.json`` (what is known so far), a file for each result.

    Args:
        folder: Made when something is put into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def scratch(self) -> Path:
        """Where intermediate results may lie until the trial has ended."""
        return self.folder / "scratch"

    def claim(self, request: TrialRequest, content: Sequence[str]) -> None:
        """Take the folder for a trial, or find that it is this one's already.

        Args:
            request: What was asked.
            content: Hashes of what was read for it.

        Raises:
            RequestError: ``trial_folder_in_use`` where it belongs to another request or other rows.
            ServiceError: ``storage_failed``.
        """
        asked = {"request": request.model_dump(mode="json"), "content": list(content)}
        if self.once("trial", lambda: asked) != asked:
            raise RequestError(
                "trial_folder_in_use",
                f"{self.folder} holds another trial, or this one on a corpus that has changed; name another folder.",
            )

    def once(self, name: str, make: Callable[[], Json]) -> Json:
        """Return the result of this name; make it and keep it where it is not there yet.

        Args:
            name: Names the file, without its suffix; may have a folder before it.
            make: Returns plain JSON values.

        Raises:
            ServiceError: ``storage_failed``.
        """
        file = self.folder / f"{name}.json"
        if not file.exists():
            self._save(file, json.dumps(make(), indent=2))
        try:
            return json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ServiceError(
                "storage_failed", f"{file} cannot be read; delete it, and it is made again."
            ) from error

    def report(self) -> TrialReport | None:
        """What is known so far; None before the first cell has finished."""
        file = self.folder / "report.json"
        return TrialReport.model_validate_json(file.read_bytes()) if file.exists() else None

    def put_report(self, report: TrialReport) -> None:
        """Keep what is known."""
        self._save(self.folder / "report.json", report.model_dump_json(indent=2) + "\n")

    def _save(self, file: Path, text: str) -> None:
        try:
            Scratch(file.parent, lambda: None).save_text(file.name, text)
        except OSError as error:
            raise ServiceError("storage_failed", f"{file} cannot be written: {error.strerror}") from error
