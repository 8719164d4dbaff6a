"""Checks at the host edge: nothing is sent before every argument of a call is known to be right."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from ep.buffers import EpBuffers
from ep.errors import ArgumentError, shown
from ep.settings import is_set

if TYPE_CHECKING:
    import numpy.typing as npt

    from ep.bootstrap import World
    from ep.config import EpConfig
    from ep.layout import EpLayout

    Array = npt.NDArray[Any]

Shape: TypeAlias = tuple[int | None, ...]
BF16 = np.dtype(ml_dtypes.bfloat16)
INT32 = np.dtype(np.int32)
FP32 = np.dtype(np.float32)


def checks_values() -> bool:
    """Whether values are checked too, not only shapes: `EP_CHECK=1`."""
    return is_set("EP_CHECK")


def check_described(
    name: str,
    given: tuple[str, tuple[int, ...]],
    allowed: tuple[str, Shape],
    *,
    contiguous: bool,
    kind: str,
) -> None:
    """Compare dtype and shape of an array with what is allowed.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    given, allowed : tuple
        Name of a dtype and a shape; None in the allowed shape stands for any length.
    contiguous : bool
        Whether the array is dense in C order and aligned.
    kind : str
        What the backend takes, for the error.

    Raises
    ------
    ArgumentError
    """
    (dtype, shape), (allowed_dtype, allowed_shape) = given, allowed
    fits = len(shape) == len(allowed_shape) and all(
        length in (None, actual) for actual, length in zip(shape, allowed_shape, strict=True)
    )
    if fits and contiguous and dtype == allowed_dtype:
        return
    # Only now: this is called for every array of every step.
    said = f"{name} is {dtype} {list(shape)}"
    want = wanted(allowed, kind)
    if dtype != allowed_dtype:
        raise ArgumentError(f"{said}; allowed is {want}: convert it first")
    if not fits:
        raise ArgumentError(f"{said}; allowed is {want}")
    if not contiguous:
        raise ArgumentError(f"{said}, not C-contiguous and aligned; pass a contiguous copy")


def wanted(allowed: tuple[str, Shape], kind: str) -> str:
    """Say in words what an argument must be."""
    dtype, shape = allowed
    lengths = ", ".join("any" if length is None else str(length) for length in shape)
    return f"a C-contiguous {kind} of {dtype}, shape [{lengths}]"


def host_array(
    name: str, array: Any, dtype: np.dtype[Any], shape: Shape, *, out: bool = False
) -> Array:
    """Check one NumPy argument and return it.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    array : object
    dtype : dtype
    shape : tuple
        None stands for any length.
    out : bool
        Whether it will be written.

    Raises
    ------
    ArgumentError
    """
    allowed = (dtype.name, shape)
    # A subclass may redefine anything: what an index gives (matrix), what is valid (MaskedArray).
    if type(array) is not np.ndarray:
        convert = ": pass numpy.asarray of it" * isinstance(array, np.ndarray)
        raise ArgumentError(
            f"{name} is a {type(array).__name__}; the host backend takes "
            f"{wanted(allowed, 'NumPy array')}{convert}"
        )
    contiguous = array.flags.c_contiguous and array.flags.aligned
    given = (_name_unlike(array.dtype, dtype), array.shape)
    check_described(name, given, allowed, contiguous=contiguous, kind="NumPy array")
    if out and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only; pass an array that can be written")
    return array


def _name_unlike(given: np.dtype[Any], allowed: np.dtype[Any]) -> str:
    """Name a dtype so that it reads like the allowed one only if it is that one."""
    if given.name != allowed.name or given == allowed:
        return given.name
    return f"{given.name} {'of another library' if given.isnative else 'in foreign byte order'}"


def token_count(config: EpConfig, x: Any) -> int:
    """T_s of `x` `[T_s, H]`; raises `ArgumentError` above max_tokens."""
    tokens = int(x.shape[0])
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
    """Return `eps` as a float; raises `ArgumentError` unless FP32 holds it and it is 0 or more."""
    try:
        value = float(eps) if isinstance(eps, numbers.Real) else math.nan
        said = shown(eps)
    except OverflowError:
        value, said = math.inf, "a number beyond FP64"
    if 0 <= value <= float(np.finfo(np.float32).max):
        return value
    raise ArgumentError(f"eps is {said}; allowed is a finite number of FP32, 0 or more")


def misfit(world: World, layout: EpLayout, buffers: EpBuffers | None) -> ArgumentError | None:
    """Say why these buffers cannot be this rank's."""
    given: object = buffers
    if given is None:
        return None
    if not isinstance(given, EpBuffers):
        return ArgumentError(f"buffers is a {type(given).__name__}; allowed is EpBuffers")
    here = None if world.device is None else world.device.ordinal
    error = None
    # Not the configs themselves: how long waits may take says nothing of memory.
    if given.device != here:
        mapped, used = (
            "the host" if ordinal is None else f"GPU {ordinal}" for ordinal in (given.device, here)
        )
        error = ArgumentError(
            f"buffers are mapped on {mapped}, but this rank uses {used}; make them there, by "
            "backend= and device="
        )
    elif given.rank != world.rank or given.layout.fields != layout.fields:
        error = ArgumentError(
            f"buffers are rank {given.rank}'s, with fields of {given.layout.total_bytes} bytes, "
            f"but this is rank {world.rank}, and the exchange's have {layout.total_bytes}; make "
            "them with the same config"
        )
    elif given.is_taken:
        error = ArgumentError(
            "buffers are those of an Exchange that was not closed; close it on every rank first, "
            "or give each one memory of its own"
        )
    return error
