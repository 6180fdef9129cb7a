"""A whole probe from text against `naive_probe.py`, in pairs of runs, with our cache of vectors cold and warm.

    python benchmarks/whole_probe.py TEXTS.jsonl[.gz] --rows 20000 --pairs 5 [--bfloat16]

- cold: `probe run`, nothing kept. cold, bfloat16: the same, encoded in bfloat16.
- warm: `probe run` again, vectors kept.
- served: sent to a service whose worker has run another probe before, vectors kept.

All but the served one are processes of their own, so that imports and model loading count. Where the rows have a column
``group``, the peer too computes S. What a probe gives beyond the peer's curves (intervals, S at every integer, nulls, n_max,
remedies) is in its time. Prints a table in Markdown, and JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from naive_probe import read_groups, read_texts
from start_up import serving

HERE = Path(__file__).resolve().parent


def seconds_of(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def served(client: httpx.Client, corpus: Path, sizes: list[int], rows: int) -> float:
    """Seconds from sending a corpus to the last step of its probe."""
    began = time.perf_counter()
    request = {"encoder": "minilm", "batch_sizes": sizes, "corpus": {"max_rows": rows}}
    with corpus.open("rb") as lines:
        sent = client.post("/v1/probes", files={"file": lines}, data={"request": json.dumps(request)})
    sent.raise_for_status()
    while (state := client.get(sent.headers["location"]).json())["state"] in ("queued", "running"):
        time.sleep(0.2)
    if state["state"] != "succeeded":
        raise SystemExit(f"the job {state['state']}: {state['error']}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**e for e in range(3, 13)])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = ["naive", "cold", "warm", "served", *(["cold, bfloat16"] if given.bfloat16 else [])]
    rows: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "rows.jsonl"
        texts, groups = read_texts(given.corpus, given.rows), read_groups(given.corpus, given.rows)
        with corpus.open("w", encoding="utf-8") as lines:
            for at, text in enumerate(texts):
                row = {"text": text} if groups is None else {"text": text, "group": str(groups[at])}
                lines.write(json.dumps(row) + "\n")
        sizes = [str(size) for size in given.sizes]
        naive = [sys.executable, str(HERE / "naive_probe.py"), str(corpus)]
        naive += ["--rows", str(given.rows), "--sizes", *sizes]
        ours = [sys.executable, "-m", "probe_service.cli", "run", str(corpus), "--encoder", "minilm"]
        ours += ["--batch-sizes", ",".join(sizes), "--max-rows", str(given.rows), "--json", "-"]
        for pair in range(given.pairs):
            environment = os.environ | {"PROBE_HOME": str(Path(scratch) / f"home-{pair}")}
            seconds, printed = seconds_of(naive, environment)
            rows["naive"].append(seconds)
            peer = json.loads(printed)
            for name in ("cold", "warm"):
                seconds, printed = seconds_of(ours, environment)
                rows[name].append(seconds)
            with serving(Path(environment["PROBE_HOME"])) as (client, _):
                served(client, corpus, [8], 300)
                rows["served"].append(served(client, corpus, given.sizes, given.rows))
            if given.bfloat16:
                other = {"PROBE_HOME": str(Path(scratch) / f"other-{pair}"), "PROBE_ENCODE_DTYPE": "bfloat16"}
                rows["cold, bfloat16"].append(seconds_of(ours, os.environ | other)[0])
            curve = {str(point["batch_size"]): point for point in json.loads(printed)["curve"]}
            figures = ["top_k_mean", *(["false_negative_softmax_share"] if groups is not None else [])]
            apart = ", ".join(
                f"{name} at most {max(abs(curve[n][name]['value'] - theirs) for n, theirs in peer[name].items()):.4f}"
                for name in figures
            )
            print(
                f"pair {pair + 1}: naive {rows['naive'][-1]:.1f} s (encoding {peer['encode_seconds']:.1f} s), cold"
                f" {rows['cold'][-1]:.1f} s, warm {rows['warm'][-1]:.1f} s, served {rows['served'][-1]:.1f} s; apart: {apart}",
                file=sys.stderr,
            )
    ratio = {
        name: statistics.median(a / b for a, b in zip(rows["naive"], rows[name], strict=True))
        for name in names[1:]
    }
    print("| run | median seconds | times as fast as naive_probe |")
    print("|---|---|---|")
    for name in rows:
        speed = f"{ratio[name]:.1f}" if name in ratio else "1"
        print(f"| {name} | {statistics.median(rows[name]):.1f} | {speed} |")
    if given.json is not None:
        given.json.write_text(json.dumps({"seconds": rows, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
