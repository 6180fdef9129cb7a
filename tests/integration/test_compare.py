"""Comparisons from end to end at the command line: before and after, encoder against encoder, corpus against corpus."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from probe_service.cli import _run
from probe_service.compare import compare, judge_increase
from probe_service.errors import RequestError
from probe_service.schemas import ComparisonReport, ProbeRequest, VerdictKind
from probe_service.settings import Settings
from tests.oracles import softmax_share

ROWS, GROUPS, DIMENSION, TEMPERATURE = 120, 24, 12, 0.05
SHARE = "false_negative_softmax_share"


@pytest.fixture(scope="module")
def world():
    """Texts, groups and vectors of 120 rows, and 24 near-duplicates of some."""
    rng = np.random.default_rng(7)
    group = rng.integers(0, GROUPS, ROWS)
    centres = rng.standard_normal((GROUPS, DIMENSION))
    vectors = centres[group] + 0.8 * rng.standard_normal((ROWS, DIMENSION))
    rows = [row(f"row {i}", group[i], vectors[i]) for i in range(ROWS)]
    near = [
        row(f"row {i}, again", group[i], vectors[i] + 0.05 * rng.standard_normal(DIMENSION))
        for i in rng.choice(ROWS, 24, replace=False)
    ]
    return rows, near


def row(text, group, vector):
    vector = vector / np.linalg.norm(vector)
    return {"text": text, "group": f"g{group}", "embedding": vector.round(5).tolist()}


def write(file, rows, columns=("text", "group", "embedding")):
    with file.open("w") as lines:
        for fields in rows:
            lines.write(json.dumps({name: fields[name] for name in columns}) + "\n")
    return str(file)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBE_HOME", str(tmp_path / "home"))
    return tmp_path


def compared(a, b, *options, status=0):
    file = Path(a).with_suffix(".report")
    assert _run(["compare", a, b, "--json", str(file), *options]) == status
    return ComparisonReport.model_validate_json(file.read_bytes())


@pytest.fixture(scope="module")
def added(world, tmp_path_factory):
    """All 120 rows, and the same with the near-duplicates before them."""
    rows, near = world
    folder = tmp_path_factory.mktemp("added")
    a, b = write(folder / "a.jsonl", rows), write(folder / "b.jsonl", [*near, *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROBE_HOME", str(folder / "home"))
        return compared(a, b, "--batch-sizes", "2,5,40", "--budget", "0.15")


def differences(report, figure=SHARE):
    return {size.batch_size: size.figures[figure].difference for size in report.sizes}


def pair_share(rows):
    """S(2): the share of ordered pairs in one group."""
    groups = [fields["group"] for fields in rows]
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if i != j]
    return sum(groups[i] == groups[j] for i, j in pairs) / len(pairs)


def whole_share(rows):
    """S(n): the corpus is the batch."""
    vectors = [np.array(fields["embedding"]) / np.linalg.norm(fields["embedding"]) for fields in rows]
    groups = [fields["group"] for fields in rows]
    table = (np.array(vectors) @ np.array(vectors).T).tolist()
    same = lambda i, j: groups[i] == groups[j]  # noqa: E731
    return math.fsum(softmax_share(line, same, i, TEMPERATURE) for i, line in enumerate(table)) / len(rows)


# -------------------------------------------------------------------------------------------------------- before and after


def test_added_near_duplicates_make_it_worse(world, added):
    rows, near = world
    assert (added.rows.common, added.rows.only_a, added.rows.only_b) == (120, 0, 24)
    assert (added.rows.matched_by, added.rows.coupling) == ("text", "common_rows")
    found = differences(added)
    truth = pair_share([*rows, *near]) - pair_share(rows)
    assert found[2].low == found[2].high == pytest.approx(truth, abs=1e-6)
    assert found[40].low < found[40].value < found[40].high
    for size in added.sizes:
        assert size.verdict == "worse"
        assert f"B is worse at N = {size.batch_size}: S +." in size.statement
    assert added.headline == "B is worse than A at N = 2, 5, 40."
    assert added.a.n_max.value >= added.b.n_max.value
    assert added.sizes[2].figures["top_k_mean"].width_share < 0.95


def test_edited_rows_are_compared_with_what_they_were(world, home):
    rows, _ = world
    edited = [dict(fields) for fields in rows]
    for place in range(0, ROWS, 10):
        edited[place] = row(f"row {place}, edited", place, np.array(rows[place]["embedding"]))
    a, b = write(home / "a.jsonl", rows), write(home / "b.jsonl", edited)
    report = compared(a, b, "--batch-sizes", "40,120")
    assert (report.rows.common, report.rows.only_a, report.rows.only_b) == (108, 12, 12)
    found = differences(report)
    # The same vectors under other groups: what was a false negative is none.
    assert found[120].value == pytest.approx(whole_share(edited) - whole_share(rows), abs=1e-4)
    assert all(size.verdict == "better" for size in report.sizes)
    similarity = report.sizes[0].figures["top_k_mean"]
    assert similarity.difference.value == 0.0
    assert found[40].high - found[40].low < similarity.a.high - similarity.a.low + 0.05


def test_a_corpus_is_the_same_as_itself_and_json_alone_goes_to_stdout(world, home, capsys):
    rows, _ = world
    a = write(home / "a.jsonl", rows)
    shuffled = write(home / "b.jsonl", [rows[place] for place in np.random.default_rng(0).permutation(ROWS)])
    assert _run(["compare", a, shuffled, "--batch-sizes", "6", "--max-increase", "0.001", "--json", "-"]) == 0
    report = ComparisonReport.model_validate_json(capsys.readouterr().out)
    assert report.rows.coupling == "same_rows"
    assert report.sizes[0].verdict == "same"
    assert report.headline == "Both are the same at N = 6."


def test_a_sample_of_each_is_compared_by_sub_pools(world, home):
    # Few groups, so that a sub-pool of five rows has some that mean the same.
    rows, near = ([{**fields, "group": fields["group"][-1]} for fields in side] for side in world)
    a, b = write(home / "a.jsonl", rows), write(home / "b.jsonl", [*noisy(rows, 0.2), *near])
    report = compared(a, b, "--batch-sizes", "5,40", "--max-rows", "100")
    assert report.rows.common > 70
    assert report.rows.common + report.rows.only_b == 100
    found = differences(report)
    assert "20 common disjoint sub-pools" in found[5].method
    assert found[5].low < found[5].value < found[5].high
    assert (found[40].low, report.sizes[1].verdict) == (None, "undecided")
    assert [warning.code for warning in report.warnings] == ["no_interval"]
    assert "too few rows are encoded" in report.sizes[1].statement


# ------------------------------------------------------------------------------------------------------ encoder by encoder


def noisy(rows, scale):
    rng = np.random.default_rng(1)
    return [
        {
            **fields,
            "embedding": (np.array(fields["embedding"]) + scale * rng.standard_normal(DIMENSION)).tolist(),
        }
        for fields in rows
    ]


def test_vectors_of_two_encoders_are_matched_by_text_and_by_id(world, home):
    rows, _ = world
    other = noisy(rows, 0.4)
    a, b = write(home / "a.jsonl", rows), write(home / "b.jsonl", other)
    report = compared(a, b, "--batch-sizes", "120")
    assert (report.rows.matched_by, report.rows.coupling) == ("text", "same_rows")
    found = differences(report)[120]
    assert found.value == pytest.approx(whole_share(other) - whole_share(rows), abs=1e-4)
    with_ids = [
        [{"id": f"r{place}", **fields} for place, fields in enumerate(side)] for side in (rows, other[::-1])
    ]
    for place, fields in enumerate(with_ids[1]):
        fields["id"] = f"r{ROWS - 1 - place}"
    columns = ("id", "group", "embedding")
    a, b = (write(home / f"{name}.jsonl", side, columns) for name, side in zip("cd", with_ids, strict=True))
    report = compared(a, b, "--batch-sizes", "120")
    assert (report.rows.matched_by, report.rows.coupling) == ("id", "same_rows")
    assert differences(report)[120].value == pytest.approx(found.value, abs=1e-6)


def test_vectors_alone_are_matched_by_vector_or_by_place(world, home):
    rows, near = world
    np.save(home / "a.npy", np.array([fields["embedding"] for fields in rows], dtype=np.float32))
    np.save(home / "b.npy", np.array([fields["embedding"] for fields in rows + near], dtype=np.float32))
    np.save(home / "c.npy", np.array([fields["embedding"][:8] for fields in rows], dtype=np.float32))
    a, b, c = (str(home / f"{name}.npy") for name in "abc")
    report = compared(a, b, "--batch-sizes", "32")
    assert (report.rows.matched_by, report.rows.common, report.rows.only_b) == ("vector", 120, 24)
    report = compared(a, c, "--batch-sizes", "32")
    assert (report.rows.common, report.rows.coupling) == (0, "file_order")
    # Eight of twelve coordinates: the hard pairs are mostly the same ones.
    assert report.sizes[0].figures["hardest_negative"].width_share < 0.9


def test_another_temperature_is_compared_on_the_same_batches(world, home):
    rows, _ = world
    a = write(home / "a.jsonl", rows)
    report = compared(a, a, "--batch-sizes", "5", "--temperature-b", "0.5", "--max-rows", "100")
    assert (report.a.request.temperature, report.b.request.temperature) == (0.05, 0.5)
    assert differences(report)[5].value < 0
    figures = report.sizes[0].figures
    for name in (
        "top_k_mean",
        "hardest_negative",
        "false_negatives_per_anchor",
        "anchors_with_false_negative",
    ):
        assert figures[name].difference.low == figures[name].difference.high == 0


# --------------------------------------------------------------------------------------------------------- nothing shared


def test_unrelated_corpora_are_measured_apart(world, home):
    rows, _ = world
    a, b = write(home / "a.jsonl", rows[:50]), write(home / "b.jsonl", rows[50:])
    report = compared(a, b, "--batch-sizes", "2")
    assert (report.rows.common, report.rows.coupling) == (0, "independent")
    assert differences(report)[2].value == pytest.approx(
        pair_share(rows[50:]) - pair_share(rows[:50]), abs=1e-6
    )
    assert all(figure.width_share is None for size in report.sizes for figure in size.figures.values())


def test_a_sample_and_a_whole_corpus_are_measured_apart(world, home):
    rows, near = world
    a, b = write(home / "a.jsonl", [*rows, *near]), write(home / "b.jsonl", rows[:80])
    report = compared(a, b, "--batch-sizes", "4", "--max-rows", "100")
    assert report.rows.coupling == "independent"
    assert report.rows.common > 0
    (difference,) = differences(report).values()
    assert difference.low < difference.value < difference.high


# ---------------------------------------------------------------------------------------------------------- what is not known


def test_without_groups_the_difference_has_bounds(world, home):
    rows, _ = world
    columns = ("text", "embedding")
    a = write(home / "a.jsonl", rows, columns)
    b = write(home / "b.jsonl", [*rows, *rows[:10]], columns)
    sizes = ["--batch-sizes", "40"]
    gate = ["--worst-case-similarity", "0.5", "--max-increase", "0.0"]
    report = compared(a, b, *sizes, *gate, "--fail-on-inconclusive", status=3)
    share = report.sizes[0].figures[SHARE]
    assert share.difference.low < 0 < share.difference.high
    # What is known about equal texts has certainly got worse all the same.
    assert report.sizes[0].figures["certain_share"].difference.low > 0
    assert [warning.code for warning in report.warnings] == ["unjudged_pairs"]
    assert judge_increase(report, 0.0) is VerdictKind.INCONCLUSIVE
    # With enough of them even the worst case of the one is better than what is known of the other.
    b = write(home / "c.jsonl", [*rows, *rows], columns)
    compared(a, b, *sizes, "--worst-case-similarity", "0.95", "--max-increase", "0.0", status=1)


def test_groups_on_one_side_alone_are_pointed_out(world, home):
    rows, _ = world
    a, b = write(home / "a.jsonl", rows), write(home / "b.jsonl", rows, ("text", "embedding"))
    report = compared(a, b, "--batch-sizes", "4")
    assert [warning.code for warning in report.warnings] == ["evidence_differs"]


def test_only_random_batches_can_be_shared(world, home):
    rows, _ = world
    a = home / "a.jsonl"
    write(a, rows)
    request = ProbeRequest.model_validate({"sampler": {"kind": "sequential"}})
    with pytest.raises(RequestError) as caught:
        compare(request, a, a, home / "work", settings=Settings(home=home))
    assert caught.value.code == "compare_random_batches_only"


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_gate_looks_at_the_lower_limit_of_the_increase(added):
    limits = [differences(added)[size] for size in (2, 5, 40)]
    assert judge_increase(added, limits[2].low - 1e-9) is VerdictKind.FAIL
    assert judge_increase(added, (limits[2].low + limits[2].high) / 2) is VerdictKind.INCONCLUSIVE
    assert judge_increase(added, limits[2].high) is VerdictKind.PASS


def test_the_table_fits_80_columns_and_the_gate_fails(world, home, capsys):
    rows, near = world
    a, b = write(home / "a.jsonl", rows), write(home / "b.jsonl", [*rows, *near])
    assert _run(["compare", a, b, "--batch-sizes", "5,40", "--max-increase", "0.001"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("A  a.jsonl, 120 rows, supplied vectors, T = 0.05, largest safe batch ")
    assert "120 are on both sides by their text, 0 only in A and 24" in " ".join(lines)
    rows_of_table = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows_of_table["5"][-2:] == ["exact", "worse"]
    assert rows_of_table["40"][-1] == "worse"
    assert rows_of_table["hardest_negative"][4].startswith("[")
    assert lines[-1].startswith("fail: at some size S of B is more than 0.001 above S of A")


def test_a_missing_file_is_bad_usage(home, capsys):
    assert _run(["compare", str(home / "none.jsonl"), str(home / "none.jsonl")]) == 2
    assert "there is no file" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- real texts


@pytest.fixture(scope="module")
def banking77(labelled_corpora):
    with gzip.open(labelled_corpora / "labels" / "banking77.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng = np.random.default_rng(0)
    return [
        {"text": rows[place]["text"], "group": rows[place]["label"]}
        for place in rng.choice(len(rows), 200, replace=False)
    ]


def test_near_duplicates_of_real_questions_are_seen_on_common_batches_only(banking77, home):
    near = [{**fields, "text": f"hello, {fields['text']}"} for fields in banking77[:8]]
    columns = ("text", "group")
    a = write(home / "a.jsonl", banking77, columns)
    b = write(home / "b.jsonl", [*banking77, *near], columns)
    report = compared(a, b, "--encoder", "minilm", "--batch-sizes", "32", "--method", "sampled")
    (size,) = report.sizes
    figure = size.figures[SHARE]
    assert size.verdict == "worse"
    assert figure.width_share < 0.5
    # Measured apart, the same batches would not have told the two from each other.
    assert figure.difference.low > 0
    assert (
        figure.difference.value - (figure.difference.high - figure.difference.value) / figure.width_share < 0
    )
    assert size.figures["top_k_mean"].width_share < 0.6
