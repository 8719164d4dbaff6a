"""How ranks of the host backend wake each other: a FIFO each.

A peer stores into the memory that is shared, then writes a message of 16 bytes into the bell. The
pipe's lock in the kernel orders the two: what was stored before the write is seen after the read of
that same message, on every architecture. Messages below PIPE_BUF are never torn or mixed.
"""

from __future__ import annotations

import math
import os
import select
import struct
import time
import weakref
from typing import NamedTuple

from ep.errors import EpTimeout

_MESSAGE = struct.Struct("<IIQ")
_READ_BYTES = 4096 * _MESSAGE.size


class Ring(NamedTuple):
    """One message: rank `src` has finished `phase` of `step`."""

    src: int
    phase: int
    step: int


class Bells:
    """The bells of all ranks.

    Parameters
    ----------
    rank : int
        Whose is answered here.
    bells : list of int
        `[ranks]` descriptors, open both ways. They are closed here.
    """

    def __init__(self, rank: int, bells: list[int]) -> None:
        self.rank = rank
        self._bells = bells
        # Where nobody calls `close`: Python closes no plain descriptor.
        self._closer = weakref.finalize(self, close_all, bells)
        self._closer.atexit = False
        self._poll = select.poll()
        self._poll.register(bells[rank], select.POLLIN)
        self._early: list[Ring] = []
        self._seen = [0] * len(bells)

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
        start = time.monotonic()
        missing = awaited - self._rung(self._early, phase, step)
        while missing:
            left_s = max(0.0, start + timeout_s - time.monotonic())
            # At the end, too, it looks: this process may have been stopped, and the others not.
            if not self._poll.poll(math.ceil(1e3 * left_s)) and left_s == 0:
                ranks = tuple(sorted(missing))
                seen = tuple(self._seen[rank] for rank in ranks)
                raise EpTimeout(what, step, self.rank, ranks, seen, time.monotonic() - start)
            rings = self._read()
            self._early += rings
            missing -= self._rung(rings, phase, step)
        # Only now: an exception on the way loses no ring that was read.
        self._early = [
            ring
            for ring in self._early
            if (ring.phase, ring.step) != (phase, step) or ring.src not in awaited
        ]

    def forget(self) -> None:
        """Drop what has been rung: every rank that rings has stopped. Local."""
        while self._read():
            pass
        self._early = []

    def close(self) -> None:
        """Close them. Local."""
        self._closer()

    def _read(self) -> list[Ring]:
        try:
            read = os.read(self._bells[self.rank], _READ_BYTES)
        except BlockingIOError:
            return []
        rings = [Ring(*fields) for fields in _MESSAGE.iter_unpack(read)]
        for ring in rings:
            self._seen[ring.src] = max(self._seen[ring.src], ring.step)
        return rings

    @staticmethod
    def _rung(rings: list[Ring], phase: int, step: int) -> set[int]:
        return {ring.src for ring in rings if (ring.phase, ring.step) == (phase, step)}


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, each once."""
    while descriptors:
        os.close(descriptors.pop())
