"""Encoders behind an OpenAI-style ``/v1/embeddings`` server: text-embeddings-inference, vLLM, infinity, OpenAI."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from probe_service.encode.protocol import (
    DIGEST_BYTES,
    CheckedEncoder,
    EncodedTexts,
    concatenate_encoded,
    digest_texts,
    to_unit_length,
)
from probe_service.errors import EncoderError
from probe_service.schemas import EncoderInfo

__all__ = ["API_KEY_VARIABLE", "RemoteEncoder", "load_remote"]

API_KEY_VARIABLE = "PROBE_EMBEDDINGS_API_KEY"
_NAME = re.compile(r"openai:(?P<model>[^@\s]+)@(?P<url>https?://[^\s]+)")
_BATCH_SIZE = 32
_ATTEMPTS = 5
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_TIMEOUT_SECONDS = 60.0
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PROBE_TEXT = "The same text twice must give the same vector."
_LEAST_SELF_COSINE = 0.999


class RemoteEncoder:
    """Ask a server for vectors, in batches, and try again when it is busy.

    Args:
        model: Name of the model as the server knows it.
        base_url: URL up to and including ``/v1``.
        api_key: Bearer key, or None.
        first_wait_seconds: Wait before the second attempt; it doubles each time.
        sleep: How to wait.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None,
        *,
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.dimension: int | None = None
        self._first_wait_seconds = first_wait_seconds
        self._sleep = sleep
        self._client = httpx.Client(
            timeout=_TIMEOUT_SECONDS, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the unit vectors of the texts; what the server cuts is not known, so no row counts as cut.

        Raises:
            EncoderError: encoder_unavailable where the server does not answer; encoder_bad_response where its
                answer is not one vector of one width a text.
        """
        parts = [encoded for _, encoded in self.stream(texts)]
        return concatenate_encoded(parts, self.dimension or 0)

    def stream(self, texts: Sequence[str]) -> Generator[tuple[NDArray[np.intp], EncodedTexts], None, None]:
        """Yield the vectors one request at a time, in the order of the texts.

        Raises:
            EncoderError: As `encode`.
        """
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = list(texts[start : start + _BATCH_SIZE])
            vectors = self._ask(batch)
            digests = np.frombuffer(b"".join(digest_texts(batch)), dtype=np.uint8)
            yield (
                np.arange(start, start + len(batch), dtype=np.intp),
                EncodedTexts(
                    to_unit_length(vectors),
                    np.zeros(len(batch), dtype=np.bool_),
                    digests.reshape(len(batch), DIGEST_BYTES).copy(),
                ),
            )

    def _ask(self, batch: list[str]) -> NDArray[np.float64]:
        body = {
            "model": self.model,
            "input": [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in batch],
            "encoding_format": "float",
        }
        response = self._post_patiently(body)
        try:
            items = response.json()["data"]
            rows = [item["embedding"] for item in sorted(items, key=lambda item: int(item["index"]))]
            vectors = np.array(rows, dtype=np.float64)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad_response(f"it is not a list of vectors of one width ({error})") from error
        if sorted(int(item["index"]) for item in items) != list(range(len(items))):
            raise self._bad_response("its indices do not number the texts")
        if vectors.ndim != 2 or vectors.shape[0] != len(batch) or vectors.shape[1] == 0:
            raise self._bad_response(f"shape {vectors.shape} for {len(batch)} texts")
        if self.dimension not in (None, vectors.shape[1]):
            raise self._bad_response(f"width {vectors.shape[1]} after width {self.dimension}")
        self.dimension = int(vectors.shape[1])
        return vectors

    def _post_patiently(self, body: dict[str, Any]) -> httpx.Response:
        """Post until the server answers, waiting twice as long each time, or as long as Retry-After says."""
        wait_seconds = self._first_wait_seconds
        for attempt in range(1, _ATTEMPTS + 1):
            asked_to_wait = None
            cause: httpx.HTTPError | None = None
            try:
                response = self._client.post(f"{self.base_url}/embeddings", json=body)
            except httpx.HTTPError as error:
                fault, cause = f"{type(error).__name__}: {error}", error
            else:
                if response.is_success:
                    return response
                fault = f"HTTP {response.status_code}: {response.text[:200]}"
                if response.status_code not in _RETRIED_STATUS:
                    raise self._unavailable(fault)
                asked_to_wait = _seconds(response.headers.get("Retry-After"))
            if attempt == _ATTEMPTS:
                raise self._unavailable(f"{fault}, after {attempt} attempts") from cause
            self._sleep(min(asked_to_wait or wait_seconds, _LONGEST_WAIT_SECONDS))
            wait_seconds *= 2
        raise AssertionError("the last attempt returns or raises")

    def _unavailable(self, fault: str) -> EncoderError:
        return EncoderError(
            "encoder_unavailable",
            f"The embeddings server at {self.base_url} does not serve {self.model!r}: {fault}. Check the address,"
            f" the model's name and {API_KEY_VARIABLE}.",
        )

    def _bad_response(self, fault: str) -> EncoderError:
        return EncoderError(
            "encoder_bad_response",
            f"The answer of the embeddings server at {self.base_url} cannot be used: {fault}.",
        )


def load_remote(name: str) -> CheckedEncoder:
    """Reach the server of ``openai:MODEL@URL`` and check it with the same text twice in one request.

    Args:
        name: For example ``openai:bge-m3@http://localhost:8080/v1``. The key is read from
            ``PROBE_EMBEDDINGS_API_KEY``.

    Raises:
        EncoderError: encoder_unknown for a malformed name; encoder_unavailable; encoder_bad_response;
            encoder_canary_mismatch if the two vectors differ.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise EncoderError(
            "encoder_unknown",
            f"{name!r} is not of the form openai:MODEL@http://host/v1.",
        )
    model, url = match["model"], match["url"].rstrip("/")
    encoder = RemoteEncoder(model, url, os.environ.get(API_KEY_VARIABLE))
    twice = encoder.encode([_PROBE_TEXT, _PROBE_TEXT]).vectors
    cosine = float(twice[0] @ twice[1])
    if not cosine >= _LEAST_SELF_COSINE:
        raise EncoderError(
            "encoder_canary_mismatch",
            f"{url} gives the same text two vectors with cosine {cosine:.4f}: {model!r} is not an embedding model"
            " in evaluation mode.",
        )
    # The weights behind a URL cannot be seen: the cache of vectors trusts the name and this one vector.
    probe_sha256 = hashlib.sha256(np.round(twice[0], 3).tobytes()).hexdigest()
    facts = {"backend": "openai", "model": model, "url": url, "probe": probe_sha256, "dtype": "float32"}
    info = EncoderInfo(
        name=name,
        backend="openai",
        location=url,
        revision=None,
        revision_pinned=False,
        weights_sha256=None,
        pooling="chosen by the server",
        normalized=True,
        max_length=None,
        dimension=int(twice.shape[1]),
        dtype="float32",
        device="remote",
        prompt=None,
        check=f"the same text twice gives cosine {cosine:.4f}; width {twice.shape[1]}",
        fingerprint=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
    )
    return CheckedEncoder(info, lambda: encoder)


def _seconds(retry_after: str | None) -> float | None:
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else None
    except ValueError:
        return None
