"""Run every benchmark of speed, one after the other, and put them in one report.

    make benchmark, or
    python benchmarks/all.py --texts TEXTS.jsonl[.gz] --out FOLDER [--quick]

Each is paired with its peer in one run (see the docstrings of the files beside this one). Writes speed.md, the tables, and
speed.json, the figures behind them, to the folder. ``--quick`` takes minutes, not an hour, and says less. Leave the machine
alone meanwhile; what a GPU does is in gpu.py, which needs one.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from encode import processor_flags

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = os.environ.get("PROBE_TEST_DATA", ".")
    parser.add_argument("--texts", type=Path, default=Path(folder) / "corpora" / "abc_news.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of the benchmarks to run")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    texts, quick = str(given.texts), given.quick
    pairs = ["--pairs", "1" if quick else "5"]
    runs = {
        "encode": ["encode.py", texts, "--pairs", "3" if quick else "7"],
        "search": ["search.py", *pairs, *(["--dimensions", "384"] if quick else [])],
        "nearest": ["nearest.py", "--rows", "20000" if quick else "20000,50000,100000"],
        "whole_probe": ["whole_probe.py", texts, *pairs, *(["--rows", "5000"] if quick else [])],
        "scaling": ["scaling.py", "--runs", "1" if quick else "3"],
        "start_up": ["start_up.py", texts, "--runs", "2" if quick else "5"],
    }
    if given.only:
        runs = {name: command for name, command in runs.items() if name in given.only}
    parts, figures = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (file, *options) in runs.items():
            print(f"{name} …", file=sys.stderr, flush=True)
            began, figures_file = time.perf_counter(), Path(scratch) / f"{name}.json"
            command = [sys.executable, str(HERE / file), *options, "--json", str(figures_file)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            figures[name] = json.loads(figures_file.read_text())
            shown = " ".join([file, *options]).replace(texts, given.texts.name)
            parts.append(
                f"## {name}\n\n`{shown}`, {time.perf_counter() - began:.0f} s\n\n{printed.strip()}\n"
            )
    about = (
        f"{dt.datetime.now(dt.UTC).date().isoformat()}, {platform.machine()} with {', '.join(processor_flags())},"
        f" {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}"
    )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "speed.md").write_text(
        f"# Speed, measured\n\n{about}\n\n" + "\n".join(parts), encoding="utf-8"
    )
    (given.out / "speed.json").write_text(json.dumps({"about": about} | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
