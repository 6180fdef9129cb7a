"""A RoBERTa of random weights as simcse-roberta-large, in the layout of the hub's cache: the path that real weights take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["save_tokenizer", "write_random_roberta"]

COMMIT = "0" * 39 + "1"


def write_random_roberta(cache: Path, *, layers: int, width: int, vocabulary: int) -> Path:
    """Write configuration and weights, and return the folder that the tokenizer belongs in."""
    import torch
    from transformers import RobertaConfig, RobertaModel

    repository = cache / "models--princeton-nlp--sup-simcse-roberta-large"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        intermediate_size=4 * width,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
    )
    config.save_pretrained(folder)
    torch.save(RobertaModel(config).state_dict(), folder / "pytorch_model.bin")
    return folder


def save_tokenizer(tokenizer: Any, folder: Path, **special: str) -> None:
    """Save one of the package tokenizers with RoBERTa's special tokens, and further ones."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        bos_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        eos_token="</s>",
        unk_token="<unk>",
        **special,
    ).save_pretrained(folder)
