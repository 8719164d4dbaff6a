"""Symmetric memory that an engine has made: any that each rank can load from and store into.

NVSHMEM's heap of the engine, mappings of cuMem handles, torch's symmetric memory, CUDA IPC, NCCL
windows: what counts are addresses.
"""

from __future__ import annotations

import itertools
import logging
import operator
from typing import Any

from ep.errors import ArgumentError, DeviceError, HeapError, shown
from ep.layout import LINE_BYTES
from ep.memory import cuda

logger = logging.getLogger(__name__)

MAX_ADDRESS = 1 << 63


class GivenMemory(cuda.DeviceMemory):
    """Every rank's buffer in memory of the engine. Made by `GivenMemory.at`."""

    @classmethod
    def at(
        cls, device: cuda.Device, rank: int, own: Any, peers: Any, ranks: int, size_bytes: int
    ) -> GivenMemory:
        """Look at the addresses, and ask the driver what it knows of them. Local.

        Parameters are those of `EpBuffers.from_addresses`; `size_bytes` is that of each buffer.
        """
        addresses = check_addresses(rank, own, peers, ranks, size_bytes)
        device.use()
        for peer, address in enumerate(addresses):
            _check_memory(peer, address, size_bytes, device)
        return cls(device, addresses[rank], addresses, size_bytes)

    def close(self) -> None:
        """Forget it: the engine frees it, once every rank has closed its exchange. Local."""
        self.take_own()


def check_addresses(rank: int, own: Any, peers: Any, ranks: int, size_bytes: int) -> list[int]:
    """Give every rank's address, the own one by its own mapping; raises `ArgumentError`."""
    try:
        given = list(peers)
    except TypeError:
        given = []
    if len(given) != ranks:
        raise ArgumentError(
            f"peers are {len(given)} addresses; allowed are {ranks}, one for each rank"
        )
    # The own entry is not looked at: engines put 0 there, or None, or one more mapping.
    given[rank] = own
    addresses = [_as_address(peer, address, rank) for peer, address in enumerate(given)]
    order = sorted(range(ranks), key=addresses.__getitem__)
    for low, high in itertools.pairwise(order):
        if addresses[high] < addresses[low] + size_bytes:
            raise ArgumentError(
                f"the buffers of ranks {low} and {high} overlap, at {addresses[low]:#x} and "
                f"{addresses[high]:#x}; each has {size_bytes} bytes of its own"
            )
    return addresses


def _as_address(peer: int, given: Any, rank: int) -> int:
    try:
        address = operator.index(given)
    except Exception:  # noqa: BLE001 - a stranger's
        address = 0
    if not 0 < address < MAX_ADDRESS or address % LINE_BYTES:
        said = f"{address:#x}" if type(given) is int else shown(given)
        which = "own" if peer == rank else f"peers[{peer}]"
        raise ArgumentError(
            f"{which} is {said}; allowed is a device address, as an integer, that is a multiple "
            f"of {LINE_BYTES}"
        )
    return address


def _check_memory(peer: int, address: int, size_bytes: int, device: cuda.Device) -> None:
    """Refuse what the driver does not know; mappings may be made of several pieces."""
    from cuda.bindings import driver

    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    for place in (address, address + size_bytes - 1):
        try:
            known = cuda.driver("PointerGetAttribute", kind, place)
        except DeviceError:
            known = None
        if known != driver.CUmemorytype.CU_MEMORYTYPE_DEVICE:
            raise HeapError(
                f"the buffer of rank {peer}, {size_bytes} bytes from {address:#x}, is not memory "
                f"that GPU {device.ordinal} has mapped: the driver does not know {place:#x} as "
                "device memory; map every peer's buffer, whole, in this process"
            )


def known_device(ordinal: Any) -> int:
    """Give `ordinal` if this process has such a GPU; raises `ArgumentError` if not."""
    count = cuda.device_count()
    if type(ordinal) is not int or not 0 <= ordinal < count:
        allowed = f"0..{count - 1}" if count else "none: this process sees no GPU"
        raise ArgumentError(f"device is {shown(ordinal)}; allowed is {allowed}")
    return ordinal


def current_device() -> int:
    """Give the ordinal of the current context's GPU; raises `ArgumentError` if there is none."""
    if cuda.device_count():
        try:
            return int(cuda.driver("CtxGetDevice"))
        except DeviceError as error:
            logger.debug("no context is current: %s", error)
    raise ArgumentError("no CUDA context is current; make one current, or pass device=")
