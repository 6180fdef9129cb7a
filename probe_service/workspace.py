"""What a probe lays out before it measures: the rows that were read, their vectors, and what is known about them.

Every public method of `Workspace` is a step: it reads what earlier steps left in the folder, does at most about two
seconds of work (or calls `checkpoint` at least twice a second), writes its result atomically, and returns small JSON.
What is then measured on a `Population` of the rows is in `measure`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probe_service.corpus import (
    BatchSampler,
    Corpus,
    TrainingRows,
    draw_epoch,
    load_corpus,
    normalize_text,
    read_corpus,
    save_corpus,
    softmax_candidates,
)
from probe_service.encode import (
    CheckedEncoder,
    VectorCache,
    default_encoder_name,
    dropout_similarities,
    encode_with_cache,
    load_encoder,
    same_meaning_similarity_floor,
)
from probe_service.encode.protocol import to_unit_length
from probe_service.errors import CorpusError, EncoderError, RequestError
from probe_service.estimate import SUB_POOLS, Evidence, SamplingPlan
from probe_service.schemas import (
    CorpusInfo,
    Direction,
    EarlyStop,
    EncoderInfo,
    ExcludedRows,
    ProbeRequest,
    SamplerKind,
    TruncatedRows,
)
from probe_service.scratch import Scratch
from probe_service.settings import Settings

__all__ = ["DEFAULT_LARGEST_SIZE", "SHORTEST_SCAN", "HardNegatives", "Population", "Wave", "Workspace"]

DEFAULT_LARGEST_SIZE = 1024
SHORTEST_SCAN = 256
"""The search for n_max goes at least this far, where there are the rows, however small the sizes asked for."""
LISTED_ROWS = 1000

_CHARACTERS_PER_PART = 48_000
_TEXTS_PER_PART = 1024
_TEXTS_PER_PART_OF_VIEWS = 512
_FIRST_WAVE = 512
_LARGEST_WAVE = 4096
_ROWS_FOR_A_TARGET = 16
_ORDER = 7
_TRIAL_EPOCHS = 3


@dataclass(frozen=True)
class Wave:
    """Rows that are encoded before the next ones.

    Args:
        rows: How many rows are encoded after it, in all.
        parts: How many parts `encode` has up to its end.
    """

    rows: int
    parts: int


@dataclass(frozen=True)
class HardNegatives:
    """The rows' own hard negatives, one after the other.

    Args:
        vectors: (q, d) float32 unit rows.
        first: (m,) int64, place of each row's first one.
        count: (m,) int64, how many each row has.
        per_row: h, how many each row brings into a batch.
        keys: (q,) their normalised texts.
        groups: (q,) the group of the row whose text they repeat, where there is one; None otherwise.
    """

    vectors: NDArray[np.float32]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    per_row: int
    keys: tuple[str, ...]
    groups: tuple[str | None, ...]


@dataclass(frozen=True)
class Population:
    """The m rows that batches are drawn from, and what is known about them.

    Args:
        name: Tells this selection of rows from another one of the same probe.
        anchors: (m, d) float32 unit rows.
        positives: (m, d), None for sentences.
        own_similarity: (m,) s_ii⁺ of sentences from two passes with dropout; None where there are none.
        anchor_keys, positive_keys: (m,) normalised texts; None where there are none (supplied vectors: their bytes).
        groups: (m,) None where unjudged; None without groups.
        sources: (m,) the data set that each row comes from; None if all come from one.
        evidence: Which candidates of which anchors are known false negatives (query to doc).
        hard_negatives: None where none are candidates.
        plan: How random batches are drawn.
        floor: s₀ of the worst case; None counts every unjudged pair.
    """

    name: str
    anchors: NDArray[np.float32]
    positives: NDArray[np.float32] | None
    own_similarity: NDArray[np.float32] | None
    anchor_keys: Sequence[str | bytes]
    positive_keys: Sequence[str] | None
    groups: Sequence[str | None] | None
    sources: Sequence[str] | None
    evidence: Evidence
    hard_negatives: HardNegatives | None
    plan: SamplingPlan
    floor: float | None

    def __len__(self) -> int:
        return len(self.anchors)

    def subset(self, name: str, rows: NDArray[np.int64], seed: int) -> Population:
        """Some of the rows, with batches of their own; what anchors accept stays as learnt from all."""

        def take(column: Any) -> Any:
            if column is None:
                return None
            return column[rows] if isinstance(column, np.ndarray) else [column[row] for row in rows]

        dropped = len(self) - len(rows)
        negatives = self.hard_negatives
        if negatives is not None:
            negatives = HardNegatives(
                negatives.vectors,
                negatives.first[rows],
                negatives.count[rows],
                negatives.per_row,
                negatives.keys,
                negatives.groups,
            )
        return Population(
            name=name,
            anchors=self.anchors[rows],
            positives=take(self.positives),
            own_similarity=take(self.own_similarity),
            anchor_keys=take(self.anchor_keys),
            positive_keys=take(self.positive_keys),
            groups=take(self.groups),
            sources=take(self.sources),
            evidence=self.evidence.subset(rows),
            hard_negatives=negatives,
            plan=SamplingPlan(
                rows_usable=self.plan.rows_usable - dropped,
                rows_encoded=self.plan.rows_encoded - dropped,
                num_repeats=self.plan.num_repeats,
                seed=seed,
            ),
            floor=self.floor,
        )


class Workspace:
    """A folder with one probe's rows and vectors.

    Args:
        request: What was asked.
        source: Path of the corpus, or a Hugging Face name (``hf:…``).
        name: Name of the corpus in the report.
        folder: Where results are kept; made if it is not there.
        settings: Of the service.
        checkpoint: Called often in long steps; may raise to cancel.
    """

    def __init__(
        self,
        request: ProbeRequest,
        source: Path | str,
        name: str,
        folder: Path,
        settings: Settings,
        checkpoint: Callable[[], None],
    ) -> None:
        self._request, self._source, self._name = request, source, name
        self._settings, self._checkpoint = settings, checkpoint
        self.scratch = Scratch(folder, checkpoint)

    # ------------------------------------------------------------------------------------------------------------ steps

    def read(self) -> dict[str, Any]:
        """Read and check the corpus; keep at most the rows that the request needs."""
        corpus = read_corpus(
            self._source,
            self._request.corpus,
            sample_size=self._request.corpus.max_rows or self._default_rows(),
            rng=np.random.default_rng([self._request.seed, 0]),
            name=self._name,
            max_row_bytes=self._settings.max_row_bytes,
            on_progress=lambda _done, _total: self._checkpoint(),
        )
        self._check(corpus)
        self._sizes(corpus.info)
        save_corpus(corpus, self.scratch.file("corpus"))
        waves = []
        if corpus.vectors is None:
            parts = accumulate(map(len, self._parts(corpus)))
            waves = [Wave(*wave) for wave in zip(_wave_ends(len(corpus)), parts, strict=True)]
        return {
            "rows": len(corpus.row_numbers),
            "parts": waves[-1].parts if waves else 0,
            "waves": [asdict(wave) for wave in waves],
        }

    def load(self) -> dict[str, Any]:
        """Make sure that the encoder passes its check; load it if a text has no vector yet."""
        if not all(map(self._cache.holds, self._texts)):
            # At the first use it would be loaded as well, but that time would pass for time to encode.
            _ = self._encoder.encoder
        return {"dimension": self._encoder.info.dimension, "fingerprint": self._encoder.info.fingerprint}

    def encode(self, part: int) -> dict[str, Any]:
        """Encode one part of the distinct texts into the cache of vectors."""
        texts = self._texts[part]
        if not self._cache.holds(texts):
            encode_with_cache(self._encoder, texts, self._cache, checkpoint=self._checkpoint)
        return {}

    def begin(self, rows: int, request: ProbeRequest) -> Workspace:
        """Lay out the first of the rows, a random sample of all, as a probe of their own.

        Args:
            rows: How many of them were encoded.
            request: What is asked of them.
        """
        begun = Workspace(
            request,
            self._source,
            self._name,
            self.scratch.file(f"first-{rows}"),
            self._settings,
            self._checkpoint,
        )
        begun.corpus, begun._encoder, begun._cache = self.corpus, self._encoder, self._cache
        begun.gather(rows)
        begun.find_floor()
        return begun

    def gather(self, rows: int | None = None) -> dict[str, Any]:
        """Lay out the vectors of all rows; leave out those that are zero or not finite, and count them.

        Args:
            rows: How many of them were encoded, in the order in which they are; None: all.
        """
        corpus = self.corpus
        chosen = np.sort(self._order(corpus)[:rows])
        count = len(chosen)
        truncated: TruncatedRows | None = None
        owner = chosen
        if corpus.vectors is not None:
            vectors, encoder = to_unit_length(corpus.vectors), _supplied_vectors(corpus.vectors)
        else:
            assert corpus.anchors is not None
            encoder = self._encoder.info
            sides = [side for side in (corpus.anchors, corpus.positives) if side is not None]
            texts = [side[row] for side in sides for row in chosen]
            owner = np.tile(chosen, len(sides))
            if self._hard_negatives_per_row(corpus):
                negatives = [_negatives_of(corpus)[row] for row in chosen]
                texts += [text for own in negatives for text in own]
                owner = np.concatenate([owner, np.repeat(chosen, list(map(len, negatives)))])
            encoded = encode_with_cache(self._encoder, texts, self._cache, checkpoint=self._checkpoint)
            vectors = encoded.vectors
            truncated = _truncation(corpus, texts, owner, encoded.was_truncated, encoded.input_digests)
        usable, excluded = _usable(corpus, vectors, owner)
        kept = np.isin(chosen, usable)
        keep = chosen[kept]
        if len(keep) < 2:
            raise CorpusError(
                "corpus_too_few_rows",
                f"Only {len(keep)} of {count} rows have a usable vector; at least 2 are needed.",
            )
        lost = count - len(keep)
        info = corpus.info.model_copy(
            update={
                "truncated": truncated,
                "excluded": [*corpus.info.excluded, *excluded],
                "rows_usable": corpus.info.rows_usable - lost,
                "rows_encoded": len(keep),
            }
        )
        self._sizes(info)
        self.scratch.save_array("anchors.npy", vectors[:count][kept])
        behind = count
        if corpus.positives is not None:
            self.scratch.save_array("positives.npy", vectors[count : 2 * count][kept])
            behind = 2 * count
        if self._hard_negatives_per_row(corpus):
            self.scratch.save_array("hard_negatives.npy", vectors[behind:][np.isin(owner[behind:], keep)])
        self.scratch.save_array("kept_rows.npy", keep)
        self.scratch.save_text("corpus_info.json", info.model_dump_json())
        self.scratch.save_text("encoder_info.json", encoder.model_dump_json())
        return {"rows": len(keep)}

    @property
    def view_parts(self) -> int:
        """How many parts `compare_views` has; 0 where s_ii⁺ is given or not asked for."""
        if not self._request.dropout_views or self.corpus.vectors is not None or self.positives is not None:
            return 0
        return -(-len(self.anchors) // _TEXTS_PER_PART_OF_VIEWS)

    def compare_views(self, part: int) -> dict[str, Any]:
        """Encode some of the sentences twice with dropout on: s_ii⁺ of rows that have no positive."""
        rows = self.kept_rows[part * _TEXTS_PER_PART_OF_VIEWS : (part + 1) * _TEXTS_PER_PART_OF_VIEWS]
        anchors = self.corpus.anchors
        assert anchors is not None
        found = dropout_similarities(
            self._encoder,
            [anchors[row] for row in rows],
            seed=self._request.seed + part,
            checkpoint=self._checkpoint,
        )
        lacking = int(np.isnan(found.similarity).sum())
        if lacking:
            raise EncoderError(
                "encoder_failed",
                f"With dropout {lacking} of {len(rows)} texts have a vector that is zero or not finite; leave dropout_views out, "
                "or give pairs.",
            )
        self.scratch.save_array(f"views-{part}.npy", found.similarity)
        self.scratch.save_text("dropout.json", json.dumps(found.rates))
        return {}

    def find_floor(self) -> dict[str, Any]:
        """Settle s₀, the similarity from which the worst case counts unjudged pairs."""
        if self._request.worst_case_similarity is not None:
            found = {"similarity": self._request.worst_case_similarity, "source": "given with the request"}
        elif self.evidence.unjudged_rows is None and self.hard_negatives is None:
            found = {"similarity": None, "source": "not needed: every pair is judged"}
        elif self.corpus.vectors is not None:
            found = {
                "similarity": None,
                "source": "none: the vectors' encoder is not known here, so the worst case counts every unjudged pair; "
                "give worst_case_similarity to narrow it",
            }
        else:
            found = asdict(
                same_meaning_similarity_floor(self._encoder, self._cache, checkpoint=self._checkpoint)
            )
        self.scratch.save_text("floor.json", json.dumps(found))
        return {}

    # ---------------------------------------------------------------------------------------------------------- results

    @cached_property
    def corpus(self) -> Corpus:
        """The rows that `read` kept."""
        return load_corpus(self.scratch.file("corpus"))

    @cached_property
    def kept_rows(self) -> NDArray[np.int64]:
        """(m,) places in `corpus` of the rows that have a usable vector."""
        return self.scratch.load_array("kept_rows.npy")

    @cached_property
    def corpus_info(self) -> CorpusInfo:
        """What was read and kept."""
        return CorpusInfo.model_validate_json(self.scratch.file("corpus_info.json").read_bytes())

    @cached_property
    def encoder_info(self) -> EncoderInfo:
        """Which encoder ran."""
        return EncoderInfo.model_validate_json(self.scratch.file("encoder_info.json").read_bytes())

    @property
    def stopped(self) -> EarlyStop | None:
        """Why not all rows were encoded, where they were not."""
        file = self.scratch.file("stopped.json")
        return EarlyStop.model_validate_json(file.read_bytes()) if file.exists() else None

    @property
    def exact_pairs_up_to(self) -> int:
        """Rows up to which the search for the most similar pairs compares each with each."""
        return self._settings.exact_pairs_up_to

    @property
    def evidence(self) -> Evidence:
        """What is known about the encoded rows."""
        return self._evidence

    @cached_property
    def floor(self) -> dict[str, Any]:
        """s₀ (`similarity`, null if none) and its `source`."""
        found: dict[str, Any] = json.loads(self.scratch.file("floor.json").read_text())
        return found

    @cached_property
    def anchors(self) -> NDArray[np.float32]:
        """(m, d) unit vectors."""
        return self.scratch.load_array("anchors.npy")

    @cached_property
    def positives(self) -> NDArray[np.float32] | None:
        """(m, d) unit vectors of the positives; None for sentences."""
        return (
            self.scratch.load_array("positives.npy") if self.scratch.file("positives.npy").exists() else None
        )

    @cached_property
    def hard_negatives(self) -> HardNegatives | None:
        """The hard negatives of the encoded rows; None where none are candidates."""
        corpus = self.corpus
        per_row = self._hard_negatives_per_row(corpus)
        if not per_row:
            return None
        of_row = [_negatives_of(corpus)[row] for row in self.kept_rows]
        keys = tuple(self._key(text) for row in of_row for text in row)
        group_of: dict[str, str] = {}
        if corpus.groups is not None:
            for side in (corpus.anchors, corpus.positives):
                for text, group in zip(side or [], corpus.groups, strict=False):
                    if group is not None:
                        group_of.setdefault(self._key(text), group)
        count = np.array([len(row) for row in of_row], dtype=np.int64)
        return HardNegatives(
            vectors=self.scratch.load_array("hard_negatives.npy"),
            first=np.cumsum(count) - count,
            count=count,
            per_row=per_row,
            keys=keys,
            groups=tuple(group_of.get(key) for key in keys),
        )

    @property
    def dropout_rates(self) -> list[float]:
        """The rates of the dropout that s_ii⁺ comes from; empty where it does not."""
        if not self.view_parts:
            return []
        rates: list[float] = json.loads(self.scratch.file("dropout.json").read_text())
        return rates

    @cached_property
    def population(self) -> Population:
        """All encoded rows, with the floor that `find_floor` settled."""
        return self.lay_out(floor=self.floor["similarity"])

    def lay_out(self, *, floor: float | None) -> Population:
        """All encoded rows, with a floor s₀; None lets the worst case count every unjudged pair."""
        anchor_keys, positive_keys, groups = self._keys
        views = [self.scratch.load_array(f"views-{part}.npy") for part in range(self.view_parts)]
        sources = self.corpus.sources
        return Population(
            name="all",
            anchors=self.anchors,
            positives=self.positives,
            own_similarity=np.concatenate(views) if views else None,
            anchor_keys=anchor_keys,
            positive_keys=positive_keys,
            groups=groups,
            sources=None if sources is None else [sources[row] for row in self.kept_rows],
            evidence=self._evidence,
            hard_negatives=self.hard_negatives,
            plan=self.plan,
            floor=floor,
        )

    @cached_property
    def distinct_population(self) -> Population:
        """The `distinct_rows`."""
        # The effect of a remedy is measured on batches that played no part in choosing it.
        return self.population.subset("distinct", self.distinct_rows, self._request.seed + 1)

    @property
    def rows_to_drop(self) -> list[int]:
        """Row numbers of encoded rows that repeat an earlier one, by normalised texts."""
        repeated = np.setdiff1d(np.arange(len(self.anchors)), self.distinct_rows)
        return self.row_numbers(repeated)

    def row_numbers(self, rows: NDArray[np.int64]) -> list[int]:
        """Row numbers, from 1, of encoded rows by place."""
        return [int(number) for number in self.corpus.row_numbers[self.kept_rows[rows]]]

    def training_rows(self, places: NDArray[np.int64] | None = None) -> TrainingRows:
        """The encoded rows, or some of them, as a batch sampler sees them."""
        corpus = self.corpus
        rows = self.kept_rows if places is None else self.kept_rows[places]
        sides = [side for side in (corpus.anchors, corpus.positives) if side is not None]
        negatives = corpus.negatives if self._hard_negatives_per_row(corpus) else None
        return TrainingRows.from_texts(
            (
                [*(side[row] for side in sides), *(negatives[row] if negatives is not None else [])]
                for row in rows
            ),
            None if corpus.sources is None else [corpus.sources[row] for row in rows],
        )

    @cached_property
    def sizes(self) -> list[int]:
        """The batch sizes to measure, ascending; by default those that the sampler makes batches of."""
        sizes = self._sizes(self.corpus_info)
        if self._request.batch_sizes is None and self._request.sampler.kind is not SamplerKind.RANDOM:
            rows = self.training_rows()
            while len(sizes) > 1 and not self._fills(sizes[-1], rows):
                sizes.pop()
        return sizes

    @property
    def plan(self) -> SamplingPlan:
        """How random batches are drawn."""
        info = self.corpus_info
        return SamplingPlan(
            rows_usable=info.rows_usable,
            rows_encoded=info.rows_encoded,
            num_repeats=self._request.num_repeats,
            seed=self._request.seed,
        )

    # ----------------------------------------------------------------------------------------------------------- inside

    @cached_property
    def _encoder(self) -> CheckedEncoder:
        return load_encoder(self._request.encoder or default_encoder_name(self._settings), self._settings)

    @cached_property
    def _cache(self) -> VectorCache:
        info = self._encoder.info
        return VectorCache(self._settings.home / "vectors", info.fingerprint, info.dimension)

    def _key(self, text: str) -> str:
        return normalize_text(text, case_fold=self._request.corpus.case_fold)

    @cached_property
    def _keys(self) -> tuple[list[Any], list[str] | None, list[str | None] | None]:
        """Normalised anchors and positives, and groups, of the encoded rows."""
        corpus, rows = self.corpus, self.kept_rows
        groups = None if corpus.groups is None else [corpus.groups[row] for row in rows]
        if corpus.anchors is None:
            vectors = (self.anchors + np.float32(0.0)).astype(np.float32)
            return [vector.tobytes() for vector in vectors], None, groups
        anchors = [self._key(corpus.anchors[row]) for row in rows]
        positives = corpus.positives
        return anchors, None if positives is None else [self._key(positives[row]) for row in rows], groups

    @cached_property
    def _evidence(self) -> Evidence:
        return Evidence.from_keys(*self._keys)

    @cached_property
    def distinct_rows(self) -> NDArray[np.int64]:
        """Places of the encoded rows whose texts no earlier row has: anchor and positive both new."""
        evidence = self._evidence
        if evidence.anchor_text is None or evidence.candidate_text is None:
            return np.arange(len(self.anchors), dtype=np.int64)
        span = int(max(evidence.anchor_text.max(), evidence.candidate_text.max())) + 1
        _, first = np.unique(evidence.anchor_text * span + evidence.candidate_text, return_index=True)
        return np.sort(first).astype(np.int64)

    def _default_rows(self) -> int:
        """Rows to keep where the request does not say: what intervals at the largest size and the search for n_max need."""
        if self._request.sampler.kind is not SamplerKind.RANDOM:
            return sys.maxsize  # which rows wait for which depends on all of them
        rows = SUB_POOLS * max(*(self._request.batch_sizes or (DEFAULT_LARGEST_SIZE,)), SHORTEST_SCAN)
        return rows if self._request.target_width is None else _ROWS_FOR_A_TARGET * rows

    def _check(self, corpus: Corpus) -> None:
        """Refuse what the corpus cannot give."""
        sampler, loss = self._request.sampler, self._request.loss
        if sampler.kind is not SamplerKind.RANDOM and len(corpus) < corpus.info.rows_usable:
            raise RequestError(
                "sampler_needs_whole_corpus",
                f"{sampler.kind} batches depend on all {corpus.info.rows_usable} rows, but max_rows keeps {len(corpus)} of "
                "them; leave max_rows out, or sample at random.",
                column="max_rows",
            )
        if sampler.kind is SamplerKind.GROUPED and corpus.sources is None:
            raise RequestError(
                "sampler_needs_sources",
                "grouped batches come from one source each, but no column says where a row comes from; name it with "
                "columns.source.",
                column="source",
            )
        softmax_candidates(
            loss.directions, loss.partition_mode, 2
        )  # refuses what the loss itself would refuse
        if loss.directions != (Direction.QUERY_TO_DOC,) and corpus.positives is None:
            raise RequestError(
                "directions_need_pairs",
                f"The directions {', '.join(loss.directions)} compare anchors with positives, but rows are {corpus.kind}.",
                column="directions",
            )
        if loss.train_group_size is not None and loss.train_group_size > 1:
            lacking = [row for row, own in enumerate(_negatives_of(corpus)) if not own]
            if lacking:
                raise CorpusError(
                    "corpus_hard_negatives_missing",
                    f"{len(lacking)} of {len(corpus)} rows have no hard negative, but train_group_size "
                    f"{loss.train_group_size} asks for {loss.train_group_size - 1}.",
                    row=int(corpus.row_numbers[lacking[0]]),
                    count=len(lacking),
                )

    def _hard_negatives_per_row(self, corpus: Corpus) -> int:
        """h: what train_group_size asks for, or as many as every row has."""
        if corpus.negatives is None:
            return 0
        if self._request.loss.train_group_size is not None:
            return self._request.loss.train_group_size - 1
        return min(map(len, corpus.negatives), default=0)

    def _order(self, corpus: Corpus) -> NDArray[np.int64]:
        """The order in which rows are encoded: a random one, so that the first ones are a sample of all."""
        return np.random.default_rng([self._request.seed, _ORDER]).permutation(len(corpus))

    @cached_property
    def _texts(self) -> list[list[str]]:
        return [part for wave in self._parts(self.corpus) for part in wave]

    def _parts(self, corpus: Corpus) -> list[list[list[str]]]:
        """For each wave its new texts, each once, by length, cut into parts of about two seconds' work on two cores."""
        sides = [side for side in (corpus.anchors, corpus.positives) if side is not None]
        negatives = _negatives_of(corpus) if self._hard_negatives_per_row(corpus) else None
        order = self._order(corpus)
        seen: set[str] = set()
        waves: list[list[list[str]]] = []
        first = 0
        for end in _wave_ends(len(corpus)):
            texts = {side[row] for side in sides for row in order[first:end]}
            if negatives is not None:
                texts.update(text for row in order[first:end] for text in negatives[row])
            texts -= seen
            seen |= texts
            first = end
            parts: list[list[str]] = []
            characters = 0
            for text in sorted(texts, key=lambda t: (len(t), t)):
                if not parts or len(parts[-1]) >= _TEXTS_PER_PART or characters > _CHARACTERS_PER_PART:
                    parts.append([])
                    characters = 0
                parts[-1].append(text)
                characters += min(len(text), 2000)
            waves.append(parts)
        return waves

    def _sizes(self, info: CorpusInfo) -> list[int]:
        if self._request.batch_sizes is not None:
            largest = max(self._request.batch_sizes)
            if largest > info.rows_encoded:
                sampled = info.rows_encoded < info.rows_usable
                raise RequestError(
                    "batch_size_too_large",
                    f"A batch of {largest} needs {largest} rows, but the corpus has {info.rows_usable} usable rows"
                    + (f", of which {info.rows_encoded} are encoded; raise max_rows." if sampled else "."),
                    column="batch_sizes",
                )
            return [self._divisible(size) for size in self._request.batch_sizes]
        whole = info.rows_encoded == info.rows_usable
        largest = info.rows_encoded if whole else max(2, info.rows_encoded // SUB_POOLS)
        powers = [2**e for e in range(1, 11) if 2**e <= min(largest, DEFAULT_LARGEST_SIZE)]
        devices = self._request.sampler.devices
        # N rows a step are N / devices a device, and a device's batch has two rows at least.
        fitting = [size for size in powers if size % devices == 0 and size >= 2 * devices]
        if not fitting:
            raise RequestError(
                "batch_size_not_divisible",
                f"No power of two up to {largest} is a whole number of rows for {devices} devices; give batch_sizes.",
                column="batch_sizes",
            )
        return fitting

    def _fills(self, size: int, rows: TrainingRows) -> bool:
        """Whether each of a few epochs has a full batch."""
        sampler = BatchSampler.of(self._request.sampler, size)
        return all(
            len(draw_epoch(sampler, rows, np.random.default_rng([self._request.seed, number])).full_contrasts)
            for number in range(_TRIAL_EPOCHS)
        )

    def _divisible(self, size: int) -> int:
        """The size, if it is a whole number of rows for each device."""
        devices = self._request.sampler.devices
        if size % devices or (devices > 1 and size < 2 * devices):
            raise RequestError(
                "batch_size_not_divisible",
                f"A gathered batch of {size} rows cannot be dealt to {devices} devices with at least 2 rows each, all alike.",
                column="batch_sizes",
            )
        return size


def _wave_ends(rows: int) -> list[int]:
    """How many rows are encoded after each wave: few at first, for a first look, then twice as many, up to a limit."""
    ends = [min(_FIRST_WAVE, rows)]
    while ends[-1] < rows:
        ends.append(min(rows, ends[-1] + min(ends[-1], _LARGEST_WAVE)))
    return ends


def _negatives_of(corpus: Corpus) -> list[list[str]]:
    return corpus.negatives if corpus.negatives is not None else [[] for _ in range(len(corpus))]


def _usable(
    corpus: Corpus, vectors: NDArray[np.float32], owner: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[ExcludedRows]]:
    """Rows all of whose vectors are finite and not zero, and the others by reason."""
    rows = len(corpus)
    finite = np.bincount(owner[~np.isfinite(vectors).all(axis=1)], minlength=rows) == 0
    zero = np.bincount(owner[(vectors == 0).all(axis=1)], minlength=rows) > 0
    excluded = []
    for reason, bad in (("non_finite_vector", ~finite), ("zero_vector", finite & zero)):
        if bad.any():
            numbers = [int(number) for number in corpus.row_numbers[bad]]
            excluded.append(
                ExcludedRows.model_validate(
                    {"reason": reason, "count": len(numbers), "rows": numbers[:LISTED_ROWS]}
                )
            )
    return np.flatnonzero(finite & ~zero).astype(np.int64), excluded


def _truncation(
    corpus: Corpus,
    texts: list[str],
    owner: NDArray[np.int64],
    was_truncated: NDArray[np.bool_],
    digests: NDArray[np.uint8],
) -> TruncatedRows:
    """Rows cut by the tokenizer, and those of them that equal another row's text only after the cut."""
    rows = len(corpus)
    cut = np.zeros(rows, dtype=bool)
    collides = np.zeros(rows, dtype=bool)
    by_digest: dict[bytes, dict[str, list[int]]] = {}
    for position in np.flatnonzero(was_truncated).tolist():
        row = int(owner[position])
        cut[row] = True
        same = by_digest.setdefault(digests[position].tobytes(), {})
        same.setdefault(normalize_text(texts[position]), []).append(row)
    for same in by_digest.values():
        if len(same) > 1:
            for places in same.values():
                collides[places] = True
    numbers = corpus.row_numbers
    return TruncatedRows(
        count=int(cut.sum()),
        rows=[int(number) for number in numbers[cut][:LISTED_ROWS]],
        collisions=int(collides.sum()),
        collision_rows=[int(number) for number in numbers[collides][:LISTED_ROWS]],
    )


def _supplied_vectors(vectors: NDArray[np.float32]) -> EncoderInfo:
    return EncoderInfo(
        name="supplied vectors",
        backend="none",
        location="the corpus",
        revision=None,
        revision_pinned=False,
        weights_sha256=None,
        pooling="unknown",
        normalized=True,
        max_length=None,
        dimension=int(vectors.shape[1]),
        dtype="float32",
        device="none",
        prompt=None,
        check="vectors are finite and not zero; brought to unit length here",
        fingerprint="none",
    )
