"""Time stamps of a CTA's progress, in kernels that are built with them; nothing in others."""

from __future__ import annotations

import dataclasses

from cutlass import Int64, Uint32, cute

from ep.device import ptx
from ep.record import STAMPS, Stamp


@dataclasses.dataclass(frozen=True)
class Stamps:
    """Where this CTA's stamps go. Thread 0 speaks for the CTA.

    Attributes
    ----------
    line : Int64
        Device address of uint64 `[STAMPS]`.
    on : bool
        Whether the kernel is built with stamps.
    """

    line: Int64
    on: bool

    @classmethod
    def of_cta(cls, stamps: Int64, *, on: bool) -> Stamps:
        """Stamps of this CTA, of all CTAs' at `stamps`."""
        cta, _, _ = cute.arch.block_idx()
        return cls(stamps + Int64(cta) * (8 * STAMPS), on)

    def mark(self, stamp: Stamp, after: Uint32 | None = None) -> None:
        """Stamp now, or as soon as the value `after` is there."""
        if self.on:
            _mark(self.line + 8 * stamp, Uint32(0) if after is None else after)


@cute.jit
def _mark(place: Int64, after: Uint32) -> None:
    tid, _, _ = cute.arch.thread_idx()
    if tid == 0:
        ptx.store_b64(place, Int64(ptx.globaltimer_after(after)))
