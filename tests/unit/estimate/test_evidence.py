from __future__ import annotations

import gzip
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.corpus import normalize_text
from probe_service.estimate.evidence import ChainInfo, Evidence


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


def chained_to(i, anchors, positives, groups):
    """Rows that a chain leads to, by walking: from a row to each that shares a text or a group with it."""
    n = len(groups if anchors is None else anchors)

    def nodes(r):
        found = set() if anchors is None else {("text", anchors[r]), ("text", (positives or anchors)[r])}
        return found if groups is None or groups[r] is None else found | {("group", groups[r])}

    reached, pending = {i}, [i]
    while pending:
        here = nodes(pending.pop())
        pending += [r for r in range(n) if r not in reached and here & nodes(r)]
        reached.update(pending)
    return reached


def inferred(i, j, anchors, positives, groups):
    """The definition, word for word."""
    return (
        i != j
        and j in chained_to(i, anchors, positives, groups)
        and not judged(i, j, anchors, positives, groups)
    )


@settings(max_examples=300, deadline=None)
@given(
    anchors=st.lists(st.sampled_from("abcdefghijklm"), min_size=1, max_size=14),
    with_positives=st.booleans(),
    with_texts=st.booleans(),
    with_groups=st.booleans(),
    draw=st.randoms(),
)
def test_inferred_pairs_and_counts_follow_the_definition(
    anchors, with_positives, with_texts, with_groups, draw
):
    n = len(anchors)
    positives = [draw.choice("abcdefnopqrstuvwxyz") for _ in anchors] if with_positives else None
    groups = [draw.choice(["g", "h", "k", None, None, None]) for _ in anchors] if with_groups else None
    if not with_texts:
        anchors, positives = None, None
        groups = groups or [None] * n
    evidence = Evidence.from_keys(anchors, positives, groups)
    every = [(i, j) for i in range(n) for j in range(n)]
    added = {pair for pair in every if inferred(*pair, anchors, positives, groups)}
    union = added | {pair for pair in every if known(*pair, anchors, positives, groups)}
    reach = [chained_to(i, anchors, positives, groups) for i in range(n)]
    largest = max(reach, key=len)
    assert evidence.chain_info() == ChainInfo(
        components=len({frozenset(rows) for rows in reach if len(rows) > 1}),
        largest_component_rows=len(largest) if len(largest) > 1 else 0,
        added_ordered_pairs=len(added),
        largest_component_row_positions=tuple(sorted(largest)) if len(largest) > 1 else (),
    )
    chained = evidence.inferred()
    if chained is None:
        assert not added
        return
    assert added
    assert chained.chain_info() == evidence.chain_info()
    assert chained.false_negative_counts().tolist() == [
        sum((i, j) in union for j in range(n)) for i in range(n)
    ]
    unjudged = sum(
        i != j and (i, j) not in union and not judged(i, j, anchors, positives, groups) for i, j in every
    )
    assert abs(chained.unjudged_pair_share() - unjudged / (n * (n - 1))) < 1e-12
    assert chained.contradictions() == evidence.contradictions()
    assert (
        chained.texts_only().false_negative_counts().tolist()
        == evidence.texts_only().false_negative_counts().tolist()
    )

    order = np.array([draw.sample(range(n), n) for _ in range(3)])
    start = draw.randrange(n)
    for block in (slice(0, n), slice(start, n)):
        found = chained.known_pairs(order, block)
        triples = list(
            zip(found.batch.tolist(), found.anchor.tolist(), found.candidate.tolist(), strict=True)
        )
        assert len(triples) == len(set(triples))
        assert set(triples) == {
            (b, p, q)
            for b in range(3)
            for p in range(block.start, n)
            for q in range(n)
            if (order[b, p], order[b, q]) in union
        }
    # Among some of the rows the chains are those of all.
    some = np.array(sorted(draw.sample(range(n), n // 2)), dtype=np.int64)
    assert chained.subset(some).false_negative_counts().tolist() == [
        sum((i, j) in union for j in some.tolist()) for i in some.tolist()
    ]


def test_chains_reach_beyond_one_hop_but_not_across_a_judgement():
    # p – q by row 0 and 1's anchor; q – r by row 1; row 2 hangs on by r: rows 0, 1, 2 are one chain.
    chained = Evidence.from_keys(["a", "b", "c", "z"], ["p", "p", "b", "y"], None).inferred()
    # Known: a accepts p of row 1, b accepts p of row 0 and its own text, the positive of row 2.
    assert chained.false_negative_counts().tolist() == [2, 2, 2, 0]
    assert chained.chain_info() == ChainInfo(1, 3, 6 - 3, (0, 1, 2))
    # With groups that say that row 0 is not what rows 1 and 2 are, nothing is left to infer.
    assert (
        Evidence.from_keys(["a", "b", "c", "z"], ["p", "p", "b", "y"], ["g", "h", "h", None]).inferred()
        is None
    )


def test_equal_texts_alone_make_no_chains():
    assert Evidence.from_keys(["a", "a", "b"], None, None).inferred() is None
    assert Evidence.from_keys(None, None, None).chain_info() == ChainInfo(0, 0, 0, ())


def test_only_the_first_thousand_rows_of_the_largest_component_are_listed():
    rows = 1200
    info = Evidence.from_keys([f"a{i}" for i in range(rows)], ["p"] * rows, None).chain_info()
    assert info == ChainInfo(1, rows, 0, tuple(range(1000)))


def test_the_positives_of_askubuntu_join_into_one_component_of_553_rows(labelled_corpora):
    with gzip.open(labelled_corpora / "pairs" / "askubuntu_titles.jsonl.gz", "rt", encoding="utf-8") as lines:
        listed = [row for row in map(json.loads, lines) if row["label"] == 1]
    anchors, positives = (
        [normalize_text(row[side], case_fold=True) for row in listed] for side in ("sentence1", "sentence2")
    )
    # Union-find with path halving, which shares nothing with the package.
    parent = {text: text for text in anchors + positives}

    def root(text):
        while parent[text] != text:
            parent[text] = text = parent[parent[text]]
        return text

    for anchor, positive in zip(anchors, positives, strict=True):
        parent[root(anchor)] = root(positive)
    members = {}
    for position, anchor in enumerate(anchors):
        members.setdefault(root(anchor), []).append(position)
    joined = sum(len(rows) * (len(rows) - 1) for rows in members.values())
    evidence = Evidence.from_keys(anchors, positives, None)
    info = evidence.chain_info()
    assert info.largest_component_rows == 553
    assert list(info.largest_component_row_positions) == max(members.values(), key=len)
    assert info.components == sum(len(rows) > 1 for rows in members.values())
    assert info.added_ordered_pairs == joined - evidence.false_negative_counts().sum()
    # Most of that component is known without chains: 546 of its rows have one anchor, which lists all of their positives.
    component = evidence.subset(np.array(info.largest_component_row_positions))
    assert component.false_negative_counts().sum() > 0.97 * 553 * 552
