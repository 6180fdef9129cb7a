"""Load a full-size RoBERTa (24 layers, 1024 wide) as simcse-roberta-large and compare it with transformers.

The weights are random, written in the layout of the Hugging Face cache in a temporary folder; what is compared is
the path that real weights take. Needs about 5 GB of memory and 1.5 GB of disk; not part of CI.

Run: ``python benchmarks/simcse_full_size.py``
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from random_roberta import save_tokenizer, write_random_roberta

LARGEST_DIFFERENCE = 1e-5
WORDS = (
    "how",
    "when",
    "where",
    "can",
    "I",
    "you",
    "we",
    "change",
    "close",
    "lose",
    "find",
    "pay",
    "card",
    "order",
)
SENTENCES = [f"{' '.join((WORDS * 3)[start : 2 * start + 3])} ?" for start in range(15)] + ["card " * 600]


def write_checkpoint(cache: Path) -> Path:
    """Write the random checkpoint and a tokenizer whose few words lie within a vocabulary of 50,265."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = write_random_roberta(cache, layers=24, width=1024, vocabulary=50_265)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS, "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    save_tokenizer(tokenizer, folder)
    return folder


def main() -> int:
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}  # before huggingface_hub reads them
        import torch
        from transformers import AutoModel, AutoTokenizer

        from probe_service.encode import load_encoder
        from probe_service.settings import Settings

        started = time.perf_counter()
        folder = write_checkpoint(Path(home) / "hub")
        print(f"written in {time.perf_counter() - started:.1f} s")

        started = time.perf_counter()
        loaded = load_encoder("simcse-roberta-large", Settings())
        print(f"loaded and checked in {time.perf_counter() - started:.1f} s on {loaded.info.device}")
        started = time.perf_counter()
        encoded = loaded.encoder.encode(SENTENCES)
        print(f"{len(SENTENCES)} sentences encoded in {time.perf_counter() - started:.1f} s")

        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(loaded.info.device)
        largest = 0.0
        for row, sentence in enumerate(SENTENCES):
            tokens = tokenizer(sentence, truncation=True, max_length=512, return_tensors="pt")
            tokens.pop("token_type_ids", None)
            with torch.no_grad():
                expected = model(**tokens.to(loaded.info.device)).pooler_output[0]
            expected = (expected / expected.norm()).cpu()
            largest = max(largest, float((expected - torch.from_numpy(encoded.vectors[row])).abs().max()))

        print(loaded.info.model_dump_json(indent=2))
        cut = encoded.was_truncated.nonzero()[0].tolist()
        print(f"rows cut at {loaded.info.max_length} tokens: {cut}")
        print(f"largest absolute difference to AutoModel's normalised pooler_output: {largest:.2e}")
        print("PASS" if largest <= LARGEST_DIFFERENCE else f"FAIL: above {LARGEST_DIFFERENCE}")
        return 0 if largest <= LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
