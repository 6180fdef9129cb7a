"""Nearest neighbours among many rows, through a FAISS index.

Which index (`_choose_index`), on the measurements of `benchmarks/nearest.py`:

- flat compares every query with every row. On a GPU, up to `FLAT_ROWS_ON_GPU` rows; on a CPU `top_pairs` does that faster.
- IVF sorts the rows into 4 √n cells and looks into the 32 cells nearest to a query. Everywhere else.
- HNSW walks a graph of near rows. Only by name: it took longer than IVF and found fewer pairs, since a graph finds its way
  badly into small groups of near copies; and only one thread may build it if the same vectors are to give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

__all__ = ["IndexKind", "VectorIndex"]

Vectors = NDArray[np.float32]
Places = NDArray[np.int64]
IndexKind = Literal["flat", "ivf", "hnsw"]

FLAT_ROWS_ON_GPU = 2_000_000
MOST_NEIGHBOURS = 2_048
"""What an index on a GPU gives at most."""

_PRODUCTS_AT_ONCE = 1e10
"""Multiplications of a block of a flat search: under half a second of one core."""
_QUERIES_AT_ONCE = 1_024
_PROBES = 32
_CANDIDATES_PER_NEIGHBOUR = 4
_ROUNDS_OF_CENTRES = 4
_ROWS_PER_CENTRE = 40
_ROWS_ADDED_AT_ONCE = 512
_LINKS = 32
_BREADTH = 64


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of some queries, most similar first.

    Args:
        query: (b,) int64, places of the queries.
        similarity: (b, k) float32 inner products; −∞ or less where there is no further neighbour.
        row: (b, k) int64, −1 where there is no further neighbour.
    """

    query: Places
    similarity: NDArray[np.float32]
    row: Places


class VectorIndex:
    """Rows that can be searched for the nearest ones.

    Args:
        vectors: (n, d) float32 unit rows, n at least 1.
        kind: Of the index; None: the one that suits n. HNSW stays on the CPU.
        seed: Of the centres of an IVF index: the same vectors and seed give the same answer.
        checkpoint: Called at least twice a second or so; may raise to abandon the work.
    """

    def __init__(
        self, vectors: Vectors, *, kind: IndexKind | None = None, seed: int, checkpoint: Callable[[], None]
    ) -> None:
        gpu = faiss.get_num_gpus() > 0
        self.rows, self._dimension = vectors.shape
        self.kind = kind or _choose_index(self.rows, gpu=gpu)
        self.on_gpu = gpu and self.kind != "hnsw"
        self._checkpoint = checkpoint
        self._index: Any
        self._quantizer: Any = None
        if self.kind == "flat":
            self._index = faiss.IndexFlatIP(self._dimension)
        elif self.kind == "ivf":
            self._quantizer = faiss.IndexFlatIP(self._dimension)
            self._quantizer.add(self._centres(vectors, np.random.default_rng(seed)))
            self._index = faiss.IndexIVFFlat(
                self._quantizer, self._dimension, self._quantizer.ntotal, faiss.METRIC_INNER_PRODUCT
            )
            self._index.train(vectors[:1])  # the centres are there: this only says so
        else:
            self._index = faiss.IndexHNSWFlat(self._dimension, _LINKS, faiss.METRIC_INNER_PRODUCT)
        if self.on_gpu:
            self._resources = faiss.StandardGpuResources()
            self._index = faiss.index_cpu_to_gpu(self._resources, 0, self._index)
        self._add(vectors)

    @property
    def exact(self) -> bool:
        """Whether nothing is missed, whatever is asked; how a GPU rounds its products is not known here."""
        return self.kind == "flat" and not self.on_gpu

    def nearest(self, queries: Vectors, k: int) -> Iterator[Neighbours]:
        """Yield the k nearest rows of each query, in blocks of queries, in whatever order suits the index.

        The naive equivalent for one query is ``np.argsort(-(vectors @ query))[:k]``; an index that is not `exact` misses
        some of them.

        Args:
            queries: (q, d) float32 unit rows.
            k: At most `MOST_NEIGHBOURS`.
        """
        if not 1 <= k <= MOST_NEIGHBOURS:
            raise ValueError(f"k must be in 1…{MOST_NEIGHBOURS}, not {k}")
        k = min(k, self.rows)
        order = np.arange(len(queries), dtype=np.int64)
        step = _QUERIES_AT_ONCE
        if self.kind == "flat" and not self.on_gpu:
            step = max(16, min(step, int(_PRODUCTS_AT_ONCE / (self.rows * self._dimension))))
        elif self.kind == "ivf":
            cells = self._quantizer.ntotal
            wanted = -(-_CANDIDATES_PER_NEIGHBOUR * k * cells // self.rows)
            self._index.nprobe = min(cells, max(_PROBES, wanted))
            # Queries of one cell look into the same cells: one after the other they find them in the processor's cache.
            order = np.argsort(self._cells_of(queries), kind="stable")
        elif self.kind == "hnsw":
            self._index.hnsw.efSearch = max(_BREADTH, 2 * k)
        for start in range(0, len(order), step):
            places = order[start : start + step]
            similarity, row = self._index.search(queries[places], k)
            yield Neighbours(places, similarity, row)
            self._checkpoint()

    def _add(self, vectors: Vectors) -> None:
        step = _ROWS_ADDED_AT_ONCE if self.kind == "hnsw" else 16 * _ROWS_ADDED_AT_ONCE
        threads = faiss.omp_get_max_threads()
        try:
            if self.kind == "hnsw":
                faiss.omp_set_num_threads(1)  # with more, the graph depends on which thread was first
            for start in range(0, self.rows, step):
                self._index.add(vectors[start : start + step])
                self._checkpoint()
        finally:
            faiss.omp_set_num_threads(threads)

    def _cells_of(self, queries: Vectors) -> Places:
        cells = np.empty(len(queries), dtype=np.int64)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            cells[part] = self._quantizer.search(queries[part], 1)[1][:, 0]
            self._checkpoint()
        return cells

    def _centres(self, vectors: Vectors, rng: np.random.Generator) -> Vectors:
        """Spherical k-means in short steps: FAISS's own cannot be interrupted, and takes minutes for a million rows."""
        count = min(self.rows, int(4 * self.rows**0.5))
        chosen = np.sort(rng.choice(self.rows, min(self.rows, _ROWS_PER_CENTRE * count), replace=False))
        centres: Vectors = vectors[rng.choice(chosen, count, replace=False)]
        for _ in range(_ROUNDS_OF_CENTRES):
            lookup = faiss.IndexFlatIP(self._dimension)
            lookup.add(centres)
            sums = np.zeros_like(centres)
            for start in range(0, len(chosen), _QUERIES_AT_ONCE):
                rows = vectors[chosen[start : start + _QUERIES_AT_ONCE]]
                cell = lookup.search(rows, 1)[1][:, 0]
                order = np.argsort(cell, kind="stable")
                cells, first = np.unique(cell[order], return_index=True)
                sums[cells] += np.add.reduceat(rows[order], first, axis=0)
                self._checkpoint()
            length = np.linalg.norm(sums, axis=1, keepdims=True)
            # A centre that no row is nearest to, or whose rows cancel out, stays where it was.
            centres = np.where(length > 0, sums / np.maximum(length, np.float32(1e-30)), centres)
        return centres


def _choose_index(rows: int, *, gpu: bool) -> IndexKind:
    """Return the kind of index that suits so many rows."""
    return "flat" if gpu and rows <= FLAT_ROWS_ON_GPU else "ivf"
