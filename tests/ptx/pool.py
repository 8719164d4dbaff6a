"""Registers of all threads of one program, on all ranks, so that they can run as one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.views import Thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.ptx.codegen import Program

_GARBAGE = 0xDEADBEEF


class Pool:
    """Arrays `[registers, lanes]` by kind, and what special registers give."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._free: list[tuple[int, int]] = []
        self.capacity = 0
        self.threads: list[Thread] = []
        self.warps: list[Any] = []
        self.pred = np.zeros((program.counts["pred"], 0), bool)
        self.u16 = np.zeros((program.counts["u16"], 0), np.uint16)
        self.u32 = np.zeros((program.counts["u32"], 0), np.uint32)
        self.u64 = np.zeros((program.counts["u64"], 0), np.uint64)
        self.u128 = np.zeros((program.counts["u128"], 0, 2), np.uint64)
        self.param = np.zeros((len(program.parsed.params), 0), np.uint64)
        self.tid, self.ctaid, self.nctaid, self.laneid = np.zeros((4, 0), np.uint32)
        self.shared_base = np.zeros(0, np.uint64)
        self.rank = np.zeros(0, np.int64)

    def reserve(self, size: int) -> int:
        """Find room for `size` lanes in a row."""
        for idx, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[idx] = (start + size, room - size)
                return start
        start = self.capacity
        self._grow(size)
        return start

    def release(self, start: int, size: int) -> None:
        """Give lanes back."""
        self._free.append((start, size))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for begin, room in self._free:
            if not room:
                continue
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self._free = merged

    def start(
        self,
        first: int,
        size: int,
        args: Sequence[int],
        ctaid: int,
        nctaid: int,
        rank: int,
        shared: int,
        threads: list[Thread],
    ) -> None:
        """Make a CTA of `size` lanes from `first` on; its registers hold garbage."""
        lanes = slice(first, first + size)
        self.u32[:, lanes] = _GARBAGE
        self.u64[:, lanes] = _GARBAGE
        for idx, arg in enumerate(args):
            self.param[idx, lanes] = arg & 0xFFFFFFFFFFFFFFFF
        self.tid[lanes] = np.arange(size)
        self.laneid[lanes] = np.arange(size) % 32
        self.ctaid[lanes] = ctaid
        self.nctaid[lanes] = nctaid
        self.rank[lanes] = rank
        self.shared_base[lanes] = shared
        self.threads[lanes] = threads

    def lanes(self, select: Any) -> Any:
        if isinstance(select, slice):
            return np.arange(select.start, select.stop)
        return select

    def size(self, select: Any) -> int:
        return select.stop - select.start if isinstance(select, slice) else len(select)

    def shared(self, select: Any, offset: int) -> Any:
        """Address of a shared variable, as the program sees it."""
        return np.full(self.size(select), offset, np.uint32)

    def shared_at(self, select: Any, offset: Any) -> Any:
        """Global address of a shared one."""
        return self.shared_base[select] + offset.astype(np.uint64)

    def _grow(self, size: int) -> None:
        self.capacity += size
        for name in ("pred", "u16", "u32", "u64", "u128", "param"):
            array = getattr(self, name)
            more = np.zeros((array.shape[0], size, *array.shape[2:]), array.dtype)
            setattr(self, name, np.concatenate([array, more], axis=1))
        for name in ("tid", "ctaid", "nctaid", "laneid", "shared_base", "rank"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(size, array.dtype)]))
        self.threads += [Thread((0, 0), 0)] * size
        self.warps += [None] * (size // 32)
