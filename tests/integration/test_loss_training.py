"""sentence-transformers' own trainer with each of our losses: it trains, and the saved model loads and has its card."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments

from probe_service import losses
from tests.unit.encode.checkpoints import SENTENCES, write_checkpoint

ROWS = {
    "anchor": [
        "the cat sat",
        "dogs run",
        "on the mat",
        "the park",
        "a cat",
        "words and the rest",
        "mat",
        "sat in",
    ],
    "positive": [
        "a cat sat",
        "dogs in the park",
        "mat",
        "in a park",
        "the cat",
        "rest and words",
        "the mat",
        "sat",
    ],
}
MASKED = {"mask_same_label": True, "margin": -0.1}
CASES = [
    ("InfoNCELoss", {}),
    ("FlatNCELoss", MASKED),
    ("GSInfoNCELoss", {"noise_weight": 0.5}),
    ("CachedInfoNCELoss", {"mini_batch_size": 3, **MASKED}),
    ("CachedFlatNCELoss", {"mini_batch_size": 3}),
    ("CachedGSInfoNCELoss", {"mini_batch_size": 3, "noise": "expected"}),
]
KEYS = {"Info": "oord2019", "Flat": "chen2021simpler", "GSInfo": "wu-etal-2022-smoothed"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random BERT with mean pooling, saved."""
    folder = tmp_path_factory.mktemp("tiny")
    base = write_checkpoint(folder, "some/bert", "bert", weights="model.safetensors")
    modules = [Transformer(str(base)), Pooling(32, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"), create_model_card=False)
    return folder / "model"


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_stock_trainer_trains_with_it(checkpoint, tmp_path, name, settings):
    model = SentenceTransformer(str(checkpoint), device="cpu")
    before = model.encode(SENTENCES)
    rows = ROWS | ({"label": [0, 1, 2, -1, 0, 3, 2, -1]} if "mask_same_label" in settings else {})
    dataset = Dataset.from_dict(rows)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=8,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        loss=getattr(losses, name)(model, **settings),
    )
    trainer.train()

    steps = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(steps) == 8
    assert np.isfinite(steps).all()
    assert steps[-1] < steps[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(steps[-1], abs=1.5)

    model.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    after = loaded.encode(SENTENCES)
    np.testing.assert_allclose(after, model.encode(SENTENCES), atol=1e-6)
    assert np.abs(after - before).max() > 1e-3

    card = (tmp_path / "saved" / "README.md").read_text("utf-8")
    assert f"loss:{name}" in card
    assert re.search(rf"probe_service\.losses\.modules\.{name}", card)
    for key, value in settings.items():
        shown = {True: "true"}.get(value, f'"{value}"' if isinstance(value, str) else str(value))
        assert f'"{key}": {shown}' in card
    source = KEYS[name.removeprefix("Cached").removesuffix("NCELoss")]
    assert source in card
    assert ("gao2021scaling" in card) == name.startswith("Cached")


# The trainer pins memory unless told that it runs on a CPU, which a program for users does not say.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_the_documented_programs_run(repository, checkpoint, tmp_path, monkeypatch):
    text = (repository / "docs" / "losses.md").read_text("utf-8")
    training, tensors = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert training.count("sentence-transformers/all-MiniLM-L6-v2") == 1
    exec(training.replace("sentence-transformers/all-MiniLM-L6-v2", str(checkpoint)), {})
    assert "FlatNCELoss" in (tmp_path / "trained" / "final" / "README.md").read_text("utf-8")
    names = {}
    exec(tensors, names)
    assert torch.isfinite(names["anchors"].grad).all()
