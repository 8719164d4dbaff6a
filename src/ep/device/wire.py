"""The fence-free protocol on the device: chunks of 16 bytes that say themselves that they are here.

A chunk is stored and loaded in one access, so that it is seen whole or not at all. Where nothing
has arrived its last word is all ones; no payload ends in that word, since each kind is coded so
that it cannot. Who reads such a chunk makes it empty again. What many read, and so nobody can, the
head of a row, the announcement and the clearance of a rank, has the number of its step instead: 64
bits, which never come round.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, Uint32, cute

from ep.device import ptx
from ep.layout import CHUNK_BYTES, NOTHING, PARITIES, EpLayout

_CANONICAL_NANS = 0x7FFF7FFF
_SCALE_BIAS = 0x04040404
"""Added to a word of scales on its way: all ones would be four scales of 251, which is none."""
NO_TOKEN = 0xFFFFFFFF
"""What the head of a row says instead of a source word: the token chose no expert here."""


def has_arrived(chunk: ptx.Vec4) -> Boolean:
    """Whether a chunk holds payload."""
    return chunk[3] != NOTHING


def words_of(step: Int64) -> tuple[Uint32, Uint32]:
    """Low and high word of a step's number."""
    return Uint32(step), Uint32(step >> 32)


def step_of(words: ptx.Vec4) -> Int64:
    """Step whose number begins a chunk."""
    return Int64(words[0]) | (Int64(words[1]) << 32)


def parity(step: Int64) -> Uint32:
    """Which half of staging, slots and announcements a step uses."""
    return Uint32(step) % PARITIES


def note(step: Int64, word: Uint32, tokens: Uint32) -> ptx.Vec4:
    """A head, with its source word, or what a rank says; with the sender's tokens, if any."""
    return *words_of(step), Uint32(word), Uint32(tokens)


def source_of(head: ptx.Vec4) -> Uint32:
    """Source word in the head of a row, or `NO_TOKEN`."""
    return head[2]


def tokens_of(chunk: ptx.Vec4) -> Int32:
    """Tokens that the sender of a head or an announcement sends in its step."""
    return Int32(chunk[3])


@cute.jit
def is_of(chunk: ptx.Vec4, step: Int64) -> Boolean:
    """Whether a head, an announcement or a clearance is of `step`, and not of one before."""
    low, high = words_of(step)
    return chunk[0] == low and chunk[1] == high


def take(addr: Int64) -> None:
    """Make a chunk of the own buffer empty again, after it was read."""
    ptx.store_b128(addr, (Uint32(NOTHING),) * 4)


@cute.jit
def seal(words: ptx.Vec4) -> ptx.Vec4:
    """8 BF16 elements for the way: two NaNs that look like nothing become two other NaNs."""
    last = words[3]
    if last == NOTHING:
        last = Uint32(_CANONICAL_NANS)
    return words[0], words[1], words[2], last


def seal_scales(words: ptx.Vec4) -> ptx.Vec4:
    """16 scale bytes for the way."""
    return tuple(word + _SCALE_BIAS for word in words)


def open_scales(words: ptx.Vec4) -> ptx.Vec4:
    """What `seal_scales` was given."""
    return tuple(word - _SCALE_BIAS for word in words)


def staged_row(layout: EpLayout, parity: Uint32, src_rank: Int32, token: Int32) -> Int64:
    """Offset of the staged row of a token in the buffer of any of its destinations."""
    staging = layout.fields["staging"]
    per_parity, per_source, per_row, _ = staging.strides_bytes
    block = Int64(parity) * per_parity + Int64(src_rank) * per_source
    return staging.offset_bytes + block + Int64(token) * per_row


def announcement(layout: EpLayout, parity: Uint32, src_rank: Int32) -> Int64:
    """Offset of the line in which `src_rank` says which step it is in, and its tokens."""
    lines = layout.fields["announcements"]
    per_parity, per_source, _ = lines.strides_bytes
    return lines.offset_bytes + Int64(parity) * per_parity + Int64(src_rank) * per_source


def clearance(layout: EpLayout, parity: Uint32, src_rank: Int32) -> Int64:
    """Offset of the chunk in which `src_rank` says with which step's dispatch it has done."""
    return announcement(layout, parity, src_rank) + CHUNK_BYTES


def slot(layout: EpLayout, parity: Uint32, token: Int32, dst_rank: Int32) -> Int64:
    """Offset of the slot that `dst_rank` stores a token's partial into, in its source's buffer."""
    slots = layout.fields["slots"]
    per_parity, per_token, per_rank, _ = slots.strides_bytes
    block = Int64(parity) * per_parity + Int64(token) * per_token
    return slots.offset_bytes + block + Int64(dst_rank) * per_rank
