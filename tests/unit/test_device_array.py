"""Descriptions of device memory, without a device."""

import ctypes
import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import ep
from ep.gpu.arrays import device_array, stream_handle
from ep.memory import dlpack
from ep.memory.cuda import DeviceArray

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_strides_of_a_dense_array():
    array = DeviceArray(0x1000, (3, 4), "bfloat16")
    assert array.strides_bytes == (8, 2)
    assert array.is_contiguous
    assert not DeviceArray(0x1000, (3, 4), "bfloat16", (16, 2)).is_contiguous
    assert DeviceArray(0, (0, 4), "bfloat16", (16, 2)).is_contiguous


def test_array_interface_only_where_numpy_has_a_letter():
    array = DeviceArray(0x1000, (5,), "int32", (16,))
    assert array.__cuda_array_interface__ == {
        "shape": (5,),
        "typestr": "<i4",
        "data": (0x1000, False),
        "strides": (16,),
        "version": 3,
    }
    for name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"):
        assert not hasattr(DeviceArray(0x1000, (5,), name), "__cuda_array_interface__")


@pytest.mark.parametrize("dtype", sorted(dlpack._CODES))
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 3), ()])
def test_dlpack_there_and_back(dtype, shape):
    itemsize = DeviceArray(0, (), dtype).itemsize
    strides = (8 * itemsize, itemsize) if shape == (2, 3) else ()
    array = DeviceArray(0x2000, shape, dtype, strides, 3, Owner())
    watch = weakref.ref(array.owner)
    capsule = array.__dlpack__()
    assert dlpack.from_capsule("x", capsule, None) == array
    assert array.__dlpack_device__() == (2, 3)
    del array
    gc.collect()
    assert watch() is not None
    del capsule
    gc.collect()
    assert watch() is None


class Owner:
    """What memory belongs to."""


def test_a_capsule_dies_in_the_middle_of_an_error():
    """Whose consumer says why; this one takes no memory of a GPU."""
    for array in (DeviceArray(0x1000, (4,), "float32"), DeviceArray(0x1000, (4,), "float8_e4m3fn")):
        with pytest.raises((RuntimeError, BufferError), match="Unsupported d"):
            np.from_dlpack(array)


def test_others_may_declare_the_interpreters_functions_as_they_like(monkeypatch):
    for name in ("PyCapsule_New", "PyCapsule_GetPointer", "PyCapsule_IsValid"):
        monkeypatch.setattr(getattr(ctypes.pythonapi, name), "argtypes", (ctypes.c_double,) * 5)
    array = DeviceArray(0x1000, (4,), "float32")
    assert dlpack.from_capsule("x", array.__dlpack__(), None) == array


def test_dlpack_gives_no_copy_for_one():
    array = DeviceArray(0x1000, (4,), "float32")
    for wish in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 1)}):
        with pytest.raises(BufferError, match="exported where it lies, without a copy"):
            array.__dlpack__(**wish)
    same = array.__dlpack__(stream=1, max_version=(1, 1), dl_device=(2, 0), copy=False)
    assert dlpack.from_capsule("x", same, None) == array


def test_memory_that_outlives_the_interpreter_says_nothing():
    program = """
from ep.memory import cuda
kept = object.__new__(cuda._Allocation)
kept.address, kept._context = 0x1000, None
cuda.anywhere = cuda.logger = None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_dlpack_of_other_memory_is_refused():
    host = np.zeros(3, np.float32)
    with pytest.raises(ep.ArgumentError, match="x is a DLPack tensor of device type 1"):
        dlpack.from_capsule("x", host.__dlpack__(), host)
    with pytest.raises(ep.ArgumentError, match="x is a ndarray; the GPU backend takes"):
        device_array("x", np.zeros((2, 2), BF16), BF16, (2, 2), device=0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (DeviceArray(0x1000, (2, 3), "float32"), r"x is float32 \[2, 3\]; allowed is .* convert"),
        (DeviceArray(0x1000, (2, 4), "bfloat16"), r"x is bfloat16 \[2, 4\]; .* \[any, 3\]"),
        (DeviceArray(0x1000, (2, 3), "bfloat16", (8, 2)), "not C-contiguous and aligned"),
        (DeviceArray(0x1002, (2, 3), "bfloat16"), "not C-contiguous and aligned"),
        (DeviceArray(0x1000, (2, 3), "bfloat16", (), 1), "x is on GPU 1, but this rank uses GPU 0"),
        ([1.0], "x is a list; the GPU backend takes a C-contiguous array in CUDA memory"),
    ],
)
def test_arguments_are_checked(array, message):
    with pytest.raises(ep.ArgumentError, match=message):
        device_array("x", array, BF16, (None, 3), device=0)


def test_a_good_argument_is_described():
    array = DeviceArray(0x1000, (2, 3), "bfloat16")
    assert device_array("x", array, BF16, (None, 3), device=0) is array

    class Torchlike:
        is_cuda, dtype, shape = True, "torch.bfloat16", (2, 3)

        def data_ptr(self):
            return 0x1000

        def element_size(self):
            return 2

        def stride(self):
            return (3, 1)

        def get_device(self):
            return 0

    assert device_array("x", Torchlike(), BF16, (None, 3), device=0) == array


def test_bytes_of_an_array():
    raw = DeviceArray(0x1000, (2, 3), "bfloat16", (16, 2)).as_bytes()
    assert (raw.dtype, raw.shape, raw.strides_bytes) == ("uint8", (2, 6), (16, 1))
    with pytest.raises(ep.ArgumentError, match="not dense along its last axis"):
        DeviceArray(0x1000, (4,), "int32", (16,)).as_bytes()


class Stream:
    def __init__(self, version: int = 0) -> None:
        self.version = version

    def __cuda_stream__(self):
        return self.version, 0x77


class PropertyStream:
    __cuda_stream__ = (0, 0x78)


@pytest.mark.parametrize(
    ("stream", "handle"), [(None, 0), (5, 5), (Stream(), 0x77), (PropertyStream(), 0x78)]
)
def test_streams(stream, handle):
    assert stream_handle(stream) == handle


def test_odd_streams_are_refused():
    with pytest.raises(ep.ArgumentError, match="stream is a list; allowed are None, an int"):
        stream_handle([])
    with pytest.raises(ep.ArgumentError, match="version 1 of __cuda_stream__; known is 0"):
        stream_handle(Stream(1))
