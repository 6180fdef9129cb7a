"""The /v1/embeddings back end against a real HTTP server on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from probe_service.encode import load as load_module
from probe_service.encode import load_encoder
from probe_service.encode.remote import RemoteEncoder, load_remote
from probe_service.errors import EncoderError
from probe_service.settings import Settings


def raw_vector(text: str) -> list[float]:
    return [float(byte) - 120.0 for byte in hashlib.sha256(text.encode()).digest()[:6]]


class EmbeddingServer(ThreadingHTTPServer):
    """Answers as told: `faults` are statuses or kinds of bad answer for the next requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: EmbeddingServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        fault = self.server.faults.pop(0) if self.server.faults else None
        items = [
            {"object": "embedding", "index": index, "embedding": raw_vector(text)}
            for index, text in enumerate(body["input"])
        ]
        status, answer = 200, {"object": "list", "data": items[::-1]}
        if self.path != "/v1/embeddings":
            status, answer = 404, {"error": "no such page"}
        elif isinstance(fault, int):
            status, answer = fault, {"error": f"told to say {fault}"}
        elif fault == "short":
            answer["data"] = items[:-1]
        elif fault == "ragged":
            items[0]["embedding"] = items[0]["embedding"][:-1]
        elif fault == "wider":
            for item in items:
                item["embedding"].append(1.0)
        elif fault == "words":
            items[0]["embedding"] = ["a"] * 6
        elif fault == "same index":
            items[0]["index"] = 1
        elif fault == "no list":
            answer = {"vectors": []}
        elif fault == "dropout":
            items[0]["embedding"][0] += 90.0
        payload = json.dumps(answer).encode()
        if fault == "not json":
            payload = b"<html>"
        self.send_response(status)
        if fault == 429:
            self.send_header("Retry-After", "7")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_vectors_in_order_and_of_unit_length(server: EmbeddingServer) -> None:
    texts = [f"text {number} 😀" for number in range(70)]

    encoded = load_remote(f"openai:some/model@{server.url}").encoder.encode(texts)

    expected = np.array([raw_vector(text) for text in texts])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(encoded.vectors, expected, atol=1e-6)
    assert encoded.vectors.dtype == np.float32
    assert not encoded.was_truncated.any()
    assert len({bytes(row) for row in encoded.input_digests}) == 70
    assert [len(request["input"]) for request in server.requests] == [2, 32, 32, 6]
    assert {request["model"] for request in server.requests} == {"some/model"}


def test_info_says_what_is_not_known(server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_checked", {})
    name = f"openai:m@{server.url}"

    info = load_encoder(name, Settings()).info

    assert (info.name, info.backend, info.location, info.dimension) == (name, "openai", server.url, 6)
    assert info.weights_sha256 is None
    assert info.max_length is None
    assert not info.revision_pinned


def test_key_from_the_environment(server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_EMBEDDINGS_API_KEY", "s3cret")

    info = load_remote(f"openai:m@{server.url}").info

    assert server.keys == ["Bearer s3cret"]
    assert "s3cret" not in info.model_dump_json()


def test_busy_server_is_asked_again_with_growing_waits(server: EmbeddingServer) -> None:
    waits: list[float] = []
    server.faults = [503, 429, 500]

    encoder = RemoteEncoder("m", server.url, None, sleep=waits.append)

    assert len(encoder.encode(["a"])) == 1
    assert waits == [0.5, 7.0, 2.0]  # 429 said Retry-After: 7


@pytest.mark.parametrize(("status", "requests"), [(500, 5), (401, 1), (404, 1)])
def test_server_that_stays_down_or_refuses(server: EmbeddingServer, status: int, requests: int) -> None:
    server.faults = [status] * 9

    with pytest.raises(EncoderError, match=f"HTTP {status}") as caught:
        RemoteEncoder("m", server.url, None, sleep=lambda seconds: None).encode(["a"])

    assert caught.value.code == "encoder_unavailable"
    assert len(server.requests) == requests


def test_nobody_listens() -> None:
    encoder = RemoteEncoder("m", "http://127.0.0.1:9/v1", None, sleep=lambda seconds: None)

    with pytest.raises(EncoderError) as caught:
        encoder.encode(["a"])

    assert caught.value.code == "encoder_unavailable"
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("fault", ["short", "ragged", "words", "same index", "no list", "not json"])
def test_bad_answers_are_refused(server: EmbeddingServer, fault: str) -> None:
    server.faults = [fault]

    with pytest.raises(EncoderError) as caught:
        RemoteEncoder("m", server.url, None).encode(["a", "b"])

    assert caught.value.code == "encoder_bad_response"


def test_width_must_not_change(server: EmbeddingServer) -> None:
    encoder = RemoteEncoder("m", server.url, None)
    encoder.encode(["a"])
    server.faults = ["wider"]

    with pytest.raises(EncoderError, match="width 7 after width 6"):
        encoder.encode(["a"])


def test_server_with_dropout_is_refused(server: EmbeddingServer) -> None:
    server.faults = ["dropout"]

    with pytest.raises(EncoderError) as caught:
        load_remote(f"openai:m@{server.url}")

    assert caught.value.code == "encoder_canary_mismatch"


@pytest.mark.parametrize("name", ["openai:m", "openai:@http://x/v1", "openai:m@ftp://x/v1"])
def test_malformed_names(name: str) -> None:
    with pytest.raises(EncoderError) as caught:
        load_remote(name)

    assert caught.value.code == "encoder_unknown"
