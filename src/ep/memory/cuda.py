"""The few calls of the CUDA driver that `ep` needs, and `DeviceArray`. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ep.errors import ArgumentError, DeviceError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from ep.layout import Field

logger = logging.getLogger(__name__)


def driver(name: str, *arguments: Any) -> Any:
    """Call `cu<name>` and return what it gives besides its status.

    Raises
    ------
    DeviceError
        Naming the call and the driver's words.
    """
    status, *values = _function(name)(*arguments)
    if status:
        raise error_of(name, status)
    return values[0] if len(values) == 1 else tuple(values) or None


def error_of(name: str, status: int) -> DeviceError:
    """What it means that `cu<name>` gave a status other than success."""
    from cuda.bindings import driver as cuda

    result = cuda.CUresult(status)
    _, words = cuda.cuGetErrorString(result)
    return DeviceError(f"cu{name}: {(words or b'unknown').decode()} ({result.name})")


@functools.cache
def _function(name: str) -> Any:
    from cuda.bindings import driver as cuda

    return getattr(cuda, f"cu{name}")


def device_count() -> int:
    """Count the CUDA devices that this process sees; 0 where there is no driver at all."""
    try:
        driver("Init", 0)
        return int(driver("DeviceGetCount"))
    except ImportError:
        return 0
    except (DeviceError, RuntimeError) as error:
        # cuda.bindings raises RuntimeError where libcuda cannot be loaded.
        logger.debug("no CUDA device: %s", error)
        return 0


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU, used through its primary context, as every framework does.

    Attributes
    ----------
    ordinal : int
        Among the devices that this process sees.
    uuid : str
    name : str
    capability : tuple of int
    num_sms : int
    """

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    num_sms: int
    context: Any = dataclasses.field(repr=False, compare=False)

    @classmethod
    def open(cls, ordinal: int) -> Self:
        """Retain the primary context of device `ordinal` and make it current in this thread."""
        from cuda.bindings import driver as cuda

        driver("Init", 0)
        handle = driver("DeviceGet", ordinal)
        attribute = cuda.CUdevice_attribute
        major, minor, num_sms = (
            int(driver("DeviceGetAttribute", which, handle))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
        name = driver("DeviceGetName", 256, handle).split(b"\0")[0].decode()
        uuid = bytes(driver("DeviceGetUuid", handle).bytes).hex()
        device = cls(
            ordinal, uuid, name, (major, minor), num_sms, driver("DevicePrimaryCtxRetain", handle)
        )
        device.use()
        return device

    @property
    def arch(self) -> str:
        """Architecture with its own instructions: "sm_90a"."""
        major, minor = self.capability
        return f"sm_{major}{minor}a"

    def use(self) -> None:
        """Make this device current in the calling thread."""
        driver("CtxSetCurrent", self.context)


def non_blocking() -> int:
    """Flag of a stream that does not wait for the default stream."""
    from cuda.bindings import driver as cuda

    return int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)


def allocate(size_bytes: int) -> int:
    """Allocate device memory, zeroed, and return its address. Local."""
    address = int(driver("MemAlloc", size_bytes))
    fill(address, size_bytes, 0)
    return address


def fill(address: int, size_bytes: int, byte: int, stream: int = 0) -> None:
    """Set every byte in order of `stream`, and wait for that."""
    driver("MemsetD8Async", address, byte, size_bytes, stream)
    driver("StreamSynchronize", stream)


def free(address: int) -> None:
    """Free what `allocate` gave."""
    driver("MemFree", address)


def synchronize() -> None:
    """Wait for all work of the current device's context."""
    driver("CtxSynchronize")


def upload(address: int, values: npt.NDArray[Any], stream: int = 0) -> None:
    """Copy a C-contiguous host array to device memory in order of `stream`, and wait for that."""
    values = np.ascontiguousarray(values)
    if values.nbytes:
        driver("MemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, stream)
        driver("StreamSynchronize", stream)


def download(address: int, shape: tuple[int, ...], dtype: Any, stream: int = 0) -> npt.NDArray[Any]:
    """Copy dense device memory to a new host array in the order of `stream`, and wait for that."""
    values = np.empty(shape, dtype)
    if values.nbytes:
        # First: a copy to pageable memory that waits keeps other threads out of the driver, and
        # with them, maybe, the rank that it waits for.
        driver("StreamSynchronize", stream)
        driver("MemcpyDtoHAsync", values.ctypes.data, address, values.nbytes, stream)
        driver("StreamSynchronize", stream)
    return values


class PinnedWords:
    """Host memory of uint32 words that kernels of this process write through a device address.

    Attributes
    ----------
    words : ndarray of uint32, `[count]`
    device_address : int
    """

    def __init__(self, count: int) -> None:
        from cuda.bindings import driver as cuda

        flags = cuda.CU_MEMHOSTALLOC_DEVICEMAP | cuda.CU_MEMHOSTALLOC_PORTABLE
        self._host = int(driver("MemHostAlloc", 4 * count, flags))
        self.words = np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(self._host))
        self.words[:] = 0
        self.device_address = int(driver("MemHostGetDevicePointer", self._host, 0))

    def close(self) -> None:
        """Free the memory; `words` must not be used afterwards."""
        if self._host:
            self.words = np.zeros_like(self.words)
            driver("MemFreeHost", self._host)
            self._host = 0


@dataclasses.dataclass(frozen=True)
class DeviceArray:
    """A dense or strided array in device memory, described by plain numbers.

    It speaks DLPack and, where its dtype has a NumPy letter, `__cuda_array_interface__`.

    Attributes
    ----------
    address : int
    shape : tuple of int
    dtype : str
        Name of a NumPy or ml_dtypes type.
    strides_bytes : tuple of int, optional
        Dense and C-contiguous if not given.
    device : int
        Ordinal of the GPU.
    owner : object
        Kept alive as long as the array.

    Raises
    ------
    ArgumentError
        If these are no numbers, or there is no such dtype.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides_bytes: tuple[int, ...] = ()
    device: int = 0
    owner: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            dense = dense_strides(self.shape, self.itemsize)
            strides_bytes = self.strides_bytes or dense
        except Exception as error:
            raise ArgumentError(
                f"DeviceArray({shown(self.address)}, {shown(self.shape)}, {shown(self.dtype)}): "
                "allowed are an address, a tuple of lengths, the name of a dtype "
                f"({shown(error)})"
            ) from error
        object.__setattr__(self, "strides_bytes", strides_bytes)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np_dtype(self.dtype).itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the array is dense in C order."""
        return 0 in self.shape or self.strides_bytes == dense_strides(self.shape, self.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        dtype = np_dtype(self.dtype)
        if dtype.kind not in "iuf" or dtype.isbuiltin != 1:
            raise AttributeError(f"{self.dtype} has no NumPy letter; use DLPack")
        return {
            "shape": self.shape,
            "typestr": dtype.str,
            "data": (self.address, False),
            "strides": self.strides_bytes,
            "version": 3,
        }

    def as_bytes(self) -> DeviceArray:
        """View as uint8, the last axis longer by the item size: for libraries without FP8 types."""
        if not self.shape or self.strides_bytes[-1] != self.itemsize:
            raise ArgumentError(f"{self} is not dense along its last axis; it has no bytes view")
        shape = (*self.shape[:-1], self.shape[-1] * self.itemsize)
        strides = (*self.strides_bytes[:-1], 1)
        return dataclasses.replace(self, shape=shape, dtype="uint8", strides_bytes=strides)

    def __dlpack_device__(self) -> tuple[int, int]:
        from ep.memory.dlpack import CUDA

        return CUDA, self.device

    def __dlpack__(self, **options: Any) -> Any:
        """Export without a copy. Work on the array must be ordered by the caller's stream."""
        from ep.memory.dlpack import to_capsule

        return to_capsule(self, **options)

    def numpy(self, stream: int = 0) -> npt.NDArray[Any]:
        """Copy to the host in the order of `stream`, and wait for that."""
        dtype = np_dtype(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides_bytes, strict=True))
        raw = download(self.address, (last + dtype.itemsize,), np.uint8, stream)
        return np.ndarray(self.shape, dtype, raw.data, strides=self.strides_bytes).copy()

    @classmethod
    def from_numpy(cls, values: npt.NDArray[Any], device: int = 0, stream: int = 0) -> Self:
        """Copy a host array to memory of its own on the current device, in order of `stream`."""
        values = np.ascontiguousarray(values)
        array = cls.empty(values.shape, values.dtype.name, device)
        upload(array.address, values, stream)
        return array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str, device: int = 0) -> Self:
        """Allocate on the current device, not initialised.

        The memory goes back with the last reference, which waits for all work of the device: so
        nothing that is still in flight can lose it.
        """
        size_bytes = max(1, int(np.prod(shape, dtype=np.int64))) * np_dtype(dtype).itemsize
        allocation = _Allocation(size_bytes)
        return cls(allocation.address, shape, dtype, (), device, allocation)


class _Allocation:
    """Device memory of this process alone: freeing it is local, so it may happen at any time."""

    def __init__(self, size_bytes: int) -> None:
        self.address = int(driver("MemAlloc", size_bytes))
        self._context = driver("CtxGetCurrent")

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end the driver may be gone, and so may the modules that this uses.
        if not is_over():
            with contextlib.suppress(DeviceError), anywhere(self._context):
                free(self.address)


@contextlib.contextmanager
def anywhere(context: Any) -> Iterator[None]:
    """Let the block free or read memory in whatever thread, also in the middle of a capture.

    For the garbage collector, which chooses neither, and for errors. Otherwise a call that may wait
    for the device would spoil the capture.
    """
    from cuda.bindings import driver as cuda

    driver("CtxPushCurrent", context)
    try:
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = driver("ThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            driver("ThreadExchangeStreamCaptureMode", mode)
    finally:
        driver("CtxPopCurrent")


@functools.cache
def np_dtype(name: str) -> np.dtype[Any]:
    """NumPy's view of a dtype by name, ml_dtypes' included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


@functools.lru_cache(maxsize=1024)
def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


class DeviceMemory:
    """Symmetric memory on GPUs, whatever its home; see `ep.memory.SymmetricMemory`.

    Parameters
    ----------
    device : Device
    own : int
        Address of this rank's buffer.
    peers : sequence of int
        Address of every rank's buffer in this process.
    size_bytes : int
    """

    def __init__(self, device: Device, own: int, peers: Sequence[int], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.addresses = (*peers, own)
        self.ordinal = device.ordinal
        self._own = own

    def array(self, where: int, field: Field) -> DeviceArray:
        """See `SymmetricMemory`. Not kept alive by its views."""
        address = self.addresses[where] + field.offset_bytes
        return DeviceArray(address, field.shape, field.dtype, field.strides_bytes, self.ordinal)

    def take_own(self) -> int:
        """Give this rank's address to be freed; 0 the second time."""
        own, self._own = self._own, 0
        return own
