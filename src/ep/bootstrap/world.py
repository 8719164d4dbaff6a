"""`World`: who am I, where are the others, and how do we agree."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ep.bootstrap.channel import Channel, SingleChannel
from ep.bootstrap.device import choose_device, gpu_obstacle
from ep.bootstrap.launcher import detect
from ep.bootstrap.mpi import open_mpi_channel
from ep.errors import (
    ArgumentError,
    BootstrapError,
    CollectiveError,
    DeviceError,
    EpError,
    HeapError,
    StateError,
)
from ep.settings import is_set

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from ep.memory.cuda import Device

logger = logging.getLogger(__name__)

BOOTSTRAP_TIMEOUT_S = 60.0
_AGREED_KINDS = {kind.__name__: kind for kind in (BootstrapError, DeviceError, HeapError)}


class Backend(StrEnum):
    """What moves the tokens."""

    HOST = "host"
    GPU = "gpu"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs: `node` for people, `machine` to tell whether memory can be shared."""

    node: str
    machine: str
    process: int
    local_rank: int = 0
    local_size: int = 1


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
    shares_gpus : bool
        Whether some ranks share a GPU.
    num_gpus : int
        GPUs that all ranks together use.
    ranks_on_gpu : int
        Ranks that use this rank's GPU.
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
        self._at_close: list[Callable[[], None]] = []
        self.rank = channel.rank
        self.size = channel.size
        obstacle = None if backend == Backend.HOST else gpu_obstacle()
        gathered = self.allgather(
            {
                "place": [socket.gethostname(), _boot_id(), os.getpid()],
                "backend": backend,
                "obstacle": obstacle,
            },
            "start-up",
        )
        self.places = _places([tuple(said["place"]) for said in gathered])
        self.local_rank = self.places[self.rank].local_rank
        self.local_size = self.places[self.rank].local_size
        self.backend = _agree_on_backend(
            [said["backend"] for said in gathered], [said["obstacle"] for said in gathered]
        )
        self.device: Device | None = None
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
            Bound of each wait during set-up, in seconds.
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
            If the launcher's variables, MPI and its library do not fit together; on GPUs, if a rank
            has none, or shares one without having asked for it.
        EpTimeout
            If ranks are missing, naming them.
        """
        if backend not in ("auto", *Backend):
            raise ArgumentError(f"backend={backend!r}: allowed are auto, {', '.join(Backend)}")
        if share_gpus is None:
            share_gpus = is_set("EP_SHARE_GPUS")
        channel = _open_channel(os.environ, timeout_s)
        world = cls(channel, backend, timeout_s, share_gpus=share_gpus)
        if world.size > 1:
            world._end_job_on_uncaught_errors()
        return world

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        """Give every rank's `value`, in rank order. Collective, bounded.

        Parameters
        ----------
        value : object
            Anything JSON can hold.
        what : str
            What the ranks are doing, for the error.

        Raises
        ------
        EpTimeout
            Naming the missing ranks.
        """
        if self._closed:
            raise StateError("this World is closed; connect a new one")
        payload = json.dumps(value).encode()
        return [
            json.loads(said) for said in self._channel.allgather(payload, self._timeout_s, what)
        ]

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
        failed = {rank: told for rank, told in enumerate(said) if told}
        if not failed:
            return
        alike: dict[str, list[int]] = {}
        for rank, (_, text) in failed.items():
            alike.setdefault(text, []).append(rank)
        words = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in alike.items())
        kinds = {kind for kind, _ in failed.values()}
        kind = _AGREED_KINDS.get(kinds.pop(), CollectiveError) if len(kinds) == 1 else None
        raise (kind or CollectiveError)(
            f"{what} failed on {len(failed)} of {self.size} ranks: {words}"
        ) from error

    def agree_on(self, facts: Mapping[str, Any], what: str) -> None:
        """Compare `facts` over the ranks. Collective.

        Raises
        ------
        CollectiveError
            On every rank, naming each fact that differs, its values and their ranks.
        """
        said = self.allgather(dict(facts), what)
        complaints = []
        for name in facts:
            values: dict[str, list[int]] = {}
            for rank, theirs in enumerate(said):
                values.setdefault(json.dumps(theirs.get(name)), []).append(rank)
            if len(values) > 1:
                told = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
                complaints.append(f"{name} differs: {told}")
        if complaints:
            raise CollectiveError(
                f"{what} must be the same on every rank; " + "; ".join(complaints)
            )

    @property
    def is_one_process(self) -> bool:
        """Whether threads of this process play all ranks."""
        return len({(place.machine, place.process) for place in self.places}) == 1

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called, on every rank, when the world is closed without an error."""
        self._at_close.append(function)

    def _take_device(self, share_gpus: bool) -> None:
        error: EpError | None = None
        try:
            self.device = choose_device(self.local_rank, share_gpus=share_gpus)
        except EpError as problem:
            error = problem
        self.agree(error, "choosing a GPU")
        uuids = self.allgather(self.device.uuid if self.device else "", "choosing a GPU")
        owners: dict[str, list[int]] = {}
        for rank, uuid in enumerate(uuids):
            owners.setdefault(uuid, []).append(rank)
        shared = [ranks for ranks in owners.values() if len(ranks) > 1]
        self.shares_gpus = bool(shared)
        self.num_gpus = len(owners)
        self.ranks_on_gpu = len(owners[uuids[self.rank]])
        if shared and not share_gpus:
            raise BootstrapError(
                f"several ranks have one GPU: {'; '.join(map(_ranks, shared))}; start one rank a "
                "GPU, check CUDA_VISIBLE_DEVICES, or allow it with EP_SHARE_GPUS=1 (--share-gpus)"
            )

    def _end_job_on_uncaught_errors(self) -> None:
        # At exit MPI would wait for all ranks, and so this one's traceback for their timeouts.
        hook = sys.excepthook

        def end_job(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            hook(kind, error, trace)
            if not self._closed:
                self._channel.abort(1)

        sys.excepthook = end_job

    def close(self) -> None:
        """Leave the world. Collective the first time; nothing after that."""
        if self._closed:
            return
        try:
            self.barrier("closing the world")
            while self._at_close:
                self._at_close.pop()()
        finally:
            self._closed = True
            self._channel.close()

    def abort(self, error: BaseException) -> None:
        """End the whole job because of `error`, after logging its traceback. Local."""
        self._closed = True
        if self.size == 1:
            return
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            logger.critical(
                "rank %d of %d left by sys.exit(%s) while the world was open; %s",
                self.rank,
                self.size,
                error.code,
                "it ends the job" if code else "ranks that wait for it will time out",
            )
            if code == 0:
                return
        else:
            logger.critical(
                "rank %d of %d failed and ends the job", self.rank, self.size, exc_info=error
            )
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


def _open_channel(environ: Mapping[str, str], timeout_s: float) -> Channel:
    launch = detect(environ)
    if launch is None:
        return SingleChannel()
    if launch.launcher == "slurm":
        if launch.size == 1:
            return SingleChannel()
        raise BootstrapError(
            f"srun started {launch.size} tasks without an MPI: use srun --mpi=pmi2 with the mpich "
            "extra, or mpirun"
        )
    return open_mpi_channel(launch, timeout_s)


def _agree_on_backend(asked: list[str], obstacles: list[str | None]) -> Backend:
    if len(set(asked)) > 1:
        told = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(asked))
        raise CollectiveError(f"backend must be the same on every rank; {told}")
    without = {rank: words for rank, words in enumerate(obstacles) if words}
    if asked[0] == Backend.HOST or (asked[0] == "auto" and without):
        return Backend.HOST
    if without:
        alike: dict[str, list[int]] = {}
        for rank, words in without.items():
            alike.setdefault(words, []).append(rank)
        told = "; ".join(f"{_ranks(ranks)}: {words}" for words, ranks in alike.items())
        raise BootstrapError(f"backend='gpu' cannot be had: {told}; use backend='host'")
    return Backend.GPU


def _places(said: list[tuple[str, str, int]]) -> tuple[Place, ...]:
    nodes = [(node, machine) for node, machine, _ in said]
    return tuple(
        Place(node, machine, process, nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]))
        for rank, (node, machine, process) in enumerate(said)
    )


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


def _ranks(ranks: list[int]) -> str:
    """Write ranks as people do: "rank 3", "ranks 0-14, 16"."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], -1]:
        if rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(parts)
