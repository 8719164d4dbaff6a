"""The played driver's knobs, and a library over it."""

import contextlib
import ctypes
import json
from typing import Any

import numpy as np

from ep import EpConfig, EpLayout
from ep.export.binding import Library, StatusError
from ep.kernels.tuning import read_table

KINDS: dict[str, Any] = {
    "u64": (ctypes.c_uint64, 8),
    "u32": (ctypes.c_int32, 4),
    "f32": (ctypes.c_float, 4),
}


MOST_BYTES = 1 << 21
"""Of buffers that are there."""


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("num_attrs", ctypes.c_uint),
    )


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class Launch(ctypes.Structure):
    _fields_ = (
        ("config", LaunchConfig),
        ("attribute", Attribute),
        ("function", ctypes.c_void_p),
        ("params", ctypes.c_uint64 * 16),
    )


class Played:
    """The driver's knobs."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self.library, f"played_{name}").value

    def set(self, **values):
        for name, value in values.items():
            ctypes.c_int.in_dll(self.library, f"played_{name}").value = value

    def wipe(self, address):
        """Have cuStreamSynchronize make the word at `address` zero; None: no word."""
        ctypes.c_void_p.in_dll(self.library, "played_wiped").value = address

    def expect(self, params):
        """Be ready for a launch with these parameters."""
        self.set(num_params=len(params), num_launches=0)
        sizes = (ctypes.c_int * 16).in_dll(self.library, "played_param_bytes")
        for index, (_, kind) in enumerate(params):
            sizes[index] = KINDS[kind][1]

    def launched(self, params):
        """The one launch, and its parameters by name."""
        assert self.num_launches == 1
        launch = (Launch * 64).in_dll(self.library, "played_launches")[0]
        values = {}
        for index, (name, kind) in enumerate(params):
            place = ctypes.addressof(launch.params) + 8 * index
            values[name] = KINDS[kind][0].from_address(place).value
        return launch, values


class Bench:
    """A library, its facts, and memory for its buffers."""

    def __init__(self, folder):
        self.folder = folder
        self.played = Played(folder / "libcuda.so.1")
        self.library = Library(folder / "libep.so")
        self.facts = json.loads((folder / "facts.json").read_text())
        self.config = EpConfig(**self.facts["config"])
        self.layout = EpLayout(self.config)
        size = self.layout.total_bytes
        self.is_dry = size > MOST_BYTES
        self.memory = np.full(0 if self.is_dry else self.config.ranks * size + 256, 0x77, np.uint8)
        base = -(-self.memory.ctypes.data // 128) * 128
        self.bases = [base + rank * size for rank in range(self.config.ranks)]
        self.table = read_table(folder / "tuning.toml")["sm_90a"]
        self.record = None

    def buffer(self, rank):
        size = self.layout.total_bytes
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.bases[rank]))

    @contextlib.contextmanager
    def opened(self, rank=0, peers=None, **fields):
        exchange = self.library.open(rank, self.bases[rank], peers or self.bases, **fields)
        yield exchange
        self.library.call("ep_close", exchange)
        assert self.played.held == 0

    def fails(self, status, *words):
        return Fails(status, words)


class Fails:
    def __init__(self, status, words):
        self.status, self.words = status, words

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert isinstance(error, StatusError), f"{self.words}: {error!r}"
        assert error.status is self.status, error
        missing = [word for word in self.words if word not in str(error)]
        assert not missing, f"{error} lacks {missing}"
        return True
