"""Estimation: batches to figures with intervals. numpy and scipy only."""

from __future__ import annotations

from probe_service.estimate.curve import Reference, SizeMeasurements, curve_point
from probe_service.estimate.evidence import BatchPairs, Evidence
from probe_service.estimate.limit import ShareScan, scan_shares
from probe_service.estimate.nulls import MatchedGaussian, isotropic
from probe_service.estimate.sampling import SUB_POOLS, WHOLE, SamplingPlan

__all__ = [
    "SUB_POOLS",
    "WHOLE",
    "BatchPairs",
    "Evidence",
    "MatchedGaussian",
    "Reference",
    "SamplingPlan",
    "ShareScan",
    "SizeMeasurements",
    "curve_point",
    "isotropic",
    "scan_shares",
]
