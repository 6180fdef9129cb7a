"""The modules for sentence-transformers against its own losses, and against loops where it has none."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import uses_gradient_cache
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from sentence_transformers.util import dot_score
from tokenizers import Tokenizer, models

from probe_service.errors import RequestError
from probe_service.losses import (
    CachedFlatNCELoss,
    CachedGSInfoNCELoss,
    CachedInfoNCELoss,
    FlatNCELoss,
    GSInfoNCELoss,
    InfoNCELoss,
    gs_info_nce,
)
from tests.unit.encode.checkpoints import SENTENCES, random_model, write_checkpoint
from tests.unit.losses import loops
from tests.unit.losses.table import Table, value_and_gradient

DIRECTIONS = [
    (["query_to_doc"], "joint"),
    (["query_to_doc", "doc_to_query"], "joint"),
    (["query_to_doc", "doc_to_query"], "per_direction"),
    (["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"], "joint"),
]
TWINS = [
    (InfoNCELoss, CachedInfoNCELoss),
    (FlatNCELoss, CachedFlatNCELoss),
    (GSInfoNCELoss, CachedGSInfoNCELoss),
]


def assert_same_step(one, other, rtol=1e-9):
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-12)


# --- as sentence-transformers has them ---


@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize(("directions", "mode"), DIRECTIONS)
def test_without_masks_infonce_is_the_ranking_loss(directions, mode, hard):
    table = Table(7, 2 + hard)
    chosen = {"scale": 5.0, "directions": directions, "partition_mode": mode}
    peer = value_and_gradient(MultipleNegativesRankingLoss(table, **chosen), table)
    assert_same_step(value_and_gradient(InfoNCELoss(table, **chosen), table), peer)
    cached = CachedInfoNCELoss(table, mini_batch_size=3, **chosen)
    assert_same_step(value_and_gradient(cached, table), peer)
    peer = CachedMultipleNegativesRankingLoss(table, mini_batch_size=3, **chosen)
    assert_same_step(value_and_gradient(cached, table), value_and_gradient(peer, table))


def test_another_similarity_is_used_as_the_ranking_loss_uses_it():
    table = Table(6, 3)
    chosen = {"scale": 1.0, "similarity_fct": dot_score}
    peer = MultipleNegativesRankingLoss(table, **chosen)
    assert_same_step(value_and_gradient(InfoNCELoss(table, **chosen), table), value_and_gradient(peer, table))


@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize(("directions", "mode"), DIRECTIONS)
def test_flatnce_is_the_ranking_loss_without_the_own_pair(directions, mode, hard):
    """exp(loss) of each anchor is 1/p of its own pair; a denominator Z has c = 1 or 2 own pairs: log ξ = log(1/p − c)."""
    table = Table(6, 2 + hard)
    vectors = table.vectors()
    losses = []
    for i in range(6):
        documents = [(c, j) for c in range(1, 2 + hard) for j in range(6)]
        met = {
            "query_to_doc": [(vectors[0][i], vectors[c][j]) for c, j in documents if (c, j) != (1, i)],
            "query_to_query": [(vectors[0][i], vectors[0][j]) for j in range(6) if j != i],
            "doc_to_query": [(vectors[1][i], vectors[0][j]) for j in range(6) if j != i],
            "doc_to_doc": [(vectors[1][i], vectors[c][j]) for c, j in documents if j != i],
        }
        own = math.exp(5 * loops.cosine(vectors[0][i], vectors[1][i]))
        sums = [
            math.fsum(math.exp(5 * loops.cosine(x, y)) for x, y in met[direction]) for direction in directions
        ]
        sums = [math.fsum(sums)] if mode == "joint" else sums
        losses.append(np.mean([math.log(each / own) for each in sums]))
    loss = FlatNCELoss(table, scale=5.0, directions=directions, partition_mode=mode)
    assert loss(table.features()).item() == pytest.approx(np.mean(losses), rel=1e-9)


@pytest.mark.parametrize("noise", ["gaussian", "expected"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gs_infonce_is_the_functional_one(noise, symmetric):
    table = Table(6, 2 if symmetric else 4)
    chosen = {"noise_weight": 0.5, "noise": noise}
    loss = GSInfoNCELoss(
        table,
        scale=4.0,
        noise_per_anchor=1.4,
        directions=["query_to_doc", "doc_to_query"] if symmetric else ["query_to_doc"],
        partition_mode="per_direction" if symmetric else "joint",
        **chosen,
    )
    found = value_and_gradient(loss, table, seed=3)
    table.weight.grad = None
    torch.manual_seed(3)
    documents = table.weight[6:]
    expected = gs_info_nce(
        table.weight[:6], documents, noise_count=8, temperature=0.25, symmetric=symmetric, **chosen
    )
    expected.backward()
    assert_same_step(found, (expected.detach(), table.weight.grad))


def test_noise_is_drawn_afresh_at_each_step():
    table = Table(5, 2)
    loss = GSInfoNCELoss(table)
    assert loss(table.features()).item() != loss(table.features()).item()


# --- cached twins ---


@pytest.mark.parametrize(("plain", "cached"), TWINS)
@pytest.mark.parametrize("mini_batch_size", [1, 3, 100])
def test_a_cached_loss_is_its_twin(plain, cached, mini_batch_size):
    table = Table(8, 3)
    labels = torch.tensor([0, 0, 1, 2, -1, -1, 1, 3])
    chosen = {
        "margin": -0.1,
        "mask_same_label": True,
        "directions": ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"],
    }
    twin = cached(table, mini_batch_size=mini_batch_size, **chosen)
    one = value_and_gradient(plain(table, **chosen), table, labels)
    assert_same_step(value_and_gradient(twin, table, labels), one)
    assert float(one[1].abs().sum()) > 0
    assert uses_gradient_cache(twin)
    assert not uses_gradient_cache(plain(table))
    with torch.no_grad():
        torch.manual_seed(0)
        torch.testing.assert_close(twin(table.features(), labels), one[0])


@pytest.mark.parametrize(("plain", "cached"), TWINS[:2])
def test_matryoshka_takes_both(plain, cached):
    table = Table(6, 2)
    table.get_embedding_dimension = lambda: 6
    steps = [
        value_and_gradient(MatryoshkaLoss(table, loss, [6, 3]), table)
        for loss in (plain(table), cached(table, mini_batch_size=4))
    ]
    assert_same_step(*steps)


def test_autocast_does_not_round_the_similarities():
    table = Table(8, 2)
    loss = InfoNCELoss(table)
    exact = loss(table.features()).item()
    table.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(table.features()).item() == pytest.approx(exact, rel=1e-5)


# --- masks ---


def test_rows_of_one_label_are_left_out_but_their_hard_negatives_stay():
    table = Table(6, 3)
    labels = torch.tensor([4, 4, 7, -1, -1, 4])
    vectors = table.vectors()
    same = np.equal.outer(labels.numpy(), labels.numpy()) & (labels.numpy() >= 0)
    mask = np.concatenate([~same, np.ones((6, 6), dtype=bool)], axis=1)
    candidates = np.concatenate([vectors[1], vectors[2]])
    for kind, loop in ((InfoNCELoss, loops.info_nce), (FlatNCELoss, loops.decoupled)):
        found = kind(table, mask_same_label=True)(table.features(), labels)
        assert found.item() == pytest.approx(loop(vectors[0], candidates, mask, 0.05), rel=1e-9)


def test_what_is_more_similar_than_the_positive_is_left_out():
    table = Table(8, 3, seed=2)
    vectors = table.vectors()
    candidates = np.concatenate([vectors[1], vectors[2]])
    cosines = np.array([[loops.cosine(x, y) for y in candidates] for x in vectors[0]])
    mask = cosines <= cosines.diagonal()[:, None] - 0.3
    assert 0 < (~mask[:, 8:]).sum() < 64
    found = InfoNCELoss(table, margin=0.3)(table.features())
    assert found.item() == pytest.approx(loops.info_nce(vectors[0], candidates, mask, 0.05), rel=1e-9)


@pytest.fixture(scope="module")
def small_models(tmp_path_factory):
    """A model, a guide with the same vocabulary, and one that reads other tokens."""
    folder = tmp_path_factory.mktemp("models")
    made = []
    for number, kind in enumerate(("bert", "bert", "roberta")):
        random = random_model(kind)
        if number == 1:
            generator = torch.Generator().manual_seed(3)
            for weight in (each for each in random.parameters() if each.ndim == 2):
                torch.nn.init.normal_(weight, std=0.5, generator=generator)
        base = write_checkpoint(
            folder, f"some/{kind}{number}", kind, weights="model.safetensors", model=random
        )
        made.append(SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, "mean")], device="cpu"))
        made[-1].eval()
    return made


def texts(model, columns):
    words = [SENTENCES[0], SENTENCES[1], SENTENCES[2], "the park", "a dogs sat and run", "on the mat words"]
    turned = [words[column:] + words[:column] for column in range(columns)]
    return [dict(model.preprocess(column)) for column in turned]


@pytest.mark.parametrize(
    ("guide", "columns", "contrasted", "margin", "strategy"),
    [
        (1, 2, False, 0.0, "absolute"),
        (1, 2, True, 0.05, "absolute"),
        (1, 3, False, 0.1, "relative"),
        (1, 3, False, -0.02, "absolute"),
        (2, 3, False, 0.1, "relative"),
    ],
)
def test_a_guide_masks_as_gistembed_does(small_models, guide, columns, contrasted, margin, strategy):
    model, judge = small_models[0], small_models[guide]
    peer = GISTEmbedLoss(
        model,
        judge,
        temperature=0.05,
        margin=margin,
        margin_strategy=strategy,
        contrast_anchors=contrasted,
        contrast_positives=contrasted,
    )
    directions = ["query_to_doc"] + ["query_to_query", "doc_to_doc"] * contrasted
    chosen = {"guide": judge, "margin": margin, "margin_strategy": strategy, "directions": directions}
    # The retokenized texts of a batch are padded in common, and mini-batches anew: float32 differs a little.
    expected = peer(texts(model, columns), None).item()
    unmasked = MultipleNegativesRankingLoss(model, directions=directions)(texts(model, columns), None).item()
    assert expected != pytest.approx(unmasked, rel=1e-3)
    assert InfoNCELoss(model, **chosen)(texts(model, columns)).item() == pytest.approx(expected, rel=1e-5)
    cached = CachedInfoNCELoss(model, mini_batch_size=4, **chosen)
    assert cached(texts(model, columns)).item() == pytest.approx(expected, rel=1e-5)


def test_a_guide_reads_rows_without_padding(small_models):
    """Where rows come one after the other, as flash attention wants them, they are told apart by their ends."""
    model, _, judge = small_models
    loss = InfoNCELoss(model, guide=judge)
    padded = model.preprocess(SENTENCES[:3])
    lengths = padded["attention_mask"].sum(dim=1)
    flat = torch.cat([row[:length] for row, length in zip(padded["input_ids"], lengths, strict=True)])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    found = loss._for_guide({"input_ids": flat[None], "cu_seq_lens_q": ends})
    assert torch.equal(found["input_ids"], judge.preprocess(SENTENCES[:3])["input_ids"])


# --- several devices ---


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """One step of every loss on two devices that gather; see gathered_step.py."""
    script = Path(__file__).with_name("gathered_step.py")
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.losses.gathered_step", tmp_path_factory.mktemp("gathered")],
        cwd=script.parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", [kind.__name__ for twins in TWINS[:2] for kind in twins])
def test_devices_that_gather_share_the_loss_of_the_whole_batch(gathered, name):
    """The mean of the devices' losses, and of their gradients as DDP takes it, is that of one device with all rows."""
    from probe_service import losses
    from tests.unit.losses.gathered_step import LABELS, SETTINGS, SIZE

    table = Table(SIZE, 3)
    value, gradient = value_and_gradient(
        getattr(losses, name.removeprefix("Cached"))(table, **SETTINGS), table, torch.tensor(LABELS)
    )
    devices = [each[name] for each in gathered]
    assert len(devices) == 2
    assert devices[0]["loss"] != pytest.approx(devices[1]["loss"], rel=1e-3)
    assert np.mean([each["loss"] for each in devices]) == pytest.approx(value.item(), rel=1e-9)
    mean = np.mean([each["gradient"] for each in devices], axis=0)
    np.testing.assert_allclose(mean, gradient.numpy(), rtol=1e-9, atol=1e-12)


# --- settings ---


def test_settings_and_sources_for_the_card(small_models):
    model, guide, _ = small_models
    shared = set(InfoNCELoss(model).get_config_dict())
    assert set(MultipleNegativesRankingLoss(model).get_config_dict()) - shared == {
        "hardness_mode",
        "hardness_strength",
    }
    loss = CachedGSInfoNCELoss(
        model, 10.0, mini_batch_size=4, noise_per_anchor=2.0, noise_mean=0.1, guide=guide
    )
    assert (loss.scale, loss.temperature, loss.margin) == (10.0, 0.1, 0.0)
    config = loss.get_config_dict()
    assert config["guide"] is guide
    assert {name: config[name] for name in ("scale", "similarity_fct", "mini_batch_size", "noise_mean")} == {
        "scale": 10.0,
        "similarity_fct": "cos_sim",
        "mini_batch_size": 4,
        "noise_mean": 0.1,
    }
    for key in ("wu-etal-2022-smoothed", "solatorio2024gistembed", "gao2021scaling"):
        assert f"{{{key}," in loss.citation
    assert FlatNCELoss(model).citation.strip().startswith("@misc{chen2021simpler")
    assert InfoNCELoss(model).citation == MultipleNegativesRankingLoss(model).citation


def static_model():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1}, unk_token="<unk>"))
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)], device="cpu")


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        (InfoNCELoss, {"scale": 0.0}),
        (InfoNCELoss, {"directions": ["doc_to_query"]}),
        (FlatNCELoss, {"directions": ["query_to_doc", "doc_to_doc"], "partition_mode": "per_direction"}),
        (InfoNCELoss, {"margin_strategy": "none"}),
        (GSInfoNCELoss, {"noise_per_anchor": 0.0}),
        (GSInfoNCELoss, {"noise_weight": -1.0}),
        (GSInfoNCELoss, {"noise": "expected", "similarity_fct": dot_score}),
        (CachedFlatNCELoss, {"mini_batch_size": 0}),
        (CachedFlatNCELoss, {"mini_batch_num_tokens": 0}),
    ],
)
def test_settings_that_cannot_be_are_refused(small_models, kind, chosen):
    with pytest.raises(RequestError) as caught:
        kind(small_models[0], **chosen)
    assert caught.value.code == "loss_invalid"


def test_batches_and_models_that_do_not_fit_are_refused(small_models):
    model, guide, _ = small_models
    table = Table(4, 2)
    features = table.features()
    for call in (
        lambda: InfoNCELoss(table)(features[:1]),
        lambda: InfoNCELoss(table, mask_same_label=True)(features),
        lambda: InfoNCELoss(table, mask_same_label=True)(features, torch.rand(4)),
        lambda: InfoNCELoss(model, guide=guide).compute_loss_from_embeddings([torch.rand(2, 3)] * 2),
        lambda: InfoNCELoss(model, guide=static_model()),
        lambda: InfoNCELoss(static_model(), guide=guide),
        lambda: CachedInfoNCELoss(static_model()),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.code == "loss_invalid"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_alone_are_enough_and_half_precision_is_compared_in_float32(dtype):
    a, p = (torch.nn.functional.normalize(torch.rand(5, 4)).to(dtype) for _ in range(2))
    plain = FlatNCELoss(Table(5, 2), scale=1.0, similarity_fct=lambda left, right: left @ right.T)
    loss = plain.compute_loss_from_embeddings([a, p])
    # By hand: log Σ_{j ≠ i} exp(a_i·p_j) − a_i·p_i, of the vectors as they were rounded.
    dots = a.double() @ p.double().T
    others = dots.exp().sum(dim=1) - dots.diagonal().exp()
    assert loss.item() == pytest.approx((others.log() - dots.diagonal()).mean().item(), rel=1e-6, abs=1e-6)
