"""One training step of the losses on two devices (processes) that gather their rows; prints loss and gradient of each.

Run as ``python -m tests.unit.losses.gathered_step FOLDER``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch

from probe_service.losses import CachedFlatNCELoss, CachedInfoNCELoss, FlatNCELoss, InfoNCELoss
from tests.unit.losses.table import Table

WORLD, SIZE = 2, 8
LABELS = [0, 1, 2, -1, 0, 3, 1, -1]
SETTINGS = {
    "directions": ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"],
    "mask_same_label": True,
    "margin": 0.0,
}


def step(rank):
    own = slice(rank * SIZE // WORLD, (rank + 1) * SIZE // WORLD)
    seen = {}
    for kind in (InfoNCELoss, CachedInfoNCELoss, FlatNCELoss, CachedFlatNCELoss):
        table = Table(SIZE, 3)
        more = {"mini_batch_size": 3} if kind.__name__.startswith("Cached") else {}
        loss = kind(table, gather_across_devices=True, **SETTINGS, **more)
        value = loss(table.features(own), torch.tensor(LABELS[own]))
        value.backward()
        seen[kind.__name__] = {"loss": value.item(), "gradient": table.weight.grad.tolist()}
    return seen


def device(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    (Path(folder) / f"seen-{rank}.json").write_text(json.dumps(step(rank)), "utf-8")
    torch.distributed.destroy_process_group()


def main():
    folder = sys.argv[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Forked, so that the libraries are imported once and not once for each device.
    forked = multiprocessing.get_context("fork")
    devices = [forked.Process(target=device, args=(rank, folder)) for rank in range(WORLD)]
    for each in devices:
        each.start()
    for each in devices:
        each.join()
    seen = [json.loads((Path(folder) / f"seen-{rank}.json").read_text("utf-8")) for rank in range(WORLD)]
    print(json.dumps(seen))
    return max(each.exitcode for each in devices)


if __name__ == "__main__":
    sys.exit(main())
