"""Small concurrent programs in PTX, and all the outcomes that some seeds give."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.codegen import load
from tests.ptx.machine import Machine, Mode

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

    Bodies use [x], [y], [z], registers %a0... (32 bits) and %b0... (128 bits), and `barrier`.
    """

    rank: int
    bodies: tuple[str, ...]


def on(rank: int, *bodies: str) -> Cta:
    return Cta(rank, bodies)


def outcomes(
    ctas: list[Cta], results: list[str], modes: tuple[Mode, ...], seeds: int = SEEDS
) -> Iterator[tuple[int, ...]]:
    """Run under many seeds; a result is "cta.warp.register" or the final value of a location."""
    for seed in range(seeds):
        for mode in modes:
            yield _run(ctas, results, mode, seed)


def _run(ctas: list[Cta], results: list[str], mode: Mode, seed: int) -> tuple[int, ...]:
    machine = Machine(1 + max(cta.rank for cta in ctas), seed, mode)
    memory = machine.memory
    cells = memory.allocate(np.zeros(3 * CELL, np.uint8), 0)
    peer = memory.alias(cells, 0)
    out = []
    for cta in ctas:
        out.append(memory.allocate(np.zeros((len(cta.bodies), 8), np.uint32), cta.rank))
        program = load(_source(cta))
        args = [peer if cta.rank else cells, out[-1]]
        machine.stream(cta.rank).launch(program, 1, 32 * len(cta.bodies), args, pdl=False)
    machine.run()
    values = []
    for name in results:
        if name in _PLACES:
            values.append(int(memory.peek(cells + _PLACES[name], 4).view(np.uint32)[0]))
        else:
            cta_idx, warp, register = name.split(".")
            words = memory.peek(out[int(cta_idx)] + 32 * int(warp), 32).view(np.uint32)
            values.append(int(words[int(register[1:])]))
    return tuple(values)


def _source(cta: Cta) -> str:
    lines = [
        ".visible .entry litmus(.param .u64 cells, .param .u64 out)",
        "{",
        ".reg .pred %p<2>; .reg .b32 %t<1>; .reg .b32 %a<8>; .reg .b64 %c<2>; .reg .b64 %q<4>;",
        ".reg .b128 %b<2>;",
        "ld.param.b64 %c0, [cells];",
        "ld.param.b64 %c1, [out];",
        "mov.u32 %t0, %tid.x;",
    ]
    sections = [body.split("barrier;") for body in cta.bodies]
    for part in range(max(map(len, sections))):
        if part:
            lines.append("bar.sync 0;")
        for warp, section in enumerate(sections):
            label = f"$L_{part}_{warp}"
            body = re.sub(r"\[([xyz])\]", lambda at: f"[%c0+{_PLACES[at[1]]}]", section[part])
            lines += [f"setp.ne.b32 %p0, %t0, {32 * warp};", f"@%p0 bra {label};", body]
            lines += [f"{label}:"]
    for warp, body in enumerate(cta.bodies):
        label = f"$E_{warp}"
        lines += [f"setp.ne.b32 %p0, %t0, {32 * warp};", f"@%p0 bra {label};"]
        for register in sorted(set(re.findall(r"%a\d", body))):
            lines.append(f"st.global.b32 [%c1+{32 * warp + 4 * int(register[2:])}], {register};")
        lines.append(f"{label}:")
    return "\n".join([*lines, "ret;", "}"])
