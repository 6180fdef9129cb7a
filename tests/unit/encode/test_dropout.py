"""Two dropout passes, against transformers in train mode on the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from probe_service.encode import CheckedEncoder, dropout_similarities, load_encoder
from probe_service.encode import load as load_module
from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.remote import RemoteEncoder
from probe_service.errors import EncoderError
from probe_service.settings import Settings
from tests.unit.encode.checkpoints import SENTENCES, random_model, write_checkpoint


def nothing():
    pass


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saves a tiny BERT with mean pooling and loads it, with dropout rates of its own."""
    monkeypatch.setattr(load_module, "_checked", {})

    def save_and_load(hidden=0.1, attention=0.1, prompt=None) -> CheckedEncoder:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        name = f"{hidden}-{attention}-{prompt}"
        inner = random_model("bert")
        inner.config.hidden_dropout_prob = hidden
        inner.config.attention_probs_dropout_prob = attention
        base = write_checkpoint(tmp_path / name, "a/base", "bert", weights="model.safetensors", model=inner)
        model = SentenceTransformer(
            modules=[Transformer(str(base)), Pooling(32, "mean")],
            device="cpu",
            prompts={"query": prompt} if prompt else None,
            default_prompt_name="query" if prompt else None,
        )
        model.save(str(tmp_path / name / "saved"), create_model_card=False)
        return load_encoder(str(tmp_path / name / "saved"), Settings(device="cpu"))

    return save_and_load


def by_transformers(folder: str, texts: list[str], seed: int) -> np.ndarray:
    """Mean-pool two passes of AutoModel in train mode over one padded batch; no sentence-transformers."""
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=64, return_tensors="pt"
    )
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).train()
    mask = tokens["attention_mask"][:, :, None].double()
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    with torch.no_grad():
        states = [model(**tokens).last_hidden_state.double() for _ in range(2)]
    torch.set_rng_state(before)
    first, second = [(each * mask).sum(dim=1) / mask.sum(dim=1) for each in states]
    return ((first * second).sum(dim=1) / (first.norm(dim=1) * second.norm(dim=1))).numpy()


@pytest.mark.parametrize(("hidden", "attention"), [(0.1, 0.1), (0.3, 0.0), (0.0, 0.3)])
def test_equal_to_transformers_in_train_mode(load, hidden, attention):
    loaded = load(hidden, attention)
    texts = sorted(SENTENCES, key=len)  # one call, in this order
    found = dropout_similarities(loaded, texts, seed=5, checkpoint=nothing)
    call_seed = int(np.random.SeedSequence([5, 0]).generate_state(1, np.uint64)[0])
    expected = by_transformers(loaded.info.location, texts, call_seed)
    np.testing.assert_allclose(found.similarity, expected, atol=2e-6)
    assert found.similarity.dtype == np.float32
    assert found.similarity.max() < 0.999
    assert found.rates == tuple(sorted({hidden, attention} - {0.0}))


def test_deterministic_and_without_a_trace(load):
    loaded = load()
    before = loaded.encoder.encode(SENTENCES).vectors
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = [dropout_similarities(loaded, SENTENCES, seed=seed, checkpoint=nothing) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(found[0].similarity, found[1].similarity)
    assert (found[0].similarity != found[2].similarity).all()
    np.testing.assert_array_equal(loaded.encoder.encode(SENTENCES).vectors, before)


def test_similarity_falls_with_the_rate(load):
    texts = [f"the cat {'sat ' * length}" for length in range(30)]
    means = []
    for rate in (0.01, 0.1, 0.5):
        found = dropout_similarities(load(rate, rate), texts, seed=0, checkpoint=nothing)
        assert found.rates == (rate,)
        means.append(found.similarity.mean())
    assert 1.0 > means[0] > means[1] + 0.005
    assert means[1] > means[2] + 0.05


def test_prompt_and_lone_surrogates_as_in_encode(load):
    texts = ["sat", "on the mat \ud83d"]
    found = dropout_similarities(load(prompt="the cat "), texts, seed=3, checkpoint=nothing)
    spelt_out = [f"the cat {text}".replace("\ud83d", "\ufffd") for text in texts]
    expected = dropout_similarities(load(), spelt_out, seed=3, checkpoint=nothing)
    np.testing.assert_allclose(found.similarity, expected.similarity, atol=1e-6)


def test_rows_keep_their_place_and_the_work_can_be_abandoned(load):
    loaded = load()
    rng = np.random.default_rng(0)
    texts = ["the cat " * int(length) for length in rng.permutation(40)]
    calls = []
    found = dropout_similarities(loaded, texts, seed=0, checkpoint=lambda: calls.append(1))
    assert len(calls) > 1
    by_length = np.argsort([len(text) for text in texts], kind="stable")
    in_order = dropout_similarities(loaded, [texts[row] for row in by_length], seed=0, checkpoint=nothing)
    np.testing.assert_array_equal(found.similarity[by_length], in_order.similarity)

    def abandon():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dropout_similarities(loaded, texts, seed=0, checkpoint=abandon)
    assert len(dropout_similarities(loaded, [], seed=0, checkpoint=abandon).similarity) == 0


def test_a_vector_without_direction_has_no_similarity(load):
    loaded = load()
    for parameter in loaded.encoder.model.parameters():
        parameter.data.zero_()
    found = dropout_similarities(loaded, SENTENCES, seed=0, checkpoint=nothing)
    assert np.isnan(found.similarity).all()


def test_a_running_mean_learns_nothing(load):
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(32)

        def forward(self, features):
            return features | {"sentence_embedding": self.norm(features["sentence_embedding"])}

    plain = load()
    model = plain.encoder.model
    model.append(Normalised())
    loaded = CheckedEncoder(plain.info, lambda: ModuleEncoder(model))
    before = loaded.encoder.encode(SENTENCES).vectors
    dropout_similarities(loaded, SENTENCES, seed=0, checkpoint=nothing)
    assert model[-1].norm.num_batches_tracked == 0
    np.testing.assert_array_equal(loaded.encoder.encode(SENTENCES).vectors, before)


def test_refused_where_there_is_no_dropout(load):
    without = load(0.0, 0.0)
    remote = CheckedEncoder(without.info, lambda: RemoteEncoder("m", "http://127.0.0.1:9/v1", None))
    for loaded, word in ((without, "no dropout above 0"), (remote, "runs on a server")):
        with pytest.raises(EncoderError, match=word) as caught:
            dropout_similarities(loaded, ["a"], seed=0, checkpoint=nothing)
        assert caught.value.code == "encoder_without_dropout"
