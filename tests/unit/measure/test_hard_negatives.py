"""What is known about hard negatives, from the file to the figures."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
import torch

from probe_service.encode import VectorCache
from probe_service.encode.protocol import EncodedTexts
from probe_service.measure import Shares
from probe_service.measure.terms import Softmaxes
from probe_service.schemas import LossOptions, ProbeRequest
from probe_service.settings import Settings
from probe_service.workspace import Workspace
from tests.unit.measure.corpora import Item, Judgement, Row, figures_of
from tests.unit.measure.probing import write_rows

# (anchor, positive, group, hard negative), and what is known of the hard negative as a negative of its own row:
# certain, labelled, judged not to be false, or nothing.
CASES = [
    ("the cat sat", "a cat sat on the mat", "g0", " the   cat sat", "certain"),  # the anchor
    ("dogs run", "dogs run in the park", "g1", "dogs run in the park", "certain"),  # the own positive
    ("dogs run", "the dogs run on", None, "dogs run in the park", "certain"),  # listed for an equal anchor
    ("the mat", "a mat on the mat", "g2", "cat mat", "labelled"),  # an anchor of the same group
    ("cat mat", "the cat on the mat", "g2", "sat sat sat", "not"),  # an anchor of another group
    ("sat sat sat", "a cat sat sat", "g3", "park park", "nothing"),  # stands nowhere else
    ("run run", "in the park run", None, "cat mat", "nothing"),  # the own row is not judged
    ("run run", "run in the park", "g4", "the words", "labelled"),
    ("on on on", "on the the the", "g5", "run run", "not"),  # first without a group, then with one
    ("the words", "words and the rest", "g4", "run run", "labelled"),
]
ROWS = [
    {"anchor": anchor, "positive": positive, "group": group, "negatives": [negative]}
    for anchor, positive, group, negative, _ in CASES
]
GROUP_OF_NEGATIVE = ["g0", "g1", "g1", "g2", "g3", None, "g2", "g4", "g4", "g4"]
T, FLOOR = 0.3, 0.6


def laid_out_in(folder, name, rows, cached=None, **request):
    """The workspace of rows, laid out up to where a probe begins to measure."""
    file = write_rows(folder / f"{name}.jsonl", rows)
    asked = ProbeRequest.model_validate({"worst_case_similarity": FLOOR} | request)
    settings = Settings(home=folder / "home", device="cpu")
    work = Workspace(asked, file, file.name, folder / f"work-{name}", settings, lambda: None)
    parts = work.read()["parts"]
    if cached is not None:
        loaded = work.load()
        cache = VectorCache(settings.home / "vectors", loaded["fingerprint"], loaded["dimension"])
        cache.put(list(cached), stand_in(list(cached.values()), loaded["dimension"]))
    for part in range(parts):
        work.encode(part)
    work.gather()
    for part in range(work.view_parts):
        work.compare_views(part)
    work.find_floor()
    return work


@pytest.fixture
def laid_out(tmp_path, tiny_encoder):
    return partial(laid_out_in, tmp_path, "rows", encoder=tiny_encoder, temperature=T)


def stand_in(values, dimension):
    """Vectors that hold the same number everywhere."""
    return EncodedTexts(
        np.repeat(np.array(values, dtype=np.float32)[:, None], dimension, axis=1),
        np.zeros(len(values), dtype=bool),
        np.arange(16 * len(values), dtype=np.uint8).reshape(-1, 16),
    )


def test_rows_whose_hard_negatives_have_no_usable_vector_are_left_out(laid_out):
    work = laid_out(ROWS, cached={"sat sat sat": np.nan, "park park": 0.0})
    # The fifth row's hard negative and the sixth row's anchor are not finite; the sixth row's hard negative is zero.
    excluded = {each.reason: each.rows for each in work.corpus_info.excluded}
    assert excluded == {"non_finite_vector": [5, 6]}
    assert work.corpus_info.rows_usable == len(ROWS) - 2
    left = [case for case in CASES if "sat sat sat" not in case]
    negatives = work.hard_negatives
    assert negatives.keys == tuple(" ".join(negative.split()) for *_, negative, _ in left)
    assert len(negatives.vectors) == len(left)
    np.testing.assert_array_equal(negatives.vectors[1], work.positives[1])  # a row's negative is its positive
    assert np.isfinite(negatives.vectors).all()


def test_hard_negatives_that_the_tokenizer_cuts_are_counted(laid_out):
    long = [dict(row) for row in ROWS]
    long[2]["negatives"] = ["cat " * 90]
    long[8]["negatives"] = ["cat " * 91]
    found = laid_out(long).corpus_info.truncated
    assert (found.count, found.rows) == (2, [3, 9])
    assert (found.collisions, found.collision_rows) == (2, [3, 9])


def spelt_out(work):
    """The rows as items, with what each text's group is known to be."""
    population, negatives = work.population, work.hard_negatives
    rows = []
    for at, (anchor, positive, group, negative, _) in enumerate(CASES):
        own = Item(" ".join(negative.split()), negatives.vectors[at], GROUP_OF_NEGATIVE[at])
        rows.append(
            Row(
                Item(anchor, population.anchors[at], group),
                Item(positive, population.positives[at], group),
                (own,),
            )
        )
    return rows


def test_what_is_known_of_each(laid_out):
    work = laid_out(ROWS)
    negatives = work.hard_negatives
    assert negatives.groups == tuple(GROUP_OF_NEGATIVE)
    assert (negatives.per_row, negatives.count.tolist()) == (1, [1] * len(CASES))
    # A batch of a row and one that has nothing to do with it: only the row's own negative can be false for it.
    softmaxes = Softmaxes(work.population, LossOptions(), temperature=T, k=1, borrowed=None)
    rng = np.random.default_rng(0)
    for row, (*_, known) in enumerate(CASES):
        other = next(
            at
            for at in range(len(CASES))
            if at != row and CASES[at][4] in ("not", "nothing") and CASES[at][2] != CASES[row][2]
        )
        found = softmaxes.measure(np.array([[row, other]]), rng, lambda: None)
        assert (found.own_false[0] > 0) == (known in ("certain", "labelled")), CASES[row]
        assert (found.certain_share[0] > 0) >= (known == "certain"), CASES[row]


def test_the_figures_of_a_probe_of_all_rows(laid_out, probe_rows, tiny_encoder):
    """A batch of all the rows there are has no chance in it, so that every figure is exact."""
    rows = spelt_out(laid_out(ROWS))
    expected = figures_of(
        rows,
        ("query_to_doc",),
        "joint",
        Judgement(rows),
        temperature=T,
        floor=FLOOR,
        borrowed=lambda _s: 0.0,
    )
    report = probe_rows(
        ROWS,
        encoder=tiny_encoder,
        batch_sizes=(len(ROWS),),
        temperature=T,
        worst_case_similarity=FLOOR,
        num_repeats=2,
    )
    (point,) = report.curve
    assert point.candidates_per_anchor == 2 * len(ROWS) - 1
    assert point.false_negative_softmax_share.value == pytest.approx(expected["false_share"], abs=1e-5)
    assert point.false_negative_gradient_share.value == pytest.approx(
        expected["false_update"] / expected["update_weight"], abs=1e-5
    )
    for name in ("own_push", "own_false", "other_push", "other_false"):
        assert getattr(point.hard_negatives, name).value == pytest.approx(expected[name], abs=1e-5), name
        assert expected[name] > 0.01
    assert point.certain_share.value == pytest.approx(expected["certain_share"], abs=1e-5)
    assert point.inferred_share.value == pytest.approx(expected["inferred_share"], abs=1e-5)
    assert point.worst_case.value == pytest.approx(expected["worst_share"], abs=1e-5)
    assert point.effective_negatives.value == pytest.approx(expected["effective_negatives"], rel=1e-4)
    assert point.xi.p50.value == pytest.approx(np.exp(np.median(expected["log_xi"])), rel=1e-3)
    warned = {warning.code for warning in report.warnings}
    assert warned >= {"hard_negatives_unjudged", "unjudged_pairs"}


def test_left_out_with_a_group_size_of_one(probe_rows, tiny_encoder):
    report = probe_rows(ROWS, encoder=tiny_encoder, batch_sizes=(4,), loss={"train_group_size": 1})
    assert report.curve[0].hard_negatives is None
    assert report.curve[0].candidates_per_anchor == 3


def test_more_are_chosen_from_and_fewer_repeated(probe_rows, tiny_encoder):
    rows = [dict(row) for row in ROWS]
    rows[0]["negatives"] = ["the cat", "a cat", "cat", "park", "sat"]
    report = probe_rows(rows, encoder=tiny_encoder, batch_sizes=(4,), loss={"train_group_size": 3})
    assert report.curve[0].candidates_per_anchor == 4 * 3 - 1
    warned = {warning.code: warning.message for warning in report.warnings}
    assert "up to 5 hard negatives" in warned["hard_negatives_chosen"]
    assert "9 rows have fewer than 2" in warned["hard_negatives_repeated"]


# --------------------------------------------------------------------------------------- positives from two dropouts

SENTENCES = [{"text": f"the cat {'sat ' * (row % 5)}on mat {'dogs ' * (row // 5)}"} for row in range(15)]
SENTENCES.append(SENTENCES[3])


def test_sentences_have_a_positive_from_dropout_and_none_without(laid_out, probe_rows, tiny_encoder):
    asked = {"batch_sizes": (16,), "temperature": T, "num_repeats": 2, "worst_case_similarity": FLOOR}
    without = probe_rows(SENTENCES, name="without", encoder=tiny_encoder, **asked).curve[0]
    assert without.xi is None
    assert without.false_negative_gradient_share is None
    assert without.effective_anchors is None
    assert without.gradient_error is None
    report = probe_rows(SENTENCES, name="with", encoder=tiny_encoder, dropout_views=True, **asked)
    (point,) = report.curve
    assert "positives_from_dropout" in {warning.code for warning in report.warnings}
    assert report.advice.starvation_floor.positives == "dropout"

    # From the stored s⁺, by the definitions; row 16 repeats row 4, and nothing else is known.
    population = laid_out(SENTENCES, dropout_views=True, **asked).population
    own = population.own_similarity.astype(np.float64)
    assert 0.2 < own.mean() < 0.999
    s = population.anchors.astype(np.float64) @ population.anchors.T.astype(np.float64)
    x = np.exp(s / T)
    np.fill_diagonal(x, 0.0)
    xi = x.sum(axis=1) / np.exp(own / T)
    v = xi / (1 + xi)
    false = np.zeros((16, 16), dtype=bool)
    false[3, 15] = false[15, 3] = True
    share = (x * false).sum(axis=1) / x.sum(axis=1)
    update = (v * share).sum() / v.sum()
    assert point.false_negative_softmax_share.value == pytest.approx(share.mean(), abs=1e-5)
    assert point.false_negative_gradient_share.value == pytest.approx(update, abs=1e-5)
    assert point.effective_anchors.value == pytest.approx(v.sum() ** 2 / (16 * (v**2).sum()), abs=1e-5)
    for name, probability in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        # Batches repeat the same 16 anchors, between which quantiles are interpolated otherwise.
        around = np.sort(np.log(xi))[[int(15 * probability), int(np.ceil(15 * probability))]]
        found = np.log(getattr(point.xi, name).value)
        assert around[0] - 1e-4 <= found <= around[1] + 1e-4, name

    # The InfoNCE gradient in bfloat16, from logits rounded to it.
    logits = s / T
    np.fill_diagonal(logits, own / T)
    exact = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) - np.eye(16)
    rounded = torch.softmax(torch.from_numpy(logits).to(torch.bfloat16), dim=1)
    error = (rounded - torch.eye(16, dtype=torch.bfloat16)).double().numpy() - exact
    expected = np.linalg.norm(error) / np.linalg.norm(exact)
    assert point.gradient_error["bfloat16"].infonce.value == pytest.approx(expected, rel=0.1)
    assert point.gradient_error["float32"].infonce.value < 1e-5


def test_the_documented_figures(repository, tmp_path):
    page = (repository / "docs" / "samplers.md").read_text("utf-8")
    table = re.findall(r"^\| (\d) \| (\d+) \| (\S+) \| (\S+) \| (\.\d+) \|$", page, re.MULTILINE)
    assert [int(size) for size, *_ in table] == [1, 2, 4]
    lines = (repository / "examples" / "helpdesk_tuples.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for size, candidates, own, other, share in table:
        work = laid_out_in(tmp_path, size, rows, encoder="minilm", loss={"train_group_size": int(size)})
        request = ProbeRequest(loss={"train_group_size": int(size)})
        shares = Shares(work.population, [16], request, work.training_rows, None, work.scratch)
        assert shares.softmaxes.candidates_per_anchor(16) == int(candidates)
        batches = shares.batches(16)
        for part in batches.parts():
            batches.run(part)
        found = {name: values.mean() for name, values in batches.result().whole.items() if values.ndim == 1}
        documented = [float(value) for value in (own.replace("–", "0"), other.replace("–", "0"), share)]
        measured = [found[name] for name in ("own_push", "other_push", "false_share")]
        assert measured == pytest.approx(documented, abs=0.006)
        assert found["own_false"] == 0.0
