"""How ranks talk while they set up: one collective, `allgather`, bounded in time.

Nothing here is used while tokens move. `regroup` is for what went wrong: ranks that are anywhere
meet again, without those that are dead.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ep.bootstrap.ranks import everywhere, in_words
from ep.errors import BootstrapError, CollectiveError, EpTimeout

if TYPE_CHECKING:
    from collections.abc import Callable


class Channel(Protocol):
    """Bytes from every rank to every rank."""

    rank: int
    size: int

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """Give every rank's `payload`, in rank order; nothing for excluded ranks. Collective.

        Raises
        ------
        EpTimeout
            After `timeout_s` seconds, naming `what` and the ranks that are missing.
        """
        ...

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """Meet all ranks but `excluded`, wherever each of them was. Collective over them.

        From then on `allgather` is theirs; what a round that was cut short has left is not heard.

        Raises
        ------
        CollectiveError
            On every rank, if they do not exclude the same.
        EpTimeout
            Naming the ranks that did not come. It may be called again.
        """
        ...

    def gone(self) -> frozenset[int]:
        """Give the ranks whose process is known to have ended, or to be out of reach. Local."""
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

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """See `Channel`."""

    def gone(self) -> frozenset[int]:
        """Give nobody: there is no sign of it."""
        return frozenset()

    def abort(self, code: int) -> None:
        """See `Channel`."""

    def note_timeout(self) -> None:
        """See `Channel`."""

    def close(self) -> None:
        """See `Channel`."""


REGROUPING = "meeting the ranks that remain"


def same_exclusions(excluded: dict[int, frozenset[int]]) -> None:
    """Raise `CollectiveError` unless all ranks said the same."""
    if len(set(excluded.values())) > 1:
        said = {rank: str(sorted(ranks)) for rank, ranks in excluded.items()}
        raise everywhere(
            CollectiveError(
                f"the ranks exclude different ranks: {in_words(said)}; agree on them first"
            )
        )


class Meeting(NamedTuple):
    """What a rank says when it waits for others to regroup."""

    excluded: frozenset[int]
    round: int


class ThreadGroup:
    """What the `ThreadChannel`s of one world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.waiting: dict[int, Meeting] = {}
        self.met: dict[int, dict[int, Meeting]] = {}
        self.aborted = False


class ThreadChannel:
    """Ranks played by threads of one process.

    Attributes
    ----------
    was_cut_short : bool
        Whether a wait of this rank has ended because another one failed.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group
        self.was_cut_short = False
        self._round = 0
        self._present = list(range(group.size))

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:
        """See `Channel`."""
        group, number = self._group, self._round
        self._round += 1
        with group.changed:
            box = group.rounds.setdefault(number, {})
            box[self.rank] = payload
            group.changed.notify_all()
            done = group.changed.wait_for(
                lambda: box.keys() >= set(self._present) or group.aborted, timeout_s
            )
            # A rank can be one round behind at most, so older rounds have no reader left.
            group.rounds.pop(number - 2, None)
        missing = tuple(rank for rank in self._present if rank not in box)
        if not missing:
            said = {rank: box[rank] for rank in self._present}
            return [said.get(rank, b"") for rank in range(self.size)]
        if done:
            self.was_cut_short = True
            raise BootstrapError(f"rank {self.rank}: another rank failed during {what}")
        raise EpTimeout(what, 0, self.rank, missing, (), timeout_s)

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """See `Channel`."""
        group = self._group
        others = [rank for rank in range(self.size) if rank not in excluded]
        with group.changed:
            group.waiting[self.rank] = Meeting(excluded, self._round)
            # Who waits for fewer may have all of them now.
            group.changed.notify_all()

            came: set[int] = set()

            def is_over() -> bool:
                came.update(group.waiting)
                if group.waiting.keys() >= set(others):
                    # Whoever comes last lets all go at once.
                    met = {rank: group.waiting.pop(rank) for rank in others}
                    group.met |= dict.fromkeys(others, met)
                    group.changed.notify_all()
                return self.rank in group.met

            if not group.changed.wait_for(is_over, timeout_s):
                # Not who came and had no more time.
                missing = tuple(rank for rank in others if rank not in came)
                group.waiting.pop(self.rank)
                raise EpTimeout(REGROUPING, 0, self.rank, missing, (), timeout_s)
            met = group.met.pop(self.rank)
        same_exclusions({rank: said.excluded for rank, said in met.items()})
        self._round = max(said.round for said in met.values())
        self._present = others

    def gone(self) -> frozenset[int]:
        """Give nobody: there is no sign of it."""
        return frozenset()

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
