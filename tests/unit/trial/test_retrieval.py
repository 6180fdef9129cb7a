"""Retrieval scores against loops from their definitions, and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from probe_service.estimate import Evidence
from probe_service.trial.retrieval import Relevance, retrieval_scores
from tests.oracles import unit_rows


def by_the_definition(similar, answers, own, k):
    """AP, recall@k and accuracy of one query: similarities of the candidates, set of right ones, place of the query or None."""
    others = [j for j in range(len(similar)) if j != own]
    precisions = []
    for answer in answers:
        at_least = [j for j in others if similar[j] >= similar[answer]]
        precisions.append(sum(j in answers for j in at_least) / len(at_least))

    def hit(k):
        return any(sum(similar[j] >= similar[answer] for j in others) <= k for answer in answers)

    return np.mean(precisions), hit(k), hit(1)


@pytest.mark.parametrize("ties", [False, True])
def test_groups_against_loops(ties):
    rng = np.random.default_rng(1)
    vectors = unit_rows(rng, 30, 5)
    if ties:
        vectors = vectors[rng.integers(0, 8, 30)]
    groups = [str(group) for group in rng.integers(0, 12, 30)]
    relevance = Relevance.from_evidence(Evidence.from_keys(None, None, groups), 30, among_themselves=True)
    found = retrieval_scores(vectors, vectors, relevance, recall_at=3)
    similar = vectors @ vectors.T
    expected = []
    for i in range(30):
        answers = {j for j in range(30) if j != i and groups[j] == groups[i]}
        if answers:
            expected.append(by_the_definition(similar[i], answers, i, 3))
    assert 20 < len(expected) < 30
    assert list(relevance.answerable) == [i for i in range(30) if groups.count(groups[i]) > 1]
    mean = np.mean(expected, axis=0)
    assert found == pytest.approx({"map": mean[0], "recall_at_3": mean[1], "accuracy": mean[2]})


def test_average_precision_is_scikit_learns():
    rng = np.random.default_rng(2)
    anchors, positives = unit_rows(rng, 40, 6), unit_rows(rng, 40, 6)
    anchor_keys = [f"a{key}" for key in rng.integers(0, 25, 40)]
    positive_keys = [f"p{key}" for key in rng.integers(0, 25, 40)]
    evidence = Evidence.from_keys(anchor_keys, positive_keys, None)
    relevance = Relevance.from_evidence(evidence, 40, among_themselves=False)
    found = retrieval_scores(anchors, positives, relevance, recall_at=5, asked=np.arange(0, 40, 2))
    expected = []
    for i in range(0, 40, 2):
        accepted = {positive_keys[j] for j in range(40) if anchor_keys[j] == anchor_keys[i]}
        right = [key in accepted for key in positive_keys]
        expected.append(average_precision_score(right, positives @ anchors[i]))
    assert found["map"] == pytest.approx(np.mean(expected))


def test_a_perfect_and_a_hopeless_ranking():
    vectors = np.eye(4, dtype=np.float32)[[0, 0, 1, 1]]
    groups = Evidence.from_keys(None, None, ["a", "a", "b", "b"])
    relevance = Relevance.from_evidence(groups, 4, among_themselves=True)
    assert set(retrieval_scores(vectors, vectors, relevance, recall_at=1).values()) == {1.0}
    crossed = Evidence.from_keys(None, None, ["a", "b", "a", "b"])
    relevance = Relevance.from_evidence(crossed, 4, among_themselves=True)
    # The row of the other group is nearest; the own one ties with the last, which counts against it: one of three.
    expected = {"map": 1 / 3, "recall_at_2": 0.0, "accuracy": 0.0}
    assert retrieval_scores(vectors, vectors, relevance, recall_at=2) == pytest.approx(expected)
