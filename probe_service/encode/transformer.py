"""sentence-transformers modules put together from a checkpoint, and checked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from probe_service.encode.weights import CheckpointFiles
from probe_service.errors import EncoderError
from probe_service.known_encoders import KnownEncoder

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

__all__ = [
    "build_known",
    "build_saved",
    "check_structure",
    "describe_pooling",
    "maximum_length",
    "quiet_libraries",
]

_STRUCTURE_TEXT = "A short text shows whether the pooler of the checkpoint is really used."
_STRUCTURE_TOLERANCE = 1e-4
# transformers renames these on reading checkpoints that were converted from TensorFlow.
_LEGACY_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def build_known(known: KnownEncoder, files: CheckpointFiles, device: str) -> SentenceTransformer:
    """Put a known encoder together: Transformer, Pooling, Dense with tanh where it has a pooler, Normalize.

    A plain ``SentenceTransformer(name)`` would mean-pool the SimCSE checkpoints and drop their dense layer.

    Args:
        known: The recipe.
        files: Its checkpoint.
        device: torch device.

    Returns:
        The modules on the device, in float32.

    Raises:
        EncoderError: encoder_checkpoint_incomplete where weights that the recipe needs are missing (transformers
            would fill them with random numbers without failing); encoder_load_failed.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    tensors = _read_tensors(files)
    with quiet_libraries(), _translated_load_errors(files):
        transformer = Transformer(
            str(files.folder),
            model_kwargs={
                "dtype": torch.float32,
                "use_safetensors": (files.folder / "model.safetensors").exists(),
                "weights_only": True,
                "local_files_only": True,
            },
            processor_kwargs={"model_max_length": known.max_length, "local_files_only": True},
            config_kwargs={"local_files_only": True},
        )
        _cap_length(transformer)
    _require_all_weights(known, files, transformer.auto_model, tensors)
    width = int(transformer.get_embedding_dimension())
    modules: list[Any] = [transformer, Pooling(width, "mean" if known.pooling == "mean" else "cls")]
    if known.pooling == "cls_dense_tanh":
        weight, bias = tensors["pooler.dense.weight"].float(), tensors["pooler.dense.bias"].float()
        modules.append(Dense(width, weight.shape[0], init_weight=weight, init_bias=bias))
    modules.append(Normalize())
    model = SentenceTransformer(modules=modules, device=device)
    check_structure(model, known, tensors)
    return model


def build_saved(files: CheckpointFiles, device: str) -> SentenceTransformer:
    """Load a model that sentence-transformers saved, with its own modules, in float32 and without its code.

    Raises:
        EncoderError: encoder_pooling_unknown where it does not say how to pool; encoder_load_failed.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    if not (files.folder / "modules.json").is_file():
        raise EncoderError(
            "encoder_pooling_unknown",
            f"{files.location} has no modules.json: it does not say how its vectors are pooled, and guessing gives"
            " wrong vectors. Save it once with sentence-transformers (Transformer and Pooling), then name that folder.",
        )
    with quiet_libraries(), _translated_load_errors(files):
        model = SentenceTransformer(
            str(files.folder),
            device=device,
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        )
        model.float()
        if isinstance(model[0], Transformer):
            _cap_length(model[0])
            _refuse_made_up_weights(files, model[0].auto_model)
    return model


def check_structure(
    model: SentenceTransformer, known: KnownEncoder, tensors: dict[str, torch.Tensor]
) -> None:
    """Check that the modules are those of the recipe, and that the checkpoint's pooler is loaded and used.

    For ``cls_dense_tanh`` one text is run through the modules and through the checkpoint's own pooler.

    Args:
        model: The modules to check.
        known: The recipe.
        tensors: The checkpoint's tensors as read from its file, without a base prefix.

    Raises:
        EncoderError: encoder_structure_mismatch.
    """
    import torch
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    expected = [Transformer, Pooling, Normalize]
    if known.pooling == "cls_dense_tanh":
        expected.insert(2, Dense)
    found = list(model)
    mode = "mean" if known.pooling == "mean" else "cls"
    if [type(module) for module in found] != expected or found[1].pooling_mode != mode:
        raise EncoderError(
            "encoder_structure_mismatch",
            f"{known.name} needs {' → '.join(kind.__name__ for kind in expected)} with {mode} pooling, but was put"
            f" together as {describe_pooling(model)}.",
        )
    if known.pooling != "cls_dense_tanh":
        return
    dense, inner = found[2], found[0].auto_model
    for held, name in (
        (dense.linear.weight, "pooler.dense.weight"),
        (dense.linear.bias, "pooler.dense.bias"),
        (inner.pooler.dense.weight, "pooler.dense.weight"),
        (inner.pooler.dense.bias, "pooler.dense.bias"),
    ):
        if not torch.equal(held.detach().cpu(), tensors[name].float()):
            raise EncoderError(
                "encoder_structure_mismatch", f"{known.name}: {name} in use is not the checkpoint's."
            )
    with quiet_libraries(), torch.inference_mode():
        features = model.preprocess([_STRUCTURE_TEXT])
        inputs = {
            name: value.to(model.device)
            for name, value in features.items()
            if isinstance(value, torch.Tensor) and name in ("input_ids", "attention_mask", "token_type_ids")
        }
        direct = torch.nn.functional.normalize(inner(**inputs).pooler_output, dim=-1)
        ours = model(dict(features) | inputs)["sentence_embedding"]
    difference = float((direct - ours).abs().max())
    if not difference <= _STRUCTURE_TOLERANCE:
        raise EncoderError(
            "encoder_structure_mismatch",
            f"{known.name}: its vector differs by {difference:.2g} from the output of the checkpoint's pooler.",
        )


def describe_pooling(model: SentenceTransformer) -> str:
    """Return how token vectors become one vector, e.g. ``mean`` or ``cls → Dense(1024, 1024, Tanh)``."""
    steps = []
    for module in list(model)[1:]:
        kind = type(module).__name__
        if kind == "Pooling":
            mode = module.pooling_mode
            steps.append(mode if isinstance(mode, str) else "+".join(mode))
        elif kind == "Dense":
            activation = type(module.activation_function).__name__
            steps.append(f"Dense({module.in_features}, {module.out_features}, {activation})")
        elif kind != "Normalize":
            steps.append(kind)
    return " → ".join(steps) or type(model[0]).__name__


def maximum_length(model: SentenceTransformer) -> int | None:
    """Return the number of tokens that texts are cut at; None where the model has no limit."""
    length = model.max_seq_length
    return int(length) if length is not None and 0 < length < 10**9 else None


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hold back progress bars and advice of transformers: what matters is checked here and raised as an error."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_progress_bar = transformers_logging.is_progress_bar_enabled()
    sentence_logger = logging.getLogger("sentence_transformers")
    sentence_level = sentence_logger.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    sentence_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        sentence_logger.setLevel(sentence_level)
        if had_progress_bar:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _translated_load_errors(files: CheckpointFiles) -> Iterator[None]:
    try:
        yield
    except EncoderError:
        raise
    except Exception as error:
        raise EncoderError(
            "encoder_load_failed",
            f"{files.location} cannot be loaded from {files.folder}: {type(error).__name__}: {error}",
        ) from error


def _read_tensors(files: CheckpointFiles) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors by name as in the bare model: without ``bert.`` or ``roberta.`` before it."""
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    with _translated_load_errors(files):
        for path in files.weight_files():
            if path.parent != files.folder:
                continue
            held = (
                load_file(path)
                if path.suffix == ".safetensors"
                else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            )
            tensors.update(held)
    if not tensors:
        raise EncoderError("encoder_checkpoint_incomplete", f"{files.location} has no weights.")
    return {_bare_name(name): tensor for name, tensor in tensors.items()}


def _bare_name(name: str) -> str:
    for prefix in ("bert.", "roberta."):
        name = name.removeprefix(prefix)
    for old, new in _LEGACY_NAMES.items():
        name = name.replace(old, new)
    return name


def _require_all_weights(
    known: KnownEncoder, files: CheckpointFiles, model: Any, tensors: dict[str, torch.Tensor]
) -> None:
    """Refuse a checkpoint that lacks a weight which the recipe uses."""
    uses_pooler = known.pooling == "cls_dense_tanh"
    needed = {name for name, _ in model.named_parameters() if uses_pooler or not name.startswith("pooler.")}
    if uses_pooler:
        needed |= {"pooler.dense.weight", "pooler.dense.bias"}
    missing = sorted(needed - tensors.keys())
    if missing:
        raise EncoderError(
            "encoder_checkpoint_incomplete",
            f"{files.location} lacks {len(missing)} weights that {known.name} needs, such as {missing[0]};"
            " random numbers would stand in for them.",
        )


def _refuse_made_up_weights(files: CheckpointFiles, inner: Any) -> None:
    """Refuse a saved model whose file lacks weights: transformers fills them with random numbers and goes on.

    Only transformers knows how each architecture names its tensors in a file, and it tells what was missing only
    to the one who loads, so the transformer is loaded a second time and dropped.
    """
    import torch
    from transformers import PreTrainedModel

    modules = files.config("modules.json").get("", [])
    folder = files.folder / str(modules[0].get("path", ""))
    if not isinstance(inner, PreTrainedModel) or not any(folder.glob("*.safetensors")):
        return
    _, loading = type(inner).from_pretrained(
        folder, config=inner.config, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    # The pooler of BERT-like models is not used by the modules of sentence-transformers.
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise EncoderError(
            "encoder_checkpoint_incomplete",
            f"{files.location} lacks {len(missing)} weights of its architecture, such as {missing[0]}; random numbers"
            " would stand in for them.",
        )


def _cap_length(transformer: Any) -> None:
    """Keep texts within the positions that the model has; RoBERTa's table begins after its padding index."""
    embeddings = getattr(getattr(transformer.auto_model, "embeddings", None), "position_embeddings", None)
    rows = getattr(embeddings, "num_embeddings", None)
    if rows is None:
        return
    padding_index = getattr(embeddings, "padding_idx", None)
    capacity = int(rows) if padding_index is None else int(rows) - int(padding_index) - 1
    length = transformer.max_seq_length
    if length is None or length > capacity:
        transformer.max_seq_length = capacity
