"""Batches as people train: which rows meet in one batch under each sampler, and which rows never do.

Four samplers, by the rules of sentence-transformers 6.2 (``sentence_transformers.base.sampler``) and of accelerate,
which deals a sampler's batches to the devices. A description (`BatchSampler`), the rows as a sampler sees them
(`TrainingRows`), and one epoch of batches (`draw_epoch` → `Epoch`) with what it left out (`Shortfall`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from probe_service.errors import RequestError
from probe_service.schemas import GroupedPolicy, SamplerKind, SamplerOptions

__all__ = [
    "BatchSampler",
    "Epoch",
    "Permutations",
    "Shortfall",
    "TrainingRows",
    "draw_epoch",
]

Rows = NDArray[np.int64]

MAX_RESAMPLE_PASSES = 2
"""Further orders that `no_duplicates` goes through when one leaves too few full batches, as in sentence-transformers."""


@dataclass(frozen=True)
class BatchSampler:
    """How a training run puts rows into batches.

    Args:
        kind: Which rule.
        per_device_batch_size: Rows in one device's batch, at least 2. With a cached loss this is the full batch, whatever
            its mini-batch size. Gradient accumulation adds no candidates: each of its batches is contrasted alone.
        world_size: Devices that take a step together.
        gather: Whether the loss gathers the candidates of all devices (``gather_across_devices``).
        drop_last: Leave out batches that cannot be filled. With several devices it must be true: sentence-transformers
            sets ``dataloader_drop_last`` there.
        policy: Of `grouped`; unused by the others.
        within_source: How `grouped` fills the batches of one source: `random` or `no_duplicates`.

    Raises:
        RequestError: ``sampler_invalid``.
    """

    kind: SamplerKind
    per_device_batch_size: int
    world_size: int = 1
    gather: bool = False
    drop_last: bool = True
    policy: GroupedPolicy = GroupedPolicy.PROPORTIONAL
    within_source: SamplerKind = SamplerKind.RANDOM

    def __post_init__(self) -> None:
        if self.per_device_batch_size < 2:
            raise _invalid(
                f"per_device_batch_size is {self.per_device_batch_size}; a batch needs at least 2 rows."
            )
        if self.world_size < 1:
            raise _invalid(f"world_size is {self.world_size}; at least one device trains.")
        if self.world_size > 1 and not self.drop_last:
            raise _invalid("With several devices the last, incomplete step is left out: set drop_last.")
        if self.within_source not in (SamplerKind.RANDOM, SamplerKind.NO_DUPLICATES):
            raise _invalid(f"within_source is {self.within_source}; random and no_duplicates are possible.")

    @classmethod
    def of(cls, options: SamplerOptions, rows_in_contrast: int) -> BatchSampler:
        """The sampler of a request at N rows that are contrasted with each other: of all devices where gathered.

        Args:
            options: What was asked.
            rows_in_contrast: N, a multiple of the devices where gathered.

        Raises:
            RequestError: ``sampler_invalid``.
        """
        return cls(
            SamplerKind(options.kind),
            rows_in_contrast // options.world_size if options.gather else rows_in_contrast,
            world_size=options.world_size,
            gather=options.gather,
            policy=options.policy,
            within_source=options.within_source,
        )

    @property
    def rows_per_step(self) -> int:
        """Rows of all devices in one step: the global batch."""
        return self.per_device_batch_size * self.world_size

    @property
    def rows_in_contrast(self) -> int:
        """N of every figure: rows contrasted with each other, the global batch where gathered, else one device's batch."""
        return self.rows_per_step if self.gather else self.per_device_batch_size


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a corpus as a sampler sees them: equal texts and sources, as numbers.

    Args:
        shared_texts: For each of n rows, the numbers of those of its texts that another row has as well, ascending.
        source: (n,) int64, which of the `sources` each row comes from.
        sources: Their names, in order of first appearance.
    """

    shared_texts: tuple[tuple[int, ...], ...]
    source: Rows
    sources: tuple[str, ...]

    @classmethod
    def from_texts(cls, texts: Iterable[Iterable[str]], sources: Sequence[str] | None = None) -> TrainingRows:
        """Number the texts and the sources of a corpus.

        Texts are compared exactly, as sentence-transformers does: no white space is folded, and an anchor that equals
        another row's positive or hard negative is a duplicate too.

        Args:
            texts: For each row, its texts in all columns: anchor, positive, each hard negative. An empty collection for a
                row of vectors alone, which is no duplicate of any.
            sources: For each row, the data set that it comes from; None if all come from one.
        """
        rows_with: dict[str, list[int]] = {}
        count = 0
        for row, row_texts in enumerate(texts):
            count += 1
            for text in set(row_texts):
                rows_with.setdefault(text, []).append(row)
        shared: list[list[int]] = [[] for _ in range(count)]
        number = 0
        for rows in rows_with.values():
            if len(rows) > 1:
                for row in rows:
                    shared[row].append(number)
                number += 1
        named = ["(all)"] * count if sources is None else list(sources)
        if len(named) != count:
            raise ValueError(f"{count} rows, but {len(named)} sources")
        codes = {name: code for code, name in enumerate(dict.fromkeys(named))}
        return cls(
            shared_texts=tuple(map(tuple, shared)),
            source=np.array([codes[name] for name in named], dtype=np.int64),
            sources=tuple(codes),
        )

    def __len__(self) -> int:
        return len(self.shared_texts)


class Permutations(Protocol):
    """What a sampler asks of a random generator; `numpy.random.Generator` has it."""

    def permutation(self, x: int, /) -> NDArray[Any]:
        """The numbers 0 … x − 1 in random order."""


@dataclass(frozen=True)
class Shortfall:
    """What an epoch did not do with the rows that were given; counts of rows and of devices' batches.

    Args:
        rows: Rows given.
        rows_left_out: Rows in no batch of this epoch, for whatever reason.
        rows_repeated: Places in batches that a row took for the second or third time (resampling).
        remainder_rows: Rows that `drop_last` leaves out because the rows (of each source) are no multiple of the batch size.
        rows_delayed: Rows that met a duplicate and had to wait for a later batch at least once.
        short_batches: Batches with fewer rows than `per_device_batch_size`; none with `drop_last`.
        batches_expected: Batches that sentence-transformers announces for this epoch (its sampler's ``len``).
        batches_resampled: Batches that repeat rows, drawn to make up for those that duplicates prevented.
        batches_missing: Batches announced and not given, even so.
        batches_not_dealt: Full batches left over when every device needs one.
        small_sources: Sources with too few rows for one full batch.
    """

    rows: int
    rows_left_out: int
    rows_repeated: int
    remainder_rows: int
    rows_delayed: int
    short_batches: int
    batches_expected: int
    batches_resampled: int
    batches_missing: int
    batches_not_dealt: int
    small_sources: tuple[str, ...]

    @property
    def batches_prevented(self) -> int:
        """Full batches that one order lacked for want of distinct rows, made up for by others or not."""
        return self.batches_resampled + self.batches_missing


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch.

    Args:
        sampler: What drew it.
        device_batches: Rows of each device's batch. Batch b goes to device b mod `world_size` in step b div `world_size`.
        shortfall: What was left out.
    """

    sampler: BatchSampler
    device_batches: tuple[Rows, ...]
    shortfall: Shortfall

    @property
    def contrasts(self) -> tuple[Rows, ...]:
        """Rows that are contrasted with each other: a step's batches together where gathered, else each device's batch.

        After resampling, the devices of one step may hold the same row.
        """
        world = self.sampler.world_size if self.sampler.gather else 1
        if world == 1:
            return self.device_batches
        return tuple(
            np.concatenate(self.device_batches[first : first + world])
            for first in range(0, len(self.device_batches), world)
        )

    @property
    def full_contrasts(self) -> Rows:
        """(c, N) those of `contrasts` that have all N = `rows_in_contrast` rows."""
        size = self.sampler.rows_in_contrast
        full = [rows for rows in self.contrasts if len(rows) == size]
        return np.stack(full) if full else np.empty((0, size), dtype=np.int64)


def draw_epoch(sampler: BatchSampler, rows: TrainingRows, rng: Permutations) -> Epoch:
    """Draw one epoch of batches as a training run would.

    The naive equivalent for `random`, one device and `drop_last`::

        order = rng.permutation(n);  [order[b * B : (b + 1) * B] for b in range(n // B)]

    Every batch of a `random` epoch has the distribution of N rows drawn without replacement. Batches of one
    `no_duplicates` epoch differ: rows that had to wait gather in the later ones, so an expectation over batches is a mean
    over whole epochs. A `sequential` epoch uses no randomness: its batches are all that there are.

    Args:
        sampler: The rule.
        rows: The rows, by place from 0.
        rng: Asked for permutations only: one for each order, in the order of need; `grouped` with `proportional` first
            asks for one of all batches.

    Returns:
        The batches, and what was left out.
    """
    count = _Count()
    if sampler.kind is SamplerKind.GROUPED:
        batches, expected = _grouped_batches(sampler, rows, rng, count)
    else:
        every = np.arange(len(rows), dtype=np.int64)
        batches = _batches(sampler, sampler.kind, every, rows.shared_texts, rng, count)
        expected = _announced(len(rows), sampler)
    given = list(batches)
    missing = max(0, expected - len(given))
    sizes = _source_sizes(sampler, rows)
    remainder = int((sizes % sampler.per_device_batch_size).sum())
    dealt = len(given) // sampler.world_size * sampler.world_size
    device_batches = tuple(np.array(batch, dtype=np.int64) for batch in given[:dealt])
    places = sum(map(len, device_batches))
    in_some = np.zeros(len(rows), dtype=bool)
    for batch in device_batches:
        in_some[batch] = True
    used = int(in_some.sum())
    return Epoch(
        sampler=sampler,
        device_batches=device_batches,
        shortfall=Shortfall(
            rows=len(rows),
            rows_left_out=len(rows) - used,
            rows_repeated=places - used,
            remainder_rows=remainder if sampler.drop_last else 0,
            rows_delayed=len(count.delayed),
            short_batches=sum(len(batch) < sampler.per_device_batch_size for batch in device_batches),
            batches_expected=expected,
            batches_resampled=count.batches_resampled,
            batches_missing=missing,
            batches_not_dealt=len(given) - dealt,
            small_sources=tuple(
                rows.sources[code] for code in np.flatnonzero(sizes < sampler.per_device_batch_size)
            )
            if sampler.kind is SamplerKind.GROUPED
            else (),
        ),
    )


@dataclass
class _Count:
    """What is counted while batches are drawn."""

    batches_resampled: int = 0
    delayed: set[int] = field(default_factory=set)


def _invalid(message: str) -> RequestError:
    return RequestError("sampler_invalid", message)


def _source_sizes(sampler: BatchSampler, rows: TrainingRows) -> Rows:
    """Rows of each source that is batched by itself."""
    if sampler.kind is SamplerKind.GROUPED:
        return np.bincount(rows.source, minlength=len(rows.sources))
    return np.array([len(rows)])


def _announced(count: int, sampler: BatchSampler) -> int:
    """Batches of `count` rows by size alone."""
    size = sampler.per_device_batch_size
    return count // size if sampler.drop_last else -(-count // size)


def _batches(
    sampler: BatchSampler,
    kind: SamplerKind,
    places: Rows,
    shared_texts: Sequence[tuple[int, ...]],
    rng: Permutations,
    count: _Count,
) -> Iterator[list[int]]:
    """Batches of the rows at `places`; an order is drawn when its first batch is asked for."""
    if not len(places):
        return
    if kind is SamplerKind.NO_DUPLICATES:
        yield from _batches_without_duplicates(sampler, places, shared_texts, rng, count)
        return
    order = places if kind is SamplerKind.SEQUENTIAL else places[rng.permutation(len(places))]
    size = sampler.per_device_batch_size
    for first in range(0, len(order), size):
        batch = order[first : first + size].tolist()
        if len(batch) < size and sampler.drop_last:
            return
        yield batch


def _batches_without_duplicates(
    sampler: BatchSampler,
    places: Rows,
    shared_texts: Sequence[tuple[int, ...]],
    rng: Permutations,
    count: _Count,
) -> Iterator[list[int]]:
    size, expected = sampler.per_device_batch_size, _announced(len(places), sampler)
    given = 0
    order = places[rng.permutation(len(places))]
    for batch in _pass_without_duplicates(order, shared_texts, size, count.delayed):
        if len(batch) == size or not sampler.drop_last:
            given += 1
            yield batch
    # Where no batch could be filled at all, another order would not help.
    for _ in range(MAX_RESAMPLE_PASSES if 0 < given < expected else 0):
        order = places[rng.permutation(len(places))]
        for batch in _pass_without_duplicates(order, shared_texts, size, set()):
            if len(batch) == size:
                count.batches_resampled += 1
                yield batch
                given += 1
                if given == expected:
                    return


def _pass_without_duplicates(
    order: Rows, shared_texts: Sequence[tuple[int, ...]], size: int, delayed: set[int]
) -> Iterator[list[int]]:
    """Fill batches from an order; a row with a text of the batch waits, and is tried first for the next one.

    Once rows run out, what waits goes into short batches. Rows that ever wait are added to `delayed`. Who waits stands in
    the line of one text that it has; a line whose text is in the batch is passed over as a whole, so that a text which
    half of all rows have costs no more than another.
    """
    lines: dict[int, list[tuple[int, int]]] = {}
    rows: list[int] = order.tolist()
    # Most rows of most corpora share no text with any; they fill a batch by stretches.
    sharing = [*(at for at, row in enumerate(rows) if shared_texts[row]), len(rows)]
    reached = passed = 0
    while True:
        batch: list[int] = []
        texts: set[int] = set()
        heads = [(line[0], text) for text, line in lines.items()]
        heapify(heads)
        while heads and len(batch) < size:
            held, text = heappop(heads)
            if text in texts:
                continue
            line = lines[text]
            heappop(line)
            if not line:
                del lines[text]
            shared = shared_texts[held[1]]
            blocking = _first_of(shared, texts)
            if blocking is None:
                batch.append(held[1])
                texts.update(shared)
            else:
                heappush(lines.setdefault(blocking, []), held)
                if line:
                    heappush(heads, (line[0], text))
        while len(batch) < size and reached < len(rows):
            stretch = min(sharing[passed], reached + size - len(batch))
            batch += rows[reached:stretch]
            reached = stretch
            if len(batch) == size or reached == len(rows):
                break
            row = rows[reached]
            shared = shared_texts[row]
            blocking = _first_of(shared, texts)
            if blocking is None:
                batch.append(row)
                texts.update(shared)
            else:
                heappush(lines.setdefault(blocking, []), (reached, row))
                delayed.add(row)
            reached, passed = reached + 1, passed + 1
        if not batch:
            return
        yield batch


def _first_of(shared: tuple[int, ...], texts: set[int]) -> int | None:
    return next((text for text in shared if text in texts), None)


def _grouped_batches(
    sampler: BatchSampler, rows: TrainingRows, rng: Permutations, count: _Count
) -> tuple[Iterator[list[int]], int]:
    """Batches of one source each, and how many sentence-transformers announces."""
    places = [np.flatnonzero(rows.source == code) for code in range(len(rows.sources))]
    announced = [_announced(len(own), sampler) for own in places]
    by_source = [
        _batches(sampler, sampler.within_source, own, rows.shared_texts, rng, count) for own in places
    ]
    if sampler.policy is GroupedPolicy.ROUND_ROBIN:
        # The round in which a source has no batch left is not given at all.
        rounds = zip(*by_source, strict=False)
        return chain.from_iterable(rounds), min(announced, default=0) * len(places)
    total = sum(announced)
    turns = np.repeat(np.arange(len(places)), announced)[rng.permutation(total)]
    return _in_turn(by_source, turns), total


def _in_turn(by_source: Sequence[Iterator[list[int]]], turns: Rows) -> Iterator[list[int]]:
    for source in turns:
        batch = next(by_source[source], None)
        if batch is not None:
            yield batch
