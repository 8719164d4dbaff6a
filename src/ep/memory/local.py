"""Symmetric memory for ranks that threads of one process play, on one GPU or on several.

Addresses are plain device addresses of this process, so peers need no mapping; across GPUs they
need peer access.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ep.errors import DeviceError, EpError, HeapError
from ep.memory import cuda

if TYPE_CHECKING:
    from ep.bootstrap import World


class LocalMemory(cuda.DeviceMemory):
    """One device allocation a rank. Made by `LocalMemory.allocate`."""

    @classmethod
    def allocate(cls, world: World, device: cuda.Device, size_bytes: int) -> LocalMemory:
        """Allocate and zero `size_bytes` for this rank. Collective.

        Raises
        ------
        HeapError
            On every rank, if memory is short or a GPU cannot reach another.
        """
        own = 0
        error: EpError | None = None
        try:
            own = cuda.allocate(size_bytes)
        except DeviceError as problem:
            error = HeapError(f"cannot allocate {size_bytes} bytes on {device.name} ({problem})")
        try:
            world.agree(error, "allocating device memory")
            said = world.allgather([os.getpid(), device.ordinal, own], "exchanging addresses")
            error = None
            try:
                if len({pid for pid, _, _ in said}) > 1:
                    raise HeapError("a local heap serves the ranks of one process; use NVSHMEM")
                for peer in {ordinal for _, ordinal, _ in said} - {device.ordinal}:
                    _enable_peer(device, peer)
            except EpError as problem:
                error = problem
            world.agree(error, "enabling peer access")
        except BaseException:
            if own:
                cuda.free(own)
            raise
        return cls(device, own, [address for _, _, address in said], size_bytes)

    def close(self) -> None:
        """Free this rank's memory. Local, after every rank has stopped using it."""
        if own := self.take_own():
            cuda.free(own)


def _enable_peer(device: cuda.Device, peer: int) -> None:
    handles = [cuda.driver("DeviceGet", ordinal) for ordinal in (device.ordinal, peer)]
    if not cuda.driver("DeviceCanAccessPeer", *handles):
        raise HeapError(f"GPU {device.ordinal} cannot reach GPU {peer}: no NVLink or P2P there")
    context = cuda.driver("DevicePrimaryCtxRetain", handles[1])
    try:
        cuda.driver("CtxEnablePeerAccess", context, 0)
    except DeviceError as error:
        if "ALREADY_ENABLED" not in str(error):
            raise
