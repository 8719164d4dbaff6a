"""Symmetric memory that an engine has made: any that each rank can load from and store into.

NVSHMEM's heap of the engine, mappings of cuMem handles, torch's symmetric memory, CUDA IPC, NCCL
windows, on the host what processes share: what counts are addresses.
"""

from __future__ import annotations

import itertools
import logging
import operator
from pathlib import Path
from typing import Any

from ep.errors import ArgumentError, DeviceError, HeapError, shown
from ep.layout import LINE_BYTES
from ep.memory import cuda
from ep.memory.host import Segments, segment_at

logger = logging.getLogger(__name__)

MAX_ADDRESS = 1 << 63
"""Addresses are below: kernels take them as signed words."""
_READ_WRITE = 3
"""Of `CU_POINTER_ATTRIBUTE_ACCESS_FLAGS`."""


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


class GivenHostMemory(Segments):
    """Every rank's buffer in host memory of the engine. Made by `GivenHostMemory.at`."""

    @classmethod
    def at(cls, rank: int, own: Any, peers: Any, ranks: int, size_bytes: int) -> GivenHostMemory:
        """Do as `GivenMemory.at`, and ask the system what this process has mapped. Local."""
        addresses = check_addresses(rank, own, peers, ranks, size_bytes)
        mapped = _mapped_ranges()
        for peer, address in enumerate(addresses):
            hole = _first_hole(mapped, address, size_bytes)
            if hole is not None:
                raise HeapError(
                    f"the buffer of rank {peer}, {size_bytes} bytes from {address:#x}, is not "
                    f"memory that this process can read and write: not at {hole:#x}; map every "
                    "peer's buffer, whole, in this process"
                )
        segments = [segment_at(address, size_bytes) for address in addresses]
        return cls([*segments, segments[rank]])

    def close(self) -> None:
        """Do nothing: the engine frees it. Local."""


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
            f"{which} is {said}; allowed is an address, as an integer, that is a multiple of "
            f"{LINE_BYTES}"
        )
    return address


def _check_memory(peer: int, address: int, size_bytes: int, device: cuda.Device) -> None:
    """Refuse what the driver says no to; what it does not tell is left to the engine."""
    last = address + size_bytes - 1
    wrong = next(filter(None, (_unfit(place, device) for place in (address, last))), None)
    if wrong is None and _range_of(address) != _range_of(last) and not _is_mapping(address):
        wrong = f"the allocation there ends before {last:#x}"
    if wrong is not None:
        raise HeapError(
            f"the buffer of rank {peer}, {size_bytes} bytes from {address:#x}, is not memory that "
            f"GPU {device.ordinal} has mapped: {wrong}; map every peer's buffer, whole, in this "
            "process"
        )


def _unfit(place: int, device: cuda.Device) -> str | None:
    """Say what is wrong with a place in memory, as far as the driver knows."""
    from cuda.bindings.driver import CUmemorytype

    if _told("MEMORY_TYPE", place) != CUmemorytype.CU_MEMORYTYPE_DEVICE:
        return f"the driver does not know {place:#x} as device memory"
    if _told("IS_MANAGED", place):
        return f"{place:#x} is managed memory, which moves"
    if _told("ACCESS_FLAGS", place) not in (None, _READ_WRITE):
        return f"GPU {device.ordinal} may not both load and store at {place:#x}"
    return None


def _range_of(place: int) -> tuple[Any, ...]:
    """Where the allocation around `place` begins, and its size."""
    return tuple(_told(f"RANGE_{name}", place) for name in ("START_ADDR", "SIZE"))


def _is_mapping(address: int) -> bool:
    """Whether cuMemMap has put it there: such mappings may lie side by side."""
    try:
        cuda.driver("MemRelease", cuda.driver("MemRetainAllocationHandle", address))
    except DeviceError:
        return False
    return True


def _told(attribute: str, place: int) -> Any:
    """Ask the driver for an attribute of a place; None where it does not tell."""
    from cuda.bindings.driver import CUpointer_attribute

    which = getattr(CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
    try:
        told = cuda.driver("PointerGetAttribute", which, place)
    except DeviceError:
        return None
    # Addresses are handles of the bindings, which compare by identity.
    return told if told is None else int(told)


def _mapped_ranges() -> list[tuple[int, int]]:
    """First and last address, and one more, of what this process may read and write, in order."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        logger.debug("the system does not tell what is mapped: %s", error)
        return [(0, MAX_ADDRESS)]
    ranges = []
    for line in lines:
        limits, access = line.split()[:2]
        if access.startswith("rw"):
            first, end = (int(limit, 16) for limit in limits.split("-"))
            ranges.append((first, end))
    return ranges


def _first_hole(ranges: list[tuple[int, int]], address: int, size_bytes: int) -> int | None:
    """Give the first of `size_bytes` from `address` on that is in no range; None if all are."""
    at = address
    for first, end in ranges:
        if first <= at < end:
            at = end
    return at if at < address + size_bytes else None


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
