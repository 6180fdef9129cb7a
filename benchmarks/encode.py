"""Encode texts with sentence-transformers and with our encoders, in turn, and compare speed and cosines.

    python benchmarks/encode.py TEXTS.jsonl[.gz] --texts 1024 --pairs 7

Each way has a process of its own. Every round runs them all on the same texts, one after the other, beginning with another
one each time; a first round, which gives the cosines, warms up. Ratios are medians over rounds of the peer's time
(sentence-transformers in float32, batches of 32) over ours in the same round. The share of the peak is that of the products
which the texts need, unpadded, in the time of one large product in the same round. Threads are torch's: set OMP_NUM_THREADS.
Prints a table in Markdown, and JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from naive_probe import packaged_minilm, read_texts
from sentence_transformers import SentenceTransformer

from probe_service.encode import load_encoder
from probe_service.errors import EncoderError
from probe_service.settings import Settings

BASE = "sentence-transformers float32, batch 32"
WAYS = (BASE, "sentence-transformers float32, batch 128", "ours float32", "ours bfloat16")
TOP_K = 4


def load(way: str, model: str | None, device: str) -> tuple[str, Callable[[list[str]], np.ndarray]]:
    """What a way says of itself, and how it encodes."""
    if way.startswith("sentence-transformers"):
        peer = SentenceTransformer(model or packaged_minilm(), device=device)
        size = int(way.rsplit(" ", 1)[1])
        return f"version {importlib.metadata.version('sentence-transformers')}", lambda texts: peer.encode(
            texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False
        )
    dtype = "bfloat16" if "bfloat16" in way else "float32"
    loaded = load_encoder(model or "minilm", Settings(device=device, encode_dtype=dtype))
    return loaded.info.check, lambda texts: loaded.encoder.encode(texts).vectors


def serve(way: str, model: str | None, device: str, line: Connection) -> None:
    """Encode what comes down the line; send back seconds, processor seconds and vectors."""
    try:
        said, encode = load(way, model, device)
    except EncoderError as error:
        line.send((False, str(error)))
        return
    line.send((True, said))
    while (texts := line.recv()) is not None:
        wall, processor = time.perf_counter(), time.process_time()
        vectors = encode(texts)
        line.send((time.perf_counter() - wall, time.process_time() - processor, vectors))


def peak(dtype: torch.dtype, device: str) -> float:
    """Operations a second of a large product of matrices, the better of torch's own way and of packed weights."""
    rows, weight = (torch.randn(2048, 1536, device=device).to(dtype) for _ in range(2))
    ways: list[Callable[[], Any]] = [lambda: torch.nn.functional.linear(rows, weight)]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], ""))
    best = 0.0
    for way in ways:
        for _ in range(4):
            began = time.perf_counter()
            way()
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, 2 * 2048 * 2048 * 1536 / (time.perf_counter() - began))
    return best


def cosines(vectors: np.ndarray) -> np.ndarray:
    rows = vectors.astype(np.float64)
    return (rows @ rows.T)[np.triu_indices(len(rows), 1)]


def processor_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    held = next((line.split() for line in lines if line.startswith("flags")), [])
    return sorted(flag for flag in held if flag.startswith(("avx2", "avx512", "amx")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", help="a folder that sentence-transformers saved; the packaged MiniLM")
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    distinct = sorted(set(read_texts(given.corpus, 10**6)))
    texts = [distinct[row] for row in rng.choice(len(distinct), given.texts, replace=False)]
    # Counted here and not where it runs: our layers are packed.
    model = SentenceTransformer(given.model or packaged_minilm(), device="cpu")
    weights = sum(each.weight.numel() for each in model[0].modules() if isinstance(each, torch.nn.Linear))
    tokens = sum(
        map(len, model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"])
    )
    processes = multiprocessing.get_context("spawn")
    ways: dict[str, Connection] = {}
    for name in WAYS:
        line, far_end = processes.Pipe()
        processes.Process(target=serve, args=(name, given.model, given.device, far_end), daemon=True).start()
        usable, said = line.recv()
        print(f"- {name}: {said}" if usable else f"- {name} is left out: {said}")
        if usable:
            ways[name] = line

    def encode(name: str) -> tuple[float, float, np.ndarray]:
        ways[name].send(texts)
        return ways[name].recv()

    found_cosines = {name: cosines(encode(name)[2]) for name in ways}
    truth = found_cosines[BASE]
    errors = {name: np.abs(found - truth) for name, found in found_cosines.items()}
    shift = {
        name: float(np.sort(found)[-TOP_K:].mean() - np.sort(truth)[-TOP_K:].mean())
        for name, found in found_cosines.items()
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    share: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.pairs):
        peaks = {dtype: peak(getattr(torch, dtype), given.device) for dtype in ("float32", "bfloat16")}
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds, of_processor, _ = encode(name)
            wall[name].append(seconds)
            processor[name].append(of_processor)
            dtype = "bfloat16" if "bfloat16" in name else "float32"
            share[name].append(2 * weights * tokens / seconds / peaks[dtype])
    for line in ways.values():
        line.send(None)

    def ratio(of: dict[str, list[float]], name: str) -> float:
        return statistics.median(base / own for base, own in zip(of[BASE], of[name], strict=True))

    found = [
        {
            "way": name,
            "texts_per_second": len(texts) / statistics.median(wall[name]),
            "ratio": ratio(wall, name),
            "ratio_of_processor_time": ratio(processor, name),
            "share_of_peak": statistics.median(share[name]),
            "largest_error": float(errors[name].max()),
            "mean_error": float(errors[name].mean()),
            "top_k_shift": shift[name],
        }
        for name in ways
    ]
    about = {
        "texts": len(texts),
        "tokens_per_text": tokens / len(texts),
        "threads": torch.get_num_threads(),
        "pairs": given.pairs,
        "device": given.device,
        "load_average": os.getloadavg()[0],
        "processor_flags": processor_flags(),
        "torch": torch.__version__,
    }
    print(
        f"{about['texts']} texts of {about['tokens_per_text']:.1f} tokens, {about['threads']} threads, {given.pairs} pairs,"
        f" load average {about['load_average']:.1f} at the end\n"
    )
    print(
        "| way | texts/s | × | × in processor time | share of the peak | error of a cosine: largest | mean | shift of top-4 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['way']} | {row['texts_per_second']:.0f} | {row['ratio']:.2f} | {row['ratio_of_processor_time']:.2f}"
            f" | {row['share_of_peak']:.0%} | {row['largest_error']:.1e} | {row['mean_error']:.1e}"
            f" | {row['top_k_shift']:.1e} |"
        )
    if given.json:
        given.json.write_text(json.dumps({"about": about, "ways": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
