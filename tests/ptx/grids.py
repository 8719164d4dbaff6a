"""What runs on a GPU: streams, kernels, their CTAs and warps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.ptx.codegen import Program
    from tests.ptx.late import Late
    from tests.ptx.pool import Pool

WARP = 32


@dataclasses.dataclass(eq=False)
class Part:
    """Lanes of a warp that are at one place; `lanes` is None where it is all of them."""

    warp: Warp
    segment: int
    lanes: Any = None


@dataclasses.dataclass(eq=False)
class Warp:
    """32 threads, from `base` on in the pool; `late` are loads that some have put off."""

    cta: Cta
    base: int
    parts: list[Part] = dataclasses.field(default_factory=list)
    num_left: int = WARP
    late: list[Late] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Cta:
    """Warps that share memory and barriers."""

    grid: Grid
    uid: int
    warps: list[Warp] = dataclasses.field(default_factory=list)
    at_barrier: list[Part] = dataclasses.field(default_factory=list)
    num_left: int = 0
    has_triggered: bool = False


@dataclasses.dataclass(eq=False)
class Grid:
    """A kernel that runs."""

    pool: Pool
    rank: int
    before: Grid | None
    base: int
    ctas: list[Cta] = dataclasses.field(default_factory=list)
    waiting: list[Part] = dataclasses.field(default_factory=list)
    view_before: int = 0
    is_done: bool = False


@dataclasses.dataclass(eq=False)
class Launch:
    """A kernel in a stream, or a function of the host that runs between kernels."""

    program: Program | None
    num_ctas: int = 0
    threads: int = 0
    args: Sequence[int] = ()
    pdl: bool = False
    call: Callable[[int], list[int]] | None = None


@dataclasses.dataclass(eq=False)
class Stream:
    """Work of one rank in order; `view` is what has come of the work that ended."""

    rank: int
    queue: list[Launch] = dataclasses.field(default_factory=list)
    running: list[Grid] = dataclasses.field(default_factory=list)
    view: int = 0

    def launch(
        self, program: Program, num_ctas: int, threads: int, args: Sequence[int], *, pdl: bool
    ) -> None:
        """Enqueue a kernel; with `pdl` it may start once the one before has triggered it."""
        self.queue.append(Launch(program, num_ctas, threads, args, pdl))

    def call(self, function: Callable[[int], list[int]]) -> None:
        """Enqueue a function: of the stream's view, gives the events of its own writes."""
        self.queue.append(Launch(None, call=function))
