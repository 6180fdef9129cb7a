"""Semantic textual similarity as SimCSE measures it: seven tasks, one Spearman correlation each.

For each task the pairs of all its subsets are put together, and the cosines of the model's vectors are correlated with the
scores that people gave (Spearman). The average is that of the seven correlations, each rounded to two decimals as a number out
of 100. Texts are tokenised and in lower case where the file has them so, as in the SentEval folder that SimCSE reads.

Source: Gao, Yao and Chen 2021, "SimCSE" (EMNLP), appendix B, and its evaluation.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from probe_service.errors import InputError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = [
    "Sts",
    "StsScores",
    "StsTask",
    "embed",
    "read_sts",
    "read_sts_dev",
    "sts_correlation",
    "sts_scores",
]

TASKS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick")


@dataclass(frozen=True)
class StsTask:
    """Pairs of sentences that people scored.

    Args:
        name: Of the task.
        first, second: (n,) texts.
        scores: (n,) how similar the two are, higher is closer.
    """

    name: str
    first: Sequence[str]
    second: Sequence[str]
    scores: NDArray[np.float64]


@dataclass(frozen=True)
class StsScores:
    """Spearman's correlation by task, −1 to 1."""

    by_task: dict[str, float]

    @property
    def average(self) -> float:
        """Mean of the correlations, each rounded to four decimals first."""
        return float(np.mean([round(score, 4) for score in self.by_task.values()]))


@dataclass(frozen=True)
class Sts:
    """The tasks that an encoder is judged by in a trial.

    Args:
        test: The seven.
        dev: The one that checkpoints are chosen by.
    """

    test: Sequence[StsTask]
    dev: StsTask


def read_sts(folder: Path) -> list[StsTask]:
    """Read the test pairs of the seven tasks.

    Args:
        folder: With a file ``<task>.jsonl.gz`` for each task; a line is an object with `split`, `score` and either
            `sentence1_tok` and `sentence2_tok`, or `sentence1` and `sentence2`.

    Raises:
        InputError: ``sts_unreadable``, naming file and line.
    """
    return [_read(folder, name, "test") for name in TASKS]


def read_sts_dev(folder: Path) -> StsTask:
    """Read the pairs that checkpoints are chosen by: STS Benchmark, dev.

    Raises:
        InputError: ``sts_unreadable``, as `read_sts`.
    """
    return _read(folder, "stsb", "dev")


def sts_scores(
    model: SentenceTransformer,
    tasks: Sequence[StsTask],
    *,
    batch_size: int = 64,
    checkpoint: Callable[[], None] = lambda: None,
) -> StsScores:
    """Score a model on some tasks.

    Args:
        model: Any sentence-transformers model.
        tasks: As `read_sts` gives them.
        batch_size: Sentences at a time.
        checkpoint: Called after each batch; may raise to cancel.
    """
    return StsScores(
        {
            task.name: sts_correlation(model, task, batch_size=batch_size, checkpoint=checkpoint)
            for task in tasks
        }
    )


def sts_correlation(
    model: SentenceTransformer,
    task: StsTask,
    *,
    batch_size: int = 64,
    checkpoint: Callable[[], None] = lambda: None,
) -> float:
    """Spearman's correlation of a model's cosines with the scores of one task."""
    sentences = sorted({*task.first, *task.second}, key=lambda text: (len(text), text))
    found = embed(model, sentences, batch_size=batch_size, checkpoint=checkpoint).astype(np.float64)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    unit = found / np.where(lengths > 0, lengths, 1.0)
    place = {text: at for at, text in enumerate(sentences)}
    first, second = ([place[text] for text in side] for side in (task.first, task.second))
    cosines = np.einsum("nd,nd->n", unit[first], unit[second])
    return float(stats.spearmanr(cosines, task.scores).statistic)


def embed(
    model: SentenceTransformer,
    sentences: Sequence[str],
    *,
    batch_size: int = 64,
    checkpoint: Callable[[], None] = lambda: None,
) -> NDArray[np.float32]:
    """(n, d) vectors of sentences, as the model gives them."""
    parts = []
    for start in range(0, len(sentences), batch_size):
        part = list(sentences[start : start + batch_size])
        parts.append(model.encode(part, batch_size=batch_size, show_progress_bar=False))
        checkpoint()
    return np.concatenate(parts).astype(np.float32)


def _read(folder: Path, name: str, split: str) -> StsTask:
    file = folder / f"{name}.jsonl.gz"
    first: list[str] = []
    second: list[str] = []
    scores: list[float] = []
    number = 0
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 - named in the message
                row: dict[str, Any] = json.loads(line)
                if row["split"] == split:
                    first.append(_text(row, "sentence1"))
                    second.append(_text(row, "sentence2"))
                    scores.append(float(row["score"]))
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        where = f" at line {number}" if number else ""
        raise InputError(
            "sts_unreadable",
            f"{file} is not a file of the {name} task{where}: {type(error).__name__}: {error}",
            row=number or None,
        ) from error
    if len(scores) < 2:
        raise InputError(
            "sts_unreadable", f"{file} has {len(scores)} pairs of split {split}; at least 2 are needed."
        )
    return StsTask(name, first, second, np.array(scores))


def _text(row: dict[str, Any], column: str) -> str:
    text = row.get(f"{column}_tok", row.get(column))
    if not isinstance(text, str):
        raise TypeError(f"{column} is no text")
    return text
