"""Tiny random checkpoints in the layout of the hub's cache, and the vectors that transformers gives for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SENTENCES = [
    "the cat sat on the mat",
    "a cat sat",
    "dogs run in the park",
    "the",
    "cat " * 90,
    "unknown zebra words and the rest",
    "",
    "mat mat mat",
]
_WORDS = ("the", "a", "cat", "sat", "on", "mat", "dogs", "run", "in", "park", "words", "and", "rest")


def write_tokenizer(folder: Path, kind: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>"] if kind == "roberta" else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    names = (
        {
            "cls_token": "<s>",
            "bos_token": "<s>",
            "pad_token": "<pad>",
            "sep_token": "</s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        }
        if kind == "roberta"
        else {"cls_token": "[CLS]", "pad_token": "[PAD]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    )
    vocabulary = {word: index for index, word in enumerate([*special, *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    first, last = names["cls_token"], names["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def random_model(kind: str) -> Any:
    import torch
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 4 + len(_WORDS),
        # Large weights, so that pooler output, CLS and mean are far from each other.
        "initializer_range": 0.5,
    }
    torch.manual_seed(7)
    if kind == "roberta":
        return RobertaModel(
            RobertaConfig(pad_token_id=1, max_position_embeddings=66, type_vocab_size=1, **sizes)
        )
    return BertModel(BertConfig(pad_token_id=0, max_position_embeddings=64, **sizes))


def write_checkpoint(
    cache: Path,
    hub_name: str,
    kind: str,
    *,
    weights: str = "pytorch_model.bin",
    rename: Callable[[str], str | None] = lambda name: name,
    model: Any = None,
) -> Path:
    """Write a snapshot; `rename` gives each tensor's name in the file, or None to leave it out."""
    import torch
    from safetensors.torch import save_file

    repository = cache / f"models--{hub_name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    model = random_model(kind) if model is None else model
    model.config.save_pretrained(folder)
    write_tokenizer(folder, kind)
    tensors = {
        renamed: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if (renamed := rename(name)) is not None
    }
    if weights.endswith(".safetensors"):
        save_file(tensors, folder / weights, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / weights)
    return folder


def save_sentence_model(folder: Path) -> Path:
    """Save a tiny random BERT with mean pooling and unit vectors as sentence-transformers saves models."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    base = write_checkpoint(folder, "some/bert", "bert", weights="model.safetensors")
    modules = [Transformer(str(base)), Pooling(32, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"), create_model_card=False)
    return folder / "model"


def vectors_of_transformers(folder: Path, texts: list[str], max_length: int, pick: str) -> np.ndarray:
    """One text at a time through AutoModel: `pick` is pooler_output or first_token; then unit length."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        tokens.pop("token_type_ids", None)
        with torch.no_grad():
            output = model(**tokens)
        row = output.pooler_output[0] if pick == "pooler_output" else output.last_hidden_state[0, 0]
        row = row.double().numpy()
        rows.append(row / np.sqrt((row**2).sum()))
    return np.array(rows)
