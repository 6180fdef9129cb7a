from __future__ import annotations

import gzip
import hashlib
import json
import math

import numpy as np
import pytest

from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.estimate.borrowed import BorrowedCurve, borrowed_curve
from probe_service.known_encoders import KNOWN_ENCODERS
from probe_service.settings import Settings

REVISION = KNOWN_ENCODERS["minilm"].revision


@pytest.fixture(scope="module")
def curves(repository):
    return json.loads((repository / "probe_service" / "estimate" / "borrowed_curves.json").read_text("utf-8"))


def test_a_curve_is_borrowed_for_exactly_the_encoder_that_it_was_learnt_for():
    curve = borrowed_curve("minilm", REVISION)
    assert curve is not None
    assert "2879 sentence pairs of the dev and test splits of the STS Benchmark" in curve.source
    assert "602 at 4 or more of 5, under minilm at 1110a243" in curve.source
    assert borrowed_curve("minilm", "0" * 40) is None
    assert borrowed_curve("minilm", None) is None
    assert borrowed_curve("simcse-roberta-large", REVISION) is None


def test_the_table_rises_and_stays_between_0_and_1(curves):
    for name, learnt in curves.items():
        table = borrowed_curve(name, learnt["revision"]).table.tolist()
        assert table == learnt["probability"] == sorted(table)
        assert len(table) == 201
        assert 0.0 < table[0] < 0.01
        assert 0.85 < table[-1] < 1.0


def test_a_probability_is_read_from_the_table_on_a_straight_line():
    # Entries at −1, 0 and 1.
    curve = BorrowedCurve(np.array([0.0, 0.2, 1.0]), "by hand")
    found = curve.probability(np.array([[-1.0, -0.5, 0.0], [0.25, 1.0, 1.0000001]], dtype=np.float32))
    np.testing.assert_allclose(found, [[0.0, 0.1, 0.2], [0.4, 1.0, 1.0]], atol=1e-12)
    assert found.dtype == np.float64


def read(file):
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_the_provenance_names_the_files_by_their_content(curves, labelled_corpora):
    for learnt in curves.values():
        for file, digest in learnt["files"].items():
            assert hashlib.sha256((labelled_corpora / file).read_bytes()).hexdigest() == digest
        scores = [
            row["score"]
            for file in learnt["files"]
            for row in read(labelled_corpora / file)
            if row["split"] != "train"
        ]
        assert len(scores) == learnt["pairs"]
        assert sum(score >= learnt["score_threshold"] for score in scores) == learnt["pairs_accepted"]


def softmax_share(cosines, chances):
    """Mean over anchors of Σ_j w_ij p_ij at T = .05, row by row from the definition."""
    shares = []
    for i in range(len(cosines)):
        weights = [math.exp((s - 1.0) / 0.05) if j != i else 0.0 for j, s in enumerate(cosines[i])]
        shares.append(math.fsum(w * p for w, p in zip(weights, chances[i], strict=True)) / math.fsum(weights))
    return math.fsum(shares) / len(shares)


def test_no_borrowed_curve_fits_every_corpus(labelled_corpora, tmp_path):
    """Banking77 at N = 1024: about .32 where the truth is .68. Flickr8k at N = 16: about .014 where it is 0."""
    rng = np.random.default_rng(0)
    questions = [
        row for row in read(labelled_corpora / "labels" / "banking77.jsonl.gz") if row["split"] == "train"
    ]
    questions = [questions[i] for i in rng.permutation(len(questions))[:1024]]
    captions = {
        row["cluster"]: row["text"]
        for row in read(labelled_corpora / "clusters" / "flickr8k_captions.jsonl.gz")
    }
    captions = [list(captions.values())[i] for i in rng.permutation(len(captions))[:256]]
    loaded = load_encoder("minilm", Settings(home=tmp_path))
    cache = VectorCache(tmp_path, loaded.info.fingerprint, loaded.info.dimension)
    vectors = encode_with_cache(loaded, [row["text"] for row in questions] + captions, cache).vectors
    curve = borrowed_curve(loaded.info.name, loaded.info.revision)

    cosines = (vectors[:1024] @ vectors[:1024].T).astype(np.float64)
    intents = np.array([row["label"] for row in questions])
    same_intent = (intents[:, None] == intents[None, :]).astype(float)
    assert softmax_share(cosines.tolist(), same_intent.tolist()) == pytest.approx(0.68, abs=0.03)
    assert softmax_share(cosines.tolist(), curve.probability(cosines).tolist()) == pytest.approx(
        0.32, abs=0.03
    )
    cosines = (vectors[1024:] @ vectors[1024:].T).astype(np.float64)
    batches = [
        cosines[np.ix_(rows, rows)] for rows in (rng.choice(256, 16, replace=False) for _ in range(100))
    ]
    shares = [softmax_share(batch.tolist(), curve.probability(batch).tolist()) for batch in batches]
    assert np.mean(shares) == pytest.approx(0.014, abs=0.005)
