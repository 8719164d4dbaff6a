"""`World`: who am I, where are the others, and how do we agree."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Self

from ep.bootstrap.caller import CallerChannel
from ep.bootstrap.collectives import Collectives
from ep.bootstrap.device import gpu_obstacle
from ep.bootstrap.ending import exit_code, log_end, watch
from ep.bootstrap.opening import open_channel
from ep.bootstrap.placement import Seat, ranks_of_gpus, take_seats
from ep.bootstrap.ranks import (
    Backend,
    Place,
    agree_on_backend,
    check_backend,
    places_of,
)
from ep.config import MAX_SECONDS
from ep.errors import (
    ArgumentError,
    EpError,
    shown,
)
from ep.settings import is_set

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ep.bootstrap.channel import Channel
    from ep.memory.cuda import Device

BOOTSTRAP_TIMEOUT_S = 60.0


class World(Collectives):
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
        embedded: bool = False,
        device: int | None = None,
    ) -> None:
        super().__init__(channel, timeout_s)
        self._at_close: list[Callable[[], None]] = []
        self._num_exchanges = 0
        self._is_embedded = embedded
        obstacle = None if backend == Backend.HOST else gpu_obstacle(embedded=embedded)
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
            self._take_device(share_gpus, device)

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
        check_backend(backend)
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

    @classmethod
    def embedded(
        cls,
        rank: int,
        size: int,
        allgather: Callable[[bytes], Any],
        *,
        backend: str = "auto",
        device: int | None = None,
        share_gpus: bool | None = None,
        regroup: Callable[[Sequence[int]], Callable[[bytes], Any]] | None = None,
    ) -> World:
        """Join ranks that an engine has started and connected already. Collective.

        Parameters
        ----------
        rank, size : int
        allgather : callable
            Takes bytes and gives a list of every rank's, in rank order. Called by the thread that
            makes a collective call, never in a step. Its waits are bounded as it bounds them, and
            what it raises comes through, with a note.
        backend, share_gpus
            As in `connect`.
        device : int, optional
            Ordinal of the GPU that the engine has given this rank; else as in `connect`. With it
            "auto" is "gpu".
        regroup : callable, optional
            Called by `reset` and `exclude` on every rank that stays, wherever each was: takes the
            ranks to go on without, all that were excluded before among them, and gives the
            `allgather` of those that stay, a list of theirs alone. Needed for `exclude`.

        Returns
        -------
        World
            It ends no job: an error goes to the engine.

        Raises
        ------
        ArgumentError, BootstrapError
            As `connect`, and if `allgather` does not do as it should.
        """
        check_backend(backend)
        if device is not None:
            if backend == Backend.HOST:
                raise ArgumentError(
                    f"device={shown(device)} is for GPUs; leave it out with backend='host'"
                )
            # Never the host in silence where the engine has chosen a GPU.
            backend = Backend.GPU
        channel = CallerChannel(rank, size, allgather, regroup)
        if share_gpus is None:
            share_gpus = is_set("EP_SHARE_GPUS")
        return cls(channel, backend, share_gpus=share_gpus, embedded=True, device=device)

    def next_exchange(self) -> int:
        """Number the exchanges of this world, the same on every rank that makes them alike."""
        self._num_exchanges += 1
        return self._num_exchanges

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called when the world is closed without an error, by all its ranks."""
        self._at_close.append(function)

    def _take_device(self, share_gpus: bool, ordinal: int | None) -> None:
        self.device, self.seats = take_seats(self, ordinal, share_gpus=share_gpus)
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

        In a forked child nothing ends but the child. An embedded World ends no job and logs
        nothing: its engine gets the error.
        """
        self._closed = True
        if self.size == 1:
            return
        if os.getpid() == self._process and not self._is_embedded:
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
