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


class Boundary(enum.Enum):
    """What the end of a kernel and the start of the next one in its stream order."""

    PLAIN = "plain"
    """What PTX says: the next kernel's threads know what the last one's did and saw."""
    ORDERS = "orders"
    """The same, and each is also a `fence.acq_rel.sys` of every thread: relaxed loads before it
    acquire, relaxed stores after it release. PTX does not promise that."""


@dataclasses.dataclass(frozen=True)
class Access:
    """What decides whether an access and a strong write meet: how they are ordered, how wide.

    `level` is the scope of a strong access, None for a weak one; `width` the bytes that are one
    scalar, and so one single-copy access if it is strong.
    """

    level: int | None
    width: int = 4

    @classmethod
    def of(cls, order: str, scope: str, width: int) -> Access:
        return cls(None if order == "weak" else SCOPES[scope], width)


WEAK = Access(None)


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
    width: int


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
        Newest write that it has stored, or met with a morally strong load, by slot: its later
        accesses there, weak or strong, come after that one.
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

    def meets(self, sent: Message | None, access: Access) -> bool:
        """Whether an access of this thread and a strong write are morally strong."""
        return (
            sent is not None
            and access.level is not None
            and access.width == sent.width
            and self.distance(sent.place) <= min(access.level, sent.scope)
        )

    def close(self) -> int:
        """Give the view with what this thread wrote and saw, which others may now learn."""
        self.view |= self.observed
        if self.event:
            self.view |= 1 << self.event
            self.event = 0
        return self.view

    def end(self, boundary: Boundary) -> int:
        """Give what the thread's kernel passes on when it ends."""
        if boundary is Boundary.ORDERS:
            self.view |= union(self.pending)
        return self.close()

    def follow(self, view: int, boundary: Boundary) -> None:
        """Go on after the kernels that have left `view`."""
        self.view |= view
        if boundary is Boundary.ORDERS:
            self.released = [known | view for known in self.released]


def union(views: Iterable[int]) -> int:
    """All events of some views, most of which are one object."""
    view = 0
    for other in {id(one): one for one in views}.values():
        view |= other
    return view
