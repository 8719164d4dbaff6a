from __future__ import annotations

import bisect
import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep import reference

Array = npt.NDArray[Any]
BLOCK = reference.SCALE_BLOCK
ODD_NAN = [0x3F80, 0x7FC0, 0xBF80, 0xFFC0, 0x7F80, 0x7F81, 0xFF80, 0x7FFF]


def bf16(bits: Any) -> Array:
    return np.asarray(bits, np.uint16).view(ml_dtypes.bfloat16)


def quantize_bits(bits: Any) -> tuple[Array, Array]:
    elements, scales = reference.mxfp8_quantize(bf16(bits))
    return elements.view(np.uint8), scales.view(np.uint8)


def exact(bits: int) -> Fraction:
    """Value of a finite BF16, from the format's definition."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    if exponent:
        mantissa += 128
    magnitude = Fraction(mantissa) * Fraction(2) ** (max(exponent, 1) - 134)
    return -magnitude if bits >> 15 else magnitude


def e4m3_magnitude(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    if exponent:
        mantissa += 8
    return Fraction(mantissa) * Fraction(2) ** (max(exponent, 1) - 10)


E4M3 = [e4m3_magnitude(code) for code in range(0x7F)]
E4M3_MIDDLE = [(low + high) / 2 for low, high in itertools.pairwise(E4M3)]


def e4m3_round(value: Fraction) -> int:
    """Code of the nearest E4M3 magnitude, ties to the even code."""
    code = bisect.bisect_left(E4M3_MIDDLE, value)
    if code < len(E4M3_MIDDLE) and value == E4M3_MIDDLE[code]:
        code += code & 1
    return code


# A few elements (the rest of the block repeats them) -> scale byte, their codes.
GOLDEN = {
    "zeros of both signs": ([0x0000, 0x8000], 0x00, [0x00, 0x80]),
    "smallest subnormals": ([0x0001, 0x8001], 0x00, [0x00, 0x80]),
    "largest subnormals": ([0x007F, 0x807F], 0x00, [0x00, 0x80]),
    "smallest normal": ([0x0080, 0x8080], 0x00, [0x00, 0x80]),
    "below 448 * 2^-127": ([0x045F, 0x845F], 0x00, [0x00, 0x80]),
    "448 * 2^-127: byte 0, so zeros": ([0x0460, 0x8460], 0x00, [0x00, 0x80]),
    "above 448 * 2^-127": ([0x0461, 0x8461], 0x01, [0x76, 0xF6]),
    "below 448 * 2^-126": ([0x04DF, 0x84DF], 0x01, [0x7E, 0xFE]),
    "448 * 2^-126": ([0x04E0, 0x84E0], 0x01, [0x7E, 0xFE]),
    "above 448 * 2^-126": ([0x04E1, 0x84E1], 0x02, [0x76, 0xF6]),
    "subnormals that count": ([0x04E0, 0x0001, 0x8040, 0x007F], 0x01, [0x7E, 0x04, 0xB0, 0x38]),
    "below 448": ([0x43DF, 0xC3DF], 0x7F, [0x7E, 0xFE]),
    "448": ([0x43E0, 0xC3E0], 0x7F, [0x7E, 0xFE]),
    "above 448": ([0x43E1, 0xC3E1], 0x80, [0x76, 0xF6]),
    "a power of two: 256": ([0x4380, 0xC380], 0x7F, [0x78, 0xF8]),
    "below a power of two: 255": ([0x437F, 0xC37F], 0x7F, [0x78, 0xF8]),
    "ties around 448: 432, 430, 400": ([0x43D8, 0x43D7, 0xC3C8, 0], 0x7F, [0x7E, 0x7D, 0xFC, 0]),
    "448 beside 1 and 2^-9": ([0x43E0, 0x3F80, 0xBB00, 0x3B00], 0x7F, [0x7E, 0x38, 0x81, 0x01]),
    "448, then around 2^-10": ([0x43E0, 0x3A80, 0x3A81, 0xBA80], 0x7F, [0x7E, 0, 0x01, 0x80]),
    "448, ties of subnormals": ([0x43E0, 0x3B40, 0x3C60, 0x3C70], 0x7F, [0x7E, 0x02, 7, 0x08]),
    "448 * 2^119": ([0x7F60, 0xFF60], 0xF6, [0x7E, 0xFE]),
    "above 448 * 2^119": ([0x7F61, 0xFF61], 0xF7, [0x76, 0xF6]),
    "largest finite": ([0x7F7F, 0xFF7F], 0xF7, [0x78, 0xF8]),
    "Inf": ([0x7F80, 0x3F80, 0xBF80, 0x0000], 0xFE, [0x7E, 0x00, 0x80, 0x00]),
    "-Inf": ([0xFF80, 0x8000, 0x7F7F, 0xFF7F], 0xFE, [0x7E, 0x80, 0x00, 0x80]),
    "Inf and NaN": ([0x7F80, 0x7FC0, 0xBF80, 0x3F80], 0xFE, [0x7E, 0x7E, 0x80, 0x00]),
    "NaN beside numbers": ([0x43E0, 0x7FC0, 0xFFFF, 0xBF80], 0x7F, [0x7E, 0x7E, 0x7E, 0xB8]),
    "signalling NaN": ([0x7F81, 0xFF81, 0x43E0, 0xBF80], 0x7F, [0x7E, 0x7E, 0x7E, 0xB8]),
    "all NaN": ([0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], 0xFF, [0x7E] * 4),
    "all even NaN": ([0x7FC0, 0x43E0, 0xFFC0, 0xBF80], 0x7F, [0x7E, 0x7E, 0x7E, 0xB8]),
    "all even NaN, odd 0": ([0x7FC0, 0x0000, 0xFFC0, 0x8000], 0x00, [0x7E, 0, 0x7E, 0x80]),
    "all odd NaN": (ODD_NAN, 0xFF, [0x00, 0x7E, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]),
}


@pytest.mark.parametrize(("bits", "scale", "codes"), GOLDEN.values(), ids=GOLDEN)
def test_golden_block(bits: list[int], scale: int, codes: list[int]) -> None:
    repeat = BLOCK // len(bits)
    elements, scales = quantize_bits([bits * repeat])
    assert scales.tolist() == [[scale]]
    assert elements.tolist() == [codes * repeat]


def test_one_number_among_odd_nan_is_enough() -> None:
    for place in range(1, BLOCK, 2):
        block = [0x3F80, 0x7FC0] * (BLOCK // 2)
        block[place] = 0x43E0
        elements, scales = quantize_bits([block])
        assert scales[0, 0] == 0x7F
        assert elements.tolist() == [[0x38, 0x7E] * (BLOCK // 2)]


def test_every_bf16_as_amax() -> None:
    expected = []
    exponent = -127
    for bits in range(0x7F80):
        while exact(bits) > 448 * Fraction(2) ** exponent:
            exponent += 1
        expected.append(exponent + 127)
    magnitudes = np.arange(0x7F81)
    for sign, place in itertools.product((0, 0x8000), (0, 1, 30, 31)):
        blocks = np.zeros((len(magnitudes), BLOCK), np.uint16)
        blocks[:, place] = magnitudes | sign
        elements, scales = quantize_bits(blocks)
        assert scales.ravel().tolist() == [*expected, 254]
        assert not np.delete(elements, place, axis=1).any()


@pytest.mark.parametrize("reciprocal", [0x3B124924, 0x3B124925])
def test_either_reciprocal_of_448_gives_the_same_byte(reciprocal: int) -> None:
    # The two FP32 neighbours of 1/448: all that an approximation good to 1 ulp can return.
    factor = np.uint32(reciprocal).view(np.float32)
    amax = np.arange(0x7F80, dtype=np.uint32)
    product = (amax << 16).view(np.float32) * factor
    fraction, exponent = np.frexp(product)
    byte = np.maximum(exponent - (fraction == 0.5) + 127, 0)
    byte[product == 0] = 0
    blocks = np.repeat(amax.astype(np.uint16)[:, None], BLOCK, axis=1)
    np.testing.assert_array_equal(quantize_bits(blocks)[1][:, 0], byte)


def every_element(byte: int) -> Array:
    """Blocks `[n, 32]` whose scale is `byte`, with every smaller element of both signs."""
    amax = (byte + 8) << 7 | 0x60
    bits = np.concatenate([np.arange(amax + 1), np.arange(amax + 1) | 0x8000])
    bits = np.append(bits, np.zeros(-len(bits) % (BLOCK - 1), np.int64)).reshape(-1, BLOCK - 1)
    return np.insert(bits, 0, amax, axis=1).astype(np.uint16)


def test_every_element_at_every_scale() -> None:
    grid = np.array([float(value) for value in E4M3])
    middle = np.array([float(value) for value in E4M3_MIDDLE])
    for byte in range(1, 247):
        blocks = every_element(byte)
        elements, scales = quantize_bits(blocks)
        assert (scales == byte).all()
        # A BF16 times a power of two is exact in FP64, and so are the grid and its middles.
        bits = blocks.astype(np.uint32)
        value = np.ldexp(((bits & 0x7FFF) << 16).view(np.float32).astype(np.float64), 127 - byte)
        code = np.searchsorted(middle, value, side="left")
        tie = value == np.append(middle, np.inf)[code]
        code += tie & (code & 1 == 1)
        assert value.max() == grid[-1]
        np.testing.assert_array_equal(elements, code | (bits >> 8 & 0x80))


@pytest.mark.parametrize("byte", [1, 2, 9, 127, 246])
def test_every_element_against_fractions(byte: int) -> None:
    blocks = every_element(byte)
    elements, _ = quantize_bits(blocks)
    factor = Fraction(2) ** (127 - byte)
    expected: dict[int, int] = {}
    for bits in np.unique(blocks & 0x7FFF).tolist():
        expected[bits] = e4m3_round(exact(bits) * factor)
    for bits, code in zip(blocks.ravel().tolist(), elements.ravel().tolist(), strict=True):
        assert code == expected[bits & 0x7FFF] | (bits >> 8 & 0x80)


def test_every_element_of_a_block_with_byte_0_or_254_is_a_signed_zero() -> None:
    for amax, byte in ((0x0460, 0), (0x7F80, 254)):
        for bits in range(0, amax, 1 if byte == 0 else 61):
            elements, scales = quantize_bits([[amax, bits, bits | 0x8000] + [0] * 29])
            assert scales[0, 0] == byte
            assert elements[0, 1:3].tolist() == [0x00, 0x80]


def test_no_code_is_nan_and_only_nan_gives_byte_255() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (256, 4 * BLOCK), dtype=np.uint16)
    elements, scales = quantize_bits(bits)
    assert not (elements & 0x7F == 0x7F).any()
    assert (scales != 255).all()


def test_quantize_takes_any_strides_and_no_tokens() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 0x7F80, (6, 4 * BLOCK), dtype=np.uint16)
    elements, scales = quantize_bits(bits)
    assert elements.shape == (6, 4 * BLOCK)
    assert scales.shape == (6, 4)
    odd = reference.mxfp8_quantize(bf16(np.asfortranarray(bits))[1::2])
    np.testing.assert_array_equal(odd[0].view(np.uint8), elements[1::2])
    np.testing.assert_array_equal(odd[1].view(np.uint8), scales[1::2])
    none = reference.mxfp8_quantize(bf16(bits[:0]))
    assert [array.shape for array in none] == [(0, 4 * BLOCK), (0, 4)]
    assert none[0].dtype == ml_dtypes.float8_e4m3fn
    assert none[1].dtype == ml_dtypes.float8_e8m0fnu


def test_quantize_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="float32, want bfloat16"):
        reference.mxfp8_quantize(np.zeros((1, BLOCK), np.float32))
    with pytest.raises(ValueError, match="multiple of 32"):
        reference.mxfp8_quantize(bf16([[0] * 33]))


def test_owners_by_hand() -> None:
    assert [reference.local_experts(rank, 3, 8) for rank in range(3)] == [
        range(3),
        range(3, 6),
        range(6, 8),
    ]
    assert [len(reference.local_experts(rank, 4, 2)) for rank in range(4)] == [1, 1, 0, 0]
    ids = np.array([[-1, 0, 2, 3], [5, 6, 7, 8], [-2, 2**31 - 1, -(2**31), 4]], np.int32)
    owner = reference.owner_of(ids, 3, 8)
    assert owner.tolist() == [[-1, 0, 0, 1], [1, 2, 2, -1], [-1, -1, -1, 1]]
    assert owner.dtype == np.int32


@settings(deadline=None)
@given(ranks=st.integers(1, 72), experts=st.integers(1, 1000))
def test_every_expert_has_one_owner(ranks: int, experts: int) -> None:
    owners = reference.owner_of(np.arange(experts), ranks, experts)
    for rank in range(ranks):
        local = reference.local_experts(rank, ranks, experts)
        assert np.flatnonzero(owners == rank).tolist() == list(local)
        assert len(local) == experts // ranks + (rank < experts % ranks)
        empty = reference.empty_id(rank, ranks, experts)
        assert empty not in local
        assert 0 <= empty <= experts


def test_empty_id_by_hand() -> None:
    assert [reference.empty_id(rank, 3, 8) for rank in range(3)] == [3, 0, 0]
    assert reference.empty_id(0, 1, 8) == 8
    assert [reference.empty_id(rank, 4, 1) for rank in range(4)] == [1, 0, 0, 0]
