"""Logs as JSON lines on stderr, one per event, for the API and the worker alike."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

__all__ = ["JsonLines", "configure_logging"]


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, process, message, traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging() -> None:
    """Send everything to stderr as JSON lines; libraries only from warnings upwards."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("probe_service").setLevel(logging.INFO)
    for name in ("dbos", "uvicorn", "uvicorn.error"):
        library = logging.getLogger(name)
        library.handlers[:] = [handler]
        library.propagate = False
    logging.getLogger("dbos").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").propagate = True
    logging.getLogger("uvicorn.error").handlers[:] = []
