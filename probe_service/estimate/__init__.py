"""Estimation: batches to figures with intervals. numpy and scipy only, but for loops that numba compiles."""

from __future__ import annotations

from probe_service.estimate.borrowed import BorrowedCurve, borrowed_curve
from probe_service.estimate.curve import (
    BatchUnits,
    Reference,
    Setting,
    SizeMeasurements,
    curve_point,
    share_point,
)
from probe_service.estimate.decomposition import Decomposition, DecompositionAccumulator
from probe_service.estimate.evidence import BatchPairs, Evidence
from probe_service.estimate.exact import (
    EXACT,
    TEMPERATURES,
    ExactFigures,
    ExactShares,
    ShareAccumulator,
    ShareGrid,
    expected_maximum,
)
from probe_service.estimate.integral import Counts
from probe_service.estimate.limit import ShareScan, exact_scan, scan_of_points, scan_shares
from probe_service.estimate.masking import Mask, MaskAccumulator, MaskEffect
from probe_service.estimate.nulls import MatchedGaussian, isotropic
from probe_service.estimate.removal import HarmfulRow, most_harmful_rows
from probe_service.estimate.sampling import SOME_ANCHORS, SUB_POOLS, WHOLE, SamplingPlan
from probe_service.estimate.starvation import starvation_floor

__all__ = [
    "EXACT",
    "SOME_ANCHORS",
    "SUB_POOLS",
    "TEMPERATURES",
    "WHOLE",
    "BatchPairs",
    "BatchUnits",
    "BorrowedCurve",
    "Counts",
    "Decomposition",
    "DecompositionAccumulator",
    "Evidence",
    "ExactFigures",
    "ExactShares",
    "HarmfulRow",
    "Mask",
    "MaskAccumulator",
    "MaskEffect",
    "MatchedGaussian",
    "Reference",
    "SamplingPlan",
    "Setting",
    "ShareAccumulator",
    "ShareGrid",
    "ShareScan",
    "SizeMeasurements",
    "borrowed_curve",
    "curve_point",
    "exact_scan",
    "expected_maximum",
    "isotropic",
    "most_harmful_rows",
    "scan_of_points",
    "scan_shares",
    "share_point",
    "starvation_floor",
]
