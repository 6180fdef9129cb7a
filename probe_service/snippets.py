"""Python to paste into a training script, so that it trains as the probe measured. Light: text only.

Written for sentence-transformers 6; the tests run every snippet with it. All speak of the same names: `model`, a
SentenceTransformer; `rows`, the datasets.Dataset of the probed corpus; `train_dataset`, `args` and `loss`, which go to the
SentenceTransformerTrainer. Names of columns and models stand in the code as Python literals, whatever they hold.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import Literal

from probe_service.corpus.batching import BatchSampler
from probe_service.errors import RequestError
from probe_service.known_encoders import find_known_encoder
from probe_service.schemas import GroupedPolicy, SamplerKind

__all__ = ["drop_rows", "group_aware", "masking_loss", "training_arguments"]

_WIDTH = 100
_BATCH_SAMPLERS = {
    SamplerKind.RANDOM: "BatchSamplers.BATCH_SAMPLER",
    SamplerKind.NO_DUPLICATES: "BatchSamplers.NO_DUPLICATES",
}
_POLICIES = {
    GroupedPolicy.ROUND_ROBIN: "MultiDatasetBatchSamplers.ROUND_ROBIN",
    GroupedPolicy.PROPORTIONAL: "MultiDatasetBatchSamplers.PROPORTIONAL",
}
_IN_FILE_ORDER = """

def in_file_order(dataset, **options):
    return DefaultBatchSampler(SequentialSampler(dataset), **options)


"""
_GROUP_AWARE_SAMPLER = '''

class GroupAwareBatchSampler(DefaultBatchSampler):
    """No group, and no text, twice among the rows that are contrasted with each other."""

    def __init__(self, dataset, batch_size, drop_last, **options):
        super().__init__(dataset, batch_size, drop_last, **options)
        keys = [
            f"(no group) {row}" if group is None else f"(group) {group}"
            for row, group in enumerate(groups)
        ]
        self.steps = NoDuplicatesBatchSampler(
            dataset.add_column("(group)", keys), devices_together * batch_size, drop_last, **options
        )

    def set_epoch(self, epoch):
        self.steps.set_epoch(epoch)

    def __iter__(self):
        for step in self.steps:
            for first in range(0, len(step), self.batch_size):
                yield step[first : first + self.batch_size]

    def __len__(self):
        return devices_together * len(self.steps)


'''


def training_arguments(
    sampler: BatchSampler,
    *,
    temperature: float,
    text_columns: Sequence[str],
    source_column: str = "source",
    mini_batch_size: int | None = None,
) -> str:
    """Write the data set, the arguments and the loss that draw batches as `sampler` does.

    Args:
        sampler: How batches are drawn.
        temperature: T > 0; the loss's scale is 1/T.
        text_columns: Columns that are trained on, each with one text a row, in the order anchor, positive, hard negatives.
            One alone is its own positive, through dropout (unsupervised SimCSE).
        source_column: Names the source of each row; used by `grouped` alone.
        mini_batch_size: Rows that go through the model at once, in a cached loss; None for the plain loss.

    Returns:
        Python that makes `train_dataset`, `args` and `loss`.

    Raises:
        ValueError: if the temperature is not a positive number.
    """
    imports, before, more = [], [], []
    match sampler.kind:
        case SamplerKind.SEQUENTIAL:
            imports = [
                "from sentence_transformers.base.sampler import DefaultBatchSampler",
                "from torch.utils.data import SequentialSampler",
            ]
            before = [*_select_texts(text_columns), *_IN_FILE_ORDER.splitlines()]
            batch_sampler = "in_file_order"
        case SamplerKind.GROUPED:
            imports = [
                "from datasets import DatasetDict",
                "from sentence_transformers.base.sampler import BatchSamplers, MultiDatasetBatchSamplers",
            ]
            before = [
                *_select_texts(text_columns),
                "by_source = {}",
                f"for place, source in enumerate(rows[{source_column!r}]):",
                "    by_source.setdefault(str(source), []).append(place)",
                "train_dataset = DatasetDict(",
                "    {source: train_dataset.select(places) for source, places in by_source.items()}",
                ")",
            ]
            batch_sampler = _BATCH_SAMPLERS[sampler.within_source]
            more = [f"multi_dataset_batch_sampler={_POLICIES[sampler.policy]}"]
        case kind:
            imports = ["from sentence_transformers.base.sampler import BatchSamplers"]
            before = _select_texts(text_columns)
            batch_sampler = _BATCH_SAMPLERS[kind]
    return _text(
        _preamble(sampler),
        _imports(imports, mini_batch_size),
        [*before, *_arguments_and_loss(sampler, temperature, batch_sampler, more, mini_batch_size)],
    )


def group_aware(
    sampler: BatchSampler,
    *,
    temperature: float,
    text_columns: Sequence[str],
    group_column: str,
    mini_batch_size: int | None = None,
) -> str:
    """Write a batch sampler under which no two rows of one group meet, and no text twice; the rest as `sampler` says.

    It is sentence-transformers' `NO_DUPLICATES` with the group as one more text. Where the loss gathers, the rule holds for
    all devices of a step together, unlike `NO_DUPLICATES`.

    Args:
        sampler: Batch size, devices, gathering; its kind is not used.
        temperature: T > 0; the loss's scale is 1/T.
        text_columns: As in `training_arguments`.
        group_column: Rows with the same value there mean the same; a null means like no other row.
        mini_batch_size: As in `training_arguments`.

    Returns:
        Python that makes `train_dataset`, `args` and `loss`.

    Raises:
        ValueError: if the temperature is not a positive number.
    """
    together = sampler.world_size if sampler.gather else 1
    before = [
        f"groups = rows[{group_column!r}]",
        *_select_texts(text_columns),
        f"devices_together = {together}",
        *_GROUP_AWARE_SAMPLER.splitlines(),
    ]
    imports = ["from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler"]
    arguments = _arguments_and_loss(sampler, temperature, "GroupAwareBatchSampler", [], mini_batch_size)
    return _text(_preamble(sampler), _imports(imports, mini_batch_size), [*before, *arguments])


def masking_loss(
    margin: float,
    *,
    guide: str,
    temperature: float,
    margin_strategy: Literal["absolute", "relative"] = "absolute",
    gather: bool = False,
    mini_batch_size: int | None = None,
) -> str:
    """Write a loss that leaves out candidates which the guide finds nearly as close to the anchor as its positive.

    A candidate is masked where guide cosine > positive's guide cosine − margin (`absolute`), or > positive's −
    |positive's| · margin (`relative`); the larger the margin, the more is masked. Anchors are contrasted with documents
    alone, as in `MultipleNegativesRankingLoss`.

    Args:
        margin: See above; the same as the probe measured.
        guide: The encoder that the probe measured with, by a name or path that sentence-transformers loads as it is.
        temperature: T > 0.
        margin_strategy: See above.
        gather: Whether candidates of all devices are compared.
        mini_batch_size: Rows that go through the models at once, in the cached loss; None for the plain one, which takes at
            most one hard negative a row.

    Returns:
        Python that makes `loss`.

    Raises:
        RequestError: encoder_no_guide for an encoder that sentence-transformers would pool wrongly.
        ValueError: if a number is not finite, or the temperature not positive.
    """
    known = find_known_encoder(guide)
    if known is not None and known.pooling != "mean":
        raise RequestError(
            "encoder_no_guide",
            f"{known.name} loaded by name in sentence-transformers is pooled wrongly; save it with its modules and name"
            " that folder as guide.",
        )
    named = [repr(guide if known is None else known.hub_name)]
    if known is not None and known.revision is not None:
        named.append(f"revision={known.revision!r}")
    kind = "GISTEmbedLoss" if mini_batch_size is None else "CachedGISTEmbedLoss"
    limit = "positive - margin" if margin_strategy == "absolute" else "positive - abs(positive) * margin"
    arguments = [
        f"temperature={_positive(temperature)}",
        *([] if mini_batch_size is None else [f"mini_batch_size={mini_batch_size:d}"]),
        f"margin_strategy={margin_strategy!r}",
        f"margin={_finite(margin)}",
        "contrast_anchors=False",
        "contrast_positives=False",
        f"gather_across_devices={gather}",
    ]
    return _text(
        [
            "# Expects `model`, a SentenceTransformer. Leaves out candidates whose cosine to the anchor, by the guide,",
            f"# is above {limit}; positive is the cosine of the anchor's own positive.",
        ],
        [
            "from sentence_transformers import SentenceTransformer",
            f"from sentence_transformers.sentence_transformer.losses import {kind}",
        ],
        [
            *_call("guide = SentenceTransformer", named),
            *_call(f"loss = {kind}", ["model", "guide", *arguments]),
        ],
    )


def drop_rows(row_numbers: Collection[int], *, rows_read: int) -> str:
    """Write what drops rows by the numbers that the report gives them.

    Args:
        row_numbers: From 1, in the order of the corpus.
        rows_read: Rows of the corpus; the code refuses a data set with another number, whose numbers would be others.

    Returns:
        Python that makes `rows` shorter.

    Raises:
        ValueError: if a number is not that of a row.
    """
    numbers = sorted(set(row_numbers))
    if numbers and not 1 <= numbers[0] <= numbers[-1] <= rows_read:
        raise ValueError(f"row numbers {numbers[0]} to {numbers[-1]} are not all among {rows_read} rows")
    listed = textwrap.wrap(", ".join(f"{number:d}" for number in numbers), _WIDTH - 4)
    return _text(
        [
            "# Expects `rows`, the datasets.Dataset of the probed corpus, with all its rows in their order.",
            "# Rows are numbered from 1.",
        ],
        [],
        [
            *(["dropped = {", *(f"    {line}" for line in listed), "}"] if listed else ["dropped = set()"]),
            f"if len(rows) != {rows_read:d}:",
            f'    raise ValueError(f"the probed corpus had {rows_read:d} rows, not {{len(rows)}}")',
            "rows = rows.select([row for row in range(len(rows)) if row + 1 not in dropped])",
        ],
    )


def _text(comments: list[str], imports: list[str], body: list[str]) -> str:
    return "\n".join([*comments, *imports, *([""] if imports else []), *body]) + "\n"


def _preamble(sampler: BatchSampler) -> list[str]:
    comments = [
        "# Expects `model`, a SentenceTransformer, and `rows`, the datasets.Dataset of the probed corpus.",
        f"# {sampler.rows_in_contrast} rows are contrasted with each other.",
    ]
    if sampler.world_size > 1:
        comments.append(
            f"# Start it on {sampler.world_size} devices: torchrun --nproc-per-node {sampler.world_size} …"
        )
    return comments


def _imports(samplers: list[str], mini_batch_size: int | None) -> list[str]:
    return sorted(
        [
            "from sentence_transformers import SentenceTransformerTrainingArguments",
            f"from sentence_transformers.sentence_transformer.losses import {_ranking_loss(mini_batch_size)}",
            *samplers,
        ]
    )


def _ranking_loss(mini_batch_size: int | None) -> str:
    return f"{'' if mini_batch_size is None else 'Cached'}MultipleNegativesRankingLoss"


def _select_texts(text_columns: Sequence[str]) -> list[str]:
    """Select the columns to train on: the trainer takes every column for a text, in the order that they come in."""
    lines = [f"train_dataset = rows.select_columns({list(text_columns)!r})"]
    if len(text_columns) == 1:
        lines.append(
            f'train_dataset = train_dataset.add_column("(same text)", list(rows[{text_columns[0]!r}]))'
        )
    return lines


def _arguments_and_loss(
    sampler: BatchSampler,
    temperature: float,
    batch_sampler: str,
    more: list[str],
    mini_batch_size: int | None,
) -> list[str]:
    return [
        *_call(
            "args = SentenceTransformerTrainingArguments",
            [
                "output_dir='checkpoints'",
                f"per_device_train_batch_size={sampler.per_device_batch_size:d}",
                f"dataloader_drop_last={sampler.drop_last}",
                f"batch_sampler={batch_sampler}",
                *more,
            ],
        ),
        *_call(
            f"loss = {_ranking_loss(mini_batch_size)}",
            [
                "model",
                f"scale=1 / {_positive(temperature)}",
                *([] if mini_batch_size is None else [f"mini_batch_size={mini_batch_size:d}"]),
                f"gather_across_devices={sampler.gather}",
            ],
        ),
    ]


def _call(called: str, arguments: list[str]) -> list[str]:
    return [f"{called}(", *(f"    {argument}," for argument in arguments), ")"]


def _finite(number: float) -> str:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return repr(float(number))


def _positive(number: float) -> str:
    if not number > 0:
        raise ValueError(f"{number} is not positive")
    return _finite(number)
