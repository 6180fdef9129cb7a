"""Whether the noise of GS-InfoNCE does more than its constant: M / N from 0 to 16, with the control arm beside it.

A linear head on frozen MiniLM vectors of Banking77 (under PROBE_TEST_DATA), as in trial_head.py. For each batch size and M / N:
MAP with Gaussian noise and with the expected value of the same noise in its place (`gs_infonce_control`), what the noise gains
over plain InfoNCE (M = 0), and what it gains over the control; gains are paired by seed, with t intervals. The last line
counts the cells in which noise and control differ, at 95% confidence.

With ``--out`` each finished cell is kept, and the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from probe_service.schemas import Estimate, Progress, TrialReport, TrialRequest
from probe_service.settings import Settings
from probe_service.trial import TrialFolder
from probe_service.trial.report import mean_over_seeds
from probe_service.trial.running import run_trial


def paired(report: TrialReport, size: int, better: str, worse: str) -> Estimate:
    """Mean difference in MAP over the seeds."""
    scores = {(cell.loss, cell.seed): cell.scores["map"] for cell in report.cells if cell.batch_size == size}
    seeds = sorted(seed for loss, seed in scores if loss == better)
    return mean_over_seeds([scores[better, seed] - scores[worse, seed] for seed in seeds])


def shown(estimate: Estimate, sign: str = "") -> str:
    """Mean ± half of the interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{sign}.4f}"
    return f"{estimate.value:{sign}.4f} ± {(estimate.high - estimate.low) / 2:.4f}"


def named(kind: str, noise: float) -> str:
    """Name of a loss in the report."""
    return kind if noise == 3 else f"{kind}_x{noise:g}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("PROBE_TEST_DATA", ".")))
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.5, 1, 2, 3, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.001, 0.003, 0.01])
    parser.add_argument("--out", type=Path, help="keep each finished cell here")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    losses = [{"kind": "infonce"}]
    for noise in given.noise:
        losses += [{"kind": kind, "noise_per_anchor": noise} for kind in ("gs_infonce", "gs_infonce_control")]
    request = TrialRequest.model_validate(
        {
            "encoder": "minilm",
            "corpus": {"columns": {"text": "text", "group": "label"}, "where": {"split": "train"}},
            "held_out_where": {"split": "test"},
            "losses": losses,
            "batch_sizes": given.sizes,
            "num_seeds": given.seeds,
            "steps": given.steps,
            "learning_rates": given.learning_rates,
        }
    )

    def show(progress: Progress) -> None:
        left = "" if progress.eta_seconds is None else f", {progress.eta_seconds / 60:.0f} min left"
        print(f"\r{progress.phase} {progress.done}/{progress.total}{left}   ", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        report = run_trial(
            request,
            given.folder / "labels" / "banking77.jsonl.gz",
            TrialFolder(given.out or Path(folder)),
            settings=Settings(),
            name="banking77",
            on_progress=show,
        )
    print(file=sys.stderr)
    figures = {(figure.loss, figure.batch_size): figure.scores["map"] for figure in report.table}
    print(
        "| N | M / N | noise | its constant | noise − InfoNCE | noise − constant |\n|---|---|---|---|---|---|"
    )
    differ = {"more": 0, "less": 0}
    for size in given.sizes:
        print(f"| {size} | 0 | {shown(figures['infonce', size])} | | | |")
        for noise in given.noise:
            drawn, constant = named("gs_infonce", noise), named("gs_infonce_control", noise)
            gain = paired(report, size, drawn, constant)
            differ["more"] += gain.low is not None and gain.low > 0
            differ["less"] += gain.high is not None and gain.high < 0
            print(
                f"| {size} | {noise:g} | {shown(figures[drawn, size])} | {shown(figures[constant, size])} | "
                f"{shown(paired(report, size, drawn, 'infonce'), '+')} | {shown(gain, '+')} |"
            )
    cells = len(given.sizes) * len(given.noise)
    print(
        f"\nNoise does more than its constant in {differ['more']} of {cells} cells and less in {differ['less']}; "
        f"{0.05 * cells:.1f} of either kind or the other are expected by chance."
    )


if __name__ == "__main__":
    main()
