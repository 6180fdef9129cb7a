"""Trials: train with a loss at a batch size, evaluate on held-out rows, and see what it costs or gains.

This package imports light; what trains (`trial.running`) is imported where it runs.
"""

from __future__ import annotations

from probe_service.trial.folder import TrialFolder

__all__ = ["TrialFolder"]
