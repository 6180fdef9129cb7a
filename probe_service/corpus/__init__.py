"""Corpora: read, check, count, hash, sample, batch.

`read_corpus` makes one pass over a file or a Hugging Face data set; `normalize_text` is the one place that says when
two texts are equal; `draw_epoch` puts rows into batches as a training sampler does. Importing this package loads
neither torch nor `datasets`.
"""

from __future__ import annotations

from probe_service.corpus.batching import BatchSampler, Epoch, Shortfall, TrainingRows, draw_epoch
from probe_service.corpus.candidates import candidates_per_anchor, draw_hard_negatives, softmax_candidates
from probe_service.corpus.equality import normalize_text
from probe_service.corpus.reading import DEFAULT_MAX_ROW_BYTES, read_corpus, sniff_corpus
from probe_service.corpus.storage import Corpus, load_corpus, save_corpus

__all__ = [
    "DEFAULT_MAX_ROW_BYTES",
    "BatchSampler",
    "Corpus",
    "Epoch",
    "Shortfall",
    "TrainingRows",
    "candidates_per_anchor",
    "draw_epoch",
    "draw_hard_negatives",
    "load_corpus",
    "normalize_text",
    "read_corpus",
    "save_corpus",
    "sniff_corpus",
    "softmax_candidates",
]
