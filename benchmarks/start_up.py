"""How long a user waits for the first sign: the help of the command, a ready API, the first curve of a large corpus.

    python benchmarks/start_up.py TEXTS.jsonl[.gz] [--rows 100000] [--runs 5]

- help: ``probe --help``, by the clock, beside Python itself doing nothing.
- API: from starting ``probe serve --no-worker`` to the first answer of ``/health``, beside importing FastAPI and DBOS.
- first curve: from sending a corpus of --rows rows to a service whose worker is up, over HTTP, to the first partial curve; the
  first job loads the encoder, later ones have it. Rows are the corpus's texts, numbered until there are enough, so that none
  is in the cache of vectors.

Prints a table in Markdown, and JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from naive_probe import read_texts

PROBE = [sys.executable, "-m", "probe_service.cli"]


def seconds_of(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


@contextmanager
def serving(home: Path, *options: str) -> Iterator[tuple[httpx.Client, float]]:
    """A service on a free port, and the seconds until it answered."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    began = time.perf_counter()
    server = subprocess.Popen(
        [*PROBE, "serve", "--port", str(port), *options],
        env=os.environ | {"PROBE_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while True:
                try:
                    client.get("/health").raise_for_status()
                    break
                except httpx.TransportError:
                    time.sleep(0.005)
            yield client, time.perf_counter() - began
    finally:
        server.terminate()
        server.wait()


def first_curve(client: httpx.Client, corpus: Path) -> tuple[float, int]:
    """Seconds until a job has a curve, and of how many rows it is; the job is cancelled then."""
    began = time.perf_counter()
    with corpus.open("rb") as rows:
        sent = client.post(
            "/v1/probes", files={"file": rows}, data={"request": json.dumps({"encoder": "minilm"})}
        )
    sent.raise_for_status()
    job = sent.headers["location"]
    while True:
        state = client.get(job).json()
        if state["progress"] and state["progress"]["curve"]:
            break
        if state["state"] not in ("queued", "running"):
            raise SystemExit(f"the job is {state['state']}: {state['error']}")
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    client.post(f"{job}/cancel")
    while client.get(job).json()["state"] not in ("cancelled", "succeeded", "failed"):
        time.sleep(0.1)
    return seconds, state["progress"]["curve_rows"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"python": [], "help": [], "imports": [], "api": []}
    texts = read_texts(given.corpus, given.rows)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for _ in range(given.runs):
            found["python"].append(seconds_of([sys.executable, "-c", "pass"]))
            found["help"].append(seconds_of([*PROBE, "--help"]))
            found["imports"].append(seconds_of([sys.executable, "-c", "import fastapi, dbos"]))
            with serving(folder / "api", "--no-worker") as (_, seconds):
                found["api"].append(seconds)
        found["first curve"] = []
        with serving(folder / "home") as (client, _):
            while not client.get("/info").json()["workers"]:
                time.sleep(0.1)
            for run in range(given.runs + 1):
                corpus = folder / f"rows-{run}.jsonl"
                with corpus.open("w", encoding="utf-8") as lines:
                    for row in range(given.rows):
                        text = f"{texts[row % len(texts)]} ({run}.{row // len(texts)})"
                        lines.write(json.dumps({"text": text}) + "\n")
                seconds, rows = first_curve(client, corpus)
                found["first curve"].append(seconds)
    cold, *warm = found.pop("first curve")
    median = {name: statistics.median(values) for name, values in found.items()}
    print("| until | median seconds | beside |")
    print("|---|---|---|")
    print(f"| `probe --help` | {median['help']:.2f} | Python alone {median['python']:.2f} |")
    print(f"| API ready | {median['api']:.2f} | importing FastAPI and DBOS {median['imports']:.2f} |")
    print(
        f"| first curve of {given.rows:,} rows, from {rows:,} of them | {statistics.median(warm):.1f} |"
        f" {cold:.1f} when the encoder had to be loaded |"
    )
    if given.json is not None:
        result = {"seconds": found | {"first curve": warm, "first curve, encoder not loaded": [cold]}}
        given.json.write_text(json.dumps(result | {"rows": given.rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
