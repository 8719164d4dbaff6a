"""Symmetric memory from NVSHMEM. The only file that imports it.

Initialised by unique id, which travels over the World's own channel, so that no MPI, PMI or torch
is involved. Kernels use plain addresses (`nvshmem_ptr`), never NVSHMEM's device library.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import TYPE_CHECKING, Any

from ep.errors import BootstrapError, EpError, HeapError
from ep.memory import cuda
from ep.settings import is_set

if TYPE_CHECKING:
    from ep.bootstrap import World

logger = logging.getLogger(__name__)

TESTED = {
    "nvidia-nvshmem-cu13": "3.8.0",
    "nvshmem4py-cu13": "0.4.1",
}
"""Versions that were run together. NVSHMEM and its bindings agree only in tested combinations."""


class NvshmemMemory(cuda.DeviceMemory):
    """A block of the symmetric heap. Made by `NvshmemMemory.allocate`."""

    world: World

    @classmethod
    def allocate(cls, world: World, device: cuda.Device, size_bytes: int) -> NvshmemMemory:
        """Allocate and zero `size_bytes` on every rank. Collective.

        Raises
        ------
        HeapError
            On every rank: naming the ranks whose memory is not load/store reachable, or how large
            the symmetric heap must be.
        """
        _initialise(world, device)
        from nvshmem import bindings

        own = int(bindings.malloc(size_bytes) or 0)
        error = None
        if not own:
            error = HeapError(
                f"NVSHMEM's symmetric heap has no {size_bytes} bytes left; set "
                f"NVSHMEM_SYMMETRIC_SIZE above that (default 1 GiB) on every rank"
            )
        world.agree(error, "allocating symmetric memory")
        addresses = [int(bindings.ptr(own, rank) or 0) for rank in range(world.size)]
        addresses[world.rank] = own
        world.agree(_unreachable(world, addresses), "reaching the other ranks' memory")
        cuda.fill(own, size_bytes, 0)
        memory = cls(device, own, addresses, size_bytes)
        memory.world = world
        return memory

    def close(self) -> None:
        """Give the block back. Collective; where ranks are excluded it stays, which is local."""
        from nvshmem import bindings

        if (own := self.take_own()) and not self.world.excluded:
            bindings.free(own)


def installed(name: str) -> str:
    """Version of an installed package, or "none"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check_versions() -> None:
    """Compare the installed versions with the tested ones.

    Raises
    ------
    BootstrapError
        Naming the package that is missing or differs, unless `EP_UNTESTED_VERSIONS=1`.
    """
    for name, tested in TESTED.items():
        found = installed(name)
        if found == tested:
            continue
        words = f"{name} {found} is installed, tested is {tested} together with " + ", ".join(
            f"{other} {version}" for other, version in TESTED.items() if other != name
        )
        if not is_set("EP_UNTESTED_VERSIONS"):
            raise BootstrapError(
                f"{words}; install the extra gpu of ep, or set EP_UNTESTED_VERSIONS=1 to go on"
            )
        logger.warning("%s", words)


def load() -> Any:
    """Load NVSHMEM's host library and give its bindings; starts nothing."""
    from cuda.pathfinder import load_nvidia_dynamic_lib
    from nvshmem import bindings

    load_nvidia_dynamic_lib("nvshmem_host")
    return bindings


_initialised_here = False


def _initialise(world: World, device: cuda.Device) -> None:
    """Start NVSHMEM once a process, or share what somebody else has started. Collective."""
    global _initialised_here  # noqa: PLW0603 - NVSHMEM itself is one a process
    check_versions()
    # All ranks are in one NVLink domain: without this NVSHMEM looks for NICs and complains.
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    bindings = load()
    status = bindings.Init_status
    running = status.STATUS_IS_INITIALIZED <= bindings.init_status() <= status.STATUS_FULL_MPG
    states = world.allgather(running, "looking for NVSHMEM")
    if any(states) and not all(states):
        some = [rank for rank, state in enumerate(states) if state]
        error = BootstrapError(
            f"NVSHMEM is already initialised on some ranks only: {some}; initialise it on all or "
            "none"
        )
        error.on_every_rank = True
        raise error
    if not running:
        _start(world, device)
        _initialised_here = True
        world.at_close(_finish)
    elif not _initialised_here:
        logger.info("sharing the NVSHMEM that this process has already initialised")
    _check_same_ranks(world, bindings)


def _finish() -> None:
    """End the NVSHMEM that `_initialise` started. Collective."""
    global _initialised_here  # noqa: PLW0603 - NVSHMEM itself is one a process
    import nvshmem.core

    _initialised_here = False
    nvshmem.core.finalize()


def _start(world: World, device: cuda.Device) -> None:
    import nvshmem.core
    from cuda.core import Device

    handle = Device(device.ordinal)
    handle.set_current()
    uid = nvshmem.core.get_unique_id(empty=world.rank != 0)
    raw = uid._data.view("u1").ravel()  # noqa: SLF001 - the id has no public bytes
    raw[:] = world.allgather(raw.tolist() if world.rank == 0 else None, "sharing NVSHMEM's id")[0]
    nvshmem.core.init(
        device=handle, uid=uid, rank=world.rank, nranks=world.size, initializer_method="uid"
    )


def _check_same_ranks(world: World, bindings: Any) -> None:
    error: EpError | None = None
    found = (int(bindings.my_pe()), int(bindings.n_pes()))
    if found != (world.rank, world.size):
        error = BootstrapError(
            f"NVSHMEM is already initialised in this process, as PE {found[0]} of {found[1]}, but "
            f"this is rank {world.rank} of {world.size}; initialise it with the same ranks, or "
            "make the World before the other library initialises NVSHMEM"
        )
    world.agree(error, "comparing ranks with NVSHMEM")


def _unreachable(world: World, addresses: list[int]) -> HeapError | None:
    ranks = [rank for rank, address in enumerate(addresses) if not address]
    if not ranks:
        return None
    nodes = sorted({world.places[rank].node for rank in ranks})
    return HeapError(
        f"rank {world.rank} on {world.places[world.rank].node} cannot load and store in the memory "
        f"of ranks {ranks} on {', '.join(nodes)}; likely causes: no NVLink or peer access between "
        "those GPUs (nvidia-smi topo -p2p r), CUDA_VISIBLE_DEVICES hiding a peer from a container, "
        "two NVLink domains, or no IMEX channel on a multi-node NVLink system"
    )
