"""GPUs that run PTX: streams of kernels, their CTAs and warps, interleaved as a seed has it.

A warp may split at branches; its parts meet again where they reach the same place. What needs
all lanes of the warp waits for them, and a CTA barrier for all warps.
"""

from __future__ import annotations

import enum
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.grids import WARP, Cta, Grid, Launch, Part, Stream, Warp
from tests.ptx.late import LateLoads, lanes_of
from tests.ptx.memory import Memory
from tests.ptx.parse import UnknownPtx
from tests.ptx.pool import Pool
from tests.ptx.views import Boundary, Choice, Thread, union

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ptx.codegen import Program

IDLE_STEPS = 4000
"""Scheduler steps without a changed word, an arrival or an exit until all are taken to hang."""
FREEZE_STEPS = 250


class Hang(Exception):
    """Nothing can run any more, or what runs changes nothing."""


class Mode(enum.Enum):
    """How the machine chooses where it may."""

    BENIGN = "benign"
    """Writes are seen at once; all who can, go on."""
    RANDOM = "random"
    """Any allowed write; some ranks, CTAs or warps stand still for a while."""
    ADVERSARIAL = "adversarial"
    """The same with the oldest allowed write."""
    UNFAIR = "unfair"
    """Writes are seen at once; half of the warps stand still for long."""


_CHOICES = {
    Mode.BENIGN: Choice.NEWEST,
    Mode.RANDOM: Choice.RANDOM,
    Mode.ADVERSARIAL: Choice.OLDEST,
    Mode.UNFAIR: Choice.NEWEST,
}


class Machine:
    """`ranks` GPUs with one memory model.

    Parameters
    ----------
    ranks : int
    seed : int
    mode : Mode
    tick_ns : int
        What one step of the scheduler adds to the global timer.
    boundary : Boundary
    """

    def __init__(
        self,
        ranks: int,
        seed: int,
        mode: Mode,
        tick_ns: int = 100,
        boundary: Boundary = Boundary.PLAIN,
    ) -> None:
        self.mode, self.tick_ns, self.boundary = mode, tick_ns, boundary
        self.rng = np.random.default_rng(seed)
        self.random = random.Random(seed)
        self.memory = Memory(seed, _CHOICES[mode], ranks)
        self.late = LateLoads(self, self.random)
        self.streams: list[Stream] = []
        self.steps = 0
        self._pools: dict[int, Pool] = {}
        self._ready: dict[tuple[int, int], list[Part]] = {}
        self._num_ctas = 0
        self._progress = 0
        self.idle_steps = IDLE_STEPS
        self._may_start = True
        self._frozen: Callable[[Part], bool] | None = None
        self._thaw_at = 0

    def stream(self, rank: int) -> Stream:
        """Make a stream of `rank`."""
        self.streams.append(Stream(rank))
        return self.streams[-1]

    def run(self, *, settle: bool = True) -> None:
        """Run until all streams are empty, as a host that waits for all of them.

        Without `settle` the host has not waited: writes may still be on their way.
        """
        last_change, since = -1, self.steps
        self._may_start = True
        with np.errstate(all="ignore"):
            while True:
                if self._may_start:
                    self._start_kernels()
                if not self._ready:
                    if any(stream.queue or stream.running for stream in self.streams):
                        raise Hang("threads wait for others that do not come")
                    break
                self._step()
                self.steps += 1
                if self.memory.changes + self._progress != last_change:
                    last_change, since = self.memory.changes + self._progress, self.steps
                    self._may_start = True
                elif self.steps - since > self.idle_steps:
                    raise Hang("threads poll for what does not come")
        if settle:
            self.memory.settle()
            for stream in self.streams:
                stream.view = 0

    # What segments call.

    def globaltimer(self, pool: Pool, select: Any) -> Any:
        return np.full(pool.size(select), 10**15 + self.steps * self.tick_ns, np.uint64)

    def launch_dependents(self, pool: Pool, select: Any) -> None:
        for cta in {pool.warps[lane // WARP].cta for lane in pool.lanes(select).tolist()}:
            if not cta.has_triggered:
                cta.has_triggered = True
                self._progress += 1

    def reduce_and(self, holds: Any) -> Any:
        return np.full(holds.shape, holds.all())

    def check_mask(self, mask: Any) -> None:
        if (mask != 0xFFFFFFFF).any():
            raise UnknownPtx("a warp operation of some lanes alone")

    # Kernels.

    def _start_kernels(self) -> None:
        self._may_start = False
        for stream in self.streams:
            while stream.queue:
                head, last = stream.queue[0], stream.running[-1] if stream.running else None
                if last is not None:
                    triggered = all(cta.has_triggered or not cta.num_left for cta in last.ctas)
                    if not (head.pdl and triggered) or len(stream.running) > 2:
                        break
                    if self.mode is not Mode.BENIGN and self.random.randrange(4):
                        self._may_start = True
                        break
                stream.queue.pop(0)
                self._progress += 1
                if head.program is None:
                    assert head.call is not None
                    for event in head.call(stream.view):
                        stream.view |= 1 << event
                else:
                    self._start(stream, head, head.program, last)

    def _start(self, stream: Stream, launch: Launch, program: Program, before: Grid | None) -> None:
        pool = self._pools.setdefault(id(program), Pool(program))
        base = pool.reserve(launch.num_ctas * launch.threads)
        grid = Grid(pool, stream.rank, before, base, view_before=stream.view)
        for number in range(launch.num_ctas):
            self._num_ctas += 1
            cta = Cta(grid, self._num_ctas, num_left=launch.threads // WARP)
            shared = 0
            if program.parsed.shared_bytes:
                shared = self.memory.shared(program.parsed.shared_bytes, stream.rank)
            first = base + number * launch.threads
            threads = [Thread((cta.uid, stream.rank), 0) for _ in range(launch.threads)]
            if before is None and not launch.pdl:
                # Otherwise nothing is known of the kernels before until the wait for them.
                for thread in threads:
                    thread.follow(stream.view, self.boundary)
            pool.start(
                first,
                launch.threads,
                launch.args,
                number,
                launch.num_ctas,
                stream.rank,
                shared,
                threads,
            )
            for start in range(first, first + launch.threads, WARP):
                warp = Warp(cta, start)
                cta.warps.append(warp)
                pool.warps[start // WARP] = warp
                self._arrive(Part(warp, 0))
            grid.ctas.append(cta)
        stream.running.append(grid)

    def _exit(self, part: Part) -> None:
        warp, cta = part.warp, part.warp.cta
        warp.num_left -= WARP if part.lanes is None else len(part.lanes)
        self._progress += 1
        if warp.num_left:
            return
        cta.num_left -= 1
        if cta.num_left and cta.at_barrier:
            raise Hang("a warp has exited, and others wait at a barrier")
        if cta.num_left:
            return
        grid = cta.grid
        if any(one.num_left for one in grid.ctas):
            return
        stream = next(one for one in self.streams if grid in one.running)
        grid.is_done = True
        pool, size = grid.pool, sum(WARP * len(one.warps) for one in grid.ctas)
        # Everything that a kernel did and saw is there for the next one.
        stream.view |= union(
            thread.end(self.boundary) for thread in pool.threads[grid.base : grid.base + size]
        )
        for cta in grid.ctas:
            if pool.program.parsed.shared_bytes:
                self.memory.give_back(int(pool.shared_base[cta.warps[0].base]))
        pool.release(grid.base, size)
        stream.running.remove(grid)
        for other in stream.running:
            if other.before is grid:
                other.before, other.view_before = None, stream.view
                self._release_waiting(other)

    def _release_waiting(self, grid: Grid) -> None:
        waiting, grid.waiting = grid.waiting, []
        for part in waiting:
            self._pass_wait(part)

    def _pass_wait(self, part: Part) -> None:
        grid = part.warp.cta.grid
        for lane in lanes_of(part).tolist():
            grid.pool.threads[lane].follow(grid.view_before, self.boundary)
        self._arrive(part, part.segment + 1)

    # Warps.

    def _arrive(self, part: Part, segment: int | None = None) -> None:
        """Bring a part, which is nowhere, to a segment."""
        warp, grid = part.warp, part.warp.cta.grid
        if segment is not None:
            part.segment = segment
        key = (id(grid.pool), part.segment)
        info = grid.pool.program.segments[part.segment]
        if info.stop:
            self.late.catch_up(grid.pool, part.segment, part)
        for other in warp.parts:
            if other.segment == part.segment and other.lanes is not None:
                lanes = np.sort(np.concatenate([lanes_of(part), other.lanes]))
                other.lanes = None if len(lanes) == WARP else lanes
                part = other
                break
        else:
            warp.parts.append(part)
        if info.whole_warp and part.lanes is not None:
            return
        if info.stop == "bar":
            self._at_barrier(part)
        elif info.stop == "wait":
            warp.parts.remove(part)
            if grid.before is None:
                self._pass_wait(part)
            else:
                grid.waiting.append(part)
        else:
            parts = self._ready.setdefault(key, [])
            if part not in parts:
                parts.append(part)

    def _at_barrier(self, part: Part) -> None:
        cta = part.warp.cta
        cta.at_barrier.append(part)
        self._progress += 1
        if len(cta.at_barrier) < len(cta.warps):
            if cta.num_left < len(cta.warps):
                raise Hang("a warp waits at a barrier, and another one has exited")
            return
        parts, cta.at_barrier = cta.at_barrier, []
        if len({one.segment for one in parts}) > 1:
            raise Hang("the warps of a CTA wait at different barriers")
        grid = cta.grid
        first = cta.warps[0].base
        select = slice(first, first + WARP * len(cta.warps))
        self.memory.join(grid.pool, select, WARP * len(cta.warps))
        grid.pool.program.functions[part.segment](grid.pool, select, self)
        for one in parts:
            one.warp.parts.remove(one)
            self._arrive(one, one.segment + 1)

    def _step(self) -> None:
        """Run one segment for some parts that are there."""
        key, parts = self._pick()
        for part in parts:
            self._ready[key].remove(part)
            part.warp.parts.remove(part)
        if not self._ready[key]:
            del self._ready[key]
        pool = parts[0].warp.cta.grid.pool
        segment = pool.program.segments[key[1]]
        if self.mode in {Mode.RANDOM, Mode.ADVERSARIAL}:
            parts = self._run_late(pool, segment.idx, parts)
            if not parts:
                return
        select = self._select(parts)
        taken = pool.program.functions[segment.idx](pool, select, self)
        branch = segment.branch
        if branch is None:
            for part in parts:
                self._arrive(part, segment.idx + 1)
        elif branch.op == "ret":
            assert taken is None
            for part in parts:
                self._exit(part)
        elif taken is None or taken.all():
            for part in parts:
                self._arrive(part, segment.target)
        elif not taken.any():
            for part in parts:
                self._arrive(part, segment.idx + 1)
        else:
            at = 0
            for part in parts:
                lanes = lanes_of(part)
                here = taken[at : at + len(lanes)]
                at += len(lanes)
                if here.all() or not here.any():
                    self._arrive(part, segment.target if here[0] else segment.idx + 1)
                else:
                    self._arrive(Part(part.warp, segment.target, lanes[here]))
                    self._arrive(Part(part.warp, segment.idx + 1, lanes[~here]))

    def _run_late(self, pool: Pool, segment: int, parts: list[Part]) -> list[Part]:
        """Run the loads that can wait no longer; gives the parts that do not put this one off."""
        for part in parts:
            self.late.catch_up(pool, segment, part)
        gone = self.late.put_off(pool, segment, parts)
        for part in gone:
            self._arrive(part, segment + 1)
        return [part for part in parts if part not in gone]

    def _select(self, parts: list[Part]) -> Any:
        """Lanes of the parts as a slice, where they are one, and in the order of the parts."""
        if all(part.lanes is None for part in parts):
            parts.sort(key=lambda part: part.warp.base)
            first, last = parts[0].warp.base, parts[-1].warp.base
            if last - first == WARP * (len(parts) - 1):
                return slice(first, last + WARP)
        return np.concatenate([lanes_of(part) for part in parts])

    def _pick(self) -> tuple[tuple[int, int], list[Part]]:
        keys = list(self._ready)
        if self.mode is Mode.BENIGN:
            key = keys[self.random.randrange(len(keys))]
            return key, list(self._ready[key])
        if self.steps >= self._thaw_at:
            self._freeze()
        key, parts = keys[0], list[Part]()
        for _ in range(4):
            key = keys[self.random.randrange(len(keys))]
            parts = [part for part in self._ready[key] if not self._is_frozen(part)]
            if parts:
                break
        else:
            parts = list(self._ready[key])
        if len(parts) > 1 and self.random.randrange(2):
            parts = self.random.sample(parts, self.random.randrange(1, len(parts) + 1))
        return key, parts

    def _is_frozen(self, part: Part) -> bool:
        return self._frozen is not None and self._frozen(part)

    def _freeze(self) -> None:
        """Choose who stands still for a while: a share of the ranks, CTAs or warps, or nobody."""
        self._thaw_at = self.steps + self.random.randrange(1, FREEZE_STEPS)
        salt, share = self.random.randrange(1 << 30), self.random.choice((2, 3, 4))
        kinds: list[Callable[[Part], Any] | None] = [
            None,
            lambda part: part.warp.cta.grid.rank,
            lambda part: part.warp.cta.uid,
            lambda part: (part.warp.cta.uid, part.warp.base),
        ]
        name = self.random.choice(kinds)
        if self.mode is Mode.UNFAIR:
            name, share = kinds[-1], 2
        self._frozen = name and (lambda part: hash((salt, name(part))) % share == 0)
