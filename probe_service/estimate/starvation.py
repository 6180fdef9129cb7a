"""The lower end of the window: where a floating-point type stops computing the gradient (the FlatNCE article)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from probe_service.schemas import Estimate, GradientError, StarvationFloor

__all__ = ["starvation_floor"]


def starvation_floor(
    sizes: Sequence[int],
    errors: Mapping[str, Sequence[GradientError]],
    *,
    dtype: str,
    temperature: float,
    positive_similarity: float,
    positives: Literal["given", "dropout"],
    largest_error: float = 0.1,
) -> StarvationFloor:
    """Find the smallest N whose InfoNCE gradient has an error of at most ε there and at all larger measured sizes.

    The upper limit of an error is held against ε, or its value where it has no interval. Small batches starve because the
    softmax's weight on the positive rounds to 1: what matters is ξ, so s⁺ and T more than N, and with good positives there
    often is no such N (STATISTICS §7).

    Args:
        sizes: Batch sizes measured, ascending, at least one.
        errors: For each dtype, its errors at each of the sizes.
        dtype: The one that the loss is computed in; a key of `errors`.
        temperature: T at which the errors were measured.
        positive_similarity: Mean s⁺ of the pairs that they were measured on.
        positives: Whether those are the corpus's pairs or two dropout passes.
        largest_error: ε > 0.

    Returns:
        The floor, null where even the largest measured size starves, with the reason and what would help.
    """
    infonce = [error.infonce for error in errors[dtype]]
    floor = _floor(sizes, infonce, largest_error)
    return StarvationFloor(
        batch_size=floor,
        dtype=dtype,
        temperature=temperature,
        positive_similarity=positive_similarity,
        positives=positives,
        largest_error=largest_error,
        tested_from=sizes[0],
        tested_up_to=sizes[-1],
        reason=_reason(sizes, infonce, floor, dtype, largest_error),
        remedies=[] if floor == sizes[0] else _remedies(sizes, errors, dtype, temperature, largest_error),
    )


def _upper(error: Estimate) -> float:
    return error.value if error.high is None else error.high


def _floor(sizes: Sequence[int], errors: Sequence[Estimate], largest_error: float) -> int | None:
    # Written so that an error that is not a number counts as too large.
    starving = [place for place, error in enumerate(errors) if not _upper(error) <= largest_error]
    first = starving[-1] + 1 if starving else 0
    return sizes[first] if first < len(sizes) else None


def _reason(
    sizes: Sequence[int], errors: Sequence[Estimate], floor: int | None, dtype: str, largest_error: float
) -> str:
    what = f"the relative error of the InfoNCE gradient in {dtype}"
    if floor is None:
        said = (
            f"{what} is up to {_upper(errors[-1]):.2g} at {sizes[-1]} rows still, the largest size measured"
        )
    else:
        first = sizes.index(floor)
        worst = max(_upper(error) for error in errors[first:])
        where = (
            f"every measured size from {floor} to {sizes[-1]}"
            if floor < sizes[-1]
            else f"{floor} rows, the largest size measured"
        )
        said = f"{what} is at most {worst:.2g} at {where}"
        if first:
            said += f", and up to {_upper(errors[first - 1]):.2g} at {sizes[first - 1]}"
    said += f"; at most {largest_error:g} is asked for"
    bare = [str(size) for size, error in zip(sizes, errors, strict=True) if error.high is None]
    if bare:
        said += f" (no interval at {', '.join(bare)}: there the value itself was held against it)"
    return said


def _remedies(
    sizes: Sequence[int],
    errors: Mapping[str, Sequence[GradientError]],
    dtype: str,
    temperature: float,
    largest_error: float,
) -> list[str]:
    """What would help; the first two were measured on the same batches."""

    def effect(found: Sequence[Estimate]) -> str:
        floor = _floor(sizes, found, largest_error)
        if floor is None:
            return f"would not be enough: its error is up to {_upper(found[-1]):.2g} at {sizes[-1]} rows"
        where = "every measured size" if floor == sizes[0] else f"every measured size from {floor} rows on"
        return f"would keep the error within {largest_error:g} at {where}"

    said = [f"FlatNCE in {dtype} {effect([error.flatnce for error in errors[dtype]])}."]
    if dtype != "float32" and "float32" in errors:
        said.append(
            "InfoNCE with the logits in float32, the model as it is,"
            f" {effect([error.infonce for error in errors['float32']])}."
        )
    said.append(
        f"A temperature above {temperature:g} gives the negatives more weight; probe again at it, since S changes too."
    )
    return said
