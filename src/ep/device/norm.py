"""RMSNorm in the one order that `ep.reference.rms_rstd` fixes; each operation rounded on its own.

A chunk is 8 consecutive elements, one lane's 16 bytes; a segment is 32 chunks, one warp's.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32, cute

from ep.device import ptx

CHUNK = 8
SEGMENT = 32 * CHUNK
ACCUMULATORS = 4


def chunk_squares(words: Sequence[Uint32]) -> Float32:
    """Sum of the squares of a lane's 8 BF16 elements, left to right."""
    values = [value for word in words for value in ptx.cvt_f32x2(word)]
    total = ptx.mul_f32(values[0], values[0])
    for value in values[1:]:
        total = ptx.add_f32(total, ptx.mul_f32(value, value))
    return total


def segment_sum(squares: Float32) -> Float32:
    """Sum over the warp by a butterfly; the same bits in every lane. All lanes take part."""
    for distance in (16, 8, 4, 2, 1):
        squares = ptx.add_f32(squares, ptx.shfl_xor(squares, distance))
    return squares


def total_sum(segments: Sequence[Float32]) -> Float32:
    """Sum of the segments: each into accumulator `s mod 4`, then the four in pairs."""
    sums = [Float32(0.0)] * ACCUMULATORS
    for idx, segment in enumerate(segments):
        sums[idx % ACCUMULATORS] = ptx.add_f32(sums[idx % ACCUMULATORS], segment)
    return ptx.add_f32(ptx.add_f32(sums[0], sums[1]), ptx.add_f32(sums[2], sums[3]))


@cute.jit
def rms_rstd(total: Float32, hidden: int, eps: Float32) -> Float32:
    """`1 / sqrt(total / hidden + eps)`; quotient, sum and root each correctly rounded."""
    shifted = ptx.add_f32(ptx.div_f32(total, Float32(hidden)), eps)
    approx = ptx.rsqrt_approx_f32(shifted)
    refined = _newton(shifted, _newton(shifted, approx, False), True)
    # The steps turn 0 x Inf into NaN; there the approximation is exact.
    bits = ptx.as_bits(shifted)
    if bits == 0 or bits >= 0x7F800000:
        refined = approx
    return refined


def _newton(value: Float32, root: Float32, last: bool) -> Float32:
    """One step towards `value ** -0.5`.

    The residual `1 - value * root^2` keeps the tail of its product. Two steps, the last one of
    third order, take any start within 2 ulp to the correctly rounded root: shown for every
    significand by `tests/unit/test_device_math.py`.
    """
    product = ptx.mul_f32(value, root)
    tail = ptx.fma_f32(value, root, -product)
    residual = ptx.fma_f32(-product, root, Float32(1.0))
    residual = ptx.fma_f32(-tail, root, residual)
    if last:
        residual = ptx.fma_f32(ptx.mul_f32(residual, Float32(0.75)), residual, residual)
    return ptx.fma_f32(ptx.mul_f32(root, Float32(0.5)), residual, root)


def scale_chunk(words: Sequence[Uint32], rstd: Float32, weight: Sequence[Uint32]) -> list[Uint32]:
    """`(x * rstd) * weight` of 8 elements, rounded once to BF16."""
    scaled = []
    for word, factor in zip(words, weight, strict=True):
        lo, hi = (
            ptx.mul_f32(ptx.mul_f32(value, rstd), gain)
            for value, gain in zip(ptx.cvt_f32x2(word), ptx.cvt_f32x2(factor), strict=True)
        )
        scaled.append(ptx.cvt_bf16x2(lo, hi))
    return scaled


def sum_chunks(sums: Sequence[Float32], words: Sequence[Uint32]) -> list[Float32]:
    """Add 8 BF16 elements to 8 FP32 sums. Zeros change no sum that started from +0."""
    values = [value for word in words for value in ptx.cvt_f32x2(word)]
    return [ptx.add_f32(total, value) for total, value in zip(sums, values, strict=True)]


def round_chunk(sums: Sequence[Float32]) -> list[Uint32]:
    """8 FP32 sums as 4 BF16 pairs."""
    return [ptx.cvt_bf16x2(sums[idx], sums[idx + 1]) for idx in range(0, CHUNK, 2)]
