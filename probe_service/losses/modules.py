"""The losses as modules for sentence-transformers' trainers, in place of its MultipleNegativesRankingLoss.

Each takes what `MultipleNegativesRankingLoss` takes (but for the weighting of hard negatives), compares the same rows in the same
directions on the same devices, and stands in the model's card with its settings and its source. In addition each can
leave false negatives out of its softmax: by label, or by how similar they are in the eyes of the model or of a guide.

The ``Cached…`` twins compute the same in mini-batches with GradCache (arXiv:2101.06983), as
`CachedMultipleNegativesRankingLoss` does, so that the batch may be larger than the memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import (
    all_gather,
    all_gather_with_grad,
    batch_to_device,
    cos_sim,
    get_rank,
)
from torch import Tensor

from probe_service.errors import RequestError
from probe_service.losses.functional import (
    Contrast,
    MarginStrategy,
    Noise,
    at_least_float32,
    below_positive,
    check_choice,
    check_noise,
    expected_noise_logits,
    flat_nce_of_rows,
    gaussian_vectors,
    info_nce_of_rows,
    other_group,
)

__all__ = [
    "CachedFlatNCELoss",
    "CachedGSInfoNCELoss",
    "CachedInfoNCELoss",
    "FlatNCELoss",
    "GSInfoNCELoss",
    "InfoNCELoss",
]

Features = dict[str, Any]
Similarity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Vectors:
    """The vectors that one model gives to the rows in contrast, those of all devices where they are gathered.

    Args:
        queries: (W, d).
        documents: (W·(1 + H), d): the W positives, then the W of each column of hard negatives.
        similarity: Compares (a, d) with (b, d), giving (a, b).
    """

    queries: Tensor
    documents: Tensor
    similarity: Similarity

    @property
    def positives(self) -> Tensor:
        """(W, d), the positives of the rows."""
        return self.documents[: len(self.queries)]

    def compare(self, direction: str, rows: Tensor) -> Tensor:
        """(n, C) similarities of some rows with all that they meet in a direction."""
        match direction:
            case "query_to_doc":
                return self.similarity(self.queries[rows], self.documents)
            case "query_to_query":
                return self.similarity(self.queries[rows], self.queries)
            case "doc_to_query":
                return self.similarity(self.queries, self.positives[rows]).T
            case _:
                return self.similarity(self.documents, self.positives[rows]).T


@dataclass(frozen=True)
class _Batch:
    """One step: the rows in contrast, which of them are this device's, and what is known about them.

    Args:
        vectors: Those of the model that is trained.
        own_rows: (n,) int64, numbers of this device's rows among the W.
        guide: The guide's vectors, if there is one.
        labels: (W,) int64, if rows of one label are to be left out.
        noise: (M, d) noise of this step, if the loss draws any.
    """

    vectors: _Vectors
    own_rows: Tensor
    guide: _Vectors | None
    labels: Tensor | None
    noise: Tensor | None


class InfoNCELoss(MultipleNegativesRankingLoss):  # type: ignore[misc]  # sentence-transformers is not typed for mypy
    """InfoNCE, log(1 + ξ), that can leave false negatives out; without that, it equals `MultipleNegativesRankingLoss`.

    ξ is Σ exp(scale·(s_j − s_t)) over the negatives j of a row with own pair t; see `probe_service.losses.functional`.

    Args:
        model: The model to train.
        scale: 1/T > 0.
        similarity_fct: Compares (a, d) with (b, d) vectors, giving (a, b) similarities.
        gather_across_devices: Contrast with the rows of all devices.
        directions: Which comparisons enter the softmax, as in `MultipleNegativesRankingLoss`.
        partition_mode: ``joint``, one softmax over all directions, or ``per_direction``, the mean of one for each.
        guide: A frozen model that judges which candidates are false negatives: those that it finds more similar to the row
            than the row's own pair, less the margin (GISTEmbed). It counts cosines.
        margin: See `below_positive`. With a guide, 0 if None; without one the model's own similarities are compared if a
            margin is given.
        margin_strategy: ``absolute`` or ``relative``.
        mask_same_label: Rows with the same label mean the same: leave their anchors and positives (not their hard negatives)
            out of each other's softmax. The data set needs an integer column ``label``; a negative label is none.

    Inputs are (anchor, positive) or (anchor, positive, negative_1, …) columns, and labels if asked for.

    Raises:
        RequestError: ``loss_invalid``.

    Source: van den Oord et al. 2018 (arXiv:1807.03748); masking by a guide: Solatorio 2024 (arXiv:2402.16829).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Similarity = cos_sim,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        guide: SentenceTransformer | None = None,
        margin: float | None = None,
        margin_strategy: MarginStrategy = "absolute",
        mask_same_label: bool = False,
    ) -> None:
        try:
            super().__init__(
                model, scale, similarity_fct, gather_across_devices, tuple(directions), partition_mode
            )
        except ValueError as error:
            raise RequestError("loss_invalid", str(error)) from error
        check_choice("margin_strategy", margin_strategy, MarginStrategy)
        self.guide = guide
        self.margin = 0.0 if guide is not None and margin is None else margin
        self.margin_strategy = margin_strategy
        self.mask_same_label = mask_same_label
        self._tokenizer = None
        if guide is not None:
            if has_static_embedding_input(model) or has_static_embedding_input(guide):
                raise RequestError("loss_invalid", "a StaticEmbedding can neither have nor be a guide.")
            if _reads_other_tokens(guide, model):
                self._tokenizer = model.tokenizer

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Embed one column after the other and return the mean loss of this device's rows, a scalar."""
        columns = list(sentence_features)
        guide_embeddings = self._guide_embeddings(columns, sys.maxsize)
        return self.compute_loss_from_embeddings(embed_columns(self.model, columns), labels, guide_embeddings)

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
        guide_embeddings: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the mean loss from (N, d) vectors of each column, and the guide's of the same where there is a guide."""
        batch = self._batch(embeddings, labels, guide_embeddings)
        return self._losses(batch, batch.own_rows).mean()

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings for the model's card."""
        shared = super().get_config_dict()
        return {name: value for name, value in shared.items() if not name.startswith("hardness_")} | {
            "guide": self.guide,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "mask_same_label": self.mask_same_label,
        }

    @property
    def citation(self) -> str:
        """BibTeX of the loss and of what it uses."""
        return self._source() + (_GISTEMBED if self.guide is not None else "")

    def _source(self) -> str:
        source: str = super().citation
        return source

    def _of_rows(self, contrast: Contrast, batch: _Batch) -> Tensor:  # noqa: ARG002
        """(n,) losses of the rows of one softmax: what the losses differ in."""
        return info_nce_of_rows(contrast)

    def _draw_noise(self, queries: Tensor) -> Tensor | None:  # noqa: ARG002
        """Noise for one step, which all mini-batches share."""
        return None

    def _losses(self, batch: _Batch, rows: Tensor) -> Tensor:
        """(n,) losses of some rows, the mean over the softmaxes."""
        # Under autocast similarities would be rounded to half precision, and the softmax would not see small differences.
        with torch.autocast(rows.device.type, enabled=False):
            losses = [self._of_rows(each, batch) for each in self._contrasts(batch, rows)]
        return torch.stack(losses).mean(dim=0)

    def _batch(
        self, embeddings: list[Tensor], labels: Tensor | None, guide_embeddings: list[Tensor] | None
    ) -> _Batch:
        """Gather the rows in contrast.

        Raises:
            RequestError: ``loss_invalid`` where columns, labels or the guide's vectors are missing.
        """
        if len(embeddings) < 2:
            raise RequestError(
                "loss_invalid", f"{len(embeddings)} columns of texts; an anchor and a positive are needed."
            )
        if self.guide is not None and guide_embeddings is None:
            raise RequestError("loss_invalid", "the loss has a guide; give its vectors as well.")
        size = len(embeddings[0])
        own_rows = torch.arange(size, device=embeddings[0].device)
        if self.gather_across_devices:
            own_rows += get_rank() * size
        vectors = self._gathered(embeddings, self.similarity_fct)
        return _Batch(
            vectors=vectors,
            own_rows=own_rows,
            guide=None if guide_embeddings is None else self._gathered(guide_embeddings, cos_sim),
            labels=self._gathered_labels(labels) if self.mask_same_label else None,
            noise=self._draw_noise(vectors.queries),
        )

    def _gathered(self, embeddings: list[Tensor], similarity: Similarity) -> _Vectors:
        columns = [at_least_float32(column) for column in embeddings]
        if self.gather_across_devices:
            columns = [all_gather_with_grad(column) for column in columns]
        return _Vectors(columns[0], torch.cat(columns[1:]), similarity)

    def _gathered_labels(self, labels: Tensor | None) -> Tensor:
        if labels is None or labels.ndim != 1 or labels.is_floating_point():
            raise RequestError("loss_invalid", "mask_same_label needs a column `label` of integers.")
        return all_gather(labels) if self.gather_across_devices else labels

    def _contrasts(self, batch: _Batch, rows: Tensor) -> list[Contrast]:
        """The softmaxes of some rows: one, or one for each direction."""
        vectors = batch.vectors
        similar = {direction: vectors.compare(direction, rows) for direction in self.directions}
        masks = self._masks(batch, rows, similar)
        positives = _own_pairs(similar, rows) * self.scale
        if self.partition_mode == "per_direction":
            compared = {"query_to_doc": vectors.queries, "doc_to_query": vectors.positives}
            return [
                Contrast(compared[direction][rows], positives, each * self.scale, masks[direction])
                for direction, each in similar.items()
            ]
        logits = torch.cat(list(similar.values()), dim=1) * self.scale
        mask = torch.cat(list(masks.values()), dim=1)
        own_pairs = 1 + ("doc_to_query" in self.directions)
        return [Contrast(vectors.queries[rows], positives, logits, mask, own_pairs)]

    def _masks(self, batch: _Batch, rows: Tensor, similar: dict[str, Tensor]) -> dict[str, Tensor]:
        """(n, C) bool by direction: which candidates are negatives of the rows."""
        size = len(batch.vectors.queries)
        others = torch.ones(len(rows), size, dtype=torch.bool, device=rows.device)
        others.scatter_(1, rows[:, None], False)
        negatives = others if batch.labels is None else others & other_group(batch.labels[rows], batch.labels)
        hard_columns = len(batch.vectors.documents) // size - 1
        # A hard negative was chosen for its anchor, and means something else than all rows of its label.
        with_own_hard = torch.cat([negatives, *[torch.ones_like(others)] * hard_columns], dim=1)
        without_own_hard = torch.cat([negatives, *[others] * hard_columns], dim=1)
        masks = {
            "query_to_doc": with_own_hard,
            "query_to_query": negatives,
            "doc_to_query": negatives,
            "doc_to_doc": without_own_hard,
        }
        if self.margin is None:
            return {direction: masks[direction] for direction in self.directions}
        if batch.guide is not None:
            similar = {direction: batch.guide.compare(direction, rows) for direction in self.directions}
        pairs = _own_pairs(similar, rows)
        return {
            direction: masks[direction]
            & below_positive(judged, pairs, margin=self.margin, margin_strategy=self.margin_strategy)
            for direction, judged in similar.items()
        }

    def _guide_embeddings(self, columns: list[Features], mini_batch_size: int) -> list[Tensor] | None:
        """(N, d′) vectors of the guide for each column, without gradients."""
        if self.guide is None:
            return None
        reader = CachedLossMixin()
        reader.model, reader.mini_batch_size = self.guide, mini_batch_size
        embeddings = []
        for column in columns:
            # Mini-batches are copies, so what the guide writes into its features never meets the model.
            parts = reader.embed_minibatch_iter(
                self._for_guide(column), with_grad=False, copy_random_state=False
            )
            embeddings.append(torch.cat([vectors for vectors, _ in parts]))
        return embeddings

    def _for_guide(self, column: Features) -> Features:
        """Tokenize the texts of a column again, if the guide reads other tokens."""
        if self._tokenizer is None or self.guide is None:
            return column
        tokens = column["input_ids"]
        if "cu_seq_lens_q" in column:  # rows without padding, one after the other
            tokens = tokens[0].split(column["cu_seq_lens_q"].diff().tolist())
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        features: Features = batch_to_device(self.guide.preprocess(texts), self.guide.device)
        return features


def _own_pairs(similar: dict[str, Tensor], rows: Tensor) -> Tensor:
    """(n,) similarities of the rows' own pairs."""
    return similar["query_to_doc"].gather(1, rows[:, None])[:, 0]


def _reads_other_tokens(guide: SentenceTransformer, model: SentenceTransformer) -> bool:
    """Whether the guide cannot take the model's tokens."""
    other: bool = (
        guide.tokenizer.get_vocab() != model.tokenizer.get_vocab()
        or guide.max_seq_length < model.max_seq_length
    )
    return other


class FlatNCELoss(InfoNCELoss):
    """FlatNCE, log ξ: InfoNCE without the own pair in the denominator, so that its gradient does not fade as ξ does.

    The gradient is that of ξ / stop_gradient(ξ); the value may be negative. The same as decoupled contrastive learning.
    Arguments and inputs are those of `InfoNCELoss`.

    Source: Chen et al. 2021 (arXiv:2107.01152); Su 2021 (kexue.fm/archives/8586) for log ξ.
    """

    def _source(self) -> str:
        return _FLATNCE

    def _of_rows(self, contrast: Contrast, batch: _Batch) -> Tensor:  # noqa: ARG002
        return flat_nce_of_rows(contrast)


class GSInfoNCELoss(InfoNCELoss):
    """GS-InfoNCE: InfoNCE with M Gaussian vectors, weighted by λ, as further negatives of every row.

    The vectors are drawn anew at each step, from torch's own generator. A joint softmax compares them with the anchors, as
    eq. 2 does; ``per_direction`` softmaxes with their own rows.

    Args:
        model: The model to train.
        scale: 1/T > 0; it multiplies the similarities of the noise as well.
        similarity_fct: As in `InfoNCELoss`.
        noise_per_anchor: M as a multiple of the rows in contrast, > 0, rounded to at least one vector; the paper takes 3.
        noise_weight: λ > 0.
        noise_mean: μ.
        noise_std: σ > 0; without effect where the similarity is the cosine and μ is 0.
        noise: ``gaussian``, or ``expected`` for the control arm, which adds λ·M·E[exp(cos/T)] instead of noise.
        in_batch: Further arguments of `InfoNCELoss`.

    Raises:
        RequestError: ``loss_invalid``.

    Source: Wu et al. 2022, "Smoothed Contrastive Learning for Unsupervised Sentence Embedding" (COLING), eq. 2.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Similarity = cos_sim,
        *,
        noise_per_anchor: float = 3.0,
        noise_weight: float = 1.0,
        noise_mean: float = 0.0,
        noise_std: float = 1.0,
        noise: Noise = "gaussian",
        **in_batch: Any,
    ) -> None:
        super().__init__(model, scale, similarity_fct, **in_batch)
        check_noise(noise_weight, noise_mean, noise_std, noise)
        if not noise_per_anchor > 0:
            raise RequestError(
                "loss_invalid", f"noise_per_anchor is {noise_per_anchor}; it must be positive."
            )
        if noise == "expected" and similarity_fct is not cos_sim:
            raise RequestError("loss_invalid", "noise='expected' is known for the cosine only.")
        self.noise_per_anchor = noise_per_anchor
        self.noise_weight = noise_weight
        self.noise_mean = noise_mean
        self.noise_std = noise_std
        self.noise = noise

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings for the model's card."""
        return super().get_config_dict() | {
            "noise_per_anchor": self.noise_per_anchor,
            "noise_weight": self.noise_weight,
            "noise_mean": self.noise_mean,
            "noise_std": self.noise_std,
            "noise": self.noise,
        }

    def _source(self) -> str:
        return _GS_INFONCE

    def _noise_count(self, queries: Tensor) -> int:
        return max(1, round(self.noise_per_anchor * len(queries)))

    def _draw_noise(self, queries: Tensor) -> Tensor | None:
        if self.noise == "expected":
            return None
        return gaussian_vectors(self._noise_count(queries), queries, self.noise_mean, self.noise_std)

    def _of_rows(self, contrast: Contrast, batch: _Batch) -> Tensor:
        if batch.noise is None:
            count = self._noise_count(batch.vectors.queries)
            logits = expected_noise_logits(contrast.vectors, count, self.temperature)
        else:
            logits = self.similarity_fct(contrast.vectors, batch.noise) * self.scale
        return info_nce_of_rows(contrast.with_negatives(logits + math.log(self.noise_weight)))


class _GradientCache(CachedLossMixin):  # type: ignore[misc]  # sentence-transformers is not typed for mypy
    """Turns a loss of this module into its cached twin: the same value and gradient, in mini-batches."""

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Similarity = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **in_batch: Any,
    ) -> None:
        if has_static_embedding_input(model):
            raise RequestError(
                "loss_invalid", "a StaticEmbedding cannot be split into mini-batches; use the plain loss."
            )
        if mini_batch_size < 1 or (mini_batch_num_tokens is not None and mini_batch_num_tokens < 1):
            raise RequestError("loss_invalid", "mini_batch_size and mini_batch_num_tokens are at least 1.")
        super().__init__(model, scale, similarity_fct, **in_batch)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Embed without gradients, take the loss's gradient by the vectors, and embed again in the backward pass."""
        columns = list(sentence_features)
        guide_embeddings = self._guide_embeddings(columns, self.mini_batch_size)
        # What is given as labels reaches calculate_loss untouched, and the guide's vectors with them.
        loss: Tensor = self.forward_cached(columns, (labels, guide_embeddings))
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the mean loss from the vectors of all mini-batches; go back through one mini-batch of rows at a time."""
        batch = self._batch([torch.cat(column) for column in reps], *(labels or (None, None)))
        total = torch.zeros((), device=batch.own_rows.device)
        for rows in batch.own_rows.split(self.mini_batch_size):
            loss = self._losses(batch, rows).sum() / len(batch.own_rows)
            if with_backward:
                loss.backward()
                loss = loss.detach()
            total = total + loss
        return total

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings for the model's card."""
        shared: dict[str, Any] = super().get_config_dict()
        return shared | {
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
        }

    @property
    def citation(self) -> str:
        """BibTeX of the loss and of what it uses."""
        sources: str = super().citation
        return sources + _GRADCACHE


class CachedInfoNCELoss(_GradientCache, InfoNCELoss):
    """`InfoNCELoss` with GradCache: memory for `mini_batch_size` rows, whatever the batch.

    Args, besides those of `InfoNCELoss`:
        mini_batch_size: Rows that are embedded at once, and rows of similarities that are held at once.
        mini_batch_num_tokens: Embed as many rows at once as have this many tokens, instead.
        show_progress_bar: Show the mini-batches of a step.

    Source: Gao et al. 2021 (arXiv:2101.06983).
    """


class CachedFlatNCELoss(_GradientCache, FlatNCELoss):
    """`FlatNCELoss` with GradCache; see `CachedInfoNCELoss`."""


class CachedGSInfoNCELoss(_GradientCache, GSInfoNCELoss):
    """`GSInfoNCELoss` with GradCache, all mini-batches of a step meeting the same noise; see `CachedInfoNCELoss`."""


_FLATNCE = """
@misc{chen2021simpler,
    title={Simpler, Faster, Stronger: Breaking The log-K Curse On Contrastive Learners With FlatNCE},
    author={Junya Chen and Zhe Gan and Xuan Li and Qing Guo and Liqun Chen and Shuyang Gao and Tagyoung Chung and
        Yi Xu and Belinda Zeng and Wenlian Lu and Fan Li and Lawrence Carin and Chenyang Tao},
    year={2021},
    eprint={2107.01152},
    archivePrefix={arXiv},
}
"""

_GS_INFONCE = """
@inproceedings{wu-etal-2022-smoothed,
    title={Smoothed Contrastive Learning for Unsupervised Sentence Embedding},
    author={Xing Wu and Chaochen Gao and Yipeng Su and Jizhong Han and Zhongyuan Wang and Songlin Hu},
    booktitle={Proceedings of the 29th International Conference on Computational Linguistics},
    year={2022},
    pages={4902--4906},
    url={https://aclanthology.org/2022.coling-1.434},
}
"""

_GISTEMBED = """
@misc{solatorio2024gistembed,
    title={GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding Fine-tuning},
    author={Aivin V. Solatorio},
    year={2024},
    eprint={2402.16829},
    archivePrefix={arXiv},
}
"""

_GRADCACHE = """
@misc{gao2021scaling,
    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},
    year={2021},
    eprint={2101.06983},
    archivePrefix={arXiv},
}
"""
