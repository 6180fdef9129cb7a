"""Corpus texts made safe to show: nothing in them can steer a terminal, an SVG file or the text around."""

from __future__ import annotations

import unicodedata

__all__ = ["visible_text"]

_WHITE_SPACE = {"\n": " ", "\r": " ", "\t": " ", "\u2028": " ", "\u2029": " ", "\x85": " "}

# Joiners and variation selectors belong to emoji and to several scripts, and steer nothing.
_HARMLESS_FORMAT = {"\u200c", "\u200d"}


def visible_text(text: str, *, limit: int | None = None) -> str:
    """Return one line of text in which every control, format or surrogate character is shown as U+FFFD.

    Terminal escapes, bidirectional overrides and characters that XML forbids all belong to Unicode's general
    categories Cc, Cf, Cs, Co and Cn. White space of every kind becomes a space.

    Args:
        text: Any string.
        limit: Longest result in characters, at least 1; a longer one is cut and ends in "…". None: no limit.
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _WHITE_SPACE:
        return _WHITE_SPACE[character]
    if unicodedata.category(character)[0] == "C" and character not in _HARMLESS_FORMAT:
        return "\ufffd"
    return character
