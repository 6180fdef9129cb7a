from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.estimate.evidence import Evidence


def known(i, j, anchors, positives, groups):
    """The definition, word for word."""
    if i == j:
        return False
    if groups is not None and groups[i] is not None and groups[i] == groups[j]:
        return True
    if anchors is None:
        return False
    candidate = (positives or anchors)[j]
    if candidate == anchors[i]:
        return True
    return positives is not None and any(
        anchors[r] == anchors[i] and positives[r] == candidate for r in range(len(anchors))
    )


def judged(i, j, anchors, positives, groups):
    if known(i, j, anchors, positives, groups):
        return True
    return groups is not None and groups[i] is not None and groups[j] is not None


texts = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    anchors=texts,
    with_positives=st.booleans(),
    with_texts=st.booleans(),
    with_groups=st.booleans(),
    draw=st.randoms(),
)
def test_pairs_counts_and_shares_follow_the_definition(
    anchors, with_positives, with_texts, with_groups, draw
):
    n = len(anchors)
    positives = [draw.choice("abcxyz") for _ in anchors] if with_positives else None
    groups = [draw.choice(["g", "h", "k", None]) for _ in anchors] if with_groups else None
    if not with_texts:
        anchors, positives = None, None
        groups = groups or [None] * n
    evidence = Evidence.from_keys(anchors, positives, groups)
    truth = {(i, j) for i in range(n) for j in range(n) if known(i, j, anchors, positives, groups)}
    counts = evidence.false_negative_counts()
    assert counts.tolist() == [sum((i, j) in truth for j in range(n)) for i in range(n)]

    order = np.array([draw.sample(range(n), n) for _ in range(3)])
    found = evidence.known_pairs(order)
    triples = list(zip(found.batch.tolist(), found.anchor.tolist(), found.candidate.tolist(), strict=True))
    assert len(triples) == len(set(triples))
    assert set(triples) == {
        (b, p, q) for b in range(3) for p in range(n) for q in range(n) if (order[b, p], order[b, q]) in truth
    }
    half = slice(n // 3, n)
    part = evidence.known_pairs(order[:1], half)
    assert set(zip(part.anchor.tolist(), part.candidate.tolist(), strict=True)) == {
        (p, q) for b, p, q in triples if b == 0 and p >= n // 3
    }
    if n >= 2:
        unjudged = sum(
            not judged(i, j, anchors, positives, groups) for i in range(n) for j in range(n) if i != j
        )
        assert abs(evidence.unjudged_pair_share() - unjudged / (n * (n - 1))) < 1e-12


def test_contradictions_are_pairs_of_equal_texts_in_two_groups():
    evidence = Evidence.from_keys(["a", "a", "b", "a"], None, ["x", "y", "y", None])
    # (0,1) and (1,0) are equal texts in groups x and y; row 3 has no group and contradicts nothing.
    assert evidence.contradictions() == 2


def test_listed_positives_reach_one_hop_and_no_further():
    # "a" lists p and q; "b" lists q and r. a accepts q (listed) but not r, which only b lists.
    evidence = Evidence.from_keys(["a", "a", "b", "b"], ["p", "q", "q", "r"], None)
    found = evidence.known_pairs(np.arange(4)[None, :])
    assert set(zip(found.anchor.tolist(), found.candidate.tolist(), strict=True)) == {
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 2),
        (2, 1),
        (2, 3),
        (3, 1),
        (3, 2),
    }
