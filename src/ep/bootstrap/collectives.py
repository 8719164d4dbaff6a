"""What the ranks of a `World` do together: gather, agree, and meet again after a failure."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ep.bootstrap.ranks import (
    Place,
    common_error,
    difference_of,
    ended_ranks,
    everywhere,
    in_words,
    ranks_to_exclude,
)
from ep.errors import ArgumentError, CollectiveError, EpTimeout, StateError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ep.bootstrap.channel import Channel


class Collectives:
    """What `World` does beside finding ranks and GPUs. Not made by itself."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._closed = False
        self._process = os.getpid()
        self._stopped: str | None = None
        self.excluded: frozenset[int] = frozenset()
        self.places: tuple[Place, ...] = ()
        self.rank = channel.rank
        self.size = channel.size

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        """Give every rank's `value`, in rank order; None for excluded ranks. Collective, bounded.

        Parameters
        ----------
        value : object
            Anything JSON can hold.
        what : str
            What the ranks are doing, for the error.

        Raises
        ------
        CollectiveError
            On every rank, if `what` differs: the ranks are at different calls.
        EpTimeout
            Naming the missing ranks.
        StateError
            If the world is closed, or a collective was cut short before: ranks may have gone on.
        """
        self.check_open()
        if self._stopped is not None:
            raise StateError(
                f"this World stopped at: {self._stopped}; end the job, or reset an exchange"
            )
        try:
            payload = json.dumps([what, value]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"{what}: JSON cannot hold what rank {self.rank} says ({shown(error)}); pass "
                "numbers, text, lists and dicts"
            ) from error
        try:
            told = self._channel.allgather(payload, self._timeout_s, what)
        except BaseException as error:
            self._stopped = f"{what}, ended by {error!r}"
            if isinstance(error, EpTimeout):
                raise self.explain(error) from None
            raise
        said = [json.loads(words) if words else [what, None] for words in told]
        calls = {rank: repr(said[rank][0]) for rank, words in enumerate(told) if words}
        if len(set(calls.values())) > 1:
            raise everywhere(
                CollectiveError(
                    f"the ranks are at different calls: {in_words(calls)}; every rank must make "
                    "the same collective calls in the same order"
                )
            )
        return [theirs for _, theirs in said]

    def barrier(self, what: str = "barrier") -> None:
        """Wait for every rank. Collective, bounded."""
        self.allgather(None, what)

    def agree(self, error: BaseException | None, what: str) -> None:
        """Fail on every rank if one failed. Collective.

        Parameters
        ----------
        error : exception or None
            What went wrong here.
        what : str
            What the ranks were doing.

        Raises
        ------
        EpError
            On every rank, with each failing rank's words; of the kind that failed where all
            failing ranks say the same kind of error, else `CollectiveError`.
        """
        said = self.allgather(error and [type(error).__name__, str(error)], what)
        common = common_error(said, what)
        if common is not None:
            raise common from error

    def agree_on(self, facts: Mapping[str, Any], what: str) -> None:
        """Compare `facts` over the ranks. Collective.

        Raises
        ------
        CollectiveError
            On every rank, naming each fact that differs, its values and their ranks.
        """
        difference = difference_of(self.allgather(dict(facts), what), what)
        if difference is not None:
            raise difference

    @property
    def is_one_process(self) -> bool:
        """Whether threads of this process play all ranks."""
        return len({(place.machine, place.process) for place in self.places}) == 1

    def check_open(self) -> None:
        """Raise `StateError` if this World is closed, or as `check_process`."""
        if self._closed:
            raise StateError("this World is closed, so are its exchanges; connect a new one")
        # Every step asks: a call less.
        if os.getpid() != self._process:
            self.check_process()

    def check_process(self) -> None:
        """Raise `StateError` in a child that this process has forked: the job is the parent's."""
        if os.getpid() != self._process:
            raise StateError(
                f"this World is that of process {self._process}, and this is a forked child "
                f"({os.getpid()}); use it in the parent alone"
            )

    def explain(self, error: EpTimeout) -> EpTimeout:
        """Add to `error` which ranks have ended. Local."""
        gone = ended_ranks(self.places, self._channel.gone() - self.excluded, self.excluded)
        fields = (error.phase, error.step, error.rank, error.awaited, error.seen, error.waited_s)
        return EpTimeout(*fields, gone, error.notes)

    def regroup(self, excluded: Iterable[int] = ()) -> None:
        """Meet again, wherever each rank was, without `excluded`. Collective over those that stay.

        It is how ranks go on after a wait that expired. What a collective call that was cut short
        has left is forgotten. Excluded ranks stay excluded; `allgather` gives None for them.

        Raises
        ------
        ArgumentError
            If `excluded` are not ranks, or this one is among them.
        CollectiveError
            On every rank, if they do not exclude the same.
        EpTimeout
            Naming the ranks that did not come. The call may be repeated.
        """
        self.check_open()
        ranks = self.excluded | ranks_to_exclude(excluded, self.rank, self.size)
        try:
            self._channel.regroup(ranks, self._timeout_s)
        except EpTimeout as error:
            raise self.explain(error) from None
        self.excluded, self._stopped = ranks, None

    def note_timeout(self) -> None:
        """Remember that a bounded wait has expired, in a step say. Local.

        Over MPI the process ends the job when it exits, unless the world is closed in order after
        it: MPI would wait, without bound, for a rank that may be dead.
        """
        self._channel.note_timeout()
