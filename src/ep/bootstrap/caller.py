"""How ranks talk by an all-gather that the engine has: no launcher, no MPI, no TCP."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from ep.bootstrap.channel import REGROUPING, same_exclusions
from ep.config import MAX_RANKS
from ep.errors import ArgumentError, BootstrapError, StateError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Allgather = Callable[[bytes], Any]
    Regroup = Callable[[Sequence[int]], Allgather]

logger = logging.getLogger(__name__)


def _mark(rank: int) -> bytes:
    """Stand before what `rank` says: an engine's own words, or another rank's, are told apart."""
    return b"ep %d " % rank


class CallerChannel:
    """A channel over `allgather`, which takes bytes and gives every rank's, in rank order.

    Its waits are bounded as the engine bounds them; what it raises comes through. `regroup`, if the
    engine has it, takes the ranks to go on without and gives the all-gather of those that stay.
    """

    def __init__(
        self, rank: Any, size: Any, allgather: Allgather, regroup: Regroup | None = None
    ) -> None:
        if type(size) is not int or not 1 <= size <= MAX_RANKS:
            raise ArgumentError(f"size is {shown(size)}; allowed is 1..{MAX_RANKS}")
        if type(rank) is not int or not 0 <= rank < size:
            raise ArgumentError(f"rank is {shown(rank)}; allowed is 0..{size - 1}")
        if not callable(allgather):
            raise ArgumentError(
                f"allgather is a {type(allgather).__name__}; allowed is a function that takes "
                "bytes and gives a list of every rank's"
            )
        if regroup is not None and not callable(regroup):
            raise ArgumentError(
                f"regroup is a {type(regroup).__name__}; allowed is a function that takes ranks to "
                "go on without and gives the allgather of the others"
            )
        self.rank = rank
        self.size = size
        self._allgather = allgather
        self._regroup = regroup
        self._present = list(range(size))

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:  # noqa: ARG002
        """See `Channel`; `timeout_s` is the engine's own affair."""
        own = _mark(self.rank) + payload
        with _during(what, "allgather", self.rank):
            told = self._allgather(own)
        try:
            said = [bytes(memoryview(words)) for words in told]
        except (TypeError, ValueError):
            said = []
        present = self._present
        if len(said) != len(present) or said[present.index(self.rank)] != own:
            raise BootstrapError(
                f"rank {self.rank}: the engine's allgather gave {shown(told)} during {what}; "
                f"allowed is a list of the bytes of each of {len(present)} ranks, in rank order, "
                "this rank's own among them"
            )
        by_rank = dict(zip(present, said, strict=True))
        for rank, words in by_rank.items():
            if not words.startswith(_mark(rank)):
                raise BootstrapError(
                    f"rank {self.rank}: the engine's allgather gave {shown(words)} as rank "
                    f"{rank}'s during {what}, which is not what that rank has passed; give every "
                    "rank's in rank order, and let no other call of the engine come between"
                )
        return [by_rank.get(rank, b"").removeprefix(_mark(rank)) for rank in range(self.size)]

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """See `Channel`. Without the engine's help every rank must come."""
        ranks = sorted(excluded)
        if self._regroup is None:
            if ranks:
                raise StateError(
                    "ranks cannot be excluded from the allgather of an engine; pass regroup= to "
                    "World.embedded, end the job, or make a new World of the ranks that live"
                )
        else:
            with _during(REGROUPING, "regroup", self.rank):
                allgather = self._regroup(ranks)
            if not callable(allgather):
                raise BootstrapError(
                    f"rank {self.rank}: the engine's regroup gave a {type(allgather).__name__}; "
                    "allowed is the allgather of the ranks that stay"
                )
            self._allgather = allgather
            self._present = [rank for rank in range(self.size) if rank not in excluded]
        # As `World.allgather` says it, so that a rank that is at another call is told so.
        payload = json.dumps([REGROUPING, ranks]).encode()
        said = self.allgather(payload, timeout_s, REGROUPING)
        heard = {rank: json.loads(words) for rank, words in enumerate(said) if words}
        if any(call != REGROUPING for call, _ in heard.values()):
            raise BootstrapError(
                "some ranks meet after a failure, and some are at another call; have every rank "
                "call reset"
            )
        same_exclusions({rank: frozenset(theirs) for rank, (_, theirs) in heard.items()})

    def gone(self) -> frozenset[int]:
        """Give nobody: there is no sign of it."""
        return frozenset()

    def abort(self, code: int) -> None:
        """Leave that to the engine, to which the error goes."""
        logger.debug("rank %d fails with code %d; the engine ends the job", self.rank, code)

    def note_timeout(self) -> None:
        """See `Channel`."""

    def close(self) -> None:
        """See `Channel`."""


@contextlib.contextmanager
def _during(what: str, function: str, rank: int) -> Iterator[None]:
    """Say in a note to what the engine raises when it was asked, and by which rank."""
    try:
        yield
    except Exception as error:
        error.add_note(f"rank {rank}: raised by the engine's {function}, which ep called: {what}")
        raise
