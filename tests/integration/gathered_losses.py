"""Run the ranking losses of sentence-transformers on several devices (processes) and print what each saw, as JSON.

Run as ``python gathered_losses.py WORLD_SIZE ROWS_PER_DEVICE FOLDER``. Every process embeds rows of its own by reading them
from a table, gives them to the losses as one training step does, and lets a similarity of zero count the finite logits of
the softmax: the loss is then the logarithm of their number.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import sys
from pathlib import Path

import torch
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

DIMENSION = 5
DIRECTIONS = [
    ["query_to_doc"],
    ["query_to_doc", "doc_to_query"],
    ["query_to_doc", "query_to_query"],
    ["query_to_doc", "doc_to_doc"],
    ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"],
]
HARD_NEGATIVES = [0, 1, 3]


class Table(torch.nn.Module):
    """Looks its rows up: the smallest model that the losses can train."""

    def __init__(self, rows):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(
            torch.randn(rows, DIMENSION, generator=generator, dtype=torch.float64)
        )

    def forward(self, features):
        return {"sentence_embedding": self.weight[features["input_ids"][:, 0]]}

    def __getitem__(self, _place):
        return self


def all_alike(left, right):
    """A similarity of zero for every pair."""
    return 0.0 * (left @ right.T)


def dot(left, right):
    return left @ right.T


def features_of(rank, size, world, hard):
    """One column after the other, as a data collator gives them; column c of global row i is table row c·G + i."""
    rows = world * size
    columns = [torch.arange(column * rows, (column + 1) * rows) for column in range(2 + hard)]
    own = slice(rank * size, (rank + 1) * size)
    return [
        {
            "input_ids": column[own, None],
            "attention_mask": torch.ones(size, 1, dtype=torch.int64),
        }
        for column in columns
    ]


def step(rank, world, size):
    """All losses of one step, on one device."""
    seen = []
    for hard, gather, cached in itertools.product(HARD_NEGATIVES, (False, True), (False, True)):
        table = Table(world * size * (2 + hard))
        kind = CachedMultipleNegativesRankingLoss if cached else MultipleNegativesRankingLoss
        for directions, mode in [(each, "joint") for each in DIRECTIONS] + [(DIRECTIONS[1], "per_direction")]:
            losses = []
            for similarity in (all_alike, dot):
                # Mini-batches that do not divide the batch; they must not lessen the candidates.
                more = {"mini_batch_size": max(1, size // 3)} if cached else {}
                loss = kind(
                    table,
                    scale=1.0,
                    similarity_fct=similarity,
                    gather_across_devices=gather,
                    directions=tuple(directions),
                    partition_mode=mode,
                    **more,
                )
                losses.append(loss(features_of(rank, size, world, hard), None).item())
            seen.append(
                {
                    "rank": rank,
                    "hard_negatives": hard,
                    "gather": gather,
                    "cached": cached,
                    "directions": directions,
                    "partition_mode": mode,
                    "finite_logits": math.exp(losses[0]),
                    "loss": losses[1],
                }
            )
    return seen


def device(rank, world, size, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    (Path(folder) / f"seen-{rank}.json").write_text(json.dumps(step(rank, world, size)), "utf-8")
    torch.distributed.destroy_process_group()


def main():
    world, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Forked, so that the libraries are imported once and not once for each device.
    forked = multiprocessing.get_context("fork")
    devices = [forked.Process(target=device, args=(rank, world, size, folder)) for rank in range(world)]
    for each in devices:
        each.start()
    for each in devices:
        each.join()
    seen = [
        each
        for rank in range(world)
        for each in json.loads((Path(folder) / f"seen-{rank}.json").read_text("utf-8"))
    ]
    print(json.dumps(seen))
    return max(each.exitcode for each in devices)


if __name__ == "__main__":
    sys.exit(main())
