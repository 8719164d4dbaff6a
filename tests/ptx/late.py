"""Loads that take their value late: load buffering.

A load may give a write that was made after a later store of its own thread was seen, unless that
store depends on the load. So a load is put off, at the longest until an instruction uses its result
or changes its operands, touches its bytes, or releases or ends something: from there on others may
make writes that come after the load in causality order, which it must not give.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.accesses import Form, form_of
from tests.ptx.grids import WARP
from tests.ptx.parse import is_access

if TYPE_CHECKING:
    import random

    from tests.ptx.grids import Part
    from tests.ptx.machine import Machine
    from tests.ptx.parse import Instr, Parsed, Segment
    from tests.ptx.pool import Pool

LATE_IN = 4
"""Of the loads that can wait, one in so many does."""
_RELEASES = {"release", "acq_rel"}


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a segment does that a load put off may not outlast.

    Attributes
    ----------
    reads, writes : frozenset of str
        Registers.
    form : Form or None
        Its access of global memory, which is its first instruction.
    stops : bool
        Whether no load may be put off beyond it.
    can_wait : bool
        Whether it is a load that may be put off.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    form: Form | None
    stops: bool
    can_wait: bool


def needs_of(parsed: Parsed, segment: Segment) -> Needs:
    """Analyse a segment."""
    reads, writes = set[str](), set[str]()
    stops = segment.branch is not None and segment.branch.op == "ret"
    form = None
    for instr in [*segment.body, *([segment.branch] if segment.branch else [])]:
        named = [
            {name for name in re.findall(r"%?\w+", arg) if name in parsed.registers}
            for arg in instr.args
        ]
        reads |= set().union(*named) | {instr.guard}
        if named and not instr.op.startswith(("st.", "red.", "bra")):
            writes |= named[0]
        if is_access(instr.op) and not instr.op.startswith("fence."):
            form = form_of(instr)
        stops |= _stops(instr, form)
    return Needs(
        reads=frozenset(reads),
        writes=frozenset(writes),
        form=form if form is not None and form.space == "global" else None,
        stops=stops,
        can_wait=_can_wait(segment, form),
    )


def _stops(instr: Instr, form: Form | None) -> bool:
    if instr.op.startswith(("fence.", "bar.", "griddepcontrol.")):
        return True
    return form is not None and form.order in _RELEASES


def _can_wait(segment: Segment, form: Form | None) -> bool:
    return (
        form is not None
        and form.what == "ld"
        and form.space == "global"
        and form.order != "acquire"
        and segment.branch is None
        and all(instr.op.startswith(("ld.", "mov.")) for instr in segment.body)
    )


@dataclasses.dataclass(eq=False)
class Late:
    """A load that some lanes have put off: its segment, and the bytes that it will read."""

    segment: int
    needs: Needs
    lanes: Any
    first: Any
    num_bytes: int


class LateLoads:
    """Puts loads off, and runs them at the last moment at the latest.

    Parameters
    ----------
    machine : Machine
    random : random.Random
    """

    def __init__(self, machine: Machine, random: random.Random) -> None:
        self.machine, self.random = machine, random

    def put_off(self, pool: Pool, segment: int, parts: list[Part]) -> list[Part]:
        """Give the parts that wait with this load; call `catch_up` before."""
        needs = pool.program.needs[segment]
        if not needs.can_wait:
            return []
        chosen = [part for part in parts if self.random.randrange(LATE_IN) == 0]
        for part in chosen:
            lanes = lanes_of(part)
            first, num_bytes = _bytes(pool, needs.form, lanes)
            part.warp.late.append(Late(segment, needs, lanes, first, num_bytes))
        return chosen

    def catch_up(self, pool: Pool, segment: int, part: Part) -> None:
        """Run the loads that `part` may not leave behind when it runs `segment`."""
        if not part.warp.late:
            return
        needs, lanes = pool.program.needs[segment], lanes_of(part)
        for late in list(part.warp.late):
            if _collide(pool, late, needs, lanes):
                part.warp.late.remove(late)
                pool.program.functions[late.segment](pool, late.lanes, self.machine)


def lanes_of(part: Part) -> Any:
    """Lanes of the pool."""
    if part.lanes is None:
        return np.arange(part.warp.base, part.warp.base + WARP)
    return part.lanes


def _bytes(pool: Pool, form: Form | None, lanes: Any) -> tuple[Any, int]:
    assert form is not None
    base = pool.u64[pool.program.index[form.base], lanes]
    return base + np.uint64(form.offset & 0xFFFFFFFFFFFFFFFF), form.num_bytes


def _collide(pool: Pool, late: Late, needs: Needs, lanes: Any) -> bool:
    _, mine, theirs = np.intersect1d(late.lanes, lanes, return_indices=True)
    if not len(mine):
        return False
    own = late.needs
    if needs.stops or own.writes & (needs.reads | needs.writes) or own.reads & needs.writes:
        return True
    if needs.form is None:
        return False
    first, num_bytes = _bytes(pool, needs.form, lanes)
    start, begin = late.first[mine], first[theirs]
    end = begin + np.uint64(num_bytes)
    return bool(((start < end) & (begin < start + np.uint64(late.num_bytes))).any())
