"""Every exception `ep` raises on purpose: what was given, what is allowed, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "CollectiveError",
    "ConfigError",
    "DeviceError",
    "EpError",
    "EpTimeout",
    "HeapError",
    "StateError",
]


class EpError(Exception):
    """Base of every exception of this library.

    Attributes
    ----------
    on_every_rank : bool
        Whether every rank raises it, in the same words, so that one may tell it for all.
    """

    on_every_rank = False


class ConfigError(EpError, ValueError):
    """A field of a configuration is outside the contract."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        super().__init__(f"{field}={given!r} is not allowed: {allowed}")
        self.field = field
        self.given = given
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.field, self.given, self.allowed)


class ArgumentError(EpError, ValueError):
    """An argument of a call has the wrong type, shape, dtype or value; nothing was sent."""


class StateError(EpError, RuntimeError):
    """The call is not allowed now: out of order, after `close`, or on a second stream."""


class CollectiveError(EpError, RuntimeError):
    """Ranks disagree on something that must be the same everywhere; raised on every rank."""


class BootstrapError(EpError, RuntimeError):
    """The ranks could not find each other, or the launcher and its MPI disagree."""


class HeapError(EpError, RuntimeError):
    """Symmetric memory could not be had, or not be shared between the ranks."""


class DeviceError(EpError, RuntimeError):
    """A call of the CUDA driver failed."""


class EpTimeout(EpError, TimeoutError):
    """A bounded wait ended before every awaited rank arrived.

    Attributes
    ----------
    phase : str
        "dispatch", "combine", or the name of a bootstrap step.
    step : int
        Step the waiting rank is in, counted from 1; 0 outside steps.
    rank : int
        The waiting rank.
    awaited : tuple of int
        The ranks that had not arrived.
    seen : tuple of int
        For each awaited rank the last step that it was seen in; 0 if in none.
    waited_s : float
        Seconds waited.
    gone : dict of int to str
        Awaited ranks whose process has ended, and their nodes. Of processes on other machines
        nothing is known.
    """

    def __init__(
        self,
        phase: str,
        step: int,
        rank: int,
        awaited: tuple[int, ...],
        seen: tuple[int, ...],
        waited_s: float,
        gone: Mapping[int, str] | None = None,
    ) -> None:
        where = f"{phase} of step {step}" if step else phase
        words = f"rank {rank}: {where} waited {waited_s:.1f} s for {name_ranks(awaited)}"
        if seen:
            steps = sorted(set(seen)) if len(set(seen)) == 1 else seen
            words += f" (their last seen step: {', '.join(map(str, steps))})"
        for dead, node in (gone or {}).items():
            words += f"; rank {dead}'s process on node {node} is gone"
        if not gone:
            words += (
                "; look at those ranks' logs first, and raise the timeout only if they are merely "
                "slow"
            )
        elif step:
            words += "; go on without the dead by Exchange.exclude, or end the job"
        super().__init__(words)
        self.phase = phase
        self.step = step
        self.rank = rank
        self.awaited = awaited
        self.seen = seen
        self.waited_s = waited_s
        self.gone = dict(gone or {})

    def __reduce__(self) -> tuple[type[EpTimeout], tuple[object, ...]]:
        fields = (self.phase, self.step, self.rank, self.awaited, self.seen, self.waited_s)
        return type(self), (*fields, self.gone)


def name_ranks(ranks: Sequence[int]) -> str:
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
