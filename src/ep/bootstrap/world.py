"""`World`: who am I, where are the others, and how do we agree."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any, Self

from ep.bootstrap.device import gpu_obstacle
from ep.bootstrap.ending import exit_code, log_end, watch
from ep.bootstrap.opening import open_channel
from ep.bootstrap.placement import Seat, ranks_of_gpus, take_seats
from ep.bootstrap.ranks import (
    Backend,
    Place,
    agree_on_backend,
    common_error,
    difference_of,
    ended_ranks,
    everywhere,
    in_words,
    places_of,
    ranks_to_exclude,
)
from ep.config import MAX_SECONDS
from ep.errors import (
    ArgumentError,
    CollectiveError,
    EpError,
    EpTimeout,
    StateError,
    shown,
)
from ep.settings import is_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from ep.bootstrap.channel import Channel
    from ep.memory.cuda import Device

BOOTSTRAP_TIMEOUT_S = 60.0


class World:
    """The ranks of one job. Made by `World.connect`; a context manager.

    Leaving the context without an exception is collective. Leaving it by an exception logs the
    traceback and ends the whole job, so that no other rank waits for this one.

    Attributes
    ----------
    rank, size : int
    local_rank, local_size : int
        This rank's index among the ranks of its node, and their number.
    places : tuple of Place
        Of every rank.
    backend : Backend
    device : Device or None
        The GPU of this rank, on the GPU backend.
    seats : tuple of Seat
        GPU and NVLink domain of every rank, on the GPU backend; else empty.
    shares_gpus : bool
        Whether some ranks share a GPU.
    num_gpus : int
        GPUs that all ranks together use.
    ranks_on_gpu : int
        Ranks that use this rank's GPU.
    excluded : frozenset of int
        Ranks that the others go on without.
    """

    def __init__(
        self,
        channel: Channel,
        backend: str,
        timeout_s: float = BOOTSTRAP_TIMEOUT_S,
        *,
        share_gpus: bool = False,
    ) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._closed = False
        self._process = os.getpid()
        self._stopped: str | None = None
        self._at_close: list[Callable[[], None]] = []
        self._num_exchanges = 0
        self.excluded: frozenset[int] = frozenset()
        self.places: tuple[Place, ...] = ()
        self.rank = channel.rank
        self.size = channel.size
        obstacle = None if backend == Backend.HOST else gpu_obstacle()
        gathered = self.allgather(
            {
                "place": dataclasses.asdict(Place.own()),
                "backend": backend,
                "obstacle": obstacle,
            },
            "start-up",
        )
        self.places = places_of([Place(**said["place"]) for said in gathered])
        self.local_rank = self.places[self.rank].local_rank
        self.local_size = self.places[self.rank].local_size
        self.backend = agree_on_backend(
            [said["backend"] for said in gathered], [said["obstacle"] for said in gathered]
        )
        self.device: Device | None = None
        self.seats: tuple[Seat, ...] = ()
        self.shares_gpus = False
        self.num_gpus = 0
        self.ranks_on_gpu = 0
        if self.backend is Backend.GPU:
            self._take_device(share_gpus)

    @classmethod
    def connect(
        cls,
        backend: str = "auto",
        *,
        timeout_s: float = BOOTSTRAP_TIMEOUT_S,
        share_gpus: bool | None = None,
    ) -> World:
        """Join the job that the launcher started, or make a world of one. Collective.

        Parameters
        ----------
        backend : {"auto", "host", "gpu"}
            "auto" takes GPUs where every rank has one and the `gpu` extra is installed.
        timeout_s : float
            Bound of each wait outside of steps, in seconds: set-up, `reset`, closing.
        share_gpus : bool, optional
            Let several ranks use one GPU: right, but slow unless CUDA MPS runs. If not given,
            the variable `EP_SHARE_GPUS=1` says so.

        Returns
        -------
        World

        Raises
        ------
        ArgumentError
            If there is no such backend.
        BootstrapError
            If the launcher's variables, MPI and its library do not fit together, or ranks cannot
            prove themselves over TCP; on GPUs, if a rank has none, or shares one unasked, or if
            they are in several NVLink domains.
        EpTimeout
            If ranks are missing, naming them.
        """
        given: object = backend
        if not isinstance(given, str) or given not in ("auto", *Backend):
            raise ArgumentError(f"backend={shown(backend)}: allowed are auto, {', '.join(Backend)}")
        bound: object = timeout_s
        if not isinstance(bound, (int, float)) or not 0 < bound <= MAX_SECONDS:
            raise ArgumentError(
                f"timeout_s={shown(timeout_s)}: allowed is above 0 and at most {MAX_SECONDS} "
                "seconds"
            )
        if share_gpus is None:
            share_gpus = is_set("EP_SHARE_GPUS")
        channel = open_channel(os.environ, timeout_s)
        try:
            world = cls(channel, backend, timeout_s, share_gpus=share_gpus)
        except EpError as error:
            if error.on_every_rank:
                # All have heard all: who tries again shall not open another.
                channel.close()
            raise
        if world.size > 1:
            watch(lambda: not world._closed, world._end_job, world.rank, world.size)
        return world

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

    def next_exchange(self) -> int:
        """Number the exchanges of this world, the same on every rank that makes them alike."""
        self._num_exchanges += 1
        return self._num_exchanges

    def note_timeout(self) -> None:
        """Remember that a bounded wait has expired, in a step say. Local.

        Over MPI the process ends the job when it exits, unless the world is closed in order after
        it: MPI would wait, without bound, for a rank that may be dead.
        """
        self._channel.note_timeout()

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called when the world is closed without an error, by all its ranks."""
        self._at_close.append(function)

    def _take_device(self, share_gpus: bool) -> None:
        self.device, self.seats = take_seats(self, share_gpus=share_gpus)
        owners = ranks_of_gpus(self.seats)
        self.shares_gpus = len(owners) < self.size
        self.num_gpus = len(owners)
        self.ranks_on_gpu = len(owners[self.seats[self.rank].uuid])

    def _end_job(self) -> None:
        if not self._closed:
            self._channel.abort(1)

    def close(self) -> None:
        """Leave the world. Collective the first time; nothing after that, or in a forked child.

        Of several processes, one where this fails ends the job: MPI would wait without bound.
        """
        if self._closed or os.getpid() != self._process:
            return
        try:
            self.barrier("closing the world")
            if self.excluded:
                # They are collective, too: what they would give back ends with the process.
                self._at_close.clear()
            while self._at_close:
                self._at_close.pop()()
        except BaseException as error:
            if not self.is_one_process:
                self.abort(error)
            raise
        finally:
            self._closed = True
        self._channel.close()

    def abort(self, error: BaseException) -> None:
        """End the whole job because of `error`, after logging its traceback. Local.

        In a forked child nothing ends but the child.
        """
        self._closed = True
        if self.size == 1:
            return
        if os.getpid() == self._process:
            log_end(error, self.rank, self.size)
        if code := exit_code(error):
            self._channel.abort(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self.abort(error)

    def __repr__(self) -> str:
        place = self.places[self.rank]
        return (
            f"World(rank={self.rank}, size={self.size}, backend={self.backend}, node={place.node})"
        )
