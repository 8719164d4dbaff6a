"""An exported library by ctypes: for Python that wants it without an `Exchange`."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from ep.config import MAX_RANKS
from ep.errors import EpError
from ep.export.plan import ABI_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Status(IntEnum):
    """As `ep_status`."""

    OK = 0
    ARGUMENT = 1
    ABI = 2
    ORDER = 3
    DEVICE = 4
    DRIVER = 5
    TIMED_OUT = 6


class StatusError(EpError):
    """A call gave another status than OK.

    Attributes
    ----------
    status : Status
    """

    def __init__(self, status: Status, words: str) -> None:
        super().__init__(f"{status.name}: {words}")
        self.status = status


class Options(ctypes.Structure):
    """As `ep_options`."""

    _fields_ = (
        ("size_bytes", ctypes.c_size_t),
        ("abi_version", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("config_id", ctypes.c_char_p),
        ("own", ctypes.c_uint64),
        ("peers", ctypes.POINTER(ctypes.c_uint64)),
        ("timeout_us", ctypes.c_uint64),
        ("grace_us", ctypes.c_uint64),
        ("ranks_on_gpu", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Arming(ctypes.Structure):
    """As `ep_arming`."""

    _fields_ = (
        ("size_bytes", ctypes.c_size_t),
        ("step", ctypes.c_uint64),
        ("excluded", ctypes.c_uint64 * 2),
    )


class Received(ctypes.Structure):
    """As `ep_received`."""

    _fields_ = (
        ("size_bytes", ctypes.c_size_t),
        *[(name, ctypes.c_void_p) for name in ("x", "scales", "ids", "weights", "source")],
        ("source_stride", ctypes.c_size_t),
    )


class Hang(ctypes.Structure):
    """As `ep_hang`."""

    _fields_ = (
        ("size_bytes", ctypes.c_size_t),
        ("phase", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("step", ctypes.c_uint64),
        ("waited_us", ctypes.c_uint64),
        ("awaited", ctypes.c_uint64 * 2),
        ("seen", ctypes.c_uint64 * MAX_RANKS),
    )


_DISPATCH: list[Any] = [ctypes.c_void_p] * 4 + [ctypes.c_int32, ctypes.c_void_p]
_COMBINE: list[Any] = [ctypes.c_void_p] * 4 + [ctypes.c_float] + _DISPATCH[-3:]


class Library:
    """The functions of a library: `library.ep_open(...)` and so on.

    Parameters
    ----------
    path : Path
        Of `libep.so`.
    """

    def __init__(self, path: Path) -> None:
        self.functions = ctypes.CDLL(str(path.resolve()))
        for name in ("ep_config_id", "ep_config", "ep_status_text", "ep_last_error"):
            getattr(self.functions, name).restype = ctypes.c_char_p
        self.functions.ep_buffer_bytes.restype = ctypes.c_uint64
        self.functions.ep_dispatch.argtypes = _DISPATCH
        self.functions.ep_combine.argtypes = _COMBINE
        self.functions.ep_close.argtypes = [ctypes.c_void_p]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that gives a status.

        Raises
        ------
        StatusError
        """
        status = Status(getattr(self.functions, name)(*arguments))
        if status is not Status.OK:
            raise StatusError(status, self.functions.ep_last_error().decode())

    def open(
        self, rank: int, own: int, peers: Sequence[int] | None, **fields: Any
    ) -> ctypes.c_void_p:
        """Call `ep_open` with these addresses, and other fields of its options."""
        exchange = ctypes.c_void_p()
        chosen: dict[str, Any] = {
            "size_bytes": ctypes.sizeof(Options),
            "abi_version": ABI_VERSION,
            "config_id": self.functions.ep_config_id(),
            "peers": peers and (ctypes.c_uint64 * len(peers))(*peers),
            "timeout_us": 10_000_000,
            "grace_us": 60_000_000,
            "ranks_on_gpu": 1,
        }
        options = Options(rank=rank, own=own, **(chosen | fields))
        self.call("ep_open", ctypes.byref(options), ctypes.byref(exchange))
        return exchange

    def arm(self, exchange: ctypes.c_void_p, step: int = 0, excluded: int = 0) -> None:
        """Call `ep_arm`; bit r of `excluded`: without rank r."""
        halves = (excluded & (1 << 64) - 1, excluded >> 64)
        arming = Arming(ctypes.sizeof(Arming), step, halves)
        self.call("ep_arm", exchange, ctypes.byref(arming))

    def step(self, exchange: ctypes.c_void_p) -> int:
        """Call `ep_step`."""
        step = ctypes.c_uint64()
        self.call("ep_step", exchange, ctypes.byref(step))
        return step.value

    def poll(self, exchange: ctypes.c_void_p) -> Hang:
        """Call `ep_poll`; the phase of what it gives is 0 where no wait has expired."""
        hang = Hang(ctypes.sizeof(Hang))
        try:
            self.call("ep_poll", exchange, ctypes.byref(hang))
        except StatusError as error:
            if error.status is not Status.TIMED_OUT:
                raise
        return hang

    def text(self, hang: Hang, size_bytes: int = 2000) -> str:
        """Call `ep_hang_text`."""
        text = ctypes.create_string_buffer(size_bytes)
        self.functions.ep_hang_text(ctypes.byref(hang), text, ctypes.c_size_t(size_bytes))
        return text.value.decode()
