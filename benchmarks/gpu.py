"""Check the pair search on a GPU, and time it and the encoding of RoBERTa-large against their peers. One H200: five minutes.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --dry-run        # all of it, tiny, on a CPU, the kernel in Triton's interpreter

First the kernel's answers are compared with float64 for many shapes. Then come speeds, each way in turn in every round; ratios
are medians over rounds of the peer's time over ours. The limit of the pair search is half a product of matrices, since it
needs the upper triangle only: N(N−1)d operations at the measured bfloat16 peak. That of encoding is two operations a weight
and token at that peak. Weights are random and the tokenizer is made here; no network is needed. A part that fails says so,
the others go on, and the command ends with 1. What is left when the time is up is skipped, and said to be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_roberta import save_tokenizer, write_random_roberta

TOP_K = 4
SMALLEST_DIFFERENCE = 1e-11
"""Cosines that differ by less are taken for ties: float64 rounds them by the order of additions."""
LARGEST_SHIFT = 0.008
"""What bfloat16 moves a cosine of unit rows by at most."""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    rounds: int
    checked: tuple[tuple[int, int, int], ...]
    timed: tuple[tuple[int, int], ...]
    stacks: tuple[tuple[int, int, int], ...]
    peak: int
    layers: int
    width: int
    vocabulary: int
    short_texts: int
    long_texts: int


FULL = Sizes(
    rounds=5,
    checked=(
        (1, 8, 3),
        (2, 1, 5),
        (777, 96, 4),
        (1000, 384, 5000),
        (2049, 130, 4),
        (4097, 768, 64),
        (5000, 1024, 65),
        (16_384, 1024, 4),
        (16_384, 1024, 500_000),
    ),
    timed=((8_192, 1024), (16_384, 384), (16_384, 1024), (65_536, 1024)),
    stacks=((1000, 64, 1024), (500, 256, 1024), (100, 1000, 1024)),
    peak=8_192,
    layers=24,
    width=1024,
    vocabulary=50_265,
    short_texts=49_152,
    long_texts=6_144,
)
DRY = Sizes(
    rounds=1,
    checked=((1, 8, 3), (2, 1, 5), (90, 40, 4), (90, 40, 300)),
    timed=((140, 32),),
    stacks=((3, 20, 32),),
    peak=256,
    layers=2,
    width=64,
    vocabulary=1_000,
    short_texts=40,
    long_texts=6,
)


@dataclass
class Bench:
    """What all parts share, and what they found."""

    sizes: Sizes
    device: str
    ends: float
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds until what is left is skipped."""
        return self.ends - time.monotonic()

    def row(self, table: str, **cells: Any) -> None:
        """Add a row to a table, and show it at once: the command may be killed."""
        self.tables.setdefault(table, []).append(cells)
        print(
            f"  {table}: " + ", ".join(f"{name} {shown(value)}" for name, value in cells.items()), flush=True
        )

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Run one part; what it raises ends that part only."""
        if self.left() <= 0:
            print(f"{name}: skipped, the time is up", flush=True)
            return
        print(f"{name} ({self.left():.0f} s are left)", flush=True)
        try:
            run()
        except Exception:  # noqa: BLE001 - on a lent machine the other parts are to run whatever this one does
            self.failed.append(name)
            traceback.print_exc()

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Wall time of one run, of several without a pause."""
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return (time.perf_counter() - began) / repeats

    def in_turn(self, ways: dict[str, Callable[[], Any]], repeats: int = 1) -> dict[str, list[float]]:
        """Time every way in every round, beginning with another one each time; a first round warms up.

        A way that raises is left out, and said to be.
        """
        usable = dict(ways)
        for name, run in ways.items():
            try:
                self.seconds(run)
            except Exception as error:  # noqa: BLE001 - a peer may lack memory or a kernel for this device
                print(f"  {name} is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
                del usable[name]
        found: dict[str, list[float]] = {name: [] for name in usable}
        names = list(usable)
        for number in range(self.sizes.rounds):
            if number and self.left() <= 0:
                print(f"  only {number} rounds: the time is up", flush=True)
                break
            turn = number % max(len(names), 1)
            for name in names[turn:] + names[:turn]:
                found[name].append(self.seconds(usable[name], repeats))
        return found


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "–" if value is None else str(value)


def ratio(peer: list[float] | None, ours: list[float]) -> float | None:
    return None if peer is None else statistics.median(a / b for a, b in zip(peer, ours, strict=True))


def unit_rows(bench: Bench, *shape: int, seed: int = 0) -> Any:
    import torch

    generator = torch.Generator(device=bench.device).manual_seed(seed)
    rows = torch.randn(shape, generator=generator, device=bench.device)
    return torch.nn.functional.normalize(rows, dim=-1)


def negatives(anchors: Any, candidates: Any) -> Any:
    """(N, N) cosines in float64; −∞ where there is no negative pair."""
    import torch

    right = anchors if candidates is None else candidates
    cosines = (anchors.double() @ right.double().T).clamp_(-1.0, 1.0)
    if candidates is not None:
        return cosines.fill_diagonal_(-torch.inf)
    return cosines.masked_fill_(torch.ones_like(cosines, dtype=torch.bool).tril_(), -torch.inf)


def check_pairs(bench: Bench) -> None:
    import torch

    from probe_service.similarity.triton_pairs import pairs_near_best, top_pairs_on_device

    for n, d, k in bench.sizes.checked:
        for kind in ("random", "positives", "duplicates", "crowded"):
            if n > 5000 and kind != "random":
                continue
            anchors, candidates = unit_rows(bench, n, d), None
            if kind == "positives":
                candidates = unit_rows(bench, n, d, seed=1)
            elif kind == "duplicates":
                anchors = anchors[torch.arange(n, device=bench.device) % max(n // 7, 1)]
            elif kind == "crowded":
                anchors = torch.nn.functional.normalize(anchors[:1] + 0.03 * anchors, dim=1)
            found = top_pairs_on_device(anchors, candidates, k=k)
            assert found is not None
            truth = negatives(anchors, candidates)
            wanted = min(k, int((truth > -torch.inf).sum()))
            best = truth.flatten().topk(wanted).values.cpu()
            similarity = torch.from_numpy(found.similarity)
            assert len(similarity) == wanted
            if wanted:
                assert float((similarity - best).abs().max()) <= SMALLEST_DIFFERENCE
                place = torch.from_numpy(found.anchor * n + found.candidate)
                assert len(place.unique()) == wanted
                taken = truth.flatten()[place.to(bench.device)].cpu()
                assert float((taken - similarity).abs().max()) <= SMALLEST_DIFFERENCE
                # Most similar first, ties by (anchor, candidate).
                tied = similarity[1:] == similarity[:-1]
                assert bool((similarity[1:] <= similarity[:-1]).all())
                assert bool((place[1:] > place[:-1])[tied].all())
            bench.row("checked", kind=kind, N=n, d=d, k=k, pairs=wanted)
            del truth
    n, d, _ = bench.sizes.checked[-1]
    anchors = unit_rows(bench, n, d)
    found_near = pairs_near_best(anchors, None, k=TOP_K, with_histogram=True)
    assert found_near is not None
    assert found_near.histogram is not None
    counts = found_near.histogram
    below = counts.cumsum(0)[:-1].tolist()
    edges = torch.linspace(-1, 1, len(counts) + 1, dtype=torch.float64)[1:-1].tolist()
    truth = negatives(anchors, None)
    truth = truth[truth > -torch.inf].sort().values
    assert int(counts.sum()) == len(truth)
    fewest, most = (
        torch.searchsorted(
            truth, torch.tensor(edges, device=bench.device, dtype=torch.float64) + shift
        ).tolist()
        for shift in (-LARGEST_SHIFT, LARGEST_SHIFT)
    )
    assert all(low <= count <= high for low, count, high in zip(fewest, below, most, strict=True))
    bench.row("checked", kind="histogram", N=n, d=d, k=TOP_K, pairs=len(truth))


def check_stacks(bench: Bench) -> None:
    import numpy as np

    from probe_service.similarity.triton_pairs import batch_top_k_on_device

    for batches, n, d in bench.sizes.stacks:
        anchors, candidates = unit_rows(bench, batches, n, d), unit_rows(bench, batches, n, d, seed=1)
        for other in (None, candidates):
            found = batch_top_k_on_device(anchors, other, k=TOP_K)
            for batch in range(0, batches, max(batches // 20, 1)):
                truth = negatives(anchors[batch], None if other is None else other[batch])
                best = truth.flatten().topk(TOP_K).values.cpu().numpy()
                np.testing.assert_allclose(found[batch], best, atol=SMALLEST_DIFFERENCE)
        bench.row("checked", kind=f"{batches} batches", N=n, d=d, k=TOP_K, pairs=None)


def peaks(bench: Bench) -> dict[str, float]:
    """Operations a second of a large product of matrices, the best of several, by what is multiplied."""
    import torch

    size, found = bench.sizes.peak, {}
    for name, dtype, tf32 in (
        ("bfloat16", torch.bfloat16, False),
        ("tf32", torch.float32, True),
        ("float32", torch.float32, False),
    ):
        left, right = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = tf32
        times = [bench.seconds(lambda a=left, b=right: a @ b, repeats=10) for _ in range(4)]
        found[name] = 2 * size**3 / min(times)
        bench.row("peaks", of=name, size=size, tflops=found[name] / 1e12)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def torch_flat(anchors: Any, dtype: Any) -> Any:
    """What a careful user would write: products of some rows at a time, mask, top-k of all, merged."""
    import torch

    rows = anchors.to(dtype)
    step, best = max(1, 2**28 // len(rows)), []
    for start in range(0, len(rows), step):
        cosines = rows[start : start + step] @ rows[start:].T
        triangle = cosines[:, : len(cosines)]
        triangle.masked_fill_(torch.ones_like(triangle, dtype=torch.bool).tril_(), -torch.inf)
        best.append(cosines.flatten().topk(min(TOP_K, cosines.numel())).values)
    return torch.cat(best).topk(TOP_K).values


def name_of(tiling: Any) -> str:
    """A tiling in words."""
    return (
        f"{tiling.rows}×{tiling.columns}×{tiling.depth}, {tiling.warps} warps, {tiling.stages} stages,"
        f" {tiling.registers or 'all'} registers"
    )


def faiss_of(bench: Bench) -> Callable[[Any], Any] | None:
    if bench.device != "cuda":
        print("  faiss-gpu is left out: there is no GPU", flush=True)
        return None
    try:
        import faiss
        import faiss.contrib.torch_utils  # its functions then take tensors

        resources = faiss.StandardGpuResources()
    except (ImportError, AttributeError) as error:
        print(f"  faiss-gpu is left out: {type(error).__name__}: {error}", flush=True)
        return None
    # One more neighbour than pairs: the nearest of every row is the row itself.
    return lambda rows: faiss.knn_gpu(resources, rows, rows, TOP_K + 1, metric=faiss.METRIC_INNER_PRODUCT)


def time_pairs(bench: Bench, peak: dict[str, float]) -> None:
    import torch

    from probe_service.similarity.triton_pairs import TILINGS, PairScreen, pairs_near_best

    faiss = faiss_of(bench)
    none = torch.full((1,), -torch.inf, device=bench.device)
    for n, d in bench.sizes.timed:
        anchors = unit_rows(bench, n, d)
        kernels = {name_of(tiling): tiling for tiling in TILINGS}
        screens = {name: PairScreen(anchors[None], None, tiling) for name, tiling in kernels.items()}
        halves = (anchors[: n // 2].bfloat16(), anchors.bfloat16())
        repeats = 1 if bench.device == "cpu" else max(1, 2**33 // n**2)
        times = bench.in_turn(
            {
                **{
                    name: lambda screen=screen: screen.run(TOP_K, none, 2**18)
                    for name, screen in screens.items()
                },
                "with histogram": lambda screens=screens: next(iter(screens.values())).run(
                    TOP_K, none, 2**18, with_histogram=True
                ),
                "half a product": lambda half=halves[0], whole=halves[1]: half @ whole.T,
            },
            repeats,
        )
        fastest = min(
            (name for name in screens if name in times), key=lambda name: statistics.median(times[name])
        )
        operations = n * (n - 1) * d
        for name, found in times.items():
            seconds = statistics.median(found)
            bench.row(
                "kernel",
                N=n,
                d=d,
                way=name,
                milliseconds=seconds * 1e3,
                share_of_half_gemm=operations / seconds / peak["bfloat16"],
                of_fastest=ratio(found, times[fastest]),
            )
        del screens
        ways: dict[str, Callable[[], Any]] = {
            "ours, whole search": lambda rows=anchors: pairs_near_best(rows, None, k=TOP_K),
            "torch float32, flat top-k": lambda rows=anchors: torch_flat(rows, torch.float32),
            "torch bfloat16 (not exact)": lambda rows=anchors: torch_flat(rows, torch.bfloat16),
        }
        if faiss is not None:
            ways["faiss.knn_gpu float32"] = lambda rows=anchors: faiss(rows)
        times = bench.in_turn(ways)
        ours = times["ours, whole search"]
        for name, found in times.items():
            seconds = statistics.median(found)
            bench.row(
                "search",
                N=n,
                d=d,
                way=name,
                milliseconds=seconds * 1e3,
                share_of_half_gemm=operations / seconds / peak["bfloat16"],
                ours_is_faster_by=ratio(found, ours),
            )
    for k in (1000, 500_000):
        k = min(k, n * (n - 1) // 4)
        seconds = statistics.median(
            bench.seconds(lambda k=k, rows=anchors: pairs_near_best(rows, None, k=k))
            for _ in range(bench.sizes.rounds)
        )
        bench.row("search", N=n, d=d, way=f"ours, k = {k}", milliseconds=seconds * 1e3)


def time_stacks(bench: Bench) -> None:
    import torch

    from probe_service.similarity.triton_pairs import batch_top_k_on_device

    def flat(anchors: Any) -> Any:
        left_out = torch.ones((anchors.shape[1],) * 2, dtype=torch.bool, device=bench.device).tril_()
        cosines = anchors @ anchors.transpose(1, 2)
        return cosines.masked_fill_(left_out, -torch.inf).flatten(1).topk(TOP_K).values.cpu()

    for batches, n, d in bench.sizes.stacks:
        anchors = unit_rows(bench, batches, n, d)
        times = bench.in_turn(
            {
                "ours": lambda rows=anchors: batch_top_k_on_device(rows, None, k=TOP_K),
                "torch, all batches at once": lambda rows=anchors: flat(rows),
                "torch, batch by batch": lambda rows=anchors: [flat(row[None]) for row in rows],
            }
        )
        for name, found in times.items():
            bench.row(
                "batches",
                batches=batches,
                N=n,
                d=d,
                way=name,
                milliseconds=statistics.median(found) * 1e3,
                ours_is_faster_by=ratio(found, times["ours"]),
            )


def words(count: int) -> list[str]:
    import numpy as np

    rng = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    return ["".join(rng.choice(syllables, size=int(size))) for size in rng.integers(1, 5, size=count)]


def texts_of(count: int, mean_words: float, seed: int) -> list[str]:
    import numpy as np

    rng = np.random.default_rng(seed)
    vocabulary = np.array(words(3000))
    sizes = np.clip(rng.gamma(4.0, mean_words / 4.0, size=count).astype(int), 1, 400)
    return [f"{number} {' '.join(rng.choice(vocabulary, size=size))}." for number, size in enumerate(sizes)]


def write_checkpoint(cache: Path, sizes: Sizes) -> None:
    """Write a RoBERTa of random weights and a byte-level BPE tokenizer as simcse-roberta-large, in the hub's cache layout."""
    from tokenizers import ByteLevelBPETokenizer, processors

    folder = write_random_roberta(cache, layers=sizes.layers, width=sizes.width, vocabulary=sizes.vocabulary)
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(
        texts_of(300, 12, 1),
        vocab_size=min(8000, sizes.vocabulary),
        show_progress=False,
        special_tokens=special,
    )
    inner = tokenizer._tokenizer
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    save_tokenizer(inner, folder, mask_token="<mask>")


def time_encoding(bench: Bench, cache: Path, peak: dict[str, float]) -> None:
    import numpy as np
    import torch

    from probe_service.encode import load_encoder, packing
    from probe_service.encode.transformer import build_known
    from probe_service.encode.weights import locate_known
    from probe_service.known_encoders import KNOWN_ENCODERS
    from probe_service.settings import Settings

    write_checkpoint(cache, bench.sizes)
    known = KNOWN_ENCODERS["simcse-roberta-large"]
    dtype = "bfloat16" if bench.device == "cuda" else "float32"
    loaded = load_encoder(known.name, Settings(device=bench.device, encode_dtype=dtype))
    print(f"  ours: {loaded.info.check}", flush=True)
    if bench.device == "cpu":
        # What runs on a GPU, as far as a CPU can run it.
        loaded.encoder._kind = "gpu"
        loaded.encoder.model[0].model = build_known(known, locate_known(known), "cpu")[0].auto_model
        print(f"  ours: {packing.lay_end_to_end(loaded.encoder, 'float32')}", flush=True)
    peer = build_known(known, locate_known(known), bench.device)
    inner = peer[0].auto_model
    weights = sum(
        each.weight.numel() for each in inner.encoder.modules() if isinstance(each, torch.nn.Linear)
    )
    sample = texts_of(256, 12, 2)
    exact = peer.encode(sample, normalize_embeddings=True, show_progress_bar=False).astype(np.float64)
    fast = loaded.encoder.encode(sample).vectors.astype(np.float64)
    errors = np.abs(fast @ fast.T - exact @ exact.T)[np.triu_indices(len(sample), 1)]
    bench.row("error of a cosine", mean=float(errors.mean()), largest=float(errors.max()))
    peer.to(getattr(torch, dtype))

    def by_length(texts: list[str]) -> Any:
        end_to_end = loaded.encoder.model[0].auto_model
        chosen = end_to_end._attend
        end_to_end._attend = packing._attend_by_length
        try:
            return loaded.encoder.encode(texts)
        finally:
            end_to_end._attend = chosen

    for name, texts in (
        ("short", texts_of(bench.sizes.short_texts, 7, 3)),
        ("long", texts_of(bench.sizes.long_texts, 60, 4)),
    ):
        tokens = sum(
            map(len, peer.tokenizer(texts, truncation=True, max_length=known.max_length)["input_ids"])
        )
        times = bench.in_turn(
            {
                "ours": lambda texts=texts: loaded.encoder.encode(texts),
                "ours, attention by runs of equal length": lambda texts=texts: by_length(texts),
                "ours, tokenizing alone": lambda texts=texts: list(loaded.encoder._batches(texts)),
                f"sentence-transformers {dtype}, batch 128": lambda texts=texts: peer.encode(
                    texts, batch_size=128, normalize_embeddings=True, show_progress_bar=False
                ),
            }
        )
        for way, found in times.items():
            seconds = statistics.median(found)
            bench.row(
                "encoding",
                texts=name,
                tokens_per_text=tokens / len(texts),
                way=way,
                texts_per_second=len(texts) / seconds,
                share_of_gemm_peak=None if "alone" in way else 2 * weights * tokens / seconds / peak[dtype],
                ours_is_faster_by=ratio(found, times["ours"]),
            )


def markdown(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|" + "---|" * len(names),
        *("| " + " | ".join(shown(row.get(name)) for name in names) + " |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    # Before triton and huggingface_hub are imported, which read these once.
    os.environ["TRITON_INTERPRET"] = "1" if given.dry_run else "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as home:
        os.environ["HF_HOME"] = home
        import torch

        if not given.dry_run and not torch.cuda.is_available():
            print("There is no GPU; --dry-run runs all of it on a CPU.")
            return 2
        bench = Bench(
            DRY if given.dry_run else FULL, "cpu" if given.dry_run else "cuda", time.monotonic() + 300
        )
        about = {
            "device": "cpu" if given.dry_run else torch.cuda.get_device_name(),
            "cores": os.cpu_count(),
            **{name: version(name) for name in ("torch", "triton", "transformers", "sentence-transformers")},
        }
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
        peak: dict[str, float] = {}
        bench.part("answers of the search", lambda: check_pairs(bench))
        bench.part("answers for stacks of batches", lambda: check_stacks(bench))
        bench.part("peaks", lambda: peak.update(peaks(bench)))
        bench.part("speed of the search", lambda: time_pairs(bench, peak))
        bench.part("speed of encoding", lambda: time_encoding(bench, Path(home) / "hub", peak))
        bench.part("speed for stacks of batches", lambda: time_stacks(bench))
    for name, rows in bench.tables.items():
        print(f"\n## {name}\n\n{markdown(rows)}")
    if bench.failed:
        print(f"\nFAILED: {', '.join(bench.failed)}")
    if given.json:
        found = {"about": about, "failed": bench.failed, **bench.tables}
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if bench.failed else 0


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


if __name__ == "__main__":
    sys.exit(main())
