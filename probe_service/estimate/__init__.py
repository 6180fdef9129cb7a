"""Estimation: batches to figures with intervals. numpy and scipy only."""

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
from probe_service.estimate.evidence import BatchPairs, Evidence
from probe_service.estimate.exact import ExactFigures, ExactShares, ShareAccumulator, expected_maximum
from probe_service.estimate.limit import ShareScan, exact_scan, scan_of_points, scan_shares
from probe_service.estimate.nulls import MatchedGaussian, isotropic
from probe_service.estimate.sampling import SUB_POOLS, WHOLE, SamplingPlan

__all__ = [
    "SUB_POOLS",
    "WHOLE",
    "BatchPairs",
    "BatchUnits",
    "BorrowedCurve",
    "Evidence",
    "ExactFigures",
    "ExactShares",
    "MatchedGaussian",
    "Reference",
    "SamplingPlan",
    "Setting",
    "ShareAccumulator",
    "ShareScan",
    "SizeMeasurements",
    "borrowed_curve",
    "curve_point",
    "exact_scan",
    "expected_maximum",
    "isotropic",
    "scan_of_points",
    "scan_shares",
    "share_point",
]
