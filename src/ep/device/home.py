"""The own buffer of a rank, as its kernels see it."""

from __future__ import annotations

import dataclasses
from enum import IntEnum

from cutlass import Boolean, Int32, Int64

from ep.device import ptx, rows, wire
from ep.layout import LINE_BYTES, EpLayout


class Control(IntEnum):
    """Line of each word of the `control` field. Only its owner touches it."""

    DISPATCHED = 0
    """Words 0 and 1: number of the last dispatch's step. Word 2: 1 once a wait has expired."""
    COMBINED = 1
    """The same of the last combine."""
    EXPIRED = 2
    """Word 0: 1 once a wait has expired. Words 1..3, bit r: one was for rank r."""


STEP_LINES = (Control.DISPATCHED, Control.COMBINED)
STOPPED_WORD = 2
"""Of the lines that kernels begin with: what tells that a kernel before gave up. Beside the step,
so that no kernel reads one word more for it."""


@dataclasses.dataclass(frozen=True)
class Home:
    """The own buffer, through the own mapping.

    Attributes
    ----------
    layout : EpLayout
    base : Int64
    rank : Int32
    """

    layout: EpLayout
    base: Int64
    rank: Int32

    @classmethod
    def load(cls, layout: EpLayout, table: Int64, rank: Int32) -> Home:
        """Read the base from `table`, the device address of `[ranks + 1]` int64: the last one."""
        return cls(layout, ptx.load_b64(table + 8 * layout.config.ranks), rank)

    def field(self, name: str) -> Int64:
        """Address of a field."""
        return self.base + self.layout.fields[name].offset_bytes

    def control(self, line: Control) -> Int64:
        """Address of a line of the control field."""
        return self.field("control") + LINE_BYTES * line

    def load_step(self, line: Control) -> tuple[Int64, Boolean]:
        """Step in a line of the control field, and whether a kernel before this one gave up.

        Weak, so that the L1 serves all warps of an SM. The second may be set while this kernel
        runs: a uniform race, in which either value is right.
        """
        words = ptx.load_v4(self.control(line))
        return wire.step_of(words), words[STOPPED_WORD] != 0

    def row(self, src_rank: Int32, token: Int32) -> Int64:
        """Receive row of a token."""
        return Int64(src_rank) * rows.stride(self.layout.config) + Int64(token)
