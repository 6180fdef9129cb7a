"""What the ranking losses of sentence-transformers see on four devices, against our counts and a loop of our own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from probe_service.corpus.candidates import (
    candidates_per_anchor,
    softmax_candidates,
)
from probe_service.schemas import Direction, PartitionMode

pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.slow

WORLD, SIZE, DIMENSION = 4, 64, 5


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """One training step of every loss on every device."""
    script = Path(__file__).with_name("gathered_losses.py")
    run = subprocess.run(
        [sys.executable, script, str(WORLD), str(SIZE), tmp_path_factory.mktemp("gathered")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("hard_negatives", [0, 1, 3])
def test_the_sampler_table(seen, hard_negatives, gather, cached):
    """N = 64 on each of four devices: the negatives of an anchor are those that the loss counts."""
    found = [
        each["finite_logits"] - 1
        for each in seen
        if each["directions"] == ["query_to_doc"]
        and (each["hard_negatives"], each["gather"], each["cached"]) == (hard_negatives, gather, cached)
    ]
    expected = candidates_per_anchor(SIZE, WORLD, gather=gather, hard_negatives=hard_negatives)
    assert found == pytest.approx([expected] * WORLD, abs=1e-6)


def test_every_direction_and_partition_sees_what_we_count(seen):
    assert len(seen) == WORLD * 3 * 2 * 2 * 6
    for each in seen:
        rows = SIZE * (WORLD if each["gather"] else 1)
        counted = softmax_candidates(
            [Direction(direction) for direction in each["directions"]],
            PartitionMode(each["partition_mode"]),
            rows,
            each["hard_negatives"],
        )
        # Separate softmaxes are averaged as logarithms.
        mean = math.exp(sum(math.log(softmax.terms) for softmax in counted) / len(counted))
        assert each["finite_logits"] == pytest.approx(mean, rel=1e-9), each


def loss_by_hand(table, device, hard, gather, directions, mode):
    """The loss of one device, from lists of the terms that each of its rows meets."""
    total = WORLD * SIZE
    columns = [table[column * total : (column + 1) * total] for column in range(2 + hard)]
    anchors, positives, documents = columns[0], columns[1], columns[1:]
    own = range(device * SIZE, (device + 1) * SIZE)
    meeting = range(total) if gather else own
    losses = []
    for i in own:
        others = [j for j in meeting if j != i]
        terms = {
            "query_to_doc": [column[list(meeting)] @ anchors[i] for column in documents],
            "query_to_query": [anchors[others] @ anchors[i]],
            "doc_to_query": [anchors[list(meeting)] @ positives[i]],
            "doc_to_doc": [column[others] @ positives[i] for column in documents],
        }
        logits = [np.concatenate(terms[direction]) for direction in directions]
        softmaxes = [np.concatenate(logits)] if mode == "joint" else logits
        denominators = [math.log(np.exp(softmax).sum()) for softmax in softmaxes]
        losses.append(sum(denominators) / len(denominators) - anchors[i] @ positives[i])
    return sum(losses) / len(losses)


def test_the_terms_are_those_rows_and_no_others(seen):
    """Counts alone could be right for the wrong rows: the loss itself, from the rows that we say meet."""
    device = 2
    checked = 0
    for each in seen:
        if each["rank"] != device:
            continue
        generator = torch.Generator().manual_seed(0)
        rows = WORLD * SIZE * (2 + each["hard_negatives"])
        table = torch.randn(rows, DIMENSION, generator=generator, dtype=torch.float64).numpy()
        expected = loss_by_hand(
            table,
            device,
            each["hard_negatives"],
            each["gather"],
            each["directions"],
            each["partition_mode"],
        )
        assert each["loss"] == pytest.approx(expected, rel=1e-9), each
        checked += 1
    assert checked == 72
