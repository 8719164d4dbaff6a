"""How ranks talk while they set up: one collective, `allgather`, bounded in time.

Nothing here is used while tokens move.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from ep.errors import BootstrapError, EpTimeout

if TYPE_CHECKING:
    from collections.abc import Callable


class Channel(Protocol):
    """Bytes from every rank to every rank."""

    rank: int
    size: int

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """Give every rank's `payload`, in rank order. Collective.

        Raises
        ------
        EpTimeout
            After `timeout_s` seconds, naming `what` and the ranks that are missing.
        """
        ...

    def abort(self, code: int) -> None:
        """End the job: every rank, at once. Returns only where there is nobody else to end."""
        ...

    def note_timeout(self) -> None:
        """Remember that a wait has expired: ranks may be dead when this process exits. Local."""
        ...

    def close(self) -> None:
        """Release what the channel holds. Local, after a last collective that all ranks came to."""
        ...


class SingleChannel:
    """A world of one."""

    rank = 0
    size = 1

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:  # noqa: ARG002 - one protocol
        """See `Channel`."""
        return [payload]

    def abort(self, code: int) -> None:
        """See `Channel`."""

    def note_timeout(self) -> None:
        """See `Channel`."""

    def close(self) -> None:
        """See `Channel`."""


class ThreadGroup:
    """What the `ThreadChannel`s of one world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.aborted = False


class ThreadChannel:
    """Ranks played by threads of one process."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group
        self._round = 0

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """See `Channel`."""
        group, number = self._group, self._round
        self._round += 1
        with group.changed:
            box = group.rounds.setdefault(number, {})
            box[self.rank] = payload
            group.changed.notify_all()
            done = group.changed.wait_for(lambda: len(box) == self.size or group.aborted, timeout_s)
            # A rank can be one round behind at most, so older rounds have no reader left.
            group.rounds.pop(number - 2, None)
        if len(box) == self.size:
            return [box[rank] for rank in range(self.size)]
        if done:
            raise BootstrapError(f"rank {self.rank}: another rank failed during {what}")
        missing = tuple(rank for rank in range(self.size) if rank not in box)
        raise EpTimeout(what, 0, self.rank, missing, (), timeout_s)

    def abort(self, code: int) -> None:  # noqa: ARG002 - one protocol
        """Make every wait of the other threads end. They are not killed."""
        with self._group.changed:
            self._group.aborted = True
            self._group.changed.notify_all()

    def note_timeout(self) -> None:
        """See `Channel`."""

    def close(self) -> None:
        """See `Channel`."""


def poll_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask `done` until it says yes, sleeping in between so that other ranks get the CPU.

    Returns
    -------
    bool
        False if `timeout_s` seconds went by first.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 20e-6
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2e-3)
    return True
