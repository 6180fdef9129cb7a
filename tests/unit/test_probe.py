"""A probe from end to end, on vectors made here, so that no encoder is needed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from probe_service.errors import RequestError
from probe_service.probe import run_probe
from probe_service.schemas import Phase, ProbeReport, ProbeRequest, VerdictKind
from probe_service.settings import Settings
from tests.oracles import unit_rows


def write_vectors(file, vectors, groups=None, texts=None):
    with file.open("w") as lines:
        for i, vector in enumerate(vectors):
            row = {"embedding": [float(x) for x in vector]}
            if groups is not None:
                row["group"] = groups[i]
            if texts is not None:
                row["text"] = texts[i]
            lines.write(json.dumps(row) + "\n")
    return file


def measure(file, folder, on_progress=lambda progress: None, execute=None, **request):
    request.setdefault("corpus", {"kind": "embeddings", "columns": {"embedding": "embedding"}})
    arguments = {} if execute is None else {"execute": execute}
    return run_probe(
        ProbeRequest.model_validate(request),
        file,
        folder,
        settings=Settings(home=folder / "home"),
        job_id="test",
        name=Path(file).name,
        on_progress=on_progress,
        **arguments,
    )


@pytest.fixture
def clustered(tmp_path):
    """60 groups of 5 rows round random centres."""
    rng = np.random.default_rng(11)
    centres = unit_rows(rng, 60, 24)
    vectors = np.repeat(centres, 5, axis=0) + 0.12 * rng.standard_normal((300, 24))
    groups = [f"g{i // 5}" for i in range(300)]
    order = rng.permutation(300)
    return (
        write_vectors(tmp_path / "rows.jsonl", vectors[order], [groups[i] for i in order]),
        vectors[order],
        [groups[i] for i in order],
    )


GROUPED = {"kind": "embeddings", "columns": {"embedding": "embedding", "group": "group"}}


def simulated_share(vectors, groups, size, temperature, batches, seed):
    """S by brute force: numpy, a loop over batches and anchors, no code of the package."""
    rng = np.random.default_rng(seed)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    labels = np.array(groups)
    shares = []
    for _ in range(batches):
        rows = rng.choice(len(unit), size, replace=False)
        s = unit[rows] @ unit[rows].T
        np.fill_diagonal(s, -np.inf)
        w = np.exp((s - s.max(axis=1, keepdims=True)) / temperature)
        w /= w.sum(axis=1, keepdims=True)
        same = labels[rows][:, None] == labels[rows][None, :]
        shares.append((w * same).sum(axis=1).mean())
    return np.mean(shares), np.std(shares) / math.sqrt(batches)


def test_share_and_n_max_agree_with_brute_force(clustered, tmp_path):
    file, vectors, groups = clustered
    seen = []
    report = measure(
        file,
        tmp_path / "work",
        seen.append,
        batch_sizes=[2, 8, 32, 128],
        corpus=GROUPED,
        temperature=0.1,
        budget=0.3,
    )
    for point in report.curve:
        truth, error = simulated_share(vectors, groups, point.batch_size, 0.1, 1500, 5)
        share = point.false_negative_softmax_share
        assert abs(share.value - truth) < 4 * (error + (share.high - share.low) / 4)
        assert point.false_negatives_per_anchor.value == pytest.approx((point.batch_size - 1) * 4 / 299)
    n_max = report.advice.n_max.value
    below, error_below = simulated_share(vectors, groups, n_max, 0.1, 3000, 6)
    above, error_above = simulated_share(vectors, groups, n_max + 3, 0.1, 3000, 7)
    assert below - 3 * error_below < 0.3 < above + 3 * error_above
    assert report.advice.verdicts[0].verdict is VerdictKind.PASS
    assert report.advice.verdicts[-1].verdict is VerdictKind.FAIL
    assert report.evidence.tier == "labelled"
    assert report.evidence.known_false_negative_pairs == 300 * 4
    assert report.evidence.unjudged_pair_share == 0.0
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert (seen[-1].fraction, seen[-1].phase) == (1.0, Phase.ADVISING)
    assert max(len(progress.curve) for progress in seen if progress.phase is Phase.MEASURING) == 4


def test_report_is_the_same_byte_for_byte_but_for_run_and_timings(clustered, tmp_path):
    file, _, _ = clustered

    def canonical(seed, folder):
        report = measure(file, folder, batch_sizes=[4, 64], corpus=GROUPED, seed=seed, num_repeats=10)
        kept = report.model_dump(mode="json", exclude={"run", "timings", "request", "sampling"})
        return json.dumps(kept)

    assert canonical(0, tmp_path / "a") == canonical(0, tmp_path / "b")
    assert canonical(0, tmp_path / "c") != canonical(1, tmp_path / "d")
    on_disk = ProbeReport.model_validate_json((tmp_path / "a" / "report.json").read_bytes())
    assert on_disk.schema_version == "1.0"


def test_after_a_crash_no_finished_step_is_repeated(clustered, tmp_path):
    """The executor keeps results, as the job database does, and dies in the middle of measuring."""
    file, _, _ = clustered
    remembered, ran = {}, []

    class Killed(Exception):
        pass

    def execute(name, function, *arguments):
        if name not in remembered:
            if len(ran) == 6:
                ran.append("killed")
                raise Killed
            ran.append(name)
            remembered[name] = json.loads(json.dumps(function(*arguments)))
        return remembered[name]

    request = {"batch_sizes": [4, 16], "corpus": GROUPED}
    with pytest.raises(Killed):
        measure(file, tmp_path / "work", execute=execute, **request)
    resumed = measure(file, tmp_path / "work", execute=execute, **request)
    assert len(set(ran)) == len(ran) > 8
    undisturbed = measure(file, tmp_path / "other", **request)
    assert resumed.curve == undisturbed.curve
    assert resumed.scan == undisturbed.scan
    assert {f.name for f in (tmp_path / "work").iterdir()} == {"report.json", "pairs.jsonl"}
    again = measure(file, tmp_path / "work", execute=execute, **request)
    assert again == resumed


def test_all_rows_equal_is_a_plain_fail(tmp_path):
    file = write_vectors(tmp_path / "rows.jsonl", np.tile([1.0, 2.0, 2.0], (50, 1)))
    report = measure(file, tmp_path / "work", batch_sizes=[2, 10])
    for point in report.curve:
        share = point.false_negative_softmax_share
        assert [share.value, share.low, share.high] == pytest.approx([1.0] * 3, abs=1e-12)
        assert point.top_k_mean is None or point.top_k_mean.value == pytest.approx(1.0)
    assert [v.verdict for v in report.advice.verdicts] == [VerdictKind.FAIL, VerdictKind.FAIL]
    assert report.advice.n_max.value is None
    assert report.corpus.rows_usable == 50


def test_ranks_beyond_the_pairs_are_null(tmp_path):
    file = write_vectors(tmp_path / "rows.jsonl", unit_rows(np.random.default_rng(0), 40, 8))
    report = measure(file, tmp_path / "work", batch_sizes=[3, 16], top_k=4)
    small, large = report.curve
    # Three rows have three pairs.
    assert [rank is None for rank in small.top_k] == [False, False, False, True]
    assert small.top_k_mean is None
    assert large.top_k_mean is not None


def test_certain_evidence_gives_bounds_and_labels_would_decide(tmp_path):
    rng = np.random.default_rng(2)
    vectors = unit_rows(rng, 200, 16)
    vectors[100:110] = vectors[0]
    file = write_vectors(tmp_path / "rows.jsonl", vectors)
    report = measure(file, tmp_path / "work", batch_sizes=[16], worst_case_similarity=0.2)
    share = report.curve[0].false_negative_softmax_share
    assert report.evidence.tier == "certain"
    # Eleven equal rows: 110 ordered pairs of 200 · 199 are known.
    assert report.evidence.known_false_negative_pairs == 110
    assert share.high == report.curve[0].worst_case.high
    assert share.value < report.curve[0].worst_case.value
    assert report.advice.verdicts[0].verdict is VerdictKind.INCONCLUSIVE
    assert report.advice.drop_duplicates.rows_to_drop == list(range(101, 111))


def test_worst_case_within_budget_passes_with_its_assumption(tmp_path):
    vectors = np.eye(64)
    report = measure(
        write_vectors(tmp_path / "rows.jsonl", vectors),
        tmp_path / "work",
        batch_sizes=[16],
        worst_case_similarity=0.5,
    )
    verdict = report.advice.verdicts[0]
    assert verdict.verdict is VerdictKind.PASS
    assert "0.50" in verdict.assumption
    # The scan goes on to all 64 rows.
    assert report.advice.n_max.value == 64
    assert not report.advice.n_max.exceeded


def test_dropping_repeated_rows_moves_n_max(tmp_path):
    rng = np.random.default_rng(3)
    vectors = unit_rows(rng, 120, 32)
    doubled = np.concatenate([vectors, vectors, vectors])
    groups = [f"g{i % 120}" for i in range(360)]
    report = measure(
        write_vectors(tmp_path / "rows.jsonl", doubled, groups),
        tmp_path / "work",
        batch_sizes=[8, 64],
        corpus=GROUPED,
    )
    drop = report.advice.drop_duplicates
    assert len(drop.rows_to_drop) == 240
    assert drop.rows_remaining == 120
    assert drop.n_max_after.value == 120
    assert all(point.estimate.value == 0.0 for point in drop.share_after)
    assert report.advice.n_max.value < 64


def test_a_sample_of_rows_has_intervals_from_sub_pools_and_none_beyond(tmp_path):
    rng = np.random.default_rng(4)
    centres = unit_rows(rng, 100, 16)
    vectors = centres[rng.integers(0, 100, 4000)] + 0.1 * rng.standard_normal((4000, 16))
    np.save(tmp_path / "rows.npy", vectors.astype(np.float32))
    report = measure(
        tmp_path / "rows.npy",
        tmp_path / "work",
        batch_sizes=[8, 100],
        corpus={"max_rows": 800},
        worst_case_similarity=0.6,
        num_repeats=20,
    )
    assert (report.corpus.rows_usable, report.corpus.rows_encoded) == (4000, 800)
    assert report.sampling.sub_pools == 20
    assert report.sampling.largest_size_with_interval == 40
    small, large = report.curve
    assert small.top_k_mean.low < small.top_k_mean.value < small.top_k_mean.high
    assert large.top_k_mean.low is None
    assert "800 of 4000 rows" in large.top_k_mean.method
    assert report.advice.verdicts[1].verdict is VerdictKind.INCONCLUSIVE
    assert "no_interval" in {warning.code for warning in report.warnings}


def test_zero_and_non_finite_vectors_are_left_out_and_listed(tmp_path):
    vectors = unit_rows(np.random.default_rng(5), 30, 8)
    vectors[3] = 0.0
    vectors[7, 2] = np.nan
    vectors[9, 1] = np.inf
    np.save(tmp_path / "rows.npy", vectors)
    report = measure(tmp_path / "rows.npy", tmp_path / "work", batch_sizes=[4], corpus={})
    assert report.corpus.rows_usable == 27
    assert {e.reason: e.rows for e in report.corpus.excluded} == {
        "zero_vector": [4],
        "non_finite_vector": [8, 10],
    }


@pytest.mark.parametrize(
    ("sizes", "code"),
    [([31], "batch_size_too_large"), ([16, 1000], "batch_size_too_large")],
)
def test_sizes_above_the_usable_rows_are_refused(tmp_path, sizes, code):
    np.save(tmp_path / "rows.npy", unit_rows(np.random.default_rng(6), 30, 4))
    with pytest.raises(RequestError) as refused:
        measure(tmp_path / "rows.npy", tmp_path / "work", batch_sizes=sizes, corpus={})
    assert refused.value.code == code
    assert "30 usable rows" in refused.value.message


def test_cancelling_raises_out_of_a_long_step(tmp_path):
    class Cancelled(Exception):
        pass

    def checkpoint():
        raise Cancelled

    np.save(tmp_path / "rows.npy", unit_rows(np.random.default_rng(7), 300, 4))
    with pytest.raises(Cancelled):
        run_probe(
            ProbeRequest(batch_sizes=(64,)),
            tmp_path / "rows.npy",
            tmp_path / "work",
            settings=Settings(home=tmp_path / "home"),
            job_id="x",
            name="rows.npy",
            checkpoint=checkpoint,
        )


def test_pairs_have_gradients_and_shares_of_updates(tmp_path):
    """Pairs given as texts need an encoder; MiniLM is small enough to take."""
    rows = [
        {"anchor": f"question number {i}", "positive": f"the answer to question number {i}"}
        for i in range(24)
    ]
    rows += [{"anchor": "question number 0", "positive": "another answer"}]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = measure(
        file, tmp_path / "work", encoder="minilm", batch_sizes=[8], corpus={}, worst_case_similarity=0.9
    )
    point = report.curve[0]
    assert point.negative_pairs_per_batch == 8 * 7
    # Two rows list positives for one anchor: each accepts the other's positive.
    assert report.evidence.known_false_negative_pairs == 2
    assert point.gradient_error.keys() == {"float32", "bfloat16", "float16"}
    assert point.gradient_error["float32"].infonce.value < point.gradient_error["bfloat16"].infonce.value
    assert 0 < point.effective_anchors.value <= 1
    assert point.xi.p10.value < point.xi.p50.value < point.xi.p90.value
    assert point.false_negative_gradient_share is not None


def test_the_smallest_temperatures_are_sampled(clustered, tmp_path):
    file, _, _ = clustered
    report = measure(file, tmp_path, batch_sizes=[4], corpus=GROUPED, temperature=0.002)
    assert report.sampling.method == "sampled"
    assert 0 < report.curve[0].false_negative_softmax_share.value < 1


def test_exact_and_sampled_agree(clustered, tmp_path):
    file, _, _ = clustered
    request = {"batch_sizes": [2, 8, 15, 100], "corpus": GROUPED, "temperature": 0.1}
    exact = measure(file, tmp_path / "exact", **request)
    sampled = measure(file, tmp_path / "sampled", method="sampled", **request)
    assert (exact.sampling.method, exact.sampling.exact_up_to) == ("exact", 15)
    assert (sampled.sampling.method, sampled.sampling.exact_up_to) == ("sampled", None)
    for a, b in zip(exact.curve[:3], sampled.curve[:3], strict=True):
        pairs = [
            (a.false_negative_softmax_share, b.false_negative_softmax_share),
            (a.hardest_negative, b.hardest_negative),
            *(
                (p.expected_pairs, q.expected_pairs)
                for p, q in zip(a.pairs_above, b.pairs_above, strict=True)
            ),
        ]
        for without_error, drawn in pairs:
            assert without_error.low == without_error.value == without_error.high
            # Five figures at three sizes: 2.5 half-widths, i.e. about 5 standard errors.
            assert abs(without_error.value - drawn.value) <= 1.25 * (drawn.high - drawn.low) + 0.002
    # Beyond a twentieth of the rows shares are sampled either way; how many pairs to expect is known at any size.
    assert exact.curve[3].false_negative_softmax_share == sampled.curve[3].false_negative_softmax_share
    for p, q in zip(exact.curve[3].pairs_above, sampled.curve[3].pairs_above, strict=True):
        assert p.expected_pairs.low == p.expected_pairs.high
        drawn = q.expected_pairs
        assert abs(p.expected_pairs.value - drawn.value) <= 1.25 * (drawn.high - drawn.low) + 0.002
    assert abs(exact.advice.n_max.value - sampled.advice.n_max.value) <= 3
