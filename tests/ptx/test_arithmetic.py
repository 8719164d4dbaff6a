"""Instructions of the machine against exact arithmetic, and what it refuses."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.ptx import arith
from tests.ptx.arena import Fault
from tests.ptx.codegen import load
from tests.ptx.litmus import on, outcomes
from tests.ptx.machine import Hang, Machine, Mode
from tests.ptx.parse import UnknownPtx

F32 = np.float32


def patterns(count, seed=0):
    """FP32 words of every kind, with many near each other."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    words[: count // 2] &= np.uint32(0xBFFFF007)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    words[: 2 * len(special)] = [*special, *(word | 0x80000000 for word in special)]
    return words.view(F32)


def rounded(value):
    """A fraction as FP32, to nearest even; None where it overflows."""
    exponent = max(abs(value).numerator.bit_length() - abs(value).denominator.bit_length(), -126)
    for power in (exponent, exponent - 1):
        if power >= -126 and abs(value) >= Fraction(2) ** power:
            exponent = power
            break
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    result = round(value / quantum) * quantum
    return float(result) if abs(result) < Fraction(2) ** 128 else None


@np.errstate(all="ignore")
def test_fma_rounds_once():
    values = patterns(6000)
    rng = np.random.default_rng(1)
    a, b, c = (rng.permutation(values) for _ in range(3))
    near = slice(0, 3000)
    # Sums that cancel almost: the places where two roundings differ from one.
    c[near] = -(a[near] * b[near])
    c[near] = (c[near].view(np.uint32) ^ rng.integers(0, 4, 3000, dtype=np.uint32)).view(F32)
    got = arith.fma(a, b, c)
    checked = 0
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        if not np.isfinite([x, y, z]).all():
            assert np.isnan(result) == np.isnan(x * y + z)
            continue
        want = rounded(Fraction(x) * Fraction(y) + Fraction(z))
        assert result == want or (want is None and np.isinf(result))
        checked += 1
    assert checked > 4000


@np.errstate(all="ignore")
def test_conversions():
    values = patterns(20000)
    bf16 = values.astype(ml_dtypes.bfloat16)
    want = np.where(np.isnan(values), 0x7FFF, bf16.view(np.uint16))
    assert (arith.cvt_bf16(values) == want).all()
    clipped = np.clip(values, F32(-448), F32(448)).astype(ml_dtypes.float8_e4m3fn)
    want = np.where(np.isnan(values), 0x7F, clipped.view(np.uint8))
    assert (arith.cvt_e4m3(values) == want).all()
    # Halfway between two E4M3 numbers: to the even one.
    ties = np.array([17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 464.0, -464.0], F32)
    assert arith.cvt_e4m3(ties).tolist() == [0x58, 0x5A, 0x00, 0x02, 0x7E, 0xFE]
    assert arith.cvt_e4m3x2(ties[:1], ties[1:2]).tolist() == [0x585A]


@np.errstate(all="ignore")
def test_least_and_greatest():
    zero, nan = np.array([0.0, -0.0], F32), np.array([np.nan, 3.0], F32)
    assert np.signbit(arith.min_f32(zero, zero[::-1])).all()
    assert arith.min_f32(nan, nan[::-1]).tolist() == [3, 3]
    a, b = (
        np.array([0x80007FC0, 0x3F807FC1], np.uint32),
        np.array([0x00003F80, 0x4000FFFF], np.uint32),
    )
    assert arith.max_bf16x2(a, b).tolist() == [0x00003F80, 0x40007FFF]


@np.errstate(all="ignore")
def test_rsqrt_stays_within_its_error_and_uses_it():
    values = np.abs(patterns(4000))
    values = values[np.isfinite(values) & (values > 0)]
    rng = np.random.default_rng(0)
    draws = np.stack([arith.rsqrt(values, rng) for _ in range(20)])
    exact = 1 / np.sqrt(values.astype(np.float64))
    assert (np.abs(draws / exact - 1) <= arith.RSQRT_ERROR).all()
    assert len({len(set(column)) for column in draws.T.tolist()} & {2, 3}) == 2
    special = arith.rsqrt(np.array([0.0, -0.0, np.inf, -1.0, np.nan], F32), rng)
    assert special.tolist()[:3] == [np.inf, -np.inf, 0]
    assert np.isnan(special[3:]).all()


def test_integers():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 64, (2, 1000), dtype=np.uint64)
    product = [x * y >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert arith.mul_hi_u64(a, b).tolist() == product
    words = a.astype(np.uint32)
    assert arith.brev(words).tolist() == [int(f"{word:032b}"[::-1], 2) for word in words.tolist()]
    ones = np.array([0, 1, 2, 0x80000000, 0xFFFFFFFF], np.uint32)
    assert arith.bfind_shiftamt(ones).tolist() == [0xFFFFFFFF, 31, 30, 0, 0]
    assert arith.shift(ones, np.array([32, 31, 33, 1, 40], np.uint32), left=True).tolist() == [
        0,
        0x80000000,
        0,
        0,
        0,
    ]


def kernel(*lines):
    head = ".visible .entry k(.param .u64 a) {.reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %d<2>;"
    return "\n".join([head, "ld.param.b64 %d0, [a];", *lines, "ret; }"])


@pytest.mark.parametrize(
    "line",
    [
        "sqrt.rn.f32 %r0, %r1;",
        "add.f32 %r0, %r1, %r2;",
        "shfl.sync.up.b32 %r0, %r1, 1, 0, -1;",
        "shfl.sync.idx.b32 %r0, %r1, 0, 31, 15;",
        "bar.sync 1;",
        "bar.warp.sync 3;",
        "ld.relaxed.gpu.global.nc.b32 %r0, [%d0];",
        "ld.mmio.relaxed.sys.global.b32 %r0, [%d0];",
        "match.any.sync.b32 %r0, %r1, 15;",
        "atom.relaxed.gpu.global.cas.b32 %r0, [%d0], %r1, %r2;",
        "@%p0 st.global.b32 [%d0], %r1;",
        "fence.proxy.async;",
        "membar.gl;",
        ".local .b8 stack[8];",
    ],
)
def test_what_is_not_known_is_refused_by_name(line):
    with pytest.raises(UnknownPtx) as problem:
        load(kernel(line))
    assert line.split()[0 if line[0] != "@" else 1].rstrip(";") in str(problem.value)


def run(ptx, rank=0, addr=None, threads=32):
    machine = Machine(2, 0, Mode.RANDOM)
    own = machine.memory.allocate(np.zeros(32, np.uint8), 0)
    peer = machine.memory.alias(own, 0)
    args = [{"own": own, "peer": peer, None: own}.get(addr, addr)]
    machine.stream(rank).launch(load(ptx), 1, threads, args, pdl=False)
    machine.run()
    return machine.memory.peek(own, 4).view(np.uint32)[0]


STORE = kernel("mov.b32 %r0, 7;", "st.global.b32 [%d0], %r0;")


def test_mappings():
    assert run(STORE, rank=0, addr="own") == 7
    assert run(STORE, rank=1, addr="peer") == 7
    for rank, addr in ((0, "peer"), (1, "own")):
        with pytest.raises(Fault, match=f"rank {rank}: 4 bytes at .* a mapping it must not use"):
            run(STORE, rank, addr)
    for offset in (30, 32, -4, 1 << 40):
        with pytest.raises(Fault, match="nothing that is mapped and aligned"):
            run(STORE, addr=(1 << 36) + offset)


def test_split_warps_meet_again():
    ptx = kernel(
        "mov.u32 %r0, %laneid;",
        "mov.b32 %r1, 0;",
        "$again:",
        "setp.ge.u32 %p0, %r1, %r0;",
        "@%p0 bra $out;",
        "add.s32 %r1, %r1, 1;",
        "bra $again;",
        "$out:",
        "redux.sync.max.u32 %r2, %r1, -1;",
        "st.global.b32 [%d0], %r2;",
    )
    assert run(ptx) == 31


def test_lanes_that_never_come_are_told():
    lone = kernel(
        "mov.u32 %r0, %tid.x;", "setp.eq.u32 %p0, %r0, 0;", "@%p0 bra $out;", "{}", "$out:"
    )
    for line in ("bar.warp.sync -1;", "bar.sync 0;"):
        with pytest.raises(Hang):
            run(lone.replace("{}", line))
    far = lone.replace("%r0, 0;", "%r0, 32;").replace("setp.eq", "setp.lt")
    with pytest.raises(Hang):
        run(far.replace("{}", "bar.sync 0;"), threads=64)


def test_polling_for_nothing_is_told():
    poll = kernel(
        "$again:",
        "ld.acquire.sys.global.b32 %r0, [%d0];",
        "setp.eq.b32 %p0, %r0, 0;",
        "@%p0 bra $again;",
    )
    with pytest.raises(Hang, match="poll"):
        run(poll)


def test_the_same_seed_gives_the_same_run():
    ctas = [on(0, "mov.b32 %a0, 1; st.global.b32 [x], %a0;"), on(1, "ld.global.b32 %a0, [x];")]
    first, second = (list(outcomes(ctas, ["1.0.a0"], (Mode.RANDOM,))) for _ in range(2))
    assert first == second
    assert set(first) == {(0,), (1,)}
