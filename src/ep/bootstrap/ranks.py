"""What ranks tell each other at start-up, where they are and what they can use; ranks in words."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ep.errors import (
    ArgumentError,
    BootstrapError,
    CollectiveError,
    DeviceError,
    EpError,
    HeapError,
    name_ranks,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

ErrorT = TypeVar("ErrorT", bound=EpError)
_AGREED_KINDS = {kind.__name__: kind for kind in (BootstrapError, DeviceError, HeapError)}
_ENDED = ("Z", "X")
"""States of processes that only their parents have not taken notice of."""


class Backend(StrEnum):
    """What moves the tokens."""

    HOST = "host"
    GPU = "gpu"


def check_backend(backend: object) -> None:
    """Raise `ArgumentError` unless it is "auto" or one of `Backend`."""
    if not isinstance(backend, str) or backend not in ("auto", *Backend):
        raise ArgumentError(f"backend={shown(backend)}: allowed are auto, {', '.join(Backend)}")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes
    ----------
    node : str
        For people.
    machine : str
        The same where memory can be shared.
    processes : str
        The same where process numbers mean the same.
    process : int
    started : str
        When the process began, in ticks since boot: the system uses numbers again.
    local_rank, local_size : int
    """

    node: str
    machine: str
    processes: str
    process: int
    started: str
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def own(cls) -> Place:
        """Place of this process, as if it were the only rank of its node. Local."""
        machine, node = _read("/proc/sys/kernel/random/boot_id"), socket.gethostname()
        space = Path("/proc/self/ns/pid")
        processes = str(space.readlink()) if space.is_symlink() else ""
        _, started = _state_of(os.getpid())
        return cls(node, machine.strip() or node, processes, os.getpid(), started)

    def has_ended(self) -> bool:
        """Whether its process has ended, as far as this one can know. Local."""
        mine = Place.own()
        if not mine.started or (mine.machine, mine.processes) != (self.machine, self.processes):
            return False
        state, started = _state_of(self.process)
        return started != self.started or state in _ENDED


def _state_of(process: int) -> tuple[str, str]:
    """State of a process and when it began; nothing where there is none."""
    # Its name, in parentheses, may hold anything.
    fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if fields else ("", "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def places_of(said: list[Place]) -> tuple[Place, ...]:
    """Give every rank's place from what each one knows of itself."""
    nodes = [(place.node, place.machine) for place in said]
    return tuple(
        dataclasses.replace(
            place, local_rank=nodes[:rank].count(node), local_size=nodes.count(node)
        )
        for rank, (place, node) in enumerate(zip(said, nodes, strict=True))
    )


def ended_ranks(
    places: tuple[Place, ...], lost: frozenset[int], excluded: frozenset[int]
) -> dict[int, str]:
    """Give the ranks that have ended, and their nodes, from their places or a lost connection.

    Not of awaited ranks alone: who waits for one that waits for the dead excludes the same.
    """
    ended = {
        rank
        for rank, place in enumerate(places)
        if rank not in excluded and (rank in lost or place.has_ended())
    }
    return {rank: places[rank].node if places else "" for rank in sorted(ended | lost)}


def agree_on_backend(asked: list[str], obstacles: list[str | None]) -> Backend:
    """Choose for all ranks, from what each asked for and what keeps it from using a GPU.

    Raises
    ------
    CollectiveError, BootstrapError
        On every rank.
    """
    if len(set(asked)) > 1:
        raise everywhere(
            CollectiveError(f"backend must be the same on every rank; {in_words(asked)}")
        )
    without = {rank: words for rank, words in enumerate(obstacles) if words}
    if asked[0] == Backend.HOST or (asked[0] == "auto" and without):
        return Backend.HOST
    if without:
        raise everywhere(
            BootstrapError(
                f"backend='gpu' cannot be had: {in_words(without)}; see python -m ep.doctor, "
                "or use backend='host'"
            )
        )
    return Backend.GPU


def everywhere(error: ErrorT) -> ErrorT:
    """Mark an error that is raised alike on every rank, so that one rank may tell it for all."""
    error.on_every_rank = True
    return error


def in_words(said: list[str] | dict[int, str]) -> str:
    """Tell what each rank said, ranks that said the same together."""
    return "; ".join(f"{name_ranks(ranks)}: {words}" for words, ranks in alike(said).items())


def alike(said: list[str] | dict[int, str]) -> dict[str, list[int]]:
    """Give the ranks that said each thing."""
    ranks: dict[str, list[int]] = {}
    for rank, words in said.items() if isinstance(said, dict) else enumerate(said):
        ranks.setdefault(words, []).append(rank)
    return ranks


def common_error(said: list[list[str] | None], what: str) -> EpError | None:
    """Make one error of those that ranks had, as kind and words; None where none had any."""
    failed = {rank: told for rank, told in enumerate(said) if told}
    if not failed:
        return None
    words = in_words({rank: text for rank, (_, text) in failed.items()})
    kinds = {kind for kind, _ in failed.values()}
    kind = _AGREED_KINDS.get(kinds.pop()) if len(kinds) == 1 else None
    return everywhere(
        (kind or CollectiveError)(f"{what} failed on {len(failed)} of {len(said)} ranks: {words}")
    )


def difference_of(said: list[dict[str, Any] | None], what: str) -> CollectiveError | None:
    """Tell which facts differ between ranks, and how; None where none does."""
    told = {rank: facts for rank, facts in enumerate(said) if facts is not None}
    complaints = []
    for name in next(iter(told.values())):
        values = alike({rank: json.dumps(facts.get(name)) for rank, facts in told.items()})
        if len(values) > 1:
            words = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())
            complaints.append(f"{name} differs: {words}")
    if not complaints:
        return None
    return everywhere(
        CollectiveError(f"{what} must be the same on every rank; " + "; ".join(complaints))
    )


def ranks_to_exclude(given: Iterable[int], rank: int, size: int) -> frozenset[int]:
    """Check ranks that `rank` of `size` would go on without.

    Raises
    ------
    ArgumentError
    """
    try:
        ranks = frozenset(operator.index(one) for one in given)
    except TypeError:
        ranks = frozenset([-1])
    if not ranks <= set(range(size)) - {rank}:
        raise ArgumentError(
            f"ranks to exclude are {shown(given)}; allowed are ranks 0..{size - 1} but this one, "
            f"{rank}"
        )
    return ranks
