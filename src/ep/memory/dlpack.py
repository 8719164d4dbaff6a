"""DLPack in both directions, with ctypes alone: describe our arrays, read those of others."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

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
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = (
    ("tensor", _Tensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", _Deleter),
)

_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

# A dying capsule is handled by address: as an object, ctypes would revive it and free it twice.
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_is_unconsumed = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

# What a consumer still holds, by address of its managed tensor: everything it points to.
_exported: dict[int, tuple[Any, ...]] = {}


def _on_release(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _on_death(capsule: Any) -> None:
    if _is_unconsumed(capsule, _NAME):
        _exported.pop(_dying_pointer(capsule, _NAME), None)


_release = _Deleter(_on_release)
_drop = _Destructor(_on_death)


def to_capsule(array: DeviceArray) -> Any:
    """Export a device array; it lives until the consumer, or the unconsumed capsule, is gone."""
    ndim = len(array.shape)
    if array.dtype not in _CODES or any(step % array.itemsize for step in array.strides_bytes):
        raise ArgumentError(
            f"{array} has no DLPack: its dtype is unknown there, or its strides are no whole "
            "elements; allowed are " + ", ".join(_CODES)
        )
    code, bits = _CODES[array.dtype]
    shape = (ctypes.c_int64 * ndim)(*array.shape)
    strides = (ctypes.c_int64 * ndim)(*(step // array.itemsize for step in array.strides_bytes))
    tensor = _Tensor(array.address, CUDA, array.device, ndim, code, bits, 1, shape, strides, 0)
    managed = _ManagedTensor(tensor, None, _release)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, array)
    return _new_capsule(address, _NAME, ctypes.cast(_drop, ctypes.c_void_p))


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
