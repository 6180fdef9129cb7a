"""The content hash of a corpus: the same rows give the same hash, whatever the format and packing."""

from __future__ import annotations

import hashlib

from probe_service.corpus.faults import Faults
from probe_service.corpus.roles import Roles
from probe_service.corpus.rows import UsableRows

__all__ = ["ContentHash"]


class ContentHash:
    """SHA-256 over usable rows in file order: anchor, positive, group, source, hard negatives, vector.

    The parts of a row are joined by NUL and a row ends with two, which is unambiguous because no part may hold a NUL;
    this is also where a NUL or a lone surrogate that came in through an escape is found. A vector follows as
    little-endian float32.

    Args:
        roles: They tell which parts a row has.
        faults: Takes rows that hold what no text may hold.
    """

    def __init__(self, roles: Roles, faults: Faults) -> None:
        parts = [roles.kind.value]
        parts += [
            name
            for name, column in (("group", roles.meaning), ("source", roles.source))
            if column is not None
        ]
        self._hash = hashlib.sha256(("\0".join(parts) + "\0\0").encode())
        self._faults = faults

    def add(self, rows: UsableRows) -> None:
        """Add rows; after a fault the hash has no meaning."""
        parts = _parts(rows)
        texts = [*map("\0".join, zip(*parts, strict=True))] if parts else [""] * len(rows.numbers)
        separators = len(texts) * (max(len(parts), 1) - 1)
        if rows.negatives is not None:
            separators += sum(len(negatives) - 1 for negatives in rows.negatives if negatives)
        block = "\0\0".join(texts)
        try:
            content = block.encode()
        except UnicodeEncodeError:
            self._find_faults(rows, parts)
            return
        if block.count("\0") != separators + 2 * (len(texts) - 1):
            self._find_faults(rows, parts)
        elif rows.vectors is None:
            self._hash.update(content + b"\0\0")
        else:
            for text, vector in zip(texts, rows.vectors.astype("<f4", copy=False), strict=True):
                self._hash.update(text.encode() + b"\0\0" + vector.tobytes())

    def hexdigest(self) -> str:
        """Return the hash of all rows added."""
        return self._hash.hexdigest()

    def _find_faults(self, rows: UsableRows, parts: list[list[str]]) -> None:
        for place, number in enumerate(rows.numbers.tolist()):
            texts = [part[place] for part in parts]
            if rows.negatives is not None:
                texts[-1] = "".join(rows.negatives[place])
            text = "".join(texts)
            if "\0" in text:
                self._faults.add("corpus_nul_bytes", number, "holds a NUL character; remove it.")
            try:
                text.encode()
            except UnicodeEncodeError:
                message = "holds half of a surrogate pair; no text can hold it."
                self._faults.add("corpus_invalid_utf8", number, message)


def _parts(rows: UsableRows) -> list[list[str]]:
    """Return the texts of each part; none is empty, so that two NULs in a row end one."""
    parts = [texts for texts in (rows.anchors, rows.positives) if texts is not None]
    if rows.groups is not None:
        parts.append(["-" if group is None else f"={group}" for group in rows.groups])
    if rows.sources is not None:
        parts.append(rows.sources)
    if rows.negatives is not None:
        parts.append(["=" + "\0".join(negatives) for negatives in rows.negatives])
    return parts
