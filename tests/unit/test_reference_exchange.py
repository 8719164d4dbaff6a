from __future__ import annotations

from typing import Any, TypedDict

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep import reference

Array = npt.NDArray[Any]
BLOCK = reference.SCALE_BLOCK


class Sizes(TypedDict):
    ranks: int
    experts: int
    stride: int


def bf16(bits: Any) -> Array:
    return np.asarray(bits, np.uint16).view(ml_dtypes.bfloat16)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Sizes, list[Array], list[Array]]:
    """Sizes, then ids and weights of each rank, with ids from -2 to E + 1."""
    ranks, experts, top_k = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 4)),
    )
    counts = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = draw(st.sampled_from([-2, 0]))
    ids = [rng.integers(low, experts + 2, (n, top_k), dtype=np.int32) for n in counts]
    weights = [rng.random((n, top_k), np.float32) for n in counts]
    stride = max(counts) + draw(st.integers(0, 2))
    return Sizes(ranks=ranks, experts=experts, stride=stride), ids, weights


def owners_by_hand(sizes: Sizes, ids: Array) -> set[int]:
    ranks, experts = sizes["ranks"], sizes["experts"]
    table = [r for r in range(ranks) for _ in range(experts // ranks + (r < experts % ranks))]
    return {table[expert] for expert in ids.tolist() if 0 <= expert < experts}


@settings(deadline=None)
@given(exchanges())
def test_rows_against_loops(exchange: tuple[Sizes, list[Array], list[Array]]) -> None:
    sizes, ids, weights = exchange
    rng = np.random.default_rng(2)
    xs = [bf16(rng.integers(0, 1 << 16, (len(i), 2 * BLOCK), dtype=np.uint16)) for i in ids]
    received = reference.dispatch(xs, ids, weights, **sizes)
    assert len(received) == sizes["ranks"]
    for rank, rows in enumerate(received):
        assert len(rows.source) == sizes["ranks"] * sizes["stride"]
        for row, word in enumerate(rows.source.tolist()):
            src, token = divmod(row, sizes["stride"])
            element, scale = rows.x[row].view(np.uint8), rows.scales[row].view(np.uint8)
            if token < len(ids[src]) and rank in owners_by_hand(sizes, ids[src][token]):
                want = reference.mxfp8_quantize(xs[src][token : token + 1])
                assert word == src * 65536 + token
                assert rows.ids[row].tolist() == ids[src][token].tolist()
                assert rows.weights[row].tobytes() == weights[src][token].tobytes()
                assert element.tobytes() == want[0].tobytes()
                assert scale.tobytes() == want[1].tobytes()
            else:
                assert word == -1
                assert set(rows.ids[row].tolist()) == {
                    reference.empty_id(rank, sizes["ranks"], sizes["experts"])
                }
                assert not rows.weights[row].any()
                assert not element.any()
                assert not scale.any()


@settings(deadline=None)
@given(exchanges())
def test_sums_against_loops(exchange: tuple[Sizes, list[Array], list[Array]]) -> None:
    sizes, ids, _ = exchange
    rng = np.random.default_rng(3)
    bits = rng.integers(0x4000, 0x4C00, (sizes["ranks"], sizes["ranks"] * sizes["stride"], 8))
    bits |= rng.integers(0, 2, bits.shape) << 15
    partials = [bf16(part) for part in bits]
    results = reference.combine(partials, ids, **sizes)
    for src, result in enumerate(results):
        assert result.shape == (len(ids[src]), 8)
        for token, chosen in enumerate(ids[src]):
            total = np.zeros(8, np.float32)
            for rank in sorted(owners_by_hand(sizes, chosen)):
                part = partials[rank][src * sizes["stride"] + token]
                total = total + part.astype(np.float32)
            assert result[token].tobytes() == total.astype(ml_dtypes.bfloat16).tobytes()


def combine_one(*values: int) -> int:
    """Bits of the sum of one element, given by the ranks in order; all ranks are chosen."""
    ranks = len(values)
    partials = [np.full((ranks, 8), np.nan, ml_dtypes.bfloat16) for _ in values]
    for partial, value in zip(partials, values, strict=True):
        partial[0] = bf16(value)
    ids = [np.arange(ranks, dtype=np.int32)[None, ::-1]] + [np.zeros((0, ranks), np.int32)] * (
        ranks - 1
    )
    result = reference.combine(partials, ids, ranks=ranks, experts=ranks, stride=1)[0]
    bits = set(result.view(np.uint16).ravel().tolist())
    assert len(bits) == 1
    return bits.pop()


BIG, MINUS_BIG, SMALL = 0x4980, 0xC980, 0x3D00  # 2^20, -2^20, 2^-5: lost beside 2^20 in FP32
SUMS = {
    "the small one first is lost": ((SMALL, BIG, MINUS_BIG), 0x0000),
    "the small one between is lost": ((BIG, SMALL, MINUS_BIG), 0x0000),
    "the small one last stays": ((BIG, MINUS_BIG, SMALL), SMALL),
    "starts from +0": ((0x8000,), 0x0000),
    "starts from +0 with several": ((0x8000, 0x8000), 0x0000),
    "rounds once: 1 + 2^-8 + 2^-8": ((0x3F80, 0x3B80, 0x3B80), 0x3F81),
    "ties to even, down: 1 + 2^-8": ((0x3F80, 0x3B80), 0x3F80),
    "ties to even, up: 1 + 2^-7 + 2^-8": ((0x3F81, 0x3B80), 0x3F82),
    "subnormals stay": ((0x0001, 0x0001), 0x0002),
    "overflow": ((0x7F7F, 0x7F7F), 0x7F80),
    "Inf": ((0x3F80, 0xFF80), 0xFF80),
}


@pytest.mark.parametrize(("values", "bits"), SUMS.values(), ids=SUMS)
def test_sum_by_hand(values: tuple[int, ...], bits: int) -> None:
    assert combine_one(*values) == bits


@pytest.mark.parametrize("values", [(0x7F80, 0xFF80), (0x3F80, 0x7F81), (0xFFFF, 0x7F80)])
def test_nan_arrives(values: tuple[int, ...]) -> None:
    assert combine_one(*values) & 0x7FFF > 0x7F80


def test_token_without_experts_gives_plus_zero() -> None:
    ids = [np.full((2, 3), -1, np.int32)]
    poison = [np.full((2, BLOCK), np.nan, ml_dtypes.bfloat16)]
    weight = np.ones(BLOCK, ml_dtypes.bfloat16)
    for norm in (None, weight):
        result = reference.combine(poison, ids, ranks=1, experts=4, stride=2, norm_weight=norm)
        assert not result[0].view(np.uint16).any()


def rstd_by_lanes(row: Array, eps: float) -> np.float32:
    """The order of `rms_rstd`, one scalar at a time and with every lane of the butterfly."""
    values = [np.float32(value) for value in row]
    sums = [np.float32(0)] * 4
    for segment in range(-(-len(values) // 256)):
        lanes = []
        for lane in range(32):
            total = np.float32(0)
            start = segment * 256 + lane * 8
            for value in values[start : start + 8]:
                total = total + value * value
            lanes.append(total)
        for distance in (16, 8, 4, 2, 1):
            lanes = [lanes[lane] + lanes[lane ^ distance] for lane in range(32)]
        assert len({lane.tobytes() for lane in lanes}) == 1
        sums[segment % 4] = sums[segment % 4] + lanes[7]
    mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / np.float32(len(values))
    return np.float32(1 / np.sqrt(np.float64(mean + np.float32(eps))))


@pytest.mark.parametrize("hidden", [32, 224, 256, 288, 1536, 2880, 3584, 16384])
def test_norm_order_and_truth(hidden: int) -> None:
    rng = np.random.default_rng(hidden)
    scale = np.exp2(rng.integers(-6, 7, (3, hidden)))
    x = (rng.standard_normal((3, hidden)) * scale).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal(hidden).astype(ml_dtypes.bfloat16)
    rstd = reference.rms_rstd(x, 1e-5)
    assert [value.tobytes() for value in rstd] == [rstd_by_lanes(r, 1e-5).tobytes() for r in x]
    wide = x.astype(np.float64)
    truth = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rstd[:, None], truth, rtol=2e-6)
    y = reference.rms_norm(x, weight, 1e-5).astype(np.float64)
    # Half a unit of the last of 8 bits, and the FP32 errors before it.
    np.testing.assert_allclose(y, wide * truth * weight.astype(np.float64), rtol=2**-8 + 1e-5)


def test_accumulators_are_added_in_pairs() -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((64, 1024)) * np.repeat([3, 1, 2, 1.5], 256)).astype(
        ml_dtypes.bfloat16
    )
    rstd = reference.rms_rstd(x, 1e-5)
    assert rstd.tolist() == [float(rstd_by_lanes(row, 1e-5)) for row in x]


def test_norm_is_of_the_rounded_sum() -> None:
    rng = np.random.default_rng(5)
    partials = [rng.standard_normal((6, 64)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    ids = [np.tile(np.arange(2, dtype=np.int32), (3, 1))] * 2
    weight = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    sizes = Sizes(ranks=2, experts=2, stride=3)
    sums = reference.combine(partials, ids, **sizes)
    normed = reference.combine(partials, ids, norm_weight=weight, eps=0.25, **sizes)
    for total, y in zip(sums, normed, strict=True):
        assert y.tobytes() == reference.rms_norm(total, weight, 0.25).tobytes()


def test_norm_by_hand() -> None:
    # Squares of +-3 sum to 9 * H exactly: rstd is 1/3 rounded, and 3 * that rounds to 1.
    partial = np.full((2, BLOCK), -1.5, ml_dtypes.bfloat16)
    partial[1] = 3
    ids = [np.array([[0, 1]], np.int32), np.array([[1, 1]], np.int32)]
    weights = [np.full(BLOCK, value, ml_dtypes.bfloat16) for value in (2, -4)]
    sizes = Sizes(ranks=2, experts=2, stride=1)
    each = reference.combine([partial, partial], ids, norm_weight=weights, eps=1e-30, **sizes)
    assert [set(y.ravel().tolist()) for y in each] == [{-2.0}, {-4.0}]
    both = reference.combine([partial, partial], ids, norm_weight=weights[0], eps=1e-30, **sizes)
    assert [set(y.ravel().tolist()) for y in both] == [{-2.0}, {2.0}]
    big_eps = reference.rms_rstd(partial, 7.0)
    assert big_eps.tolist() == [np.float32(1 / np.sqrt(9.25)), 0.25]


def test_norm_passes_nan_and_inf_and_overflows_to_zero() -> None:
    x = np.ones((4, BLOCK), ml_dtypes.bfloat16)
    x[0, 5], x[1, 5], x[2] = np.nan, np.inf, 2.0**64
    y = reference.rms_norm(x, np.ones(BLOCK, ml_dtypes.bfloat16)).astype(np.float32)
    assert np.isnan(y[0]).all()
    assert np.isnan(y[1, 5])
    assert not np.delete(y[1], 5).any()
    assert not y[2].any()
    assert (y[3] == 1).all()
    np.testing.assert_array_equal(reference.rms_rstd(x[:3]), np.array([np.nan, 0, 0], np.float32))


def test_exchange_refuses_what_does_not_fit() -> None:
    x, ids = bf16([[0] * BLOCK]), np.zeros((1, 2), np.int32)
    weights = np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match="ids has 1 arrays, want one a rank: 2"):
        reference.dispatch([x, x], [ids], [weights] * 2, ranks=2, experts=2, stride=1)
    with pytest.raises(ValueError, match="rank 0 has 1 tokens, want at most stride = 0"):
        reference.dispatch([x], [ids], [weights], ranks=1, experts=2, stride=0)
    with pytest.raises(ValueError, match=r"weights\[0\] has 0 tokens, want 1"):
        reference.dispatch([x], [ids], [weights[:0]], ranks=1, experts=2, stride=1)
    with pytest.raises(ValueError, match=r"partials\[0\] has shape \(1, 32\), want \[2, H\]"):
        reference.combine([x], [ids], ranks=1, experts=2, stride=2)
    with pytest.raises(ValueError, match="norm_weight has 2 arrays"):
        reference.combine([x], [ids], ranks=1, experts=2, stride=1, norm_weight=[x[0], x[0]])
    with pytest.raises(ValueError, match=r"weight is bfloat16 \(16,\), want bfloat16 \(32,\)"):
        reference.rms_norm(x, x[0, :16])
