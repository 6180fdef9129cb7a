"""Typed client of probe-service over HTTP.

>>> from pathlib import Path
>>> from probe_client import ProbeClient
>>> with ProbeClient("http://127.0.0.1:8000") as client:  # doctest: +SKIP
...     job = client.submit(path=Path("helpdesk.jsonl"), request={"encoder": "minilm"})
...     client.wait(job.id)
...     print(client.report(job.id).advice.headline)
"""

from probe_client._client import ProbeClient
from probe_client._errors import (
    AnswerNotUnderstood,
    ApiError,
    ConnectionFailed,
    JobCancelled,
    JobFailed,
    ProbeClientError,
    WaitTimeout,
)

__all__ = [
    "AnswerNotUnderstood",
    "ApiError",
    "ConnectionFailed",
    "JobCancelled",
    "JobFailed",
    "ProbeClient",
    "ProbeClientError",
    "WaitTimeout",
]
