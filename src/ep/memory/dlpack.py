"""DLPack in both directions, with ctypes and NumPy: describe our arrays, read those of others."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.errors import ArgumentError

if TYPE_CHECKING:
    from ep.memory.cuda import DeviceArray

CUDA = 2
"""kDLCUDA of dlpack.h."""
MAX_AXES = 8
"""More than any argument has; what is beyond the end of a shape is not looked at."""

# (type code, bits) of dlpack.h 1.1.
_CODES = {
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e8m0fnu": (14, 8),
}
_NAMES = {code: name for name, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_NAME = b"dltensor"
# A prototype of its own: the attribute of pythonapi is one for the process, and other libraries
# (JAX is one) declare it in their way.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Standing(np.ndarray[Any, np.dtype[np.uint8]]):
    """A host array that is exported in a device array's place, and keeps that alive."""

    stands_for: DeviceArray


def to_capsule(
    array: DeviceArray,
    *,
    stream: int | None = None,  # noqa: ARG001 - of the protocol; work is ordered by the caller
    max_version: tuple[int, int] | None = None,  # noqa: ARG001 - what is given, all versions read
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """Export a device array; it lives until the consumer, or the unconsumed capsule, is gone.

    Parameters are those of `__dlpack__`.

    Raises
    ------
    ArgumentError
        If DLPack cannot describe it.
    BufferError
        If a copy is asked for, or memory elsewhere: the protocol's own error.

    Notes
    -----
    NumPy makes the capsule, of a host array of that shape, and what it describes is then replaced.
    So native code frees it: a capsule may die while an error is under way, and a destructor in
    Python would lose that error.
    """
    if copy or dl_device not in (None, array.__dlpack_device__()):
        raise BufferError(
            f"{array} is exported where it lies, without a copy; take it so, and copy it with the "
            "library that takes it"
        )
    try:
        standing = _Standing(array.shape, np.uint8, bytearray(1), 0, (0,) * len(array.shape))
        code, bits = _CODES[array.dtype]
        strides = [_whole(step, array.itemsize) for step in array.strides_bytes]
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{array} has no DLPack: its dtype is unknown there, or its strides are no whole "
            "elements; allowed are " + ", ".join(_CODES)
        ) from error
    standing.stands_for = array
    capsule = standing.__dlpack__()
    tensor = _ManagedTensor.from_address(_capsule_pointer(capsule, _NAME)).tensor
    tensor.data, tensor.byte_offset = array.address, 0
    tensor.device_type, tensor.device_id = CUDA, array.device
    tensor.code, tensor.bits = code, bits
    # NumPy gives none where they do not matter: where no axis is longer than 1, or one is empty.
    if tensor.strides:
        for axis, step in enumerate(strides):
            tensor.strides[axis] = step
    return capsule


def _whole(step_bytes: int, itemsize: int) -> int:
    step, rest = divmod(step_bytes, itemsize)
    if rest:
        raise ValueError
    return step


def from_capsule(name: str, capsule: Any, owner: Any) -> DeviceArray:
    """Describe what a DLPack capsule holds.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    capsule : PyCapsule
        Left unconsumed: it frees itself, so `owner` must own the memory.
    owner : object
        Kept alive by the result.

    Raises
    ------
    ArgumentError
        If it is no such capsule or already consumed, the memory is not a GPU's, the type is none
        that `ep` knows, or the shape is none.

    Notes
    -----
    What the capsule points to is believed: a producer that lies about it has the process's rights
    anyway.
    """
    from ep.memory.cuda import DeviceArray

    try:
        managed = _ManagedTensor.from_address(_capsule_pointer(capsule, _NAME))
    except ValueError as error:
        raise ArgumentError(
            f"{name} gave a {type(capsule).__name__} that is no DLPack capsule, or a consumed one "
            f"({error}); allowed is what __dlpack__ of DLPack 0 or 1 returns, fresh"
        ) from error
    tensor = managed.tensor
    dtype = _NAMES.get((tensor.code, tensor.bits))
    if tensor.device_type != CUDA or dtype is None or tensor.lanes != 1:
        raise ArgumentError(
            f"{name} is a DLPack tensor of device type {tensor.device_type}, type code "
            f"{tensor.code}, {tensor.bits} bits; allowed is CUDA memory of a type that ep uses"
        )
    if not 0 <= tensor.ndim <= MAX_AXES or (tensor.ndim and not tensor.shape):
        raise ArgumentError(
            f"{name} is a DLPack tensor of {tensor.ndim} axes; allowed are 0..{MAX_AXES}, with a "
            "shape"
        )
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides: tuple[int, ...] = ()
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * (tensor.bits // 8) for axis in range(tensor.ndim))
    address = (tensor.data or 0) + tensor.byte_offset
    return DeviceArray(address, shape, dtype, strides, tensor.device_id, (owner, capsule))
