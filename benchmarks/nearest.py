"""The most similar pairs of a large corpus: through FAISS indexes, against comparing each row with each.

    python benchmarks/nearest.py [--rows 20000,50000,100000,200000] [--ways exact,flat,ivf,hnsw] [--above 0.9]
        [--vectors FILE.npy] [--json FILE]

Two searches: the 1,000 most similar pairs, and every pair with a cosine of at least ``--above``. Rows are unit vectors of 384
numbers in topics, meanings within topics and wordings within meanings, some of them nearly equal; or a random choice of
your own. Each search runs in a process of its own, on one thread. Seconds are of the processor, so that other work on the
machine does not count; memory is the peak beyond the vectors. Recall is the share of the exact list that is found, and next to
it stands what the search's own sample says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

TASKS = ("1,000 most similar", "all above")


def text_like_rows(rows: int, rng: np.random.Generator) -> np.ndarray:
    dimension = 384
    topics = rng.standard_normal((max(1, rows // 400), dimension), dtype=np.float32)
    meanings = rng.standard_normal((max(1, rows // 4), dimension), dtype=np.float32)
    meanings += topics[rng.integers(0, len(topics), len(meanings))]
    vectors = meanings[rng.integers(0, len(meanings), rows)]
    # From nearly the same wording to quite another one.
    apart = rng.uniform(0.05, 1.0, (rows, 1)).astype(np.float32)
    vectors += apart * rng.standard_normal((rows, dimension), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure(file: str, way: str, task: str, above: float, sender: object) -> None:
    import faiss
    import torch

    from probe_service.measure.pair_search import MOST_PAIRS, MOST_SIMILAR
    from probe_service.similarity import top_pairs
    from probe_service.similarity.indexed_pairs import indexed_pairs

    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    vectors = np.load(file)
    count, at_least = (MOST_SIMILAR, -1.0) if task == TASKS[0] else (MOST_PAIRS, above)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    sample = None
    if way == "exact":
        pairs = top_pairs(vectors, k=count + 1)
        kept = np.flatnonzero(pairs.similarity >= at_least)[:count]
        anchor, candidate = pairs.anchor[kept], pairs.candidate[kept]
    else:
        found = indexed_pairs(
            vectors, count=count, at_least=at_least, kind=way, seed=0, checkpoint=lambda: None
        )
        anchor, candidate, sample = found.pairs.anchor, found.pairs.candidate, found.sample
    seconds = time.process_time() - began
    mebibytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sampled = None
    if sample is not None:
        having = sample.pairs > 0
        sampled = {
            "rows": len(sample.pairs),
            "nearest": float(sample.nearest_found.mean()),
            "rows_with_pairs": int(having.sum()),
            "listed": float((sample.found[having] / sample.pairs[having]).mean()) if having.any() else None,
        }
    sender.send((seconds, mebibytes, anchor * len(vectors) + candidate, sampled))


def in_a_process(*given: object) -> tuple:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(*given, sender))
    process.start()
    sender.close()
    answer = receiver.recv()
    process.join()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="20000,50000,100000,200000")
    parser.add_argument("--ways", default="exact,flat,ivf,hnsw")
    parser.add_argument("--above", type=float, default=0.9)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = []
    print("| rows | search | way | s | × exact | MiB | pairs | recall | sample: nearest | sample: listed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for rows in map(int, given.rows.split(",")):
            file, rng = Path(folder) / f"{rows}.npy", np.random.default_rng(rows)
            if given.vectors is None:
                np.save(file, text_like_rows(rows, rng))
            else:
                own = np.load(given.vectors, mmap_mode="r")
                np.save(file, own[np.sort(rng.choice(len(own), rows, replace=False))])
            for task in TASKS:
                exact: tuple | None = None
                for way in given.ways.split(","):
                    answer = in_a_process(str(file), way, task, given.above)
                    seconds, mebibytes, keys, sampled = answer
                    exact = answer if way == "exact" else exact
                    result = {
                        "rows": rows,
                        "search": task,
                        "way": way,
                        "seconds": seconds,
                        "mebibytes": mebibytes,
                        "pairs": len(keys),
                        "ratio": exact and exact[0] / seconds,
                        "recall": exact and float(np.isin(exact[2], keys).mean()),
                        "sample": sampled,
                    }
                    results.append(result)
                    print(line(result), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


def line(result: dict) -> str:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    sampled = result["sample"] or {}
    listed = shown(sampled.get("listed"), ".3f")
    if sampled:
        listed += f" ({sampled['rows_with_pairs']} of {sampled['rows']:,} rows)"
    cells = (
        f"{result['rows']:,}",
        result["search"],
        result["way"],
        f"{result['seconds']:.1f}",
        shown(result["ratio"], ".2f"),
        f"{result['mebibytes']:.0f}",
        f"{result['pairs']:,}",
        shown(result["recall"], ".4f"),
        shown(sampled.get("nearest"), ".3f"),
        listed,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
