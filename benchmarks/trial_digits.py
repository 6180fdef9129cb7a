"""InfoNCE against FlatNCE on images: SimCLR with scikit-learn's digits, by batch size.

Accuracy of a linear probe (mean and t interval over ``--seeds`` seeds) after ``--steps`` steps at each batch size, and what
FlatNCE gains over InfoNCE, paired by seed. With ``--out`` each finished cell is kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from probe_service.schemas import Estimate, Progress, TrialRequest
from probe_service.settings import Settings
from probe_service.trial import TrialFolder
from probe_service.trial.report import mean_over_seeds
from probe_service.trial.running import run_trial


def shown(estimate: Estimate, sign: str = "") -> str:
    """Mean ± half of the interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{sign}.3f}"
    return f"{estimate.value:{sign}.3f} ± {(estimate.high - estimate.low) / 2:.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--out", type=Path, help="keep each finished cell here")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    request = TrialRequest.model_validate(
        {
            "mode": "images",
            "batch_sizes": given.sizes,
            "temperatures": [given.temperature],
            "num_seeds": given.seeds,
            "steps": given.steps,
        }
    )

    def show(progress: Progress) -> None:
        left = "" if progress.eta_seconds is None else f", {progress.eta_seconds / 60:.0f} min left"
        print(f"\r{progress.phase} {progress.done}/{progress.total}{left}   ", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        report = run_trial(
            request,
            None,
            TrialFolder(given.out or Path(folder)),
            settings=Settings(),
            name="digits",
            on_progress=show,
        )
    print(file=sys.stderr)
    figures = {(figure.loss, figure.batch_size): figure for figure in report.table}
    scores = {(cell.loss, cell.batch_size, cell.seed): cell.scores["accuracy"] for cell in report.cells}
    print(f"Without training: {report.before['accuracy']:.3f}\n")
    print("| N | InfoNCE | FlatNCE | FlatNCE − InfoNCE | learning rates |\n|---|---|---|---|---|")
    for size in given.sizes:
        gains = [scores["flatnce", size, seed] - scores["infonce", size, seed] for seed in range(given.seeds)]
        both = [figures[loss, size] for loss in ("infonce", "flatnce")]
        rates = ", ".join(f"{figure.learning_rate:g}" for figure in both)
        cells = " | ".join(shown(figure.scores["accuracy"]) for figure in both)
        print(f"| {size} | {cells} | {shown(mean_over_seeds(gains), '+')} | {rates} |")


if __name__ == "__main__":
    main()
