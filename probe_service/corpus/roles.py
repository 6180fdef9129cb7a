"""Which column plays which part: inferred from common names, overridden by the request, echoed in the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from probe_service.errors import CorpusError
from probe_service.schemas import ColumnRoles, CorpusKind, CorpusOptions

__all__ = ["Roles", "resolve_roles"]

# Tiers: a name of an earlier tier wins; two names of one tier are a question for the user.
_ANCHOR_NAMES = (("anchor",), ("query", "question", "sentence1", "text", "sentence"))
_POSITIVE_NAMES = (("positive", "positives", "pos", "positive_passages"), ("answer", "passage", "sentence2"))
_SENTENCE_NAMES = (("text", "sentence", "anchor", "query", "question", "sentence1"),)
_EMBEDDING_NAMES = (("embeddings", "embedding", "vectors", "vector"),)
_ID_NAMES = (("id", "_id"), ("query_id", "qid", "docid"))
_GROUP_NAMES = (("group", "group_id"), ("cluster", "cluster_id"))
_LABEL_NAMES = (("label",),)
_SOURCE_NAMES = (("source",), ("dataset",))
_NEGATIVE_NAME = re.compile(r"(hard_)?neg(ative)?(s|_passages)?[-_]?\d*")
# A lone column of a csv may be a file without a header: then the name is the first text.
_COLUMN_LIKE = re.compile(r"[^\W\d][\w.-]*( [\w.-]+){0,2}")
_SCORE_NAMES = ("score", "similarity", "similarity_score")
_JUDGEMENTS = frozenset(
    {"0", "1", "0.0", "1.0", "-1", "true", "false", "entailment", "neutral", "contradiction", "duplicate"}
)


@dataclass(frozen=True)
class Roles:
    """The kind of corpus, and the column of each part.

    Args:
        kind: What a row is.
        anchor: Text of a sentence, or the anchor of a pair or tuple; None for embeddings without texts.
        positive: For pairs and tuples.
        negatives: For tuples: columns of one text each, or of lists.
        embedding: For embeddings.
        inferred: Whether any of them was inferred rather than asked for.
    """

    kind: CorpusKind
    anchor: str | None = None
    positive: str | None = None
    negatives: tuple[str, ...] = ()
    embedding: str | None = None
    id: str | None = None
    group: str | None = None
    label: str | None = None
    source: str | None = None
    meaning: str | None = None
    inferred: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, once."""
        named = (
            self.anchor,
            self.positive,
            *self.negatives,
            self.embedding,
            self.id,
            self.meaning,
            self.source,
        )
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def echo(self) -> ColumnRoles:
        """Return the roles as the report shows them."""
        paired = self.kind in (CorpusKind.PAIRS, CorpusKind.TUPLES)
        return ColumnRoles(
            text=None if paired else self.anchor,
            anchor=self.anchor if paired else None,
            positive=self.positive,
            negatives=self.negatives,
            id=self.id,
            group=self.group,
            label=self.label,
            source=self.source,
            embedding=self.embedding,
        )


def resolve_roles(columns: Sequence[str], head: Mapping[str, Sequence[Any]], options: CorpusOptions) -> Roles:
    """Give each column its part.

    Args:
        columns: The columns that exist.
        head: The first values of each column: they tell judged pairs (``label`` 0 or 1) from positives.
        options: Overrides win; what they leave open is inferred.

    Raises:
        CorpusError: ``corpus_column_missing`` if a column that was asked for, or that the kind needs, is not there;
            ``corpus_roles_ambiguous`` if several columns could play one part.
    """
    asked = options.columns
    _require(columns, asked, options)
    picker = _Picker(columns)
    optional: dict[str, str | None] = {
        "id": asked.id or picker.pick("id", _ID_NAMES),
        "group": asked.group or picker.pick("group", _GROUP_NAMES),
        "label": asked.label or picker.pick("label", _LABEL_NAMES),
        "source": asked.source or picker.pick("source", _SOURCE_NAMES),
    }
    meaning = optional["group"]
    if meaning is None and options.label_is_meaning:
        meaning = optional["label"]
        if meaning is None:
            raise _missing(
                columns, "label_is_meaning needs a label column; name it with columns.label", "label"
            )
    texts = picker.without(optional.values())
    roles = _text_roles(texts, options)
    roles = replace(
        roles,
        id=optional["id"],
        group=optional["group"],
        label=optional["label"],
        source=optional["source"],
        meaning=meaning,
    )
    if roles.kind in (CorpusKind.PAIRS, CorpusKind.TUPLES) and asked.positive is None:
        _refuse_judged_pairs(roles, columns, head, options)
    given = {asked.text, asked.anchor, asked.positive, *asked.negatives, asked.embedding}
    given |= {asked.id, asked.group, asked.label, asked.source}
    used = {*roles.columns, *filter(None, optional.values())}
    return replace(roles, inferred=not used <= given)


class _Picker:
    """Finds columns by name, whatever their case."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)

    def without(self, taken: Any) -> _Picker:
        return _Picker([column for column in self.columns if column not in set(taken)])

    def pick(self, role: str, tiers: Sequence[Sequence[str]]) -> str | None:
        for tier in tiers:
            found = [column for column in self.columns if column.strip().lower() in tier]
            if len(found) > 1:
                raise CorpusError(
                    "corpus_roles_ambiguous",
                    f"Columns {_listed(found)} could each be the {role}; name the one that is meant with"
                    f" columns.{role}.",
                    column=found[0],
                )
            if found:
                return found[0]
        return None

    def negatives(self) -> tuple[str, ...]:
        return tuple(column for column in self.columns if _NEGATIVE_NAME.fullmatch(column.strip().lower()))


def _text_roles(texts: _Picker, options: CorpusOptions) -> Roles:
    """Decide the kind, and the columns of texts and vectors."""
    asked = options.columns
    kind = options.kind
    paired = asked.anchor is not None or asked.positive is not None or bool(asked.negatives)
    if kind is None and (asked.embedding or not (paired or asked.text)):
        embedding = asked.embedding or texts.pick("embedding", _EMBEDDING_NAMES)
        kind = CorpusKind.EMBEDDINGS if embedding else None
    if kind is None and asked.text and not paired:
        kind = CorpusKind.SENTENCES
    if kind is CorpusKind.EMBEDDINGS:
        embedding = asked.embedding or texts.pick("embedding", _EMBEDDING_NAMES)
        if embedding is None:
            raise _missing(
                texts.columns, "no column holds vectors; name it with columns.embedding", "embedding"
            )
        return Roles(kind, embedding=embedding, anchor=asked.text or texts.pick("text", _SENTENCE_NAMES))
    if kind is CorpusKind.SENTENCES:
        return Roles(kind, anchor=asked.text or asked.anchor or _sentence(texts))

    positive = asked.positive or texts.pick("positive", _POSITIVE_NAMES)
    negatives = asked.negatives or texts.negatives()
    anchors = texts.without((positive, *negatives))
    if kind is None and positive is None and not paired and not negatives:
        return Roles(CorpusKind.SENTENCES, anchor=_sentence(texts))
    if kind is None and not paired and not negatives and len(texts.columns) == 1:
        return Roles(CorpusKind.SENTENCES, anchor=_sentence(texts))
    anchor = asked.anchor or asked.text or anchors.pick("anchor", _ANCHOR_NAMES)
    if anchor is None or positive is None:
        role = "anchor" if anchor is None else "positive"
        raise _missing(texts.columns, f"no column is known as the {role}; name it with columns.{role}", role)
    if kind is None:
        kind = CorpusKind.TUPLES if negatives else CorpusKind.PAIRS
    if kind is CorpusKind.PAIRS:
        return Roles(kind, anchor=anchor, positive=positive)
    if not negatives:
        raise _missing(
            texts.columns, "tuples need hard negatives; name them with columns.negatives", "negatives"
        )
    return Roles(kind, anchor=anchor, positive=positive, negatives=negatives)


def _sentence(texts: _Picker) -> str:
    named = texts.pick("text", _SENTENCE_NAMES)
    if named is not None:
        return named
    if len(texts.columns) == 1 and _COLUMN_LIKE.fullmatch(texts.columns[0].strip()):
        return texts.columns[0]
    raise _missing(
        texts.columns,
        "no column is known as the text; name it with columns.text (a csv or tsv file needs a header line)",
        "text",
    )


def _require(columns: Sequence[str], asked: ColumnRoles, options: CorpusOptions) -> None:
    singles = (asked.text, asked.anchor, asked.positive, asked.id, asked.group, asked.label, asked.source)
    for name in (*singles, asked.embedding, *asked.negatives, *options.where):
        if name is not None and name not in columns:
            raise _missing(columns, f"there is no column {name!r}", name)
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if list(columns).count(name) > 1)
        raise CorpusError(
            "corpus_roles_ambiguous", f"Two columns are called {twice!r}; rename one of them.", column=twice
        )


def _refuse_judged_pairs(
    roles: Roles, columns: Sequence[str], head: Mapping[str, Sequence[Any]], options: CorpusOptions
) -> None:
    """Pairs with a score or a yes/no label are judged pairs: taking all of them as positives would be wrong."""
    for column in columns:
        name = column.strip().lower()
        values = {str(value).lower() for value in head.get(column, ()) if value is not None}
        judged = name in _SCORE_NAMES or (column == roles.label and values and values <= _JUDGEMENTS)
        if judged and column not in options.where:
            raise CorpusError(
                "corpus_roles_ambiguous",
                f"Columns {roles.anchor!r} and {roles.positive!r} stand beside {column!r}: perhaps only some rows are"
                f" positives. Keep those with where, e.g. {{{column!r}: '1'}}, or name columns.anchor and"
                " columns.positive to say that every row is a positive pair.",
                column=column,
            )


def _missing(columns: Sequence[str], what: str, column: str) -> CorpusError:
    return CorpusError(
        "corpus_column_missing",
        f"{what[0].upper()}{what[1:]}. Columns here: {_listed(columns) or 'none'}.",
        column=column,
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in names[:50])
    return f"{shown} and {len(names) - 50} more" if len(names) > 50 else shown
