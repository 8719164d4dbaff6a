"""CUDA graphs and events without a framework, for benchmarks, tests and engines without one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ep.errors import DeviceError
from ep.memory.cuda import driver

if TYPE_CHECKING:
    from collections.abc import Callable


class Graph:
    """What a function enqueued on a stream, to be replayed. Made by `Graph.capture`."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    @classmethod
    def capture(cls, stream: int, function: Callable[[], object]) -> Graph:
        """Record what `function` enqueues on `stream`, ready to be replayed. Nothing runs.

        Parameters
        ----------
        stream : int
            Not the default stream.
        function : callable
            Allocates nothing: it passes `out` to every combine.

        Returns
        -------
        Graph
        """
        from cuda.bindings import driver as cuda

        # Other threads may go on with calls that a stricter mode forbids during a capture.
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver("StreamBeginCapture", stream, mode)
        try:
            function()
        except BaseException:
            # What was captured may be spoiled; that is not what went wrong.
            with contextlib.suppress(DeviceError):
                driver("GraphDestroy", driver("StreamEndCapture", stream))
            raise
        graph = driver("StreamEndCapture", stream)
        executable = driver("GraphInstantiate", graph, 0)
        driver("GraphDestroy", graph)
        # The first replay would take memory, and so wait for a kernel that waits for this rank.
        driver("GraphUpload", executable, stream)
        return cls(executable)

    def launch(self, stream: int) -> None:
        """Enqueue a replay on `stream`."""
        driver("GraphLaunch", self._executable, stream)

    def close(self) -> None:
        """Release the graph; no replay may be under way."""
        driver("GraphExecDestroy", self._executable)


class Events:
    """Time stamps in a stream.

    Parameters
    ----------
    count : int
    """

    def __init__(self, count: int) -> None:
        self._events = [driver("EventCreate", 0) for _ in range(count)]

    def record(self, index: int, stream: int, *, captured: bool = False) -> None:
        """Stamp once the work before it on `stream` has ended; `captured`: at every replay."""
        from cuda.bindings import driver as cuda

        flags = cuda.CUevent_record_flags
        flag = flags.CU_EVENT_RECORD_EXTERNAL if captured else flags.CU_EVENT_RECORD_DEFAULT
        driver("EventRecordWithFlags", self._events[index], stream, int(flag))

    def elapsed_ns(self, first: int, second: int) -> float:
        """Nanoseconds between two stamps that have been made."""
        return 1e6 * float(driver("EventElapsedTime", self._events[first], self._events[second]))

    def close(self) -> None:
        """Release the events."""
        for event in self._events:
            driver("EventDestroy", event)
