"""Audits where q_N is not known: other samplers, and hard negatives among the candidates."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from probe_service.audit import apply_audit
from probe_service.audit.drawing import draw_audit
from probe_service.errors import RequestError
from probe_service.estimate import Evidence, SamplingPlan
from probe_service.judges import Answer, Sheet
from probe_service.measure.terms import Softmaxes
from probe_service.schemas import LossOptions, ProbeRequest
from probe_service.settings import Settings
from probe_service.workspace import HardNegatives, Population, Workspace

ROWS, GROUPS, SIZE, T = 240, 40, 16, 0.05


def lay_out(file, folder, **request):
    request = ProbeRequest.model_validate({"batch_sizes": [SIZE], **request})
    work = Workspace(request, file, file.name, folder, Settings(home=folder / "home"), lambda: None)
    work.read()
    work.gather()
    return work, request


@pytest.fixture(scope="module")
def sorted_corpus(tmp_path_factory):
    """Rows sorted by meaning, so that batches in file order are full of false negatives; nothing is known of them."""
    rng = np.random.default_rng(4)
    group = np.sort(rng.integers(0, GROUPS, ROWS))
    centres = rng.standard_normal((GROUPS, 12))
    vectors = centres[group] + 0.9 * rng.standard_normal((ROWS, 12))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).round(5)
    file = tmp_path_factory.mktemp("sorted") / "rows.jsonl"
    with file.open("w") as lines:
        for row in range(ROWS):
            lines.write(
                json.dumps({"text": f"row {row} of {group[row]}", "embedding": vectors[row].tolist()})
            )
            lines.write("\n")
    return file, group, vectors


def test_labels_of_batches_in_file_order_estimate_their_share(sorted_corpus, tmp_path):
    file, group, vectors = sorted_corpus
    shares = []
    for start in range(0, ROWS, SIZE):
        rows = np.arange(start, start + SIZE)
        weights = np.exp(vectors[rows] @ vectors[rows].T / T)
        np.fill_diagonal(weights, 0.0)
        same = group[rows][:, None] == group[rows][None, :]
        shares.append(((weights * same).sum(axis=1) / weights.sum(axis=1)).mean())
    truth = float(np.mean(shares))
    work, request = lay_out(file, tmp_path / "work", sampler={"kind": "sequential"})
    drawn = draw_audit(work, tmp_path / "work", request, labels=400, checks=0)
    batch_of = np.arange(ROWS) // SIZE
    assert all(batch_of[pair.anchor] == batch_of[pair.candidate] for pair in drawn.audit.design.pairs)
    sheet = Sheet(tmp_path / "pairs.jsonl", drawn.questions, {})
    for question in drawn.questions:
        same = question.anchor.rsplit(" ", 1)[1] == question.candidate.rsplit(" ", 1)[1]
        sheet.record(question.id, Answer.YES if same else Answer.NO, "person")
    report = apply_audit(drawn.audit, sheet)
    (share,) = report.shares
    assert share.estimate.low <= truth <= share.estimate.high
    assert share.estimate.high - share.estimate.low < 0.12
    assert share.effective_labels == pytest.approx(400)
    assert report.n_max is None
    assert truth > 0.5


def test_one_size_at_a_time(sorted_corpus, tmp_path):
    file, _, _ = sorted_corpus
    work, request = lay_out(file, tmp_path / "work", sampler={"kind": "sequential"}, batch_sizes=[8, 16])
    with pytest.raises(RequestError, match="audit_one_size"):
        draw_audit(work, tmp_path / "work", request, labels=50)


def test_candidates_are_drawn_by_their_weight_hard_negatives_included():
    rng = np.random.default_rng(0)

    def unit(*shape):
        vectors = rng.standard_normal(shape).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    rows, per_row, temperature = 5, 2, 0.4
    anchors, positives, hard = unit(rows, 6), unit(rows, 6), unit(rows * per_row, 6)
    anchor_keys, positive_keys = [f"a{i}" for i in range(rows)], [f"p{i}" for i in range(rows)]
    hard_keys = [f"h{i}" for i in range(rows * per_row)]
    hard_keys[3] = "p0"  # listed as the positive of row 0: certainly a false negative of its anchor
    population = Population(
        name="all",
        anchors=anchors,
        positives=positives,
        own_similarity=None,
        anchor_keys=anchor_keys,
        positive_keys=positive_keys,
        groups=None,
        sources=None,
        evidence=Evidence.from_keys(anchor_keys, positive_keys, None),
        hard_negatives=HardNegatives(
            hard,
            np.arange(rows) * per_row,
            np.full(rows, per_row),
            per_row,
            tuple(hard_keys),
            (None,) * len(hard_keys),
        ),
        plan=SamplingPlan(rows_usable=rows, rows_encoded=rows, num_repeats=2, seed=0),
        floor=None,
    )
    softmaxes = Softmaxes(population, LossOptions(), temperature=temperature, k=1, borrowed=None)
    batch = np.array([4, 0, 2])
    seen: dict[tuple[int, int], int] = {}
    judged = set()
    draws = 6000
    for _ in range(draws):
        pair = softmaxes.draw_pair(batch, rng)
        seen[pair.anchor, pair.candidate] = seen.get((pair.anchor, pair.candidate), 0) + 1
        if pair.judged:
            judged.add((pair.anchor, pair.candidate))
    expected = {}
    for anchor in batch.tolist():
        candidates = {other: positives[other] for other in batch.tolist() if other != anchor}
        candidates |= {
            rows + other * per_row + place: hard[other * per_row + place]
            for other in batch.tolist()
            for place in range(per_row)
        }
        weights = {c: np.exp(float(anchors[anchor] @ v) / temperature) for c, v in candidates.items()}
        total = sum(weights.values()) * len(batch)
        expected |= {(anchor, c): draws * weight / total for c, weight in weights.items()}
    assert set(seen) <= set(expected)
    statistic = sum((seen.get(pair, 0) - count) ** 2 / count for pair, count in expected.items())
    assert statistic < stats.chi2.ppf(0.9999, len(expected) - len(batch))
    # Hard negative 3 is row 1's, which is not in the batch; had it been, (0, rows + 3) would be judged.
    assert judged == set()
    again = softmaxes.draw_pair
    found = {(p.anchor, p.candidate) for p in (again(np.array([0, 1]), rng) for _ in range(400)) if p.judged}
    assert found == {(0, rows + 3)}
