"""Calls of the driver that eager steps make all the time, without what makes others convenient."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from ep.memory.cuda import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep.kernels.compile import Launcher


@functools.cache
def entry(name: str, *kinds: Any) -> Callable[..., None]:
    """Give the driver's function `cu<name>`, called without the interpreter's lock.

    Parameters
    ----------
    name : str
    kinds : ctypes types
        Of its arguments.

    Returns
    -------
    callable
        Raises `DeviceError`, as `ep.memory.cuda.driver` does.
    """
    function = getattr(ctypes.CDLL("libcuda.so.1"), f"cu{name}")
    function.argtypes, function.restype = kinds, ctypes.c_int
    function.errcheck = functools.partial(_check, name)
    return function  # type: ignore[no-any-return]


def _check(name: str, status: int, _function: Any, _arguments: Any) -> None:
    if status:
        raise error_of(name, status)


def set_context(context: int) -> None:
    """Make a context current in the calling thread."""
    entry("CtxSetCurrent", ctypes.c_void_p)(context)


def is_capturing(stream: int) -> bool:
    """Whether a graph is captured from `stream`."""
    state = ctypes.c_int()
    entry("StreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.addressof(state))
    return state.value != 0


def record(event: int, stream: int) -> None:
    """Record an event; not while a graph is captured."""
    entry("EventRecord", ctypes.c_void_p, ctypes.c_void_p)(event, stream)


class Bound:
    """A launch with all its arguments, to be made again and again by one thread at a time.

    Parameters
    ----------
    launcher : Launcher
    stream : int
    num_ctas : int
    args : float
        As `Launcher.__call__` takes them.
    """

    def __init__(self, launcher: Launcher, stream: int, num_ctas: int, *args: float) -> None:
        self._values, self._pointers = launcher.pack(args)
        self._config = launcher.config(stream, num_ctas)
        self._launch = entry("LaunchKernelEx", *[ctypes.c_void_p] * 4)
        self._where = (
            int(self._config.getPtr()),
            launcher.function,
            ctypes.addressof(self._pointers),
            None,
        )

    def __call__(self) -> None:
        """Enqueue it; the stream's context is current."""
        self._launch(*self._where)
