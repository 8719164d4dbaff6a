"""Coordinate descent over the limits of grids. Knows neither GPUs nor clocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from ep.kernels.compile import Kind
from ep.kernels.tuning import PerSm

Choice = Mapping[Kind, PerSm]
"""Limits of dispatch and of combine."""
Grids = Callable[[Choice], Hashable]
"""What a choice comes to on this device: choices with the same grids are the same launch."""
Measure = Callable[[Sequence[Choice], str], Sequence[float] | None]
"""Time of each choice, all measured in one run; None where a check failed. The second argument says
in words what is varied."""


class Coordinate(NamedTuple):
    """A number that the search varies while the others stay."""

    kind: Kind
    role: Literal["senders", "waiters"]
    words: str


COORDINATES = (
    Coordinate(Kind.DISPATCH, "senders", "dispatch senders"),
    Coordinate(Kind.DISPATCH, "waiters", "dispatch receivers"),
    Coordinate(Kind.COMBINE, "senders", "combine senders"),
    Coordinate(Kind.COMBINE, "waiters", "combine reducers"),
)
CONFIRM = "present and winner"


def search(
    present: Choice, values: Sequence[float], grids: Grids, measure: Measure, margin: float
) -> Choice | None:
    """Look for limits that are faster than the present ones.

    Parameters
    ----------
    present : Choice
    values : sequence of float
        CTAs for each SM that each role is tried with, beside the formula.
    grids : callable
    measure : callable
    margin : float
        Part of the time by which a choice must be faster to take another's place: 0.02 is 2 %. So
        noise changes nothing, and what is kept is simple.

    Returns
    -------
    Choice or None
        One that beat the present one by the margin twice, along the way and at last side by side;
        else the present one. None where `measure` gave None.
    """
    best = present
    for coordinate in COORDINATES:
        field = candidates(best, coordinate, values, grids)
        if len(field) == 1:
            continue
        times = measure(field, coordinate.words)
        if times is None:
            return None
        best = winner(field, times, margin)
    if best is present:
        return present
    # The best of many is partly luck, and several small steps should come to one that counts.
    times = measure([present, best], CONFIRM)
    return None if times is None else winner([present, best], times, margin)


def candidates(
    best: Choice, coordinate: Coordinate, values: Sequence[float], grids: Grids
) -> list[Choice]:
    """Give `best`, then what differs from it in `coordinate` and in its grids."""
    kind, role, _ = coordinate
    found = {grids(best): best}
    for value in (None, *values):
        one = dict(best) | {kind: best[kind]._replace(**{role: value})}
        found.setdefault(grids(one), one)
    return list(found.values())


def winner(field: Sequence[Choice], times: Sequence[float], margin: float) -> Choice:
    """Give the fastest if it beats the first by `margin`, else the first."""
    fastest = min(range(len(field)), key=times.__getitem__)
    return field[fastest] if times[fastest] < times[0] * (1 - margin) else field[0]
