"""The private half of an audit: what each question of the blind sheet stands for, and how the pairs were drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from probe_service.errors import InputError, ServiceError
from probe_service.estimate.audit import AuditDesign, JudgedShares
from probe_service.schemas import ProbeRequest

__all__ = ["Audit", "AuditItem", "ItemKind"]

_VERSION = 1


class ItemKind(StrEnum):
    """What a question is asked for."""

    PAIR = "pair"
    """A drawn pair."""
    REPEAT = "repeat"
    """A drawn pair for the second time: does the judge agree with itself?"""
    DUPLICATE = "duplicate"
    """A pair that certainly means the same: it measures sensitivity."""
    OTHER = "other"
    """A pair that certainly does not: it measures specificity."""


@dataclass(frozen=True)
class AuditItem:
    """What one question stands for.

    Args:
        id: Of the question.
        kind: Why it is asked.
        digest: `judges.question_digest` of the texts shown, so that labels for other texts are noticed.
        draws: For a pair: which drawn pairs it answers.
        repeats: For a repeat: id of the first question.
        source: For a check: why its truth is certain, in words.
    """

    id: str
    kind: ItemKind
    digest: str
    draws: tuple[int, ...] = ()
    repeats: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Audit:
    """All that is needed to make sense of an answered sheet.

    Args:
        id: Of the audit.
        corpus_sha256: Content hash of the corpus.
        corpus_name: Its name.
        encoder: Name of the encoder.
        encoder_fingerprint: Of its weights and settings.
        request: How the corpus is read, the seed of the draws, the budget.
        design: How the pairs were drawn.
        judged: By size of the design: what needed no label.
        items: In the order of the sheet.
    """

    id: str
    corpus_sha256: str
    corpus_name: str
    encoder: str
    encoder_fingerprint: str
    request: ProbeRequest
    design: AuditDesign
    judged: Mapping[int, JudgedShares]
    items: tuple[AuditItem, ...]

    @property
    def checks_and_repeats(self) -> frozenset[str]:
        """Ids of questions that measure the judge and so must be answered anew."""
        return frozenset(item.id for item in self.items if item.kind is not ItemKind.PAIR)

    @staticmethod
    def file_beside(sheet: Path) -> Path:
        """Return where the private half of a sheet lies: ``pairs.jsonl`` → ``pairs.audit.json``."""
        return sheet.with_name(f"{sheet.stem}.audit.json")

    def to_json(self) -> str:
        """Return all of it as JSON."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["request"] = self.request.model_dump(mode="json")
        fields["design"] = self.design.to_dict()
        fields["judged"] = {str(size): asdict(judged) for size, judged in self.judged.items()}
        fields["items"] = [asdict(item) for item in self.items]
        return json.dumps({"version": _VERSION, **fields})

    @classmethod
    def from_json(cls, text: str | bytes) -> Audit:
        """Rebuild an audit from `to_json`.

        Raises:
            InputError: audit_unreadable.
        """
        try:
            fields = json.loads(text)
            if fields.pop("version") != _VERSION:
                raise ValueError("it was written by another version")
            fields["request"] = ProbeRequest.model_validate(fields["request"])
            fields["design"] = AuditDesign.from_dict(fields["design"])
            fields["judged"] = {
                int(size): JudgedShares(**judged) for size, judged in fields["judged"].items()
            }
            fields["items"] = tuple(
                AuditItem(**{**item, "kind": ItemKind(item["kind"]), "draws": tuple(item["draws"])})
                for item in fields["items"]
            )
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                "audit_unreadable", f"This is no record of an audit ({error}); draw the pairs again."
            ) from error

    def save(self, file: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            ServiceError: storage_failed.
        """
        partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ServiceError("storage_failed", f"{file} cannot be written: {error.strerror}.") from error

    @classmethod
    def read(cls, file: Path) -> Audit:
        """Read it back.

        Raises:
            InputError: audit_unreadable.
        """
        try:
            content = file.read_bytes()
        except OSError as error:
            raise InputError(
                "audit_unreadable",
                f"{file} cannot be opened ({error.strerror}); `probe audit draw` left it beside the pairs.",
            ) from error
        return cls.from_json(content)
