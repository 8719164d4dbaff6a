"""What ranks tell each other at start-up, where they are and what they can use; ranks in words."""

from __future__ import annotations

import dataclasses
import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from ep.errors import BootstrapError, CollectiveError, EpError

ErrorT = TypeVar("ErrorT", bound=EpError)


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


def own_place() -> tuple[str, str, int]:
    """Node, machine and process of this rank. Local."""
    path = Path("/proc/sys/kernel/random/boot_id")
    machine = path.read_text().strip() if path.exists() else socket.gethostname()
    return socket.gethostname(), machine, os.getpid()


def places_of(said: list[tuple[str, str, int]]) -> tuple[Place, ...]:
    """Give every rank's place from every rank's `own_place`."""
    nodes = [(node, machine) for node, machine, _ in said]
    return tuple(
        Place(node, machine, process, nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]))
        for rank, (node, machine, process) in enumerate(said)
    )


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
            BootstrapError(f"backend='gpu' cannot be had: {in_words(without)}; use backend='host'")
        )
    return Backend.GPU


def everywhere(error: ErrorT) -> ErrorT:
    """Mark an error that is raised alike on every rank, so that one rank may tell it for all."""
    error.on_every_rank = True
    return error


def in_words(said: list[str] | dict[int, str]) -> str:
    """Tell what each rank said, ranks that said the same together."""
    alike: dict[str, list[int]] = {}
    for rank, words in said.items() if isinstance(said, dict) else enumerate(said):
        alike.setdefault(words, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {words}" for words, ranks in alike.items())


def name_ranks(ranks: list[int]) -> str:
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
