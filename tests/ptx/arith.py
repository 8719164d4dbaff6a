"""Bit-exact arithmetic of the PTX instructions that NumPy has no operation for, over arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

U16, U32, U64 = np.uint16, np.uint32, np.uint64
I32, I64, F32 = np.int32, np.int64, np.float32
WARP = 32
NAN = U32(0x7FFFFFFF)
RSQRT_ERROR = 2.0**-22.9
"""Greatest relative error of `rsqrt.approx.f32`, from the PTX manual."""

_LANES = np.arange(WARP)


def bits(value: Any) -> Any:
    """Words of FP32 values; the result of an FP32 instruction that is NaN has one pattern."""
    words = value.view(U32)
    nan = value != value
    return np.where(nan, NAN, words) if nan.any() else words


def fma(a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of FP32 with one rounding: the sum in FP64 is rounded to odd first."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = np.isfinite(total) & (error != 0)
    words = total.view(I64)
    even = inexact & (words & 1 == 0)
    away = (error > 0) == (total > 0)
    return (words + np.where(even, np.where(away, 1, -1), 0)).view(np.float64).astype(F32)


def min_f32(a: Any, b: Any) -> Any:
    """Smaller of two; a NaN gives way; -0 is below +0."""
    both = np.broadcast_arrays(a, b)
    same = (both[0].view(U32) | both[1].view(U32)).view(F32)
    return np.where(a == b, same, np.fmin(a, b))


def max_bf16x2(a: Any, b: Any) -> Any:
    """Greater of two BF16 pairs, half by half; a NaN gives way; +0 is above -0."""
    halves = []
    for shift in (U32(0), U32(16)):
        x, y = (((word >> shift) << U32(16)).view(F32) for word in (a, b))
        same = (x.view(U32) & y.view(U32)).view(F32)
        half = np.where(x == y, same, np.fmax(x, y))
        halves.append(bits(half) >> U32(16))
    return halves[0] | (halves[1] << U32(16))


def cvt_bf16(value: Any) -> Any:
    """BF16 bits, to nearest even; every NaN is 0x7fff."""
    words = value.view(U32)
    rounded = (words + U32(0x7FFF) + ((words >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(value), U32(0x7FFF), rounded)


def cvt_e4m3(value: Any) -> Any:
    """E4M3 bits, to nearest even, saturating; NaN is 0x7f."""
    nan = np.isnan(value)
    finite = np.clip(np.where(nan, F32(0), value), F32(-448), F32(448))
    found = finite.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(U16)
    return np.where(nan, U16(0x7F), found)


def cvt_e4m3x2(high: Any, low: Any) -> Any:
    return cvt_e4m3(high) << U16(8) | cvt_e4m3(low)


def cvt_bf16x2(high: Any, low: Any) -> Any:
    return cvt_bf16(high) << U32(16) | cvt_bf16(low)


def rsqrt(value: Any, rng: np.random.Generator) -> Any:
    """`rsqrt.approx.f32`: any FP32 number within the documented error, as the seed has it."""
    exact = 1.0 / np.sqrt(np.abs(value.astype(np.float64)))
    nearest = exact.astype(F32)
    shift = rng.integers(-2, 3, value.shape)
    moved = (nearest.view(I32) + shift.astype(I32)).view(F32)
    near = np.abs(moved / exact - 1) <= RSQRT_ERROR
    result = np.where(near & np.isfinite(exact) & (exact != 0), moved, nearest)
    result = np.where(np.signbit(value) & (value == 0), F32(-np.inf), result)
    return np.where((value < 0) | np.isnan(value), F32(np.nan), result)


def mul_hi_u32(a: Any, b: Any) -> Any:
    return (np.asarray(a).astype(U64) * np.asarray(b).astype(U64) >> U64(32)).astype(U32)


def mul_hi_u64(a: Any, b: Any) -> Any:
    low = U64(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> U64(32), a & low, b >> U64(32), b & low
    middle = a1 * b0 + (a0 * b0 >> U64(32))
    return a1 * b1 + (middle >> U64(32)) + (a0 * b1 + (middle & low) >> U64(32))


def shift(value: Any, amount: Any, *, left: bool) -> Any:
    """Logical shift; amounts of the width or more give 0."""
    kind = value.dtype.type
    width = 8 * value.dtype.itemsize
    within = (amount & U32(width - 1)).astype(kind)
    moved = value << within if left else value >> within
    return np.where(amount < U32(width), moved, kind(0))


def wide(words: Any, at: int) -> Any:
    """Words `at` and `at + 1` as one of 64 bits."""
    return words[at].astype(U64) | (words[at + 1].astype(U64) << U64(32))


def narrow(value: Any) -> tuple[Any, Any]:
    """Low and high word."""
    return value.astype(U32), (value >> U64(32)).astype(U32)


def brev(value: Any) -> Any:
    for distance, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        low = value & U32(mask)
        value = (value >> U32(distance)) & U32(mask) | low << U32(distance)
    return value >> U32(16) | value << U32(16)


def bfind_shiftamt(value: Any) -> Any:
    """How far left the highest one must go to bit 31; all ones where there is none."""
    _, exponent = np.frexp(value.astype(np.float64))
    return np.where(value == 0, U32(0xFFFFFFFF), (32 - exponent).astype(U32))


# Warps: the arrays hold whole warps, lane after lane.


def shfl_idx(value: Any, lane: Any) -> Any:
    rows = value.reshape(-1, WARP)
    if np.ndim(lane) == 0:
        return np.repeat(rows[:, int(lane) & 31], WARP)
    return np.take_along_axis(rows, (lane & 31).astype(I64).reshape(rows.shape), 1).ravel()


def shfl_bfly(value: Any, distance: Any) -> Any:
    return value.reshape(-1, WARP)[:, _LANES ^ int(distance)].ravel()


def shfl_down(value: Any, distance: Any) -> Any:
    source = _LANES + int(distance)
    return value.reshape(-1, WARP)[:, np.where(source < WARP, source, _LANES)].ravel()


def vote_all(holds: Any) -> Any:
    return np.repeat(holds.reshape(-1, WARP).all(axis=1), WARP)


def ballot(holds: Any) -> Any:
    if np.ndim(holds) == 0:
        # A constant, which all lanes of a whole warp have.
        return U32(0xFFFFFFFF if holds else 0)
    packed = np.packbits(holds.reshape(-1, WARP), axis=1, bitorder="little")
    return np.repeat(packed.view(U32).ravel(), WARP)


def match_any(value: Any) -> Any:
    rows = value.reshape(-1, WARP)
    same = np.packbits(rows[:, :, None] == rows[:, None, :], axis=2, bitorder="little")
    return same.view(U32).ravel()


def redux(operation: np.ufunc, value: Any) -> Any:
    return np.repeat(operation.reduce(value.reshape(-1, WARP), axis=1), WARP)


def prmt(low: Any, high: Any, selector: Any) -> Any:
    """Bytes of `high:low` picked by the four nibbles of `selector`; the sign mode is not used."""
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    picked = np.zeros_like(low)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(0xF)
        if np.any(nibble > 7):
            raise NotImplementedError("prmt that spreads a sign")
        byte = (both >> (np.uint64(8) * nibble.astype(np.uint64))) & np.uint64(0xFF)
        picked = picked | (byte.astype(np.uint32) << np.uint32(8 * place))
    return picked


def dp2a_lo(halves: Any, factors: Any, addend: Any) -> Any:
    """Both halves of `halves` times the two low bytes of `factors`, and `addend`."""
    low = (halves & np.uint32(0xFFFF)) * (factors & np.uint32(0xFF))
    high = (halves >> np.uint32(16)) * ((factors >> np.uint32(8)) & np.uint32(0xFF))
    return low + high + addend
