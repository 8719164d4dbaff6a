"""Symmetric memory of the host backend: one shared segment a rank, and a bell to wake it.

A bell is a FIFO. A peer stores into the segment, then writes a message of 16 bytes into the bell.
The pipe's lock in the kernel orders the two: what was stored before the write is seen after the
read of that same message, on every architecture. Messages below PIPE_BUF are never torn or mixed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes  # noqa: F401 - registers the names of the dtypes that the layout uses
import numpy as np

from ep.errors import EpTimeout, HeapError

if TYPE_CHECKING:
    import numpy.typing as npt

    from ep.bootstrap import World
    from ep.layout import Field

_MESSAGE = struct.Struct("<IIQ")
_READ_BYTES = 4096 * _MESSAGE.size


class Ring(NamedTuple):
    """One message: rank `src` has finished `phase` of `step`."""

    src: int
    phase: int
    step: int


class HostMemory:
    """Shared segments and bells of all ranks of one machine. Made by `HostMemory.allocate`."""

    def __init__(self, rank: int, segments: list[npt.NDArray[np.uint8]], bells: list[int]) -> None:
        self.rank = rank
        self.size_bytes = segments[-1].nbytes
        self.addresses = tuple(segment.ctypes.data for segment in segments)
        self._segments = segments
        self._bells = bells
        self._poll = select.poll()
        self._poll.register(bells[rank], select.POLLIN)
        self._early: list[Ring] = []

    @classmethod
    def allocate(cls, world: World, size_bytes: int) -> HostMemory:
        """Make, zero and share `size_bytes` on every rank. Collective.

        The files live in `EP_SHM_DIR` (default /dev/shm) and lose their names before this returns,
        so that whatever happens to the job leaves nothing behind.

        Raises
        ------
        HeapError
            On every rank, if memory is short on one or ranks do not share a machine or folder.
        """
        machines = {place.machine for place in world.places}
        if len(machines) > 1:
            nodes = sorted({place.node for place in world.places})
            raise HeapError(
                f"the host backend shares memory on one machine, but the ranks are on "
                f"{len(machines)}: {', '.join(nodes)}; start all ranks on one node, or use GPUs"
            )
        folder = _shared_folder(world)
        try:
            return _open_all(cls, world, folder, size_bytes)
        finally:
            _remove(folder, world.rank)

    def array(self, where: int, field: Field) -> npt.NDArray[np.generic]:
        """See `SymmetricMemory`. Views keep the mapping alive, also after `close`."""
        return np.ndarray(
            field.shape,
            np.dtype(field.dtype),
            buffer=self._segments[where].data,
            offset=field.offset_bytes,
            strides=field.strides_bytes,
        )

    def ring(self, rank: int, phase: int, step: int) -> None:
        """Tell `rank` that this one finished `phase` of `step`, after all stores before. Local."""
        os.write(self._bells[rank], _MESSAGE.pack(self.rank, phase, step))

    def wait(self, awaited: set[int], phase: int, step: int, timeout_s: float, what: str) -> None:
        """Wait until each of `awaited` has rung for `phase` of `step`; orders all loads after it.

        Raises
        ------
        EpTimeout
            Naming the ranks that had not rung after `timeout_s` seconds.
        """
        missing = set(awaited)
        start = time.monotonic()
        kept: list[Ring] = []
        rings, self._early = self._early, []
        while True:
            for ring in rings:
                if ring.phase == phase and ring.step == step and ring.src in missing:
                    missing.remove(ring.src)
                else:
                    kept.append(ring)
            if not missing:
                break
            left_s = start + timeout_s - time.monotonic()
            if left_s <= 0 or not self._poll.poll(max(1, int(1e3 * left_s))):
                self._early = kept
                ranks = tuple(sorted(missing))
                seen = tuple(step - 1 for _ in ranks)
                raise EpTimeout(what, step, self.rank, ranks, seen, time.monotonic() - start)
            rings = [
                Ring(*fields)
                for fields in _MESSAGE.iter_unpack(os.read(self._bells[self.rank], _READ_BYTES))
            ]
        self._early = kept

    def close(self) -> None:
        """Close the bells and drop the segments. Local."""
        for bell in self._bells:
            os.close(bell)
        self._bells = []
        self._segments = []


def _shared_folder(world: World) -> Path:
    """Make one folder for the segments, on rank 0, and tell everybody."""
    parent = Path(os.environ.get("EP_SHM_DIR", "/dev/shm"))  # noqa: S108 - memory, not a temporary file
    name, error = "", None
    if world.rank == 0:
        try:
            name = tempfile.mkdtemp(prefix="ep-", dir=parent)
        except OSError as problem:
            error = HeapError(f"cannot make a folder in {parent} ({problem}); set EP_SHM_DIR")
    world.agree(error, "making the shared folder")
    return Path(world.allgather(name, "making the shared folder")[0])


def _open_all(kind: type[HostMemory], world: World, folder: Path, size_bytes: int) -> HostMemory:
    error = None
    try:
        _create(folder, world.rank, size_bytes)
    except OSError as problem:
        error = HeapError(f"cannot allocate {size_bytes} bytes in {folder.parent} ({problem})")
    world.agree(error, "allocating shared memory")
    segments: list[npt.NDArray[np.uint8]] = []
    bells: list[int] = []
    try:
        for rank in range(world.size):
            segments.append(_map(folder, rank, size_bytes))
            # Opened for both directions, a FIFO never blocks on open and never reports an end.
            bells.append(os.open(_bell(folder, rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        segments.append(_map(folder, world.rank, size_bytes))
    except OSError as problem:
        error = HeapError(
            f"{world.places[world.rank].node} cannot map the memory of rank "
            f"{min(len(segments), world.size - 1)} in {folder.parent} ({problem}); every rank must "
            "see the same folder: set EP_SHM_DIR to one that all ranks share"
        )
    try:
        world.agree(error, "mapping the other ranks' memory")
    except BaseException:
        for bell in bells:
            os.close(bell)
        raise
    return kind(world.rank, segments, bells)


def _create(folder: Path, rank: int, size_bytes: int) -> None:
    os.mkfifo(_bell(folder, rank), 0o600)
    descriptor = os.open(_segment(folder, rank), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserves the pages: a full /dev/shm is an error here, not a SIGBUS in mid-step.
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _map(folder: Path, rank: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    descriptor = os.open(_segment(folder, rank), os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
    finally:
        os.close(descriptor)


def _remove(folder: Path, rank: int) -> None:
    for path in (_segment(folder, rank), _bell(folder, rank)):
        path.unlink(missing_ok=True)
    # Not empty until the last rank has removed its own.
    with contextlib.suppress(OSError):
        folder.rmdir()


def _segment(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.memory"


def _bell(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.bell"
