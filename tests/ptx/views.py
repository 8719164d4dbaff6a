"""What threads know: views, as bits for events, and the messages that carry them."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SCOPES = {"cta": 0, "gpu": 1, "sys": 2}


class Choice(enum.Enum):
    """Which of the writes that the model allows a load gives."""

    NEWEST = "newest"
    RANDOM = "random"
    OLDEST = "oldest"


@dataclasses.dataclass(frozen=True)
class Message:
    """What a strong write carries; it is an event of its own.

    `views[r]` is what it releases to a reader that is r away: in the CTA, on the GPU, elsewhere.
    """

    place: tuple[int, int]
    scope: int
    event: int
    views: tuple[int, int, int]
    is_atomic: bool


@dataclasses.dataclass
class Thread:
    """A thread's part in the memory model.

    Attributes
    ----------
    place : (int, int)
        Number of its CTA, unique in the run, and rank.
    view : int
        Events it knows.
    event : int
        The event of its weak writes since its last release; 0 where there were none.
    released : list of int
        What a relaxed store releases: the view at the last fence of at least each scope.
    pending : list of int
        What relaxed loads have seen, by distance of the writer, for a fence to acquire.
    observed : int
        Strong writes read: known to whom this thread releases to, not yet to itself.
    floors : dict
        Newest write that a strong access has met, by slot: those of one thread never go back.
    """

    place: tuple[int, int]
    view: int
    event: int = 0
    released: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    pending: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    observed: int = 0
    floors: dict[int, int] = dataclasses.field(default_factory=dict)

    def distance(self, other: tuple[int, int]) -> int:
        if self.place[0] == other[0]:
            return 0
        return 1 if self.place[1] == other[1] else 2

    def close(self) -> int:
        """Give the view with what this thread wrote and saw, which others may now learn."""
        self.view |= self.observed
        if self.event:
            self.view |= 1 << self.event
            self.event = 0
        return self.view


def union(views: Iterable[int]) -> int:
    """All events of some views, most of which are one object."""
    view = 0
    for other in {id(one): one for one in views}.values():
        view |= other
    return view
