"""Encoders that run here: tokenize ahead, batch rows of one length, and run the model on several threads and devices."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from probe_service.encode.batching import batches_by_length, split_by_work
from probe_service.encode.protocol import DIGEST_BYTES, EncodedTexts, digest_texts, to_unit_length
from probe_service.encode.token_rows import RowTokenizer
from probe_service.encode.transformer import maximum_length
from probe_service.errors import EncoderError

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

__all__ = ["ModuleEncoder"]

_log = logging.getLogger(__name__)

_Kind = Literal["cpu", "gpu"]
# Tokenized at once: enough that most rows find a full batch of their length, and about .2 s of one core.
_TEXTS_PER_WINDOW: dict[_Kind, int] = {"cpu": 4096, "gpu": 8192}
_CHARACTERS_PER_WINDOW: dict[_Kind, int] = {"cpu": 262_144, "gpu": 524_288}
# More tokens make no call faster; fewer waste it. A call of a large model is kept near a second on a core, and near a
# twentieth of one on a large GPU.
_LEAST_TOKENS: dict[_Kind, int] = {"cpu": 128, "gpu": 16_384}
_MOST_TOKENS: dict[_Kind, int] = {"cpu": 512, "gpu": 131_072}
_OPERATIONS_PER_CALL: dict[_Kind, float] = {"cpu": 8e10, "gpu": 2e13}
# Threads beyond these would wait for each other at Python's lock; they work inside the calls instead.
_MOST_CALLS_AT_ONCE = 8
# One is launched while the other runs. More of them wait for their turn: enough to last while the caller writes results.
_CALLS_ON_GPU = 2
_CALLS_WAITING_ON_GPU = 14
_KEPT_BYTES = 31 * 2**20
# Of a call with dropout, whose rows are padded to its longest.
_TEXTS_PER_DROPOUT_CALL: dict[_Kind, int] = {"cpu": 32, "gpu": 128}
_CHARACTERS_PER_DROPOUT_CALL: dict[_Kind, int | None] = {"cpu": 16_384, "gpu": None}


@dataclass(frozen=True)
class _Batch:
    """What one call of the model takes, and what is known of its b rows before the call.

    Args:
        rows: (b,) which of the texts they are.
        features: What sentence-transformers' modules take.
        was_truncated: (b,) bool.
        input_digests: (b, 16) uint8.
    """

    rows: NDArray[np.intp]
    features: dict[str, Any]
    was_truncated: NDArray[np.bool_]
    input_digests: NDArray[np.uint8]


class ModuleEncoder:
    """Encode with sentence-transformers modules on one device.

    On a CPU every core runs calls of its own, on rows of one length each: nothing is padded, and no core waits for
    another. Elsewhere rows of similar length share large calls, and several devices take calls from one queue, each with a
    replica of its own. Tokenizing goes on meanwhile.

    Args:
        model: The modules, already on their device.
        prompt: Text put before every text, or None.
    """

    def __init__(self, model: SentenceTransformer, prompt: str | None = None) -> None:
        import torch

        self.model = model.eval()
        self.prompt = prompt
        self.dimension = int(model.get_embedding_dimension() or 0)
        self.max_length = maximum_length(model)
        self._kind: _Kind = "cpu" if model.device.type == "cpu" else "gpu"
        self._calls_on_each = (
            min(torch.get_num_threads(), _MOST_CALLS_AT_ONCE) if self._kind == "cpu" else _CALLS_ON_GPU
        )
        weights = sum(each.weight.numel() for each in model[0].modules() if isinstance(each, torch.nn.Linear))
        fitting = int(_OPERATIONS_PER_CALL[self._kind] / (2 * max(weights, 1)))
        self._most_tokens = min(max(fitting, _LEAST_TOKENS[self._kind]), _MOST_TOKENS[self._kind])
        # A fast tokenizer of transformers keeps its truncation as state and fails when two threads use it at once.
        self._tokenizing = threading.Lock()
        # A call takes a model out and puts it back; dropout, which changes the modules for a while, takes them all.
        self._calls_at_once = 0
        self._idle: queue.SimpleQueue[SentenceTransformer] = queue.SimpleQueue()
        self._let_call(self.model)

    def add_replicas(self, replicas: Sequence[SentenceTransformer]) -> None:
        """Let copies of the model on other devices take calls as well; before the first text is encoded."""
        for replica in replicas:
            self._let_call(replica.eval())

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the unit vectors of the texts.

        Args:
            texts: n texts. Lone surrogates, which no tokenizer takes, are read as U+FFFD.

        Returns:
            n vectors of width d, with what the tokenizer cut.

        Raises:
            EncoderError: encoder_out_of_memory, encoder_failed.
        """
        encoded = EncodedTexts.empty(len(texts), self.dimension)
        for rows, part in self.stream(texts):
            encoded.put(rows, part)
        return encoded

    def stream(self, texts: Sequence[str]) -> Generator[tuple[NDArray[np.intp], EncodedTexts], None, None]:
        """Yield what `encode` returns, a call of the model at a time, while later calls run.

        Raises:
            EncoderError: As `encode`.
        """
        running: deque[tuple[_Batch, Future[NDArray[np.float32]]]] = deque()

        def first() -> tuple[NDArray[np.intp], EncodedTexts]:
            batch, vectors = running.popleft()
            return batch.rows, EncodedTexts(vectors.result(), batch.was_truncated, batch.input_digests)

        waiting = self._calls_at_once if self._kind == "cpu" else _CALLS_WAITING_ON_GPU
        try:
            for batch in self._batches(texts):
                running.append((batch, self._threads.submit(self._vectors, batch.features, len(batch.rows))))
                # Some more wait their turn, so that no thread is idle while the next texts are tokenized.
                if len(running) > self._calls_at_once + waiting:
                    yield first()
            while running:
                yield first()
        finally:
            for _, vectors in running:
                vectors.cancel()

    @property
    def dropout_rates(self) -> tuple[float, ...]:
        """The different dropout rates above 0 that the modules were made with, ascending."""
        import torch

        found = set()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                found.add(float(module.p))
            # Some attentions and recurrent layers drop by themselves, at a rate that is a plain number.
            found |= {
                rate for name, rate in vars(module).items() if "dropout" in name and isinstance(rate, float)
            }
        return tuple(sorted(rate for rate in found if rate > 0.0))

    def dropout_calls(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Split texts into calls for `dropout_views`: their rows, and what the tokenizer is given for them."""
        readable, by_length = _readable(texts)
        start = 0
        for call in split_by_work(
            [readable[row] for row in by_length],
            self.max_length,
            most_texts=_TEXTS_PER_DROPOUT_CALL[self._kind],
            most_characters=_CHARACTERS_PER_DROPOUT_CALL[self._kind],
        ):
            yield by_length[start : start + len(call)], call
            start += len(call)

    def dropout_views(self, call: list[str], seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the vectors of one call's texts from two passes with dropout on, (b, d) each, of any length.

        Args:
            call: The texts of one call.
            seed: Of torch's generator during the two passes; its state is put back afterwards.

        Raises:
            EncoderError: encoder_out_of_memory, encoder_failed.
        """
        import torch

        on_gpu = [self.model.device] if self.model.device.type == "cuda" else []
        with contextlib.ExitStack() as held:
            held.enter_context(self._tokenizing)
            for _ in range(self._calls_at_once):
                held.callback(self._idle.put, self._idle.get())
            held.enter_context(torch.random.fork_rng(on_gpu))
            held.enter_context(self._running(len(call)))
            torch.manual_seed(seed)
            features = self.model.preprocess(call, prompt=self.prompt)
            try:
                # Not the dropout modules alone: an attention drops its weights by a flag of its own. Only what would
                # learn from the texts in training, a batch normalisation, stays as it is.
                for module in self.model.modules():
                    module.training = not hasattr(module, "running_mean")
                return self._forward(self.model, features), self._forward(self.model, features)
            finally:
                self.model.eval()

    def _let_call(self, model: SentenceTransformer) -> None:
        """Let `_calls_on_each` calls run on the model at a time; those on several devices take turns."""
        for _ in range(self._calls_on_each):
            self._idle.put(model)
        self._calls_at_once += self._calls_on_each

    @cached_property
    def _row_tokenizer(self) -> RowTokenizer | None:
        """None where only the modules themselves can make of texts what they take."""
        with self._tokenizing:
            try:
                return RowTokenizer(self.model, self.prompt, self.max_length)
            except Exception as error:  # noqa: BLE001 - whatever a tokenizer of unknown make stumbles over
                _log.debug("tokens are read through sentence-transformers: %s", error)
                return None

    @cached_property
    def _tokenizer_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """The threads that run the model; on a CPU they share its cores out among them."""
        import torch

        from probe_service.cores import pool_on_cores

        if self._kind == "gpu":
            return ThreadPoolExecutor(self._calls_at_once)
        # glibc returns freed memory to the kernel at once, and every call would pay for getting it again, until it has seen
        # a block of this size freed.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        cores = torch.get_num_threads()
        return pool_on_cores(self._calls_at_once, max(cores // self._calls_at_once, 1), name="encode")

    def _batches(self, texts: Sequence[str]) -> Iterator[_Batch]:
        """Tokenize a window of texts at a time, shortest first, and cut it into batches of similar length."""
        readable, by_length = _readable(texts)
        start = 0
        ahead: deque[Future[list[_Batch]]] = deque()
        try:
            for window in split_by_work(
                [readable[row] for row in by_length],
                self.max_length,
                most_texts=_TEXTS_PER_WINDOW[self._kind],
                most_characters=_CHARACTERS_PER_WINDOW[self._kind],
            ):
                rows = np.array(by_length[start : start + len(window)], dtype=np.intp)
                start += len(window)
                ahead.append(self._tokenizer_thread.submit(self._batches_of_window, rows, window))
                if len(ahead) > 1:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for batches in ahead:
                batches.cancel()

    def _batches_of_window(self, rows: NDArray[np.intp], window: list[str]) -> list[_Batch]:
        tokenizer = self._row_tokenizer
        with contextlib.ExitStack() as held:
            if tokenizer is None:
                held.enter_context(self._tokenizing)
            held.enter_context(self._running(len(window)))
            if tokenizer is None:
                features = self.model.preprocess(window, prompt=self.prompt)
                digests, was_truncated = self._inspect(window, features)
                if not _has_rows(features):
                    return [_Batch(rows, features, was_truncated, digests)]
                lengths = features["attention_mask"].sum(dim=1).numpy()
                take = partial(_take, features)
            else:
                tokens = tokenizer.rows(window)
                digests, was_truncated, lengths = tokens.digests(), tokens.was_truncated, tokens.lengths
                take = partial(tokenizer.features, tokens)
            return [
                _Batch(rows[places], take(places), was_truncated[places], digests[places])
                for places in batches_by_length(
                    lengths.astype(np.intp), self._most_tokens, equal=self._kind == "cpu"
                )
            ]

    def _vectors(self, features: dict[str, Any], count: int) -> NDArray[np.float32]:
        model = self._idle.get()
        try:
            with self._running(count):
                return to_unit_length(self._forward_in_pieces(model, features, count))
        finally:
            self._idle.put(model)

    def _forward_in_pieces(
        self, model: SentenceTransformer, features: dict[str, Any], count: int
    ) -> NDArray[np.float32]:
        """Run the model, on half the rows at a time where the device has too little memory for all."""
        import torch

        try:
            return self._forward(model, features)
        except torch.OutOfMemoryError:
            if count == 1 or not _has_rows(features):
                raise
        # Later batches are made smaller at once.
        self._most_tokens = max(min(self._most_tokens, features["attention_mask"].numel() // 2), 1)
        halves = [_take(features, half) for half in np.array_split(np.arange(count), 2)]
        return np.concatenate(
            [self._forward_in_pieces(model, half, len(half["attention_mask"])) for half in halves]
        )

    def _forward(self, model: SentenceTransformer, features: dict[str, Any]) -> NDArray[np.float32]:
        if getattr(getattr(model[0], "auto_model", None), "takes_rows_end_to_end", False):
            mask = features["attention_mask"]
            # Counted here, so that the host need not wait for the device in the middle of a call.
            features = features | {
                "token_places": mask.flatten().nonzero().squeeze(1),
                "row_lengths": tuple(mask.sum(dim=1).tolist()),
            }
        on_device = {name: _moved(value, model.device) for name, value in features.items()}
        vectors: NDArray[np.float32] = model(on_device)["sentence_embedding"].float().cpu().numpy()
        return vectors

    @contextlib.contextmanager
    def _running(self, count: int) -> Iterator[None]:
        """Run the model without gradients, on `count` texts, with its errors translated."""
        import torch

        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            raise EncoderError(
                "encoder_out_of_memory",
                f"The device {self.model.device} has too little free memory for a batch of {count} texts.",
            ) from error
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise EncoderError("encoder_failed", f"The model failed on a batch of texts: {error}") from error

    def _inspect(self, texts: list[str], features: dict[str, Any]) -> tuple[Any, Any]:
        """Digest the token ids of each row, and find the rows that the tokenizer cut."""
        digests = np.zeros((len(texts), DIGEST_BYTES), dtype=np.uint8)
        was_truncated = np.zeros(len(texts), dtype=np.bool_)
        ids, mask = features.get("input_ids"), features.get("attention_mask")
        if ids is None or mask is None or ids.ndim != 2:
            for row, digest in enumerate(digest_texts(texts)):
                digests[row] = np.frombuffer(digest, dtype=np.uint8)
            return digests, was_truncated
        id_rows, mask_rows = ids.cpu().numpy(), mask.cpu().numpy().astype(bool)
        for row in range(len(texts)):
            fed = np.ascontiguousarray(id_rows[row][mask_rows[row]], dtype="<i8").tobytes()
            digests[row] = np.frombuffer(
                hashlib.blake2b(fed, digest_size=DIGEST_BYTES).digest(), dtype=np.uint8
            )
        # Only a row as long as the limit can have been cut; those few are counted again without the limit.
        full = np.flatnonzero(mask_rows.sum(axis=1) >= (self.max_length or np.inf))
        if full.size:
            whole = self.model.tokenizer(
                [(self.prompt or "") + texts[row] for row in full], truncation=False, verbose=False
            )["input_ids"]
            was_truncated[full] = [len(tokens) > (self.max_length or np.inf) for tokens in whole]
        return digests, was_truncated


def _moved(value: Any, device: torch.device) -> Any:
    """The value on the device, if it is a tensor; the copy goes on while the host does the next thing."""
    import torch

    if not isinstance(value, torch.Tensor) or device.type == "cpu":
        return value
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


def _readable(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The texts as a tokenizer takes them, and their rows, shortest first."""
    readable = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in texts]
    return readable, sorted(range(len(readable)), key=lambda row: len(readable[row]))


def _has_rows(features: dict[str, Any]) -> bool:
    """Whether what the modules take is a matrix of tokens with its mask, and can be cut into rows."""
    import torch

    mask = features.get("attention_mask")
    return (
        isinstance(mask, torch.Tensor)
        and mask.ndim == 2
        and all(isinstance(value, torch.Tensor | str | int) for value in features.values())
    )


def _take(features: dict[str, Any], rows: NDArray[np.intp]) -> dict[str, Any]:
    """Keep some rows, without the columns in which none of them has a token."""
    import torch

    mask = features["attention_mask"]
    chosen = torch.from_numpy(rows)
    columns = mask[chosen].any(dim=0).nonzero()
    kept = slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 1)
    taken = {}
    for name, value in features.items():
        if isinstance(value, torch.Tensor) and value.shape[:1] == mask.shape[:1]:
            value = value[chosen, kept] if value.shape[:2] == mask.shape else value[chosen]
        taken[name] = value
    return taken
