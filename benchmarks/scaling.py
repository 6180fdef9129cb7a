"""How a probe's cost grows with the rows n, the largest batch N and the width d of the vectors, encoding apart.

    python benchmarks/scaling.py [--runs 3]

Probes of supplied vectors around random centres, with groups, in this process; each of n, N and d is varied while the others
stay. The exponent is the slope of log time over log size between the two largest. Prints a table in Markdown, and JSON with
``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from search import clustered_rows

from probe_service import probe

ROWS, SIZE, WIDTH = 10_000, 1024, 384
VARIED = {"n": (2_500, 5_000, 10_000, 20_000), "N": (64, 256, 1024, 4096), "d": (96, 384, 1024)}


def write_rows(file: Path, rows: int, width: int) -> None:
    vectors = clustered_rows(rows, width, np.random.default_rng(0))
    np.savez(file, embeddings=vectors, id=np.arange(rows).astype(str))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.npz"
        for name, values in VARIED.items():
            for value in values:
                n, largest, width = ({"n": ROWS, "N": SIZE, "d": WIDTH} | {name: value}).values()
                write_rows(file, n, width)
                sizes = tuple(2**e for e in range(3, 13) if 2**e <= min(largest, n // 2))
                seconds = []
                for _ in range(given.runs):
                    began = time.perf_counter()
                    probe(file, batch_sizes=sizes, corpus={"max_rows": n})
                    seconds.append(time.perf_counter() - began)
                found.append({"varied": name, "n": n, "N": max(sizes), "d": width, "seconds": seconds})
    print("| varied | n | N up to | d | median seconds | exponent at the end |")
    print("|---|---|---|---|---|---|")
    for name in VARIED:
        rows = [row for row in found if row["varied"] == name]
        medians = [statistics.median(row["seconds"]) for row in rows]
        ends = np.log([rows[-2][name], rows[-1][name]]), np.log(medians[-2:])
        exponent = (ends[1][1] - ends[1][0]) / (ends[0][1] - ends[0][0])
        for row, median in zip(rows, medians, strict=True):
            last = f"{exponent:.1f}" if row is rows[-1] else ""
            print(f"| {name} | {row['n']:,} | {row['N']:,} | {row['d']:,} | {median:.1f} | {last} |")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
