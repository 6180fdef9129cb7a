"""What a batch size costs and what each loss brings, with a head on frozen MiniLM vectors, on four labelled corpora.

For each corpus under PROBE_TEST_DATA: MAP on held-out rows by batch size and loss (mean and t interval over ``--seeds`` seeds),
and beside S(N), which the probe predicts from the training vectors, what masking the true false negatives gains. Then, over all
corpora and sizes, the rank correlation of S with that gain, and the budget: the largest S at which masking gains less than one
point of MAP on at least three corpora (gains are interpolated linearly in S between the sizes).

Every cell takes ``--steps`` steps; learning rates are tuned as `probe trial` does it. With ``--out`` each finished cell is kept,
and the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from probe_service.schemas import Estimate, MaskingGain, Progress, TrialReport, TrialRequest
from probe_service.settings import Settings
from probe_service.trial import TrialFolder
from probe_service.trial.running import run_trial

ONE_POINT, FEWEST_CORPORA = 0.01, 3
CORPORA: dict[str, tuple[str, str, dict[str, object]]] = {
    "banking77": ("labels/banking77", "label", {"where": {"split": "train"}, "held_out": {"split": "test"}}),
    "hwu64": ("labels/hwu64", "label", {"where": {"split": "train"}, "held_out": {"split": "test"}}),
    "flickr8k": (
        "clusters/flickr8k_captions",
        "cluster",
        {"where": {"split": "dev"}, "held_out": {"split": "test"}},
    ),
    "tatoeba": ("corpora/tatoeba_en", "cluster", {"where": {}, "held_out": {}}),
}


def run(name: str, given: argparse.Namespace, out: Path) -> TrialReport:
    """One corpus's trial."""
    file, column, split = CORPORA[name]
    request = TrialRequest.model_validate(
        {
            "encoder": "minilm",
            "corpus": {"columns": {"text": "text", "group": column}, "where": split["where"]},
            "held_out_where": split["held_out"],
            "batch_sizes": given.sizes,
            "num_seeds": given.seeds,
            "steps": given.steps,
            "learning_rates": given.learning_rates,
        }
    )

    def show(progress: Progress) -> None:
        left = "" if progress.eta_seconds is None else f", {progress.eta_seconds / 60:.0f} min left"
        print(
            f"\r{name}: {progress.phase} {progress.done}/{progress.total}{left}   ", end="", file=sys.stderr
        )

    report = run_trial(
        request,
        given.folder / f"{file}.jsonl.gz",
        TrialFolder(out / name),
        settings=Settings(),
        name=name,
        on_progress=show,
    )
    print(file=sys.stderr)
    return report


def shown(estimate: Estimate) -> str:
    """Mean ± half of the interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ± {(estimate.high - estimate.low) / 2:.3f}"


def print_report(name: str, report: TrialReport) -> None:
    """The table of one corpus."""
    losses = list(dict.fromkeys(figure.loss for figure in report.table))
    found = {(figure.batch_size, figure.loss): figure for figure in report.table}
    print(
        f"\n### {name}\n\n{report.training_rows:,} rows to train on, {report.held_out.queries:,} held-out queries "
        f"({report.held_out.description}); MAP of the frozen vectors {report.before['map']:.3f}.\n"
    )
    print(f"| N | {' | '.join(losses)} | predicted S | gain of masking |\n{'|---' * (len(losses) + 3)}|")
    gains = {gain.batch_size: gain for gain in report.masking}
    for size in sorted(gains):
        cells = [shown(found[size, loss].scores["map"]) for loss in losses]
        share = gains[size].predicted_share
        print(
            f"| {size} | {' | '.join(cells)} | {'–' if share is None else f'{share.value:.3f}'} | "
            f"{shown(gains[size].gain)} |"
        )
    rates = ", ".join(
        f"{tuned.loss} {tuned.chosen:g}" for tuned in report.tuned if tuned.batch_size == min(gains)
    )
    print(f"\nLearning rates at N = {min(gains)}: {rates}.", end=" ")
    rates = ", ".join(
        f"{tuned.loss} {tuned.chosen:g}" for tuned in report.tuned if tuned.batch_size == max(gains)
    )
    print(f"At N = {max(gains)}: {rates}.", flush=True)


def crossing(gains: list[MaskingGain], *, upper: bool) -> float:
    """The S at which masking first gains a point; the largest S measured where it never does.

    Args:
        gains: Of one corpus.
        upper: Take the upper limits of the gains instead of their means.
    """
    known = sorted((g.predicted_share.value, g.gain) for g in gains if g.predicted_share is not None)
    shares = np.array([0.0, *(share for share, _ in known)])
    values = np.array(
        [0.0, *(gain.high if upper and gain.high is not None else gain.value for _, gain in known)]
    )
    above = np.flatnonzero(values >= ONE_POINT)
    if not len(above):
        return float(shares[-1])
    at = int(above[0])
    step = (ONE_POINT - values[at - 1]) / (values[at] - values[at - 1])
    return float(shares[at - 1] + step * (shares[at] - shares[at - 1]))


def print_summary(reports: dict[str, TrialReport]) -> None:
    """Rank correlations and the budget."""
    points = [
        (gain.predicted_share.value, gain.gain.value)
        for report in reports.values()
        for gain in report.masking
        if gain.predicted_share is not None
    ]
    pooled = stats.spearmanr(*zip(*points, strict=True))
    print("\n### S and the gain of masking\n")
    own = ", ".join(
        f"{name} {report.rank_correlation:.2f}" for name, report in reports.items() if report.rank_correlation
    )
    print(
        f"Rank correlation of predicted S with the gain of masking over {len(points)} cells of {len(reports)} corpora: "
        f"{pooled.statistic:.2f} (p = {pooled.pvalue:.1g}); within each: {own}.\n"
    )
    print("| corpus | masking gains a point at S = | by the upper limit of the gain |\n|---|---|---|")
    ends = {}
    for name, report in reports.items():
        ends[name] = [crossing(report.masking, upper=upper) for upper in (False, True)]
        print(f"| {name} | {ends[name][0]:.2f} | {ends[name][1]:.2f} |")
    if len(ends) >= FEWEST_CORPORA:
        mean, upper = (
            sorted((each[at] for each in ends.values()), reverse=True)[FEWEST_CORPORA - 1] for at in (0, 1)
        )
        print(
            f"\nThe largest S at which masking gains less than one point on at least {FEWEST_CORPORA} corpora: {mean:.2f}; "
            f"with 95% confidence, by the upper limits: {upper:.2f}."
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("PROBE_TEST_DATA", ".")))
    parser.add_argument("--sets", nargs="+", choices=list(CORPORA), default=list(CORPORA))
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.001, 0.003, 0.01])
    parser.add_argument("--out", type=Path, help="keep each finished cell here")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        reports = {}
        for name in given.sets:
            reports[name] = run(name, given, given.out or Path(folder))
            print_report(name, reports[name])
    print_summary(reports)


if __name__ == "__main__":
    main()
