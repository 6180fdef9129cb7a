"""What is measured on the rows that a workspace laid out: tasks of short parts, each of which leaves a file.

A `Task` lists its parts, runs one of them, and puts the files of all together; so a crash costs one part, and a
measurement can be cancelled between them.
"""

from __future__ import annotations

from probe_service.measure.all_pairs import LARGEST_EXACT_CORPUS, AllPairs, AllPairsInDetail
from probe_service.measure.batches import Batches
from probe_service.measure.draws import EpochDraws, no_full_batch
from probe_service.measure.listed import ListedCurve
from probe_service.measure.pairs import Histograms, SimilarPairs
from probe_service.measure.references import MOST_BATCHES, References
from probe_service.measure.shares import Shares
from probe_service.measure.task import Task, run_all

__all__ = [
    "LARGEST_EXACT_CORPUS",
    "MOST_BATCHES",
    "AllPairs",
    "AllPairsInDetail",
    "Batches",
    "EpochDraws",
    "Histograms",
    "ListedCurve",
    "References",
    "Shares",
    "SimilarPairs",
    "Task",
    "no_full_batch",
    "run_all",
]
