"""How a benchmark or a test hands NumPy data to an exchange of any backend, and reads it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ep.bootstrap import Backend
from ep.reference import Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from ep.exchange import Exchange, Received

    Array = npt.NDArray[Any]


class Bridge(Protocol):
    """Arrays to and from a backend, and the stream that its calls are made on."""

    stream: Any

    def put(self, array: Array) -> Any:
        """Give the backend's copy of a NumPy array."""
        ...

    def get(self, array: Any) -> Array:
        """Give a NumPy copy, in the order of `stream`."""
        ...

    def poison(self, array: Any) -> None:
        """Set every byte of a dense array to 0xFF, NaN in BF16, in the order of `stream`."""
        ...

    def close(self) -> None:
        """Release the stream."""
        ...


class HostBridge:
    """NumPy is what the host backend takes."""

    stream = None

    def put(self, array: Array) -> Array:
        """See `Bridge`."""
        return array

    def get(self, array: Array) -> Array:
        """See `Bridge`."""
        return np.asarray(array)

    def poison(self, array: Array) -> None:
        """See `Bridge`."""
        array.view(np.uint8)[...] = 0xFF

    def close(self) -> None:
        """See `Bridge`."""


class GpuBridge:
    """Device memory, and a stream of its own that waits for no other."""

    def __init__(self, device: Any) -> None:
        from ep.memory.cuda import driver, non_blocking

        self._device = device
        device.use()
        self._handle = driver("StreamCreate", non_blocking())
        self.stream = int(self._handle)

    def put(self, array: Array) -> Any:
        """See `Bridge`."""
        from ep.memory.cuda import DeviceArray

        self._device.use()
        return DeviceArray.from_numpy(array, self._device.ordinal, self.stream)

    def get(self, array: Any) -> Array:
        """See `Bridge`."""
        self._device.use()
        values: Array = array.numpy(self.stream)
        return values

    def poison(self, array: Any) -> None:
        """See `Bridge`."""
        from ep.memory.cuda import fill

        self._device.use()
        size_bytes = int(np.prod(array.shape, dtype=np.int64)) * array.itemsize
        if size_bytes:
            fill(array.address, size_bytes, 0xFF, self.stream)

    def close(self) -> None:
        """See `Bridge`."""
        from ep.memory.cuda import driver

        driver("StreamDestroy", self._handle)


def open_bridge(exchange: Exchange) -> Bridge:
    """Give the bridge for the backend of `exchange`."""
    if exchange.world.backend is Backend.GPU:
        return GpuBridge(exchange.world.device)
    return HostBridge()


def received_rows(bridge: Bridge, received: Received) -> Rows:
    """Copy what a rank received to NumPy."""
    names = ("x", "scales", "ids", "weights", "source")
    return Rows(**{name: bridge.get(getattr(received, name)) for name in names})
