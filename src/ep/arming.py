"""What a buffer holds between steps: the words that `EpLayout`'s fields are filled with.

Data alone, so that every backend, and engines with memory of their own, write the same bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ep.config import Protocol
from ep.layout import CHUNK_BYTES, EMPTY_SOURCE, LINE_BYTES, NOTHING, PARITIES

if TYPE_CHECKING:
    from ep.layout import EpLayout

CLEARANCE_WORD = CHUNK_BYTES // 4
"""Of an announcement's line: chunk 1 holds the step that its rank has given clearance of."""


class Unknown(StrEnum):
    """A word that is known only where a buffer is armed."""

    EMPTY_ID = "empty_id"
    """`EpConfig.empty_id` of the rank."""
    STEP_LOW = "step_low"
    """Of the step that the buffer is armed as after."""
    STEP_HIGH = "step_high"


class Fill(NamedTuple):
    """Words of a buffer that are alike.

    Attributes
    ----------
    offset_bytes : int
        Of the first, from the buffer's base.
    width_words : int
        Words side by side.
    height : int
        How many times.
    pitch_bytes : int
        Distance of these.
    word : int or Unknown
    """

    offset_bytes: int
    width_words: int
    height: int
    pitch_bytes: int
    word: int | Unknown

    def value(self, layout: EpLayout, rank: int, step: int) -> int:
        """Give the word of `rank`'s buffer as after `step`, as uint32."""
        match self.word:
            case Unknown.EMPTY_ID:
                word = layout.config.empty_id(rank)
            case Unknown.STEP_LOW:
                word = step
            case Unknown.STEP_HIGH:
                word = step >> 32
            case _:
                word = self.word
        return word & 0xFFFFFFFF


def fills(layout: EpLayout) -> tuple[Fill, ...]:
    """Give what arms a buffer of `layout`, in the order in which it is written.

    The kernels' buffers alone: the host backend counts in its own way.
    """
    is_fence_free = layout.config.protocol is Protocol.FENCE_FREE
    words: dict[str, int | Unknown] = {"header": EMPTY_SOURCE, "ids": Unknown.EMPTY_ID}
    if is_fence_free:
        words |= {"slots": NOTHING, "staging": NOTHING}
    made = [Fill(0, layout.total_bytes // 4, 1, layout.total_bytes, 0)]
    for name, word in words.items():
        field = layout.fields[name]
        made.append(Fill(field.offset_bytes, field.size_bytes // 4, 1, field.size_bytes, word))
    # Both lines of the fence-free protocol; the flag protocol counts in the first one alone.
    made += _steps(layout, "control", 0, 1 + is_fence_free)
    if is_fence_free:
        # As if every rank had given its clearance of the step: the next dispatch waits for it.
        made += _steps(layout, "announcements", CLEARANCE_WORD, PARITIES * layout.config.ranks)
    return tuple(made)


def _steps(layout: EpLayout, name: str, first_word: int, lines: int) -> list[Fill]:
    """Put the step into two words of each of a field's first lines."""
    offset = layout.fields[name].offset_bytes + 4 * first_word
    return [
        Fill(offset + 4 * place, 1, lines, LINE_BYTES, word)
        for place, word in enumerate((Unknown.STEP_LOW, Unknown.STEP_HIGH))
    ]
