"""The hang record: what a kernel whose wait expired leaves in host-visible memory.

One record a rank, `RECORD_WORDS` uint32 words in pinned host memory that the kernel writes through
its device alias and the host reads without a stream. `STATE` is written last. A step takes two
words, the low one first.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import TYPE_CHECKING

from ep.errors import EpTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt


class Word(IntEnum):
    """Index of each word of the record."""

    STATE = 0
    """0: nothing happened; `EXPIRED` once the other words are valid."""
    PHASE = 1
    STEP = 2
    """And what was expected of every rank."""
    RANK = 4
    WAITED_US = 5
    AWAITED = 8
    """Three words, bit r: rank r had not arrived."""


RECORD_WORDS = 32
"""One 128-byte line."""
EXPIRED = 1


class Phase(IntEnum):
    """The kernel that waited."""

    DISPATCH = 1
    COMBINE = 2


class Stamp(IntEnum):
    """When a CTA of a kernel built with stamps got how far: index of nanoseconds in its line."""

    START = 0
    READY = 1
    """The kernels before it have ended."""
    QUANTIZED = 2
    """First token or row in hand, in the form in which it travels."""
    SENT = 3
    """Last store to a peer issued."""
    FIRST = 4
    """First chunk of another rank seen."""
    LAST = 5
    """Last chunk of another rank seen."""
    DONE = 6


STAMPS = 8
"""uint64 a CTA."""


@dataclasses.dataclass(frozen=True)
class HangRecord:
    """A decoded record."""

    phase: Phase
    step: int
    rank: int
    waited_us: int
    awaited: tuple[int, ...]

    @classmethod
    def read(cls, words: npt.NDArray[np.uint32]) -> HangRecord | None:
        """Decode `words` `[RECORD_WORDS]`; None while no wait has expired."""
        if words[Word.STATE] != EXPIRED:
            return None
        bits = sum(int(words[Word.AWAITED + word]) << (32 * word) for word in range(3))
        return cls(
            Phase(int(words[Word.PHASE])),
            int(words[Word.STEP]) | int(words[Word.STEP + 1]) << 32,
            int(words[Word.RANK]),
            int(words[Word.WAITED_US]),
            tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1),
        )

    def error(self, seen: Mapping[int, int]) -> EpTimeout:
        """Give the exception; `seen` is the last step that each rank was seen in."""
        return EpTimeout(
            self.phase.name.lower(),
            self.step,
            self.rank,
            self.awaited,
            tuple(seen[rank] for rank in self.awaited),
            self.waited_us / 1e6,
        )
