"""Arrays and streams of others, described by plain numbers. No framework is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.arguments import Shape, check_described, wanted
from ep.errors import ArgumentError, EpError, shown
from ep.memory.cuda import DeviceArray
from ep.memory.dlpack import CUDA, from_capsule
from ep.memory.given import MAX_ADDRESS

KIND = "array in CUDA memory"


def device_array(
    name: str, array: Any, dtype: np.dtype[Any], shape: Shape, *, device: int, out: bool = False
) -> DeviceArray:
    """Check one argument in device memory and describe it.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    array : object
        An `ep.DeviceArray`, a torch tensor, or anything with `__dlpack__` or
        `__cuda_array_interface__`.
    dtype : dtype
    shape : tuple
        None stands for any length.
    device : int
        Ordinal of this rank's GPU.
    out : bool
        Whether it will be written.

    Raises
    ------
    ArgumentError
    """
    allowed = (dtype.name, shape)
    try:
        described = _describe(name, array)
        # A vector access of 16 bytes needs an address to match; every allocator gives one.
        contiguous = described is not None and _is_dense(described)
        is_here = described is not None and int(described.device) == device
    except EpError:
        raise
    except Exception as error:
        # Whatever it is, it is another library's, and says nothing of the argument's name.
        raise ArgumentError(
            f"{name} is a {type(array).__name__} that cannot be read ({shown(error)}); the GPU "
            f"backend takes {wanted(allowed, KIND)}"
        ) from error
    if described is None:
        raise ArgumentError(
            f"{name} is a {type(array).__name__}; the GPU backend takes {wanted(allowed, KIND)}"
        )
    given = (described.dtype, described.shape)
    check_described(name, given, allowed, contiguous=contiguous, kind=KIND)
    if described.shape and described.shape[0] < 0:
        raise ArgumentError(f"{name} has the shape {list(described.shape)}; none is below 0")
    if not described.address and 0 not in described.shape:
        raise ArgumentError(f"{name} has no memory: its address is 0")
    if not is_here:
        raise ArgumentError(
            f"{name} is on GPU {described.device}, but this rank uses GPU {device}; move it there"
        )
    if out and getattr(getattr(array, "flags", None), "writeable", True) is False:
        raise ArgumentError(f"{name} is read-only; pass an array that can be written")
    return described


def stream_handle(stream: Any) -> int:
    """Give a stream as the driver's number: an int, a CUstream, or by `__cuda_stream__`.

    Raises
    ------
    ArgumentError
    """
    if stream is None:
        return 0
    number = cause = None
    try:
        number = _stream_number(stream)
    except EpError:
        raise
    except Exception as error:  # noqa: BLE001 - another library's
        cause = error
    if number is None or not 0 <= number < MAX_ADDRESS:
        said = shown(stream) if type(stream) is int else f"a {type(stream).__name__}"
        raise ArgumentError(
            f"stream is {said}; allowed are None, an int, a CUstream, or an object with "
            "__cuda_stream__"
        ) from cause
    return number


def _stream_number(stream: Any) -> int | None:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # The protocol is a method; some libraries have it as a property.
        version, stream = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ArgumentError(
                f"stream follows version {shown(version)} of __cuda_stream__; known is 0"
            )
    # A text or a fraction has an int, too, but is no stream.
    return None if isinstance(stream, (str, bytes, float)) else int(stream)


def _is_dense(array: DeviceArray) -> bool:
    return array.is_contiguous and array.address % 16 == 0 and 0 <= array.address < MAX_ADDRESS


def _describe(name: str, array: Any) -> DeviceArray | None:
    if isinstance(array, DeviceArray):
        return array
    if getattr(array, "is_cuda", False) and hasattr(array, "data_ptr"):
        return _from_torch(array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        if array.__dlpack_device__()[0] != CUDA:
            return None
        return _from_dlpack(name, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    return None if interface is None else _from_interface(interface, array)


def _from_torch(tensor: Any) -> DeviceArray:
    # Many times faster than DLPack, and this is the call that decode repeats.
    dtype = str(tensor.dtype).removeprefix("torch.")
    itemsize = tensor.element_size()
    strides = tuple(step * itemsize for step in tensor.stride())
    device = tensor.get_device()
    if dtype not in _KNOWN:
        return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), f"u{itemsize}", strides, device)
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), dtype, strides, device, tensor)


def _from_dlpack(name: str, array: Any) -> DeviceArray:
    try:
        # -1: do not synchronize; the caller orders its work by the stream that it passes.
        capsule = array.__dlpack__(stream=-1)
    except Exception:  # noqa: BLE001 - libraries that do not know -1 fail each in its own way
        capsule = array.__dlpack__()
    return from_capsule(name, capsule, array)


def _from_interface(interface: dict[str, Any], owner: Any) -> DeviceArray:
    return DeviceArray(
        interface["data"][0],
        tuple(interface["shape"]),
        np.dtype(interface["typestr"]).name,
        tuple(interface.get("strides") or ()),
        _device_of(interface["data"][0]),
        owner,
    )


def _device_of(address: int) -> int:
    from cuda.bindings import driver as cuda

    from ep.memory.cuda import driver

    if not address:
        return 0
    which = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(driver("PointerGetAttribute", which, address))


_KNOWN = frozenset(
    (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e8m0fnu",
        "int8",
        "int32",
        "int64",
        "uint8",
    )
)
