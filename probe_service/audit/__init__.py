"""The audit from end to end: `draw_audit` finds what to ask, a judge answers the sheet, `apply_audit` says what it means.

`apply_audit` and all that it needs are light; `draw_audit` needs the encoder, so import it from `probe_service.audit.drawing`,
and `run_draw`, which begins with the corpus, from `probe_service.audit.running`.
"""

from __future__ import annotations

from probe_service.audit.applying import apply_audit, keep_labels
from probe_service.audit.folder import AuditFolder
from probe_service.audit.record import Audit, AuditItem, ItemKind

__all__ = ["Audit", "AuditFolder", "AuditItem", "ItemKind", "apply_audit", "keep_labels"]
