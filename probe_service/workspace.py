"""The work of one probe, cut into short steps that each leave a file: so that a crash costs one step.

Every public method of `Workspace` is a step: it reads what earlier steps left in the folder, does at most about two
seconds of work (or calls `checkpoint` at least twice a second), writes its result atomically, and returns small JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.corpus import Corpus, load_corpus, normalize_text, read_corpus, save_corpus
from probe_service.encode import (
    LoadedEncoder,
    VectorCache,
    default_encoder_name,
    encode_with_cache,
    load_encoder,
    same_meaning_similarity_floor,
)
from probe_service.encode.protocol import to_unit_length
from probe_service.errors import CorpusError, RequestError
from probe_service.estimate import (
    SUB_POOLS,
    WHOLE,
    Evidence,
    ExactFigures,
    ExactShares,
    MatchedGaussian,
    Reference,
    SamplingPlan,
    ShareAccumulator,
    ShareScan,
    SizeMeasurements,
    exact_scan,
    expected_maximum,
    isotropic,
    scan_shares,
)
from probe_service.losses.numerics import DTYPES, gradient_errors
from probe_service.schemas import (
    SIMILARITY_THRESHOLDS,
    CorpusInfo,
    EncoderInfo,
    ExcludedRows,
    Histogram,
    ProbeRequest,
    SimilarPair,
    TruncatedRows,
)
from probe_service.settings import Settings
from probe_service.similarity import (
    BIN_CENTRES,
    BatchMeasurements,
    batch_top_k,
    measure_batches,
    measure_windows,
    noise_similarity,
    row_histograms,
    stack_size,
    top_pairs,
)

__all__ = ["BatchPart", "ExactPart", "ScanPart", "Workspace"]

REFERENCE_BATCHES = 20
"""Batches behind each null and the noise series: t with 19 degrees of freedom."""
NOISE_PER_ROW = 3
"""The paper's M = 3 × batch size."""
DEFAULT_LARGEST_SIZE = 1024
SHORTEST_SCAN = 256
"""The scan for n_max goes at least this far, where there are the rows, however small the sizes asked for."""
LARGEST_EXACT_CORPUS = 50_000
"""Rows up to which all pairs are looked at; their number grows with the square."""
LISTED_ROWS = 1000
KEPT_PAIRS = 1000
HISTOGRAM_BINS = 100

_STEP_SECONDS = 1.0
_CHARACTERS_PER_PART = 24_000
_TEXTS_PER_PART = 512

Checkpoint = Callable[[], None]


@dataclass(frozen=True)
class BatchPart:
    """Some batches of one size: `count` from number `first` on, drawn from one pool of rows."""

    size: int
    pool: int
    first: int
    count: int


@dataclass(frozen=True)
class ScanPart:
    """Some permutations of the scan over all integers; `deduplicated` leaves repeated rows out."""

    length: int
    pool: int
    first: int
    count: int
    deduplicated: bool


@dataclass(frozen=True)
class ExactPart:
    """Some anchors of the pass over all pairs; `deduplicated` leaves repeated rows out."""

    first: int
    stop: int
    deduplicated: bool


class Workspace:
    """A folder with one probe's intermediate results.

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
        checkpoint: Checkpoint,
    ) -> None:
        self._request, self._source, self._name = request, source, name
        self._folder, self._settings, self._checkpoint = folder, settings, checkpoint
        folder.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------------------------------------- read and encode

    def read(self) -> dict[str, Any]:
        """Read and check the corpus; keep at most the rows that the request needs."""
        # Enough rows for intervals at the largest size, and for the scan to n_max.
        largest = max(*(self._request.batch_sizes or (DEFAULT_LARGEST_SIZE,)), SHORTEST_SCAN)
        corpus = read_corpus(
            self._source,
            self._request.corpus,
            sample_size=self._request.corpus.max_rows or SUB_POOLS * largest,
            rng=np.random.default_rng([self._request.seed, 0]),
            name=self._name,
            max_row_bytes=self._settings.max_row_bytes,
            on_progress=lambda _done, _total: self._checkpoint(),
        )
        self._sizes(corpus.info)
        save_corpus(corpus, self._folder / "corpus")
        return {
            "rows": len(corpus.row_numbers),
            "parts": 0 if corpus.vectors is not None else len(_parts(corpus)),
        }

    def load(self) -> dict[str, Any]:
        """Load the encoder and make sure that it passes its check."""
        return {"dimension": self._encoder.info.dimension, "fingerprint": self._encoder.info.fingerprint}

    def encode(self, part: int) -> dict[str, Any]:
        """Encode one part of the distinct texts into the cache of vectors."""
        encode_with_cache(self._encoder, _parts(self._read)[part], self._cache, checkpoint=self._checkpoint)
        return {}

    def gather(self) -> dict[str, Any]:
        """Lay out the vectors of all rows; leave out those that are zero or not finite, and count them."""
        corpus = self._read
        truncated: TruncatedRows | None = None
        positives: NDArray[np.float32] | None = None
        if corpus.vectors is not None:
            anchors, encoder = to_unit_length(corpus.vectors), _supplied_vectors(corpus.vectors)
        else:
            assert corpus.anchors is not None
            encoder = self._encoder.info
            texts = corpus.anchors + (corpus.positives or [])
            encoded = encode_with_cache(self._encoder, texts, self._cache, checkpoint=self._checkpoint)
            anchors = encoded.vectors[: len(corpus.anchors)]
            if corpus.positives is not None:
                positives = encoded.vectors[len(corpus.anchors) :]
            truncated = _truncation(corpus, texts, encoded.was_truncated, encoded.input_digests)
        keep, excluded = _usable(corpus, anchors, positives)
        if len(keep) < 2:
            raise CorpusError(
                "corpus_too_few_rows",
                f"Only {len(keep)} of {len(anchors)} rows have a usable vector; at least 2 are needed.",
            )
        lost = len(anchors) - len(keep)
        info = corpus.info.model_copy(
            update={
                "truncated": truncated,
                "excluded": [*corpus.info.excluded, *excluded],
                "rows_usable": corpus.info.rows_usable - lost,
                "rows_encoded": len(keep),
            }
        )
        self._sizes(info)
        _save_array(self._folder / "anchors.npy", anchors[keep])
        if positives is not None:
            _save_array(self._folder / "positives.npy", positives[keep])
        _save_array(self._folder / "kept_rows.npy", keep)
        _save_text(self._folder / "corpus_info.json", info.model_dump_json())
        _save_text(self._folder / "encoder_info.json", encoder.model_dump_json())
        return {"rows": len(keep)}

    def find_floor(self) -> dict[str, Any]:
        """Settle s₀, the similarity from which the worst case counts unjudged pairs."""
        if self._request.worst_case_similarity is not None:
            found = {"similarity": self._request.worst_case_similarity, "source": "given with the request"}
        elif self.evidence.unjudged_rows is None:
            found = {"similarity": None, "source": "not needed: every pair is judged"}
        elif self._read.vectors is not None:
            found = {
                "similarity": None,
                "source": "none: the vectors' encoder is not known here, so the worst case counts every unjudged pair; "
                "give worst_case_similarity to narrow it",
            }
        else:
            found = asdict(
                same_meaning_similarity_floor(self._encoder, self._cache, checkpoint=self._checkpoint)
            )
        _save_text(self._folder / "floor.json", json.dumps(found))
        return {}

    # ------------------------------------------------------------------------------------------------- plan

    @property
    def sizes(self) -> list[int]:
        """The batch sizes to measure, ascending."""
        return self._sizes(self.corpus_info)

    def batch_parts(self, size: int) -> list[BatchPart]:
        """The steps that measure one size."""
        per_step = max(1, int(_STEP_SECONDS / self._batch_seconds(size)))
        pools = [(WHOLE, self.plan.num_batches(size))]
        if self.plan.num_pool_batches(size):
            pools += [(pool, self.plan.num_pool_batches(size)) for pool in range(SUB_POOLS)]
        return [
            BatchPart(size, pool, first, min(per_step, total - first))
            for pool, total in pools
            for first in range(0, total, per_step)
        ]

    def reference_parts(self, size: int) -> list[BatchPart]:
        """The steps that measure the nulls and the noise at one size."""
        per_step = max(1, int(_STEP_SECONDS / (8 * self._batch_seconds(size))))
        return [
            BatchPart(size, WHOLE, first, min(per_step, REFERENCE_BATCHES - first))
            for first in range(0, REFERENCE_BATCHES, per_step)
        ]

    def scan_parts(self, *, deduplicated: bool) -> list[ScanPart]:
        """The steps of the scan over all integers up to the largest size with an interval."""
        plan = self._scan_plan(deduplicated=deduplicated)
        length = self._scan_length(deduplicated=deduplicated)
        if length < 2 or length <= self.exact_up_to(deduplicated=deduplicated):
            return []
        per_step = max(1, int(_STEP_SECONDS / (3 * self._batch_seconds(length))))
        pools = [(WHOLE, plan.num_orders(length))]
        if not plan.whole_corpus:
            pools += [(pool, -(-plan.num_orders(length) // SUB_POOLS)) for pool in range(SUB_POOLS)]
        return [
            ScanPart(length, pool, first, min(per_step, total - first), deduplicated)
            for pool, total in pools
            for first in range(0, total, per_step)
        ]

    def exact_up_to(self, *, deduplicated: bool) -> int:
        """Largest N whose shares come from all pairs: n / 20 of a fully encoded corpus (STATISTICS §3); 0 if none does."""
        plan = self._scan_plan(deduplicated=deduplicated)
        if (
            self._request.method == "sampled"
            or not plan.whole_corpus
            or plan.rows_encoded > LARGEST_EXACT_CORPUS
        ):
            return 0
        largest = min(plan.rows_encoded // 20, self._scan_length(deduplicated=deduplicated))
        return largest if largest >= 2 else 0

    def exact_parts(self, *, deduplicated: bool) -> list[ExactPart]:
        """The steps of the pass over all pairs."""
        largest = self.exact_up_to(deduplicated=deduplicated)
        if not largest:
            return []
        rows = len(self._rows(deduplicated=deduplicated))
        seconds = rows * (self.anchors.shape[1] * 4e-11 + 4e-8) + largest * 5e-7 + 3e-4
        step = max(1, int(_STEP_SECONDS / seconds))
        return [ExactPart(first, min(rows, first + step), deduplicated) for first in range(0, rows, step)]

    @property
    def plan(self) -> SamplingPlan:
        """How batches are drawn."""
        return self._scan_plan(deduplicated=False)

    # ------------------------------------------------------------------------------------------------- measure

    def measure(self, part: BatchPart) -> dict[str, Any]:
        """Measure some batches of one size."""
        rows = self.plan.batches(part.size, part.pool, part.first, part.count)
        step = stack_size(part.size)
        found = [self._measure_stack(rows[start : start + step]) for start in range(0, len(rows), step)]
        measured = BatchMeasurements.concatenate(found)
        _save_arrays(self._batch_file(part), {name: getattr(measured, name) for name in vars(measured)})
        return {}

    def measure_reference(self, part: BatchPart) -> dict[str, Any]:
        """Measure the nulls, the noise and (for pairs) the gradients on some batches of one size."""
        size, k = part.size, self._request.top_k
        columns: dict[str, list[Any]] = {name: [] for name in ("noise", "gaussian", "isotropic", *DTYPES)}
        rows = self.plan.batches(size, WHOLE, part.first, part.count)
        for number, batch in enumerate(rows, start=part.first):
            self._checkpoint()
            rng = self.plan.null_rng(size, number)
            anchors = torch.from_numpy(self.anchors[batch])
            dimension = anchors.shape[1]
            noise = rng.standard_normal((NOISE_PER_ROW * size, dimension), dtype=np.float32)
            columns["noise"].append(noise_similarity(anchors, torch.from_numpy(noise)))
            self._checkpoint()
            matched = [gaussian.draw(rng, size) for gaussian in self._gaussians]
            columns["gaussian"].append(_top_mean(matched, k))
            directions = [isotropic(rng, size, dimension) for _ in self._gaussians]
            columns["isotropic"].append(_top_mean(directions, k))
            if self.positives is not None:
                self._checkpoint()
                errors = gradient_errors(
                    anchors, torch.from_numpy(self.positives[batch]), temperature=self._request.temperature
                )
                for dtype, error in errors.items():
                    columns[dtype].append((error.infonce, error.flatnce, error.zero_loss_share))
        filled = {name: np.array(values, dtype=np.float64) for name, values in columns.items() if values}
        _save_arrays(self._folder / f"reference-{size}-{part.first}.npz", filled)
        return {}

    def measure_exact(self, part: ExactPart) -> dict[str, Any]:
        """Look at all pairs of some anchors."""
        rows = self._rows(deduplicated=part.deduplicated)
        largest = self.exact_up_to(deduplicated=part.deduplicated)
        unjudged = self.evidence.unjudged_rows
        accumulator = ShareAccumulator(
            BIN_CENTRES, lowest=-1.0, rows=len(rows), largest=largest, temperature=self._request.temperature
        )
        sizes = [size for size in self.sizes if size <= largest]
        hardest, above = np.zeros(len(sizes)), np.zeros(len(SIMILARITY_THRESHOLDS))
        for found in row_histograms(
            self.anchors[rows],
            None if self.positives is None else self.positives[rows],
            block=slice(part.first, part.stop),
            thresholds=SIMILARITY_THRESHOLDS,
            known=lambda block: self.evidence.known_pairs(rows[None, :], block),
            unjudged=None if unjudged is None else unjudged[rows],
            worst_case_similarity=self.floor["similarity"],
            checkpoint=self._checkpoint,
        ):
            accumulator.add(found.candidates, found.known, found.worst, found.own, self._checkpoint)
            above += found.above
            for at, size in enumerate(sizes):
                hardest[at] += expected_maximum(found.candidates, BIN_CENTRES, size) * len(found.candidates)
        _save_arrays(
            self._exact_file(part),
            {"sums": accumulator.sums[None], "hardest": hardest[None], "above": above[None]},
        )
        return {}

    def scan(self, part: ScanPart) -> dict[str, Any]:
        """Measure S at every integer on some permutations."""
        plan = self._scan_plan(deduplicated=part.deduplicated)
        rows_of = self._rows(deduplicated=part.deduplicated)
        false, worst = [], []
        for number in range(part.first, part.first + part.count):
            order = rows_of[plan.order(part.length, part.pool, number)]
            shares = measure_windows(
                torch.from_numpy(self.anchors[order]),
                None if self.positives is None else torch.from_numpy(self.positives[order]),
                temperature=self._request.temperature,
                known=lambda block, order=order: self.evidence.known_pairs(order[None, :], block),  # type: ignore[misc]
                unjudged=self._unjudged(order),
                worst_case_similarity=self.floor["similarity"],
                checkpoint=self._checkpoint,
            )
            false.append(shares.false_share)
            worst.append(shares.worst_share)
        _save_arrays(self._scan_file(part), {"false": np.stack(false), "worst": np.stack(worst)})
        return {}

    def find_pairs(self) -> dict[str, Any]:
        """Find the most similar negative pairs of all encoded rows, and write them to pairs.jsonl."""
        found = top_pairs(
            self.anchors, self.positives, k=KEPT_PAIRS, on_block=lambda _done, _total: self._checkpoint()
        )
        corpus, rows = self._read, self._kept_rows
        known = self._known_flags(found.anchor, found.candidate)
        lines = []
        for rank, (similarity, i, j) in enumerate(
            zip(found.similarity, rows[found.anchor], rows[found.candidate], strict=True)
        ):
            others = corpus.positives if corpus.positives is not None else corpus.anchors
            pair = SimilarPair(
                rank=rank + 1,
                similarity=float(similarity),
                row=int(corpus.row_numbers[i]),
                other_row=int(corpus.row_numbers[j]),
                text=None if corpus.anchors is None else corpus.anchors[i],
                other_text=None if others is None else others[j],
                known_false_negative=known[rank],
                source=None if corpus.sources is None else corpus.sources[i],
                other_source=None if corpus.sources is None else corpus.sources[j],
            )
            lines.append(pair.model_dump_json())
        _save_text(self.pairs_file, "".join(line + "\n" for line in lines))
        return {}

    def count_similarities(self) -> dict[str, Any]:
        """Histogram of the similarities of random negative pairs."""
        edges = np.linspace(-1.0, 1.0, HISTOGRAM_BINS + 1)
        total, known = np.zeros(HISTOGRAM_BINS), np.zeros(HISTOGRAM_BINS)
        length = min(DEFAULT_LARGEST_SIZE, len(self.anchors))
        for number in range(REFERENCE_BATCHES // 2):
            self._checkpoint()
            order = self.plan.order(length, WHOLE, number)
            right = self.anchors if self.positives is None else self.positives
            similarities = np.clip(self.anchors[order] @ right[order].T, -1.0, 1.0)
            pairs = self.evidence.known_pairs(order[None, :])
            negative = np.triu(np.ones_like(similarities, dtype=bool), 1)
            if self.positives is not None:
                negative |= negative.T
            total += np.histogram(similarities[negative], edges)[0]
            counted = negative[pairs.anchor, pairs.candidate]
            known += np.histogram(similarities[pairs.anchor[counted], pairs.candidate[counted]], edges)[0]
        histogram = Histogram(
            bin_edges=[round(float(edge), 10) for edge in edges],
            all_pairs=[int(count) for count in total],
            known_false_negatives=[int(count) for count in known],
            pairs_counted=int(total.sum()),
        )
        _save_text(self._folder / "histogram.json", histogram.model_dump_json())
        return {}

    # ------------------------------------------------------------------------------------------------- results

    @cached_property
    def corpus_info(self) -> CorpusInfo:
        """What was read and kept."""
        return CorpusInfo.model_validate_json((self._folder / "corpus_info.json").read_bytes())

    @cached_property
    def encoder_info(self) -> EncoderInfo:
        """Which encoder ran."""
        return EncoderInfo.model_validate_json((self._folder / "encoder_info.json").read_bytes())

    @cached_property
    def evidence(self) -> Evidence:
        """What is known about the encoded rows."""
        corpus = self._read
        fold = self._request.corpus.case_fold
        rows = self._kept_rows

        def keys(texts: Sequence[str]) -> list[str]:
            return [normalize_text(texts[row], case_fold=fold) for row in rows]

        groups = None if corpus.groups is None else [corpus.groups[row] for row in rows]
        if corpus.anchors is None:
            vectors = (self.anchors + np.float32(0.0)).astype(np.float32)
            return Evidence.from_keys([vector.tobytes() for vector in vectors], None, groups)
        return Evidence.from_keys(
            keys(corpus.anchors), None if corpus.positives is None else keys(corpus.positives), groups
        )

    @cached_property
    def floor(self) -> dict[str, Any]:
        """s₀ (`similarity`, null if none) and its `source`."""
        found: dict[str, Any] = json.loads((self._folder / "floor.json").read_text())
        return found

    @cached_property
    def anchors(self) -> NDArray[np.float32]:
        """(m, d) unit vectors."""
        vectors: NDArray[np.float32] = np.load(self._folder / "anchors.npy", allow_pickle=False)
        return vectors

    @cached_property
    def positives(self) -> NDArray[np.float32] | None:
        """(m, d) unit vectors of the positives; None for sentences."""
        file = self._folder / "positives.npy"
        return np.load(file, allow_pickle=False) if file.exists() else None

    @property
    def pairs_file(self) -> Path:
        """Where `find_pairs` leaves its pairs, one JSON object a line."""
        return self._folder / "pairs.jsonl"

    @property
    def rows_to_drop(self) -> list[int]:
        """Row numbers of encoded rows that repeat an earlier one, by normalised texts."""
        repeated = np.setdiff1d(np.arange(len(self.anchors)), self._distinct_rows)
        return [int(number) for number in self._read.row_numbers[self._kept_rows[repeated]]]

    def size_measurements(self, size: int) -> SizeMeasurements:
        """Collect what the steps measured at one size."""
        parts = self.batch_parts(size)

        def batches(pool: int) -> dict[str, NDArray[np.float64]]:
            return _load_arrays([self._batch_file(part) for part in parts if part.pool == pool])

        pools = sorted({part.pool for part in parts} - {WHOLE})
        reference = _load_arrays(
            [self._folder / f"reference-{size}-{part.first}.npz" for part in self.reference_parts(size)]
        )
        return SizeMeasurements(
            whole=batches(WHOLE),
            pools=[batches(pool) for pool in pools],
            pool_rows=[self.plan.pool_rows(pool) for pool in pools],
            reference=Reference(
                noise_mean=reference["noise"][:, 0],
                noise_max=reference["noise"][:, 1],
                noise_vectors=NOISE_PER_ROW * size,
                gaussian_top_k_mean=reference["gaussian"],
                isotropic_top_k_mean=reference["isotropic"],
                gradient={dtype: reference[dtype] for dtype in DTYPES if dtype in reference},
            ),
        )

    def share_scan(self, *, deduplicated: bool) -> ShareScan | None:
        """S at every integer; None if too few rows were encoded for any interval."""
        parts = self.scan_parts(deduplicated=deduplicated)
        complete = self.evidence.unjudged_rows is None
        exact = self._exact_shares(deduplicated=deduplicated)
        if not parts:
            return None if exact is None else exact_scan(exact, complete=complete)
        whole = _load_arrays([self._scan_file(part) for part in parts if part.pool == WHOLE])
        pools = []
        for pool in sorted({part.pool for part in parts} - {WHOLE}):
            found = _load_arrays([self._scan_file(part) for part in parts if part.pool == pool])
            pools.append((found["false"].mean(axis=0), found["worst"].mean(axis=0)))
        return scan_shares(whole["false"], whole["worst"], pools, complete=complete, exact=exact)

    def exact_figures(self, size: int) -> ExactFigures | None:
        """The figures that all pairs give at one size; None where they are sampled."""
        exact = self._exact_shares(deduplicated=False)
        if exact is None or size > exact.largest:
            return None
        found = _load_arrays([self._exact_file(part) for part in self.exact_parts(deduplicated=False)])
        rows = len(self.anchors)
        at = size - 2
        in_batch = size * (size - 1) / (1 if self.positives is not None else 2)
        return ExactFigures(
            known=float(exact.known[at]),
            worst=float(exact.worst[at]),
            known_update=None if exact.known_update is None else float(exact.known_update[at]),
            worst_update=None if exact.worst_update is None else float(exact.worst_update[at]),
            hardest_negative=float(found["hardest"][:, self.sizes.index(size)].sum() / rows),
            pairs_above=found["above"].sum(axis=0) / (rows * (rows - 1)) * in_batch,
        )

    def histogram(self) -> Histogram:
        """The histogram that `count_similarities` left."""
        return Histogram.model_validate_json((self._folder / "histogram.json").read_bytes())

    def similar_pairs(self, count: int) -> list[SimilarPair]:
        """The first `count` of the most similar pairs."""
        with self.pairs_file.open(encoding="utf-8") as lines:
            return [
                SimilarPair.model_validate_json(line) for line, _ in zip(lines, range(count), strict=False)
            ]

    # ------------------------------------------------------------------------------------------------- inside

    @cached_property
    def _read(self) -> Corpus:
        return load_corpus(self._folder / "corpus")

    @cached_property
    def _encoder(self) -> LoadedEncoder:
        return load_encoder(self._request.encoder or default_encoder_name(self._settings), self._settings)

    @cached_property
    def _cache(self) -> VectorCache:
        info = self._encoder.info
        return VectorCache(self._settings.home / "vectors", info.fingerprint, info.dimension)

    @cached_property
    def _kept_rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = np.load(self._folder / "kept_rows.npy", allow_pickle=False)
        return rows

    @cached_property
    def _gaussians(self) -> list[MatchedGaussian]:
        sides = [self.anchors] if self.positives is None else [self.anchors, self.positives]
        return [MatchedGaussian.fit(side) for side in sides]

    @cached_property
    def _distinct_rows(self) -> NDArray[np.int64]:
        """Encoded rows whose texts no earlier row has: anchor and positive both new."""
        evidence = self.evidence
        if evidence.anchor_text is None or evidence.candidate_text is None:
            return np.arange(len(self.anchors), dtype=np.int64)
        span = int(max(evidence.anchor_text.max(), evidence.candidate_text.max())) + 1
        _, first = np.unique(evidence.anchor_text * span + evidence.candidate_text, return_index=True)
        return np.sort(first).astype(np.int64)

    def _rows(self, *, deduplicated: bool) -> NDArray[np.int64]:
        return self._distinct_rows if deduplicated else np.arange(len(self.anchors), dtype=np.int64)

    def _scan_length(self, *, deduplicated: bool) -> int:
        plan = self._scan_plan(deduplicated=deduplicated)
        return min(max(*self.sizes, SHORTEST_SCAN), plan.largest_size_with_interval)

    def _exact_shares(self, *, deduplicated: bool) -> ExactShares | None:
        parts = self.exact_parts(deduplicated=deduplicated)
        if not parts:
            return None
        found = _load_arrays([self._exact_file(part) for part in parts])
        return ExactShares.from_sums(
            found["sums"].sum(axis=0), rows=len(self._rows(deduplicated=deduplicated))
        )

    def _scan_plan(self, *, deduplicated: bool) -> SamplingPlan:
        info = self.corpus_info
        dropped = len(self.anchors) - len(self._distinct_rows) if deduplicated else 0
        return SamplingPlan(
            rows_usable=info.rows_usable - dropped,
            rows_encoded=info.rows_encoded - dropped,
            num_repeats=self._request.num_repeats,
            # The effect of a remedy is measured on batches that played no part in choosing it.
            seed=self._request.seed + (1 if deduplicated else 0),
        )

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
            return list(self._request.batch_sizes)
        whole = info.rows_encoded == info.rows_usable
        largest = info.rows_encoded if whole else max(2, info.rows_encoded // SUB_POOLS)
        return [2**e for e in range(1, 11) if 2**e <= min(largest, DEFAULT_LARGEST_SIZE)]

    def _batch_seconds(self, size: int) -> float:
        """A cautious guess of the seconds that one batch costs, to cut the work into steps."""
        dimension = int(self.anchors.shape[1])
        return 1e-4 + 1e-8 * size * dimension + size**2 * (4e-11 * dimension + 4e-8)

    def _batch_file(self, part: BatchPart) -> Path:
        return self._folder / f"batches-{part.size}-{part.pool}-{part.first}.npz"

    def _exact_file(self, part: ExactPart) -> Path:
        kind = "exact-distinct" if part.deduplicated else "exact"
        return self._folder / f"{kind}-{part.first}.npz"

    def _scan_file(self, part: ScanPart) -> Path:
        kind = "distinct" if part.deduplicated else "scan"
        return self._folder / f"{kind}-{part.pool}-{part.first}.npz"

    def _measure_stack(self, rows: NDArray[np.int64]) -> BatchMeasurements:
        certain = self._certain
        return measure_batches(
            torch.from_numpy(self.anchors[rows]),
            None if self.positives is None else torch.from_numpy(self.positives[rows]),
            temperature=self._request.temperature,
            k=self._request.top_k,
            thresholds=SIMILARITY_THRESHOLDS,
            known=lambda block: self.evidence.known_pairs(rows, block),
            certain=None if certain is None else lambda block: certain.known_pairs(rows, block),
            unjudged=self._unjudged(rows),
            worst_case_similarity=self.floor["similarity"],
            checkpoint=self._checkpoint,
        )

    @cached_property
    def _certain(self) -> Evidence | None:
        """The certain tier where it differs from all evidence."""
        return None if self.evidence.group is None else self.evidence.texts_only()

    def _unjudged(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        unjudged = self.evidence.unjudged_rows
        return None if unjudged is None else torch.from_numpy(unjudged[rows])

    def _known_flags(self, i: NDArray[np.int64], j: NDArray[np.int64]) -> list[bool | None]:
        """True, False or unjudged (None) for each pair of encoded rows."""
        unjudged = self.evidence.unjudged_rows
        flags: list[bool | None] = []
        for a, b in zip(i.tolist(), j.tolist(), strict=True):
            pair = self.evidence.known_pairs(np.array([[a, b]]), slice(0, 1))
            if len(pair.anchor):
                flags.append(True)
            else:
                flags.append(None if unjudged is not None and bool(unjudged[a] | unjudged[b]) else False)
        return flags


def _parts(corpus: Corpus) -> list[list[str]]:
    """The distinct texts by length, cut into parts of about a second's work."""
    assert corpus.anchors is not None
    parts: list[list[str]] = []
    characters = 0
    for text in sorted(set(corpus.anchors + (corpus.positives or [])), key=lambda t: (len(t), t)):
        if not parts or len(parts[-1]) >= _TEXTS_PER_PART or characters > _CHARACTERS_PER_PART:
            parts.append([])
            characters = 0
        parts[-1].append(text)
        characters += min(len(text), 2000)
    return parts


def _usable(
    corpus: Corpus, anchors: NDArray[np.float32], positives: NDArray[np.float32] | None
) -> tuple[NDArray[np.int64], list[ExcludedRows]]:
    """Rows whose vectors are finite and not zero, and the others by reason."""
    sides = [anchors] if positives is None else [anchors, positives]
    finite = np.logical_and.reduce([np.isfinite(side).all(axis=1) for side in sides])
    zero = np.logical_or.reduce([(side == 0).all(axis=1) for side in sides])
    excluded = []
    for reason, bad in (("non_finite_vector", ~finite), ("zero_vector", finite & zero)):
        if bad.any():
            rows = [int(number) for number in corpus.row_numbers[bad]]
            excluded.append(
                ExcludedRows.model_validate(
                    {"reason": reason, "count": len(rows), "rows": rows[:LISTED_ROWS]}
                )
            )
    return np.flatnonzero(finite & ~zero).astype(np.int64), excluded


def _truncation(
    corpus: Corpus, texts: list[str], was_truncated: NDArray[np.bool_], digests: NDArray[np.uint8]
) -> TruncatedRows:
    """Rows cut by the tokenizer, and those of them that equal another row's text only after the cut."""
    rows = len(corpus.row_numbers)
    cut = np.zeros(rows, dtype=bool)
    collides = np.zeros(rows, dtype=bool)
    by_digest: dict[bytes, dict[str, list[int]]] = {}
    for position in np.flatnonzero(was_truncated).tolist():
        cut[position % rows] = True
        same = by_digest.setdefault(digests[position].tobytes(), {})
        same.setdefault(normalize_text(texts[position]), []).append(position % rows)
    for same in by_digest.values():
        if len(same) > 1:
            for positions in same.values():
                collides[positions] = True
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


def _top_mean(sides: list[NDArray[np.float32]], k: int) -> float:
    anchors, *rest = [torch.from_numpy(side)[None] for side in sides]
    return float(batch_top_k(anchors, rest[0] if rest else None, k=k).mean())


def _save_text(file: Path, text: str) -> None:
    with _replaced(file) as partial:
        partial.write_text(text, encoding="utf-8")


def _save_array(file: Path, array: NDArray[Any]) -> None:
    with _replaced(file) as partial, partial.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)


def _save_arrays(file: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with _replaced(file) as partial, partial.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _load_arrays(files: list[Path]) -> dict[str, NDArray[np.float64]]:
    """Concatenate the columns of several files."""
    loaded = []
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            loaded.append(dict(arrays))
    return {name: np.concatenate([arrays[name] for arrays in loaded]) for name in loaded[0]}


class _replaced:  # noqa: N801 - reads as a verb
    """Write beside a file, then put it in place at once, so that no reader sees half of it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._partial = file.with_name(f"{file.name}.partial-{os.getpid()}")

    def __enter__(self) -> Path:
        return self._partial

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        if kind is None:
            self._partial.replace(self._file)
        else:
            self._partial.unlink(missing_ok=True)
