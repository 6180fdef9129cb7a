"""From the name of a judge, as a command line has it, to the judge."""

from __future__ import annotations

import os
import re

from probe_service.errors import RequestError
from probe_service.judges.chat import API_KEY_VARIABLE, ChatJudge
from probe_service.judges.cross_encoder import DEFAULT_THRESHOLD, CrossEncoderJudge

__all__ = ["judge_by_name"]

_CHAT = re.compile(r"chat:(?P<model>.+)@(?P<url>https?://\S+)")
_CROSS_ENCODER = re.compile(r"cross-encoder:(?P<model>.+)")


def judge_by_name(
    name: str, *, threshold: float = DEFAULT_THRESHOLD, concurrency: int = 4, device: str | None = None
) -> ChatJudge | CrossEncoderJudge:
    """Return the judge of this name.

    Args:
        name: ``cross-encoder:NAME`` or ``chat:MODEL@URL``; the key for the latter is read from PROBE_JUDGE_API_KEY.
        threshold: Of a cross-encoder.
        concurrency: Of a chat endpoint.
        device: Of a cross-encoder.

    Raises:
        RequestError: judge_unknown.
    """
    if match := _CHAT.fullmatch(name):
        return ChatJudge(
            match["model"], match["url"], os.environ.get(API_KEY_VARIABLE), concurrency=concurrency
        )
    if match := _CROSS_ENCODER.fullmatch(name):
        return CrossEncoderJudge(match["model"], threshold=threshold, device=device)
    raise RequestError(
        "judge_unknown",
        f"{name!r} is neither cross-encoder:NAME nor chat:MODEL@http://host/v1.",
        column="judge",
    )
