"""Checks at the host edge: nothing is sent before every argument of a call is known to be right."""

from __future__ import annotations

import math
import numbers
import os
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ep.errors import ArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

    from ep.config import EpConfig

    Array = npt.NDArray[np.generic]

BF16 = np.dtype(ml_dtypes.bfloat16)
INT32 = np.dtype(np.int32)
FP32 = np.dtype(np.float32)


def checks_values() -> bool:
    """Whether values are checked too, not only shapes: `EP_CHECK=1`."""
    return os.environ.get("EP_CHECK", "0") not in ("", "0")


def host_array(
    name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...], *, out: bool = False
) -> Array:
    """Check one NumPy argument.

    Parameters
    ----------
    name : str
        Its name, for the error.
    array : object
    dtype : dtype
    shape : tuple
        None stands for any length.
    out : bool
        Whether it will be written.

    Returns
    -------
    ndarray
        `array` itself.

    Raises
    ------
    ArgumentError
    """
    want = f"a C-contiguous NumPy array of {dtype.name}, shape [{', '.join(_names(shape))}]"
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{name} is a {type(array).__name__}; the host backend takes {want}")
    given = f"{array.dtype.name} {list(array.shape)}"
    if array.dtype != dtype:
        raise ArgumentError(f"{name} is {given}; allowed is {want}: convert it with .astype")
    fits = len(array.shape) == len(shape) and all(
        want_length in (None, length)
        for length, want_length in zip(array.shape, shape, strict=True)
    )
    if not fits:
        raise ArgumentError(f"{name} is {given}; allowed is {want}")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ArgumentError(
            f"{name} is {given}, not C-contiguous and aligned; pass np.ascontiguousarray({name})"
        )
    if out and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only; pass an array that can be written")
    return array


def token_count(config: EpConfig, x: Array) -> int:
    """T_s of `x` `[T_s, H]`; raises `ArgumentError` above max_tokens."""
    tokens = x.shape[0]
    if tokens > config.max_tokens:
        raise ArgumentError(
            f"x has {tokens} tokens; allowed are 0..{config.max_tokens} (max_tokens): send the "
            "rest in a further step, or make the exchange with a larger max_tokens"
        )
    return tokens


def check_ids(config: EpConfig, ids: Array) -> None:
    """Raise `ArgumentError` for the first id outside -1..E-1, naming token and place."""
    wrong = np.argwhere((ids < -1) | (ids >= config.experts))
    if wrong.size:
        token_idx, choice_idx = map(int, wrong[0])
        raise ArgumentError(
            f"ids[{token_idx}, {choice_idx}] is {ids[token_idx, choice_idx]}; allowed are "
            f"0..{config.experts - 1}, or -1 for a masked choice ({len(wrong)} of {ids.size} wrong)"
        )


def check_eps(eps: Any) -> float:
    """Return `eps` as a float; raises `ArgumentError` unless it is finite and not negative."""
    if isinstance(eps, numbers.Real) and math.isfinite(eps) and eps >= 0:
        return float(eps)
    raise ArgumentError(f"eps is {eps!r}; allowed is a finite number, 0 or more")


def _names(shape: tuple[int | None, ...]) -> list[str]:
    return ["any" if length is None else str(length) for length in shape]
