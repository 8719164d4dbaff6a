"""Small concurrent programs in PTX, and all the outcomes that some seeds give."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.codegen import load
from tests.ptx.machine import Machine, Mode
from tests.ptx.views import Boundary

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = 40
"""Of each mode, in which something forbidden must not show."""
CELL = 128
"""Bytes from one location to the next."""
_PLACES = {"x": 0, "y": CELL, "z": 2 * CELL}


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of one warp for each body, of which lane 0 runs it; `rank` is its GPU.

    Bodies use [x], [y], [z], [x+4]..., registers %a0... (32 bits) and %b0... (128 bits), and
    `barrier`. At `boundary` the kernel ends and the next one of the stream goes on; registers do
    not last, but each %a counts as a result where it was last used. With `pdl` each kernel lets the
    next one start at once, which then waits.
    """

    rank: int
    bodies: tuple[str, ...]
    pdl: bool = False


def on(rank: int, *bodies: str, pdl: bool = False) -> Cta:
    return Cta(rank, bodies, pdl)


def outcomes(
    ctas: list[Cta],
    results: list[str],
    modes: tuple[Mode, ...],
    seeds: int = SEEDS,
    boundary: Boundary = Boundary.PLAIN,
) -> Iterator[tuple[int, ...]]:
    """Run under many seeds; a result is "cta.warp.register" or the final value of a location."""
    for seed in range(seeds):
        for mode in modes:
            machine = Machine(1 + max(cta.rank for cta in ctas), seed, mode, boundary=boundary)
            yield _run(machine, ctas, results)


def _run(machine: Machine, ctas: list[Cta], results: list[str]) -> tuple[int, ...]:
    memory = machine.memory
    cells = memory.allocate(np.zeros(3 * CELL, np.uint8), 0)
    peer = memory.alias(cells, 0)
    out = []
    for cta in ctas:
        out.append(memory.allocate(np.zeros((len(cta.bodies), 8), np.uint32), cta.rank))
        args = [peer if cta.rank else cells, out[-1]]
        stream = machine.stream(cta.rank)
        for bodies in zip(*(body.split("boundary;") for body in cta.bodies), strict=True):
            source = _source(bodies, pdl=cta.pdl)
            stream.launch(load(source), 1, 32 * len(bodies), args, pdl=cta.pdl)
    machine.run()
    values = []
    for name in results:
        if name[0] in _PLACES:
            at = cells + _PLACES[name[0]] + int(name[1:] or 0)
            values.append(int(memory.peek(at, 4).view(np.uint32)[0]))
        else:
            cta_idx, warp, register = name.split(".")
            words = memory.peek(out[int(cta_idx)] + 32 * int(warp), 32).view(np.uint32)
            values.append(int(words[int(register[1:])]))
    return tuple(values)


def _source(bodies: tuple[str, ...], *, pdl: bool) -> str:
    lines = [
        ".visible .entry litmus(.param .u64 cells, .param .u64 out)",
        "{",
        ".reg .pred %p<2>; .reg .b32 %t<1>; .reg .b32 %a<8>; .reg .b64 %c<2>; .reg .b64 %q<4>;",
        ".reg .b128 %b<2>;",
        *(["griddepcontrol.launch_dependents;", "griddepcontrol.wait;"] if pdl else []),
        "ld.param.b64 %c0, [cells];",
        "ld.param.b64 %c1, [out];",
        "mov.u32 %t0, %tid.x;",
    ]
    sections = [body.split("barrier;") for body in bodies]
    for part in range(max(map(len, sections))):
        if part:
            lines.append("bar.sync 0;")
        for warp, section in enumerate(sections):
            label = f"$L_{part}_{warp}"
            body = re.sub(
                r"\[([xyz])(\+\d+)?\]",
                lambda at: f"[%c0+{_PLACES[at[1]] + int(at[2] or 0)}]",
                section[part],
            )
            lines += [f"setp.ne.b32 %p0, %t0, {32 * warp};", f"@%p0 bra {label};", body]
            lines += [f"{label}:"]
    for warp, body in enumerate(bodies):
        label = f"$E_{warp}"
        lines += [f"setp.ne.b32 %p0, %t0, {32 * warp};", f"@%p0 bra {label};"]
        for register in sorted(set(re.findall(r"%a\d", body))):
            lines.append(f"st.global.b32 [%c1+{32 * warp + 4 * int(register[2:])}], {register};")
        lines.append(f"{label}:")
    return "\n".join([*lines, "ret;", "}"])
