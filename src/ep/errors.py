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


MAX_SHOWN = 200
"""Characters of a value that an error repeats."""


def shown(value: object) -> str:
    """Give `repr(value)` for an error: cut, and in words where it has none."""
    try:
        words = repr(value)
    except Exception:  # noqa: BLE001 - an int of thousands of digits, or whatever a stranger raises
        return f"<{type(value).__name__}>"
    return cut(words)


def cut(words: str) -> str:
    """Give the beginning of what may be long."""
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}..."


class EpError(Exception):
    """Base of every exception of this library.

    Attributes
    ----------
    on_every_rank : bool
        Whether every rank raises it, in the same words, so that one may tell it for all.
    on_whole_node : bool
        The same of the ranks of this node, though of others nothing is known.
    """

    on_every_rank = False
    on_whole_node = False


class ConfigError(EpError, ValueError):
    """A field of a configuration is outside the contract."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        super().__init__(f"{cut(field)}={shown(given)} is not allowed: {allowed}")
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
        Ranks whose process has ended, awaited or not, and their nodes; "" for one that was never
        told. Over MPI nothing is known of other machines; over TCP a lost connection counts, too.
    notes : tuple of str
        What else was seen while waiting.
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
        notes: Sequence[str] = (),
    ) -> None:
        where = f"{phase} of step {step}" if step else phase
        steps = ", ".join(map(str, sorted(set(seen)) if len(set(seen)) == 1 else seen))
        last = f" (their last seen step: {steps})" if seen else ""
        dead = "".join(
            f"; rank {one}'s process{f' on node {node}' * bool(node)} is gone"
            for one, node in (gone or {}).items()
        )
        dead += "".join(f"; {note}" for note in notes)
        remedy = "look at those ranks' logs first"
        if gone and step:
            remedy = "go on without the dead by Exchange.exclude, or end the job"
        elif step:
            remedy += "; if they are merely slow, go on by Exchange.reset, and raise the timeout"
        elif not gone:
            remedy += ", and raise the timeout only if they are slow"
        super().__init__(
            f"rank {rank}: {where} waited {waited_s:.1f} s for {name_ranks(awaited)}{last}{dead}; "
            f"{remedy}"
        )
        self.phase = phase
        self.step = step
        self.rank = rank
        self.awaited = awaited
        self.seen = seen
        self.waited_s = waited_s
        self.gone = dict(gone or {})
        self.notes = tuple(notes)

    def __reduce__(self) -> tuple[type[EpTimeout], tuple[object, ...]]:
        fields = (self.phase, self.step, self.rank, self.awaited, self.seen, self.waited_s)
        return type(self), (*fields, self.gone, self.notes)


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
