"""Learn the borrowed curve p(s) = P(score ≥ 4 of 5 | cosine s) of a known encoder from STS pairs that people scored.

``python benchmarks/learn_borrowed_curve.py --encoder minilm`` reads the STS sets under PROBE_TEST_DATA, fits, and prints three
tables; with ``--write`` it also puts the curve, with its provenance, into probe_service/estimate/borrowed_curves.json.

The curve is learnt from the dev and test splits of the STS Benchmark, the selection that its makers recommend. Left out are
train splits, on which many encoders were trained; the sets of single years, of which the benchmark is a selection; and SICK,
which scores how related two sentences are: contradictions score high there.

Its form is logistic in a natural cubic spline of s with three knots (Harrell 2015, Regression Modeling Strategies, §2.4.5),
and it must rise; isotonic and straight logistic regression stand beside it in the first table, by ten-fold cross-validation.
The second table is the fit against shares of pairs. The third says what no fit can mend: the share S that each set's curve
gives for two corpora of known truth (T = .05), for Banking77's train split and for one caption of each picture of Flickr8k.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from scipy.special import expit

from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.settings import Settings

THRESHOLD = 4.0
LEARNT_FROM = "stsb"
SETS = ("stsb", "sts12", "sts13", "sts14", "sts15", "sts16", "sick")
TABLE = Path(__file__).parents[1] / "probe_service" / "estimate" / "borrowed_curves.json"
SIMILARITIES = np.linspace(-1.0, 1.0, 201)
TEMPERATURE = 0.05
ANCHORS = 20_000

Curve = Callable[[np.ndarray], np.ndarray]
Fit = Callable[[np.ndarray, np.ndarray], Curve]


def logistic(columns: Curve, similarity: np.ndarray, accepted: np.ndarray) -> Curve:
    """Logistic regression on some columns of s, by Newton's method."""
    x = columns(similarity)
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        p = expit(x @ weights)
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x, x.T @ (accepted - p))
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            return lambda s: expit(columns(s) @ weights)
    raise SystemExit("The logistic regression does not converge.")


def fit_straight(similarity: np.ndarray, accepted: np.ndarray) -> Curve:
    return logistic(lambda s: np.stack([np.ones_like(s), s], axis=1), similarity, accepted)


def fit_spline(similarity: np.ndarray, accepted: np.ndarray) -> Curve:
    low, middle, high = np.quantile(similarity, [0.1, 0.5, 0.9])

    def cube(s: np.ndarray, knot: float) -> np.ndarray:
        return np.maximum(s - knot, 0.0) ** 3

    def columns(s: np.ndarray) -> np.ndarray:
        bend = cube(s, low) - (cube(s, middle) * (high - low) - cube(s, high) * (middle - low)) / (
            high - middle
        )
        return np.stack([np.ones_like(s), s, bend / (high - low) ** 2], axis=1)

    return logistic(columns, similarity, accepted)


def fit_isotonic(similarity: np.ndarray, accepted: np.ndarray) -> Curve:
    values, place, counts = np.unique(similarity, return_inverse=True, return_counts=True)
    steps = isotonic_regression(np.bincount(place, accepted) / counts, weights=counts).x
    # A share of 0 or 1 would cost infinitely much in another fold.
    return lambda s: np.clip(np.interp(s, values, steps), 1e-3, 1 - 1e-3)


FORMS: dict[str, Fit] = {
    "logistic, spline": fit_spline,
    "logistic, straight": fit_straight,
    "isotonic": fit_isotonic,
}


def log_loss(fit: Fit, similarity: np.ndarray, accepted: np.ndarray) -> float:
    """Mean −log P of what people said, by ten-fold cross-validation."""
    fold = np.random.default_rng(0).permutation(len(similarity)) % 10
    loss = 0.0
    for left_out in range(10):
        inside, outside = fold != left_out, fold == left_out
        p = fit(similarity[inside], accepted[inside])(similarity[outside])
        loss -= np.log(np.where(accepted[outside] > 0, p, 1 - p)).sum()
    return float(loss / len(similarity))


def share(vectors: np.ndarray, size: int, chances: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
    """S(N) of random batches; `chances` gives p of the cosines (N, N) of the rows (N,) of a batch."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(ANCHORS // size):
        rows = rng.choice(len(vectors), size, replace=False)
        cosines = np.clip(vectors[rows] @ vectors[rows].T, -1.0, 1.0).astype(np.float64)
        weights = np.exp((cosines - 1.0) / TEMPERATURE)
        np.fill_diagonal(weights, 0.0)
        shares.append(((weights * chances(cosines, rows)).sum(axis=1) / weights.sum(axis=1)).mean())
    return float(np.mean(shares))


def read_rows(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    """Learn, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("PROBE_TEST_DATA", ".")))
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(home=Path(os.environ.get("PROBE_HOME", tempfile.mkdtemp())))
    loaded = load_encoder(given.encoder, settings)
    cache = VectorCache(settings.home / "vectors", loaded.info.fingerprint, loaded.info.dimension)

    def encode(texts: list[str]) -> np.ndarray:
        return encode_with_cache(loaded, texts, cache).vectors

    def scored_pairs(name: str) -> tuple[np.ndarray, np.ndarray]:
        """Cosines of a set's pairs but for those of a train split, and whether people accept them."""
        rows = [
            row for row in read_rows(given.folder / "sts" / f"{name}.jsonl.gz") if row["split"] != "train"
        ]
        left, right = (encode([row[side] for row in rows]) for side in ("sentence1", "sentence2"))
        cosines = np.clip(np.einsum("nd,nd->n", left, right), -1.0, 1.0).astype(np.float64)
        return cosines, np.array([row["score"] >= THRESHOLD for row in rows], dtype=np.float64)

    similarity, accepted = scored_pairs(LEARNT_FROM)
    curve = fit_spline(similarity, accepted)
    table = curve(SIMILARITIES)
    if (np.diff(table) < 0).any():
        raise SystemExit("The curve falls somewhere: this spline does not suit this encoder.")

    print("| form | log loss |\n|---|---|")
    for form, fit in FORMS.items():
        print(f"| {form} | {log_loss(fit, similarity, accepted):.4f} |")

    print("\n| cosines | pairs | share accepted | curve's mean |\n|---|---|---|---|")
    for low in np.arange(-2, 10) / 10:
        inside = (similarity >= low) & (similarity < low + 0.1)
        if inside.any():
            print(
                f"| {low:.1f} to {low + 0.1:.1f} | {inside.sum()} | {accepted[inside].mean():.3f} "
                f"| {curve(similarity[inside]).mean():.3f} |"
            )

    banking = [
        row for row in read_rows(given.folder / "labels" / "banking77.jsonl.gz") if row["split"] == "train"
    ]
    captions = {
        row["cluster"]: row["text"]
        for row in read_rows(given.folder / "clusters" / "flickr8k_captions.jsonl.gz")
    }
    questions, pictures = encode([row["text"] for row in banking]), encode(list(captions.values()))
    intents = np.array([row["label"] for row in banking])
    truth = share(questions, 1024, lambda _, rows: intents[rows][:, None] == intents[rows][None, :])
    print("\n| curve of | pairs | accepted | Banking77, N = 1024 | Flickr8k, N = 16 |\n|---|---|---|---|---|")
    for name in SETS:
        pairs, judged = scored_pairs(name)
        of_set = fit_spline(pairs, judged)
        shares = [
            share(vectors, size, lambda s, _, of_set=of_set: np.interp(s, SIMILARITIES, of_set(SIMILARITIES)))
            for vectors, size in ((questions, 1024), (pictures, 16))
        ]
        print(
            f"| {name} | {len(pairs)} | {judged.mean():.3f} | {shares[0]:.3f} | {shares[1]:.4f} |", flush=True
        )
    print(f"| the truth | | | {truth:.3f} | 0 |")

    if given.write:
        file = given.folder / "sts" / f"{LEARNT_FROM}.jsonl.gz"
        curves = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {}
        curves[loaded.info.name] = {
            "revision": loaded.info.revision,
            "fingerprint": loaded.info.fingerprint,
            "sets": "dev and test splits of the STS Benchmark",
            "files": {f"sts/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()},
            "pairs": len(similarity),
            "pairs_accepted": int(accepted.sum()),
            "score_threshold": THRESHOLD,
            "script": "benchmarks/learn_borrowed_curve.py",
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "probability": [round(p, 6) for p in table.tolist()],
        }
        TABLE.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
