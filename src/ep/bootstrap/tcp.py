"""The channel over TCP: no MPI, no launcher but for the variables that it has set."""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from ep.bootstrap.channel import REGROUPING, same_exclusions
from ep.bootstrap.frames import MAX_PAYLOAD, Frame, Kind
from ep.bootstrap.lines import Lines
from ep.bootstrap.rendezvous import Meeting
from ep.errors import ArgumentError, BootstrapError, EpError, EpTimeout, StateError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep.bootstrap.address import Rendezvous
    from ep.bootstrap.door import Link
    from ep.bootstrap.launcher import Launch
    from ep.bootstrap.proof import Authenticator

logger = logging.getLogger(__name__)

GRACE_S = 0.5
"""How long a wait for a rank that is gone goes on: others of its node may be about to be seen."""
LAST_WORDS_S = 1.0
"""For what a process that ends at once has still to say."""
_LAST_ROUND = struct.Struct("!Q")
"""Before one byte for each rank, whether it is excluded."""


class TcpChannel:
    """A connection to every other rank; made by `open_tcp_channel`.

    Parameters
    ----------
    rank, size : int
    links : dict of int to Link
        Of all other ranks.
    """

    def __init__(self, rank: int, size: int, links: dict[int, Link]) -> None:
        self.rank = rank
        self.size = size
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._round = 0
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._excluded: frozenset[int] = frozenset()
        self._meetings = 0
        # The last that each rank has said: number, its last round, whom it excludes.
        self._heard: dict[int, tuple[int, int, frozenset[int]]] = {}
        self._lost: set[int] = set()
        self._lines = Lines(links, self._changed, self._hear, self._lost.add)

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """See `Channel`. It does not wait long for a rank that is gone."""
        if len(payload) > MAX_PAYLOAD:
            raise ArgumentError(
                f"{what}: rank {self.rank} says {len(payload)} bytes; allowed are {MAX_PAYLOAD}: "
                "say it in parts"
            )
        peers = self._peers(self._excluded)
        start = time.monotonic()
        with self._changed:
            self._round += 1
            number = self._round
            box = self._rounds.setdefault(number, {})
        self._lines.send(peers, Kind.ROUND, number, payload)

        def missing() -> list[int]:
            # A rank that has sent, but does not take what is sent to it, is missing as well.
            return [rank for rank in peers if rank not in box] or self._lines.unsent(peers)

        if absent := self._wait(missing, timeout_s):
            waited_s = time.monotonic() - start
            raise EpTimeout(what, 0, self.rank, tuple(absent), (), waited_s)
        with self._changed:
            self._rounds.pop(number, None)
        said = box | {self.rank: payload}
        return [said.get(rank, b"") for rank in range(self.size)]

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """See `Channel`.

        Ranks may have waited in vain for each other before: the number of the meeting tells its
        messages from those of such a try, and who is behind catches up with the highest.
        """
        peers = self._peers(excluded)
        start = time.monotonic()
        with self._changed:
            self._meetings += 1
        self._say(peers, excluded)

        def absent() -> list[int]:
            heard = {rank: self._heard[rank] for rank in peers if rank in self._heard}
            latest = max((said[0] for said in heard.values()), default=0)
            if latest > self._meetings:
                self._meetings = latest
                self._say(peers, excluded)
            here = {rank: said for rank, said in heard.items() if said[0] == self._meetings}
            # Who excludes others may not wait for the same ranks.
            if any(others != excluded for _, _, others in here.values()):
                return self._lines.unsent(here)
            return [rank for rank in peers if rank not in here] or self._lines.unsent(peers)

        if missing := self._wait(absent, timeout_s):
            waited_s = time.monotonic() - start
            raise EpTimeout(REGROUPING, 0, self.rank, tuple(missing), (), waited_s)
        with self._changed:
            here = [r for r in peers if self._heard.get(r, (0,))[0] == self._meetings]
            said = {rank: self._heard[rank][2] for rank in here} | {self.rank: excluded}
            same_exclusions(dict(sorted(said.items())))
            latest = [self._heard[rank][1] for rank in here]
            self._round = max(self._round, *latest, 0)
            self._excluded = excluded
            # What a peer sent before it came to the meeting came before what it sent there.
            for number in [one for one in self._rounds if one <= self._round]:
                del self._rounds[number]
        if excluded:
            _left_without.append(excluded)

    def gone(self) -> frozenset[int]:
        """See `Channel`: those whose connection has ended."""
        with self._changed:
            return frozenset(self._lost)

    @property
    def is_own(self) -> bool:
        """Whether this process has made it, and not one that has forked this."""
        return os.getpid() == self._process

    def abort(self, code: int) -> None:
        """See `Channel`. A forked child has nobody to end."""
        if not self.is_own:
            return
        peers = self._peers(frozenset())
        self._lines.send(peers, Kind.ABORT, code, b"")
        with self._changed:
            self._changed.wait_for(lambda: not self._lines.unsent(peers), LAST_WORDS_S)
        _end(code)

    def note_timeout(self) -> None:
        """See `Channel`. Nothing: no end of this process waits for another."""

    def close(self) -> None:
        """Keep the connections for the next World."""
        # The same on every rank, as the order of closing is, and so is who takes it again.
        if not self._excluded:
            _closed.append(self)

    def _peers(self, excluded: frozenset[int]) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and rank not in excluded]

    def _say(self, peers: list[int], excluded: frozenset[int]) -> None:
        flags = bytes(rank in excluded for rank in range(self.size))
        self._lines.send(peers, Kind.MEETING, self._meetings, _LAST_ROUND.pack(self._round) + flags)

    def _wait(self, missing: Callable[[], list[int]], timeout_s: float) -> list[int]:
        """Wait until nobody is missing, and give those that are when the time is up."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while absent := missing():
                if not self._lost.isdisjoint(absent):
                    # They never come; what else is about to be seen is worth a moment.
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return absent
                self._changed.wait(left_s)
        return []

    def _hear(self, rank: int, frame: Frame) -> None:
        """Take what a rank says; `_changed` is held."""
        if frame.kind is Kind.ROUND and rank not in self._excluded:
            self._rounds.setdefault(frame.number, {})[rank] = frame.payload
        elif frame.kind is Kind.MEETING:
            (last,) = _LAST_ROUND.unpack_from(frame.payload)
            flags = frame.payload[_LAST_ROUND.size :]
            others = frozenset(index for index, flag in enumerate(flags) if flag)
            self._heard[rank] = (frame.number, last, others)
        elif frame.kind is Kind.ABORT:
            _end(frame.number & 0xFF or 1, f"rank {rank} of {self.size} ends the job")


_closed: list[TcpChannel] = []
"""Channels to be used again; their rounds go on, so that nothing old is taken for news."""
_left_without: list[frozenset[int]] = []
"""Ranks that Worlds of this process have excluded."""


def open_tcp_channel(
    launch: Launch, rendezvous: Rendezvous, authenticator: Authenticator, timeout_s: float
) -> TcpChannel:
    """Meet the other ranks of the job. Collective.

    Raises
    ------
    BootstrapError
        If rank 0 cannot listen, or this rank can have no more sockets.
    EpTimeout
        If ranks are missing, naming them and what came instead.
    StateError
        If an earlier World of this process has gone on without some.
    """
    if _left_without:
        raise StateError(
            "an earlier World of this process has excluded "
            f"{name_ranks(sorted(_left_without[-1]))}; no other can be made without them: "
            "start a new job"
        )
    if _closed and _closed[-1].is_own:
        return _closed.pop()
    meeting = Meeting(launch.rank, launch.size, rendezvous, authenticator, timeout_s)
    links: dict[int, Link] = {}
    try:
        links = meeting.meet()
        return TcpChannel(launch.rank, launch.size, links)
    except EpError:
        raise
    except OSError as error:
        for link in links.values():
            link.socket.close()
        raise BootstrapError(
            f"rank {launch.rank} has no sockets to meet the others at {rendezvous}: {error}; it "
            f"needs {launch.size - 1} for them and some to spare (ulimit -n), and that address"
        ) from error


def _end(code: int, words: str = "") -> NoReturn:
    """End this process, whatever its threads are at; what they have written is flushed."""

    def say() -> None:
        if words:
            logger.critical("%s, with code %d", words, code)
        for stream in (sys.stdout, sys.stderr):
            # Closed, or a pipe that nobody reads any more.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()

    # Another thread may have the lock of a stream, and wait for its reader.
    last = threading.Thread(target=say, daemon=True)
    last.start()
    last.join(LAST_WORDS_S)
    os._exit(code)
