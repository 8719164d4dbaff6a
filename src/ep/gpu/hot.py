"""Calls of the driver that eager steps make all the time, without what makes others convenient."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from ep.memory.cuda import error_of

if TYPE_CHECKING:
    from ep.kernels.compile import Launcher


@functools.cache
def _library() -> ctypes.CDLL:
    """Give the driver, apart from what others load of it, whose functions may have types."""
    return ctypes.CDLL("libcuda.so.1")


class Calls:
    """Calls for one context, by one thread at a time, which go without the interpreter's lock.

    Each raises `DeviceError` as `ep.memory.cuda.driver` does. A function of `ctypes` is called
    fastest if it has no types and is given objects of `ctypes`.

    Parameters
    ----------
    context : int
    """

    def __init__(self, context: int) -> None:
        library = _library()
        self._set_current = library.cuCtxSetCurrent
        self._is_capturing = library.cuStreamIsCapturing
        self._context = ctypes.c_void_p(context)
        self._state = ctypes.c_int()
        self._state_at = ctypes.byref(self._state)

    def set_context(self) -> None:
        """Make the context current in the calling thread."""
        if status := self._set_current(self._context):
            raise error_of("CtxSetCurrent", status)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is captured from `stream`."""
        if status := self._is_capturing(ctypes.c_void_p(stream), self._state_at):
            raise error_of("StreamIsCapturing", status)
        return self._state.value != 0


class Mark:
    """An event recorded in a stream again and again, but not while a graph is captured."""

    def __init__(self, event: int, stream: int) -> None:
        library = _library()
        self._is_capturing = library.cuStreamIsCapturing
        self._record = library.cuEventRecord
        self._event, self._stream = ctypes.c_void_p(event), ctypes.c_void_p(stream)
        self._state = ctypes.c_int()
        self._state_at = ctypes.byref(self._state)

    def __call__(self) -> None:
        """Record it; the stream's context is current."""
        if status := self._is_capturing(self._stream, self._state_at):
            raise error_of("StreamIsCapturing", status)
        if not self._state.value and (status := self._record(self._event, self._stream)):
            raise error_of("EventRecord", status)


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
        self._launch = _library().cuLaunchKernelEx
        self._config_at = ctypes.c_void_p(int(self._config.getPtr()))
        self._function = ctypes.c_void_p(launcher.function)

    def __call__(self) -> None:
        """Enqueue it; the stream's context is current."""
        if status := self._launch(self._config_at, self._function, self._pointers, None):
            raise error_of("LaunchKernelEx", status)
