"""MXFP8 on the device: two neighbouring lanes quantize a 32-block, 16 elements each.

The rules are those of `ep.reference.mxfp8_quantize`, for every BF16 pattern. Amax and scale are
integers; an element is one exact FP32 product, so no flush-to-zero mode can reach it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32, cute, range_constexpr

from ep.device import ptx

BLOCK_LANES = 2
_ABS = 0x7FFF7FFF
_INF = 0x7F80


@cute.jit
def block_amax(words: Sequence[Uint32]) -> Uint32:
    """BF16 bits of the greatest magnitude of the block; above Inf where it counts as NaN.

    `words` are the lane's 8 BF16 pairs. All lanes take part; both lanes of a block agree.
    """
    top = words[0] & _ABS
    for idx in range_constexpr(1, len(words)):
        top = ptx.max_bf16x2(top, words[idx] & _ABS)
    top = ptx.max_bf16x2(top, ptx.shfl_xor(top, 1))
    even, odd = top & 0xFFFF, top >> 16
    # The odd half wins unless the even one compares greater, which a NaN does not.
    if even > _INF:
        even = Uint32(0)
    amax = odd
    if even > odd:
        amax = even
    return amax


@cute.jit
def scale_byte(amax: Uint32) -> Uint32:
    """E8M0 byte: amax / 448 rounded up to a power of two. 254 for Inf, 255 for NaN."""
    # Adding 0x1f carries into the exponent where the mantissa is above 1.75.
    biased = (amax + 0x1F) >> 7
    byte = Uint32(0)
    if biased > 8:
        byte = biased - 8
    if amax == _INF:
        byte = Uint32(254)
    if amax > _INF:
        byte = Uint32(255)
    return byte


@cute.jit
def scale_factor(byte: Uint32) -> Float32:
    """`2 ** (127 - byte)`, but 0 where the byte is 0, 254 or 255."""
    exponent = Uint32(0)
    if byte > 0 and byte < 254:
        exponent = (254 - byte) << 23
    return ptx.as_f32(exponent)


def quantize(words: Sequence[Uint32], factor: Float32) -> ptx.Vec4:
    """16 E4M3 elements of the lane's 8 BF16 pairs."""
    halves = []
    for word in words:
        even, odd = (
            # NaN, and Inf times a factor of 0, become +448; the factor keeps the rest within it.
            ptx.min_f32(ptx.mul_f32(value, factor), Float32(448.0))
            for value in ptx.cvt_f32x2(word)
        )
        halves.append(ptx.cvt_e4m3x2(even, odd))
    packed = [low | (high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    return packed[0], packed[1], packed[2], packed[3]


@cute.jit
def pack_scales(byte: Uint32, width: int) -> list[Uint32]:
    """`width` bytes of neighbouring blocks, as words; valid in lanes 0, 2 * width, 4 * width...

    All lanes take part.
    """
    lane = cute.arch.lane_idx()
    word = byte
    if width > 1:
        word = byte << (8 * (Uint32(lane // BLOCK_LANES) % min(width, 4)))
        word = word | ptx.shfl_xor(word, 2)
    if width > 2:
        word = word | ptx.shfl_xor(word, 4)
    return [word, *(ptx.shfl_down(word, 8 * idx) for idx in range(1, width // 4))]


def gather_scales(byte: Uint32) -> ptx.Vec4:
    """The warp's 16 scale bytes as 4 words, in every lane. All lanes take part."""
    lane = cute.arch.lane_idx()
    word = byte << (8 * (Uint32(lane // BLOCK_LANES) % 4))
    word = word | ptx.shfl_xor(word, 2)
    word = word | ptx.shfl_xor(word, 4)
    return ptx.shfl(word, 0), ptx.shfl(word, 8), ptx.shfl(word, 16), ptx.shfl(word, 24)
