"""The arithmetic of `ep.device`, step by step in NumPy, against the oracle. No compiler, no GPU."""

import ml_dtypes
import numpy as np
import pytest

from ep import reference

CHUNK = 1 << 19
INF = 0x7F80


def rounded(exact, rest):
    """FP32 of `exact + rest`, where `rest` is what FP64 lost: through round-to-odd, so once."""
    bits = exact.view(np.int64)
    step = np.where((rest > 0) == (exact > 0), 1, -1)
    odd = np.where((rest != 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def fma(a, b, c):
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    return rounded(total, (product - (total - part)) + (addend - part))


def newton(value, root, last):
    """`ep.device.norm._newton`, operation by operation."""
    one = np.float32(1)
    product = value * root
    tail = fma(value, root, -product)
    residual = fma(-product, root, one)
    residual = fma(-tail, root, residual)
    if last:
        residual = fma(residual * np.float32(0.75), residual, residual)
    return fma(root * np.float32(0.5), residual, root)


def significands(start):
    """FP32 values of [1, 4): every significand, with both parities of the exponent."""
    return (np.uint32(0x3F800000) + np.arange(start, start + CHUNK, dtype=np.uint32)).view(
        np.float32
    )


def true_root(value):
    return (1.0 / np.sqrt(value.astype(np.float64))).astype(np.float32)


def shifted(root, ulps):
    return (root.view(np.int32) + np.int32(ulps)).view(np.float32)


def above_one(value, numerator):
    """Whether `value * (numerator / 2^25)^2 > 1`, in integers: their product has 75 bits."""
    bits = value.view(np.uint32).astype(np.uint64)
    exponent = (bits >> 23) - 127
    scaled = ((bits & 0x7FFFFF) | 0x800000) << exponent
    square = numerator * numerator
    top = scaled * (square >> 26) + ((scaled * (square & ((1 << 26) - 1))) >> 26)
    return top >= 1 << (23 + 50 - 26)


@pytest.mark.parametrize("start", range(0, 1 << 24, 1 << 22))
def test_reciprocal_root_is_correctly_rounded_for_every_significand(start):
    for begin in range(start, start + (1 << 22), CHUNK):
        value = significands(begin)
        root = true_root(value)
        # The roots lie in [0.5, 1]: half their ulp is 2^-25.
        numerator = np.ldexp(root.astype(np.float64), 25).astype(np.uint64)
        np.testing.assert_array_equal(above_one(value, numerator + 1), True)
        np.testing.assert_array_equal(above_one(value, numerator - 1), False)
        for ulps in (-2, -1, 0, 1, 2):
            near = newton(value, shifted(root, ulps), last=False)
            off = near.view(np.int32) - root.view(np.int32)
            assert np.abs(off).max() <= 1
        for ulps in (-1, 0, 1):
            np.testing.assert_array_equal(newton(value, shifted(root, ulps), last=True), root)


def max_bf16(a, b):
    """`max.bf16x2` on magnitudes: the other one where one is NaN, 0x7fff where both are."""
    number = np.maximum(np.where(a > INF, 0, a), np.where(b > INF, 0, b))
    return np.where((a > INF) & (b > INF), 0x7FFF, number)


def block_amax(bits):
    """`ep.device.mxfp8.block_amax` of `[blocks, 32]` BF16 bits."""
    lanes = (bits & 0x7FFF).reshape(-1, 2, 8, 2)
    top = lanes[:, :, 0]
    for idx in range(1, 8):
        top = max_bf16(top, lanes[:, :, idx])
    top = max_bf16(top[:, 0], top[:, 1])
    even, odd = np.where(top[:, 0] > INF, 0, top[:, 0]), top[:, 1]
    return np.where(even > odd, even, odd)


def scale_byte(amax):
    """`ep.device.mxfp8.scale_byte`."""
    byte = np.maximum(((amax + 0x1F) >> 7) - 8, 0)
    return np.where(amax > INF, 255, np.where(amax == INF, 254, byte))


def quantize(bits, byte):
    """`ep.device.mxfp8.quantize` after `scale_factor`; `byte` broadcasts against `bits`."""
    exponent = np.where((byte > 0) & (byte < 254), (254 - byte) << 23, 0)
    factor = exponent.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        product = (bits.astype(np.uint32) << 16).view(np.float32) * factor
        return np.fmin(product, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def assert_blocks_match(bits):
    x = bits.astype(np.uint16).view(ml_dtypes.bfloat16).reshape(len(bits), 32)
    elements, scales = reference.mxfp8_quantize(x)
    byte = scale_byte(block_amax(bits))
    np.testing.assert_array_equal(byte, scales.view(np.uint8)[:, 0])
    np.testing.assert_array_equal(quantize(bits, byte[:, None]), elements.view(np.uint8))


def test_scale_and_element_of_every_bf16_pattern():
    bits = np.zeros((1 << 16, 32), np.int32)
    for place in (0, 17, 31):
        bits[:] = 0
        bits[:, place] = np.arange(1 << 16)
        assert_blocks_match(bits)


@pytest.mark.parametrize("exponent", [0, 1, 7, 8, 9, 20, 127, 200, 254])
def test_every_element_beside_every_scale(exponent):
    """All patterns in blocks whose amax has the given exponent, with mantissas round 1.75."""
    every = np.arange(1 << 16).reshape(-1, 16)
    for mantissa in (0, 0x5F, 0x60, 0x61, 0x7F):
        top = exponent << 7 | mantissa
        bits = np.empty((len(every), 32), np.int32)
        bits[:, ::2] = np.where((every & 0x7FFF) > top, every & 0x8000 | top, every)
        bits[:, 1::2] = top
        assert_blocks_match(bits)


def test_blocks_with_nan_and_inf():
    generator = np.random.default_rng(3)
    specials = np.array([0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0, 0x8000, 1, 0x3F80, 0x7F7F])
    blocks = [specials[generator.integers(0, len(specials), (20000, 32))]]
    for mask in ("even", "odd", "all"):
        nan = generator.integers(0, 1 << 16, (2000, 32))
        chosen = slice(None) if mask == "all" else slice(mask == "odd", None, 2)
        nan[:, chosen] = 0x7F81 + generator.integers(0, 0x7F, nan[:, chosen].shape)
        blocks.append(nan)
    assert_blocks_match(np.concatenate(blocks).astype(np.int32))


def test_random_blocks():
    generator = np.random.default_rng(4)
    assert_blocks_match(generator.integers(0, 1 << 16, (50000, 32)).astype(np.int32))


@pytest.mark.parametrize("hidden", [32, 256, 288, 2880, 3584, 16384])
def test_sum_of_squares_follows_the_order_of_the_oracle(hidden):
    """Warps, passes and accumulators of combine, with its passes past the last segment."""
    generator = np.random.default_rng(hidden)
    x = generator.standard_normal((5, hidden)).astype(ml_dtypes.bfloat16)
    segments = -(-hidden // 256)
    passes = -(-segments // 16)
    warps = -(-segments // passes)
    values = np.zeros((5, passes * warps * 256), np.float32)
    values[:, :hidden] = x.astype(np.float32)
    lanes = values.reshape(5, passes * warps, 32, 8)
    total = lanes[..., 0] * lanes[..., 0]
    for element in range(1, 8):
        total = total + lanes[..., element] * lanes[..., element]
    for distance in (16, 8, 4, 2, 1):
        total = total + total[..., np.arange(32) ^ distance]
    sums = np.zeros((5, 4), np.float32)
    for segment in range(passes * warps):
        sums[:, segment % 4] = sums[:, segment % 4] + total[:, segment, 0]
    mean = ((sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])) / np.float32(hidden)
    np.testing.assert_array_equal(true_root(mean + np.float32(1e-5)), reference.rms_rstd(x, 1e-5))
