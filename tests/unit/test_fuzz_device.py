"""Arrays and streams of libraries that lie, without a device: refused, never followed."""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ep
from ep.gpu import arrays
from ep.gpu.arrays import device_array, stream_handle
from ep.memory import dlpack
from ep.memory.cuda import DeviceArray
from tests.strategies import ODD, anything

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (None, 64)
NAMES = st.sampled_from(["bfloat16", "float32", "int32", "float8_e5m2", "V3", "O", "i4,i4", "u3"])
NUMBERS = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 16, 0x1000, 64, 128, 1 << 63])


@pytest.fixture(scope="module", autouse=True)
def no_driver():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_device_of", lambda address: 0)
        yield


def read(array):
    """Describe an argument; what comes through must be what kernels can take."""
    try:
        described = device_array("x", array, BF16, SHAPE, device=0)
    except ep.EpError as error:
        words = str(error)
    else:
        assert described.dtype == "bfloat16"
        assert described.shape[1:] == (64,)
        assert described.shape[0] >= 0
        assert described.address % 16 == 0
        assert 0 <= described.address < 2**63
        assert described.address or described.shape[0] == 0
        assert 0 in described.shape or described.strides_bytes == (128, 2)
        return described
    assert len(words) < 2000
    return None


@given(anything())
def test_arrays_of_anything(array):
    assert read(array) is None


@pytest.mark.parametrize("make", ODD, ids=range(len(ODD)))
def test_odd_arrays_and_streams(make):
    assert read(make()) is None
    streams = [make(), type("Stream", (), {"__cuda_stream__": make()})()]
    streams.append(type("Stream", (), {"__cuda_stream__": (0, make())})())
    for stream in streams:
        try:
            assert 0 <= stream_handle(stream) < 2**63
        except ep.EpError as error:
            assert str(error).startswith("stream")  # noqa: PT017 - some are streams


@given(anything() | NUMBERS)
def test_streams_of_anything(stream):
    try:
        handle = stream_handle(stream)
    except ep.ArgumentError:
        return
    assert 0 <= handle < 2**63
    assert stream is None or int(stream) == handle
    assert not isinstance(stream, (str, bytes, float))


def lengths():
    return st.lists(NUMBERS | st.sampled_from([2, 64]), max_size=3).map(tuple) | anything()


@given(NUMBERS | anything(), lengths(), NAMES | anything(), lengths(), NUMBERS | anything())
def test_descriptions_of_anything(address, shape, dtype, strides, device):
    try:
        array = DeviceArray(address, shape, dtype, strides, device)
    except ep.ArgumentError:
        return
    read(array)


GOOD = {"address": 0x1000, "shape": (2, 64), "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (-2, 64)}, r"x has the shape \[-2, 64\]; none is below 0"),
        ({"address": 0}, "x has no memory"),
        ({"address": 1 << 63}, "not C-contiguous and aligned"),
        ({"address": -16}, "not C-contiguous and aligned"),
        ({"address": "0x1000"}, "x is a DeviceArray that cannot be read"),
        ({"device": "cuda"}, "x is a DeviceArray that cannot be read"),
        ({"device": 1}, "x is on GPU 1"),
        ({"strides_bytes": (128,)}, "not C-contiguous and aligned"),
    ],
)
def test_descriptions_that_no_kernel_can_take(changes, words):
    fields: Any = GOOD | changes
    with pytest.raises(ep.ArgumentError, match=words):
        device_array("x", DeviceArray(**fields), BF16, SHAPE, device=0)


FIELDS = {
    "data": (0x1000, False),
    "shape": (2, 64),
    "typestr": "<f4",
    "strides": None,
    "version": 3,
}
VALUES = anything() | lengths() | st.tuples(NUMBERS, st.booleans()) | NAMES


@given(
    st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES, max_size=3),
    st.sets(st.sampled_from(sorted(FIELDS)), max_size=2),
)
def test_interfaces_that_lie(changes, missing):
    told = {name: value for name, value in (FIELDS | changes).items() if name not in missing}
    read(type("Liar", (), {"__cuda_array_interface__": told})())


@given(anything())
def test_an_interface_of_anything(interface):
    assert read(type("Liar", (), {"__cuda_array_interface__": interface})()) is None


# DLPack.


new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


def capsule_of(tensor):
    managed = dlpack._ManagedTensor(tensor, None, None)
    # Kept alive as long as the test, as the producer would.
    KEPT.append(managed)
    return new_capsule(ctypes.addressof(managed), dlpack._NAME, None)


KEPT: list[Any] = []


class Producer:
    def __init__(self, capsule, device=(2, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        return self.capsule


INT64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, 2, 64, 128])
UINT64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 16, 0x1000, 1])


@given(
    data=UINT64 | st.none(),
    device=st.tuples(st.sampled_from([0, 1, 2, 13, -1]), st.sampled_from([0, 1, -1])),
    axes=st.integers(-(2**31), 2**31 - 1) | st.sampled_from([0, 1, 2, 2, 2, 8, 9]),
    code=st.sampled_from([0, 1, 2, 4, 4, 4, 10, 14, 200]),
    bits=st.sampled_from([0, 8, 16, 16, 16, 32, 255]),
    lanes=st.sampled_from([1, 1, 1, 0, 4]),
    shape=st.none() | st.tuples(*[INT64] * 8) | st.just((2, 64) * 4),
    strides=st.none() | st.tuples(*[INT64] * 8) | st.just((64, 1) * 4),
    offset=UINT64,
)
def test_capsules_that_lie(data, device, axes, code, bits, lanes, shape, strides, offset):
    words = ctypes.c_int64 * 8
    tensor = dlpack._Tensor(
        data,
        *device,
        axes,
        code,
        bits,
        lanes,
        words(*shape) if shape else None,
        words(*strides) if strides else None,
        offset,
    )
    KEPT[:] = [tensor]
    described = read(Producer(capsule_of(tensor)))
    if described is not None:
        assert (device, code, bits, lanes) == ((2, 0), 4, 16, 1)
        assert described.address == (data or 0) + offset


@pytest.mark.parametrize(("axes", "shape"), [(9, (2, 64)), (-1, (2, 64)), (2, None)])
def test_a_shape_without_an_end_is_not_followed(axes, shape):
    words = ctypes.c_int64 * 8
    memory = words(*shape) if shape else None
    KEPT[:] = [dlpack._Tensor(0x1000, 2, 0, axes, 4, 16, 1, memory, None, 0)]
    with pytest.raises(ep.ArgumentError, match=f"x is a DLPack tensor of {axes} axes"):
        dlpack.from_capsule("x", capsule_of(KEPT[0]), None)


def test_consumed_and_false_capsules_are_refused():
    host = np.zeros((2, 64), np.float32)
    used = host.__dlpack__()
    np.from_dlpack(Producer(used, (1, 0)))
    for capsule in (used, None, 5, object(), host.__dlpack__()):
        assert read(Producer(capsule)) is None
        with pytest.raises(ep.ArgumentError, match="x "):
            dlpack.from_capsule("x", capsule, None)


@given(anything(), anything())
def test_producers_of_anything(capsule, device):
    assert read(Producer(capsule, device)) is None
    assert read(Producer(capsule)) is None


def test_what_has_no_capsule_is_told():
    for array in (
        DeviceArray(0x1000, (2, 3), "float8_e5m2"),
        DeviceArray(0x1000, (2,), "float32", (6,)),
        DeviceArray(0x1000, (2**40, 2**40), "float32"),
        DeviceArray(0x1000, (-2,), "float32"),
        DeviceArray(0x1000, (1,) * 65, "float32"),
    ):
        with pytest.raises(ep.ArgumentError, match="has no DLPack"):
            array.__dlpack__()
    with pytest.raises(ep.ArgumentError, match="no bytes view"):
        DeviceArray(0x1000, (), "float32").as_bytes()
