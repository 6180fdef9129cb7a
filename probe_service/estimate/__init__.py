"""Estimation: batches to figures with intervals. numpy and scipy only."""

from __future__ import annotations

from probe_service.estimate.curve import Reference, SizeMeasurements, curve_point
from probe_service.estimate.evidence import BatchPairs, Evidence
from probe_service.estimate.exact import ExactFigures, ExactShares, ShareAccumulator, expected_maximum
from probe_service.estimate.limit import ShareScan, exact_scan, scan_shares
from probe_service.estimate.nulls import MatchedGaussian, isotropic
from probe_service.estimate.sampling import SUB_POOLS, WHOLE, SamplingPlan

__all__ = [
    "SUB_POOLS",
    "WHOLE",
    "BatchPairs",
    "Evidence",
    "ExactFigures",
    "ExactShares",
    "MatchedGaussian",
    "Reference",
    "SamplingPlan",
    "ShareAccumulator",
    "ShareScan",
    "SizeMeasurements",
    "curve_point",
    "exact_scan",
    "expected_maximum",
    "isotropic",
    "scan_shares",
]
