"""How ranks talk by an all-gather that the engine has: no launcher, no MPI, no TCP."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from ep.bootstrap.channel import REGROUPING
from ep.config import MAX_RANKS
from ep.errors import ArgumentError, BootstrapError, StateError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_MEETING = json.dumps([REGROUPING, None]).encode()
"""As `World.allgather` says it, so that a rank that is at another call is told so."""


def _mark(rank: int) -> bytes:
    """Stand before what `rank` says: an engine's own words, or another rank's, are told apart."""
    return b"ep %d " % rank


class CallerChannel:
    """A channel over `allgather`, which takes bytes and gives every rank's, in rank order.

    Its waits are bounded as the engine bounds them; what it raises comes through.
    """

    def __init__(self, rank: Any, size: Any, allgather: Callable[[bytes], Any]) -> None:
        if type(size) is not int or not 1 <= size <= MAX_RANKS:
            raise ArgumentError(f"size is {shown(size)}; allowed is 1..{MAX_RANKS}")
        if type(rank) is not int or not 0 <= rank < size:
            raise ArgumentError(f"rank is {shown(rank)}; allowed is 0..{size - 1}")
        if not callable(allgather):
            raise ArgumentError(
                f"allgather is a {type(allgather).__name__}; allowed is a function that takes "
                "bytes and gives a list of every rank's"
            )
        self.rank = rank
        self.size = size
        self._allgather = allgather

    def allgather(self, payload: bytes, timeout_s: float, what: str) -> list[bytes]:  # noqa: ARG002
        """See `Channel`; `timeout_s` is the engine's own affair."""
        own = _mark(self.rank) + payload
        told = self._allgather(own)
        try:
            said = [bytes(memoryview(words)) for words in told]
        except (TypeError, ValueError):
            said = []
        if len(said) != self.size or said[self.rank] != own:
            raise BootstrapError(
                f"rank {self.rank}: the engine's allgather gave {shown(told)} during {what}; "
                f"allowed is a list of the bytes of each of {self.size} ranks, in rank order, this "
                "rank's own among them"
            )
        for rank, words in enumerate(said):
            if not words.startswith(_mark(rank)):
                raise BootstrapError(
                    f"rank {self.rank}: the engine's allgather gave {shown(words)} as rank "
                    f"{rank}'s during {what}, which is not what that rank has passed; give every "
                    "rank's in rank order, and let no other call of the engine come between"
                )
        return [words.removeprefix(_mark(rank)) for rank, words in enumerate(said)]

    def regroup(self, excluded: frozenset[int], timeout_s: float) -> None:
        """See `Channel`. Every rank comes: the engine's all-gather knows no ranks left out."""
        if excluded:
            raise StateError(
                "ranks cannot be excluded from the allgather of an engine; end the job, or make "
                "a new World of the ranks that live"
            )
        said = self.allgather(_MEETING, timeout_s, REGROUPING)
        if set(said) != {_MEETING}:
            raise BootstrapError(
                "some ranks meet after a failure, and some are at another call; have every rank "
                "call reset"
            )

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
