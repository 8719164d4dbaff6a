"""Each PTX instruction the kernels use, wrapped once.

An `addr` is an Int64 byte address of global memory, aligned to the width of the access. A `Vec4` is
four Uint32 words, word 0 at the lowest address. `order` is "weak", "relaxed", "acquire" (loads) or
"release" (stores), `scope` "gpu" or "sys"; the scope of a weak access means nothing. Weak accesses
take part in no ordering of their own: who fences is said at each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, Uint64, cute
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

Vec4 = tuple[Uint32, Uint32, Uint32, Uint32]

_CONSTRAINTS = {16: "h", 32: "r", 64: "l"}


@dsl_user_op
def _asm(
    code: str,
    results: Sequence[Any],
    operands: Sequence[Any],
    *,
    pure: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Emit `code`. Anything not `pure` keeps its place among the other memory accesses."""
    constraints = [f"={_constraint(kind)}" for kind in results]
    constraints += [_constraint(type(operand)) for operand in operands]
    if not pure:
        constraints.append("~{memory}")
    types = [kind.mlir_type for kind in results]
    value = llvm.inline_asm(
        None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        code,
        ",".join(constraints),
        has_side_effects=not pure,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(results) < 2:
        return results[0](value) if results else None
    return tuple(
        kind(llvm.extractvalue(kind.mlir_type, value, [idx], loc=loc, ip=ip))
        for idx, kind in enumerate(results)
    )


def _constraint(kind: Any) -> str:
    return "f" if kind is Float32 else _CONSTRAINTS[kind.width]


def _ordered(order: str, scope: str) -> str:
    return "" if order == "weak" else f".{order}.{scope}"


# Loads.


def load_b32(addr: Int64, order: str = "weak", scope: str = "sys") -> Uint32:
    """4 bytes. "acquire": what the writer released before is visible to this thread afterwards."""
    return _asm(f"ld{_ordered(order, scope)}.global.b32 $0, [$1];", [Uint32], [Int64(addr)])


def load_b64(addr: Int64, order: str = "weak", scope: str = "sys") -> Int64:
    """8 bytes."""
    return _asm(f"ld{_ordered(order, scope)}.global.b64 $0, [$1];", [Int64], [Int64(addr)])


def load_v4(addr: Int64, order: str = "weak", scope: str = "sys") -> Vec4:
    """16 bytes as four words; not one single-copy access, and "relaxed" never served by L1."""
    code = f"ld{_ordered(order, scope)}.global.v4.b32 {{$0, $1, $2, $3}}, [$4];"
    return _asm(code, [Uint32] * 4, [Int64(addr)])


def load_v4_if(wanted: Boolean, addr: Int64, order: str = "weak", scope: str = "sys") -> Vec4:
    """16 bytes where `wanted`, else zeros without touching `addr`."""
    zeros = " ".join(f"@!p mov.b32 ${idx}, 0;" for idx in range(4))
    load = f"@p ld{_ordered(order, scope)}.global.v4.b32 {{$0, $1, $2, $3}}, [$5];"
    return _asm(
        f"{{ .reg .pred p; setp.ne.u32 p, $4, 0; {zeros} {load} }}",
        [Uint32] * 4,
        [Uint32(wanted), Int64(addr)],
    )


def load_b128(addr: Int64, order: str = "relaxed") -> Vec4:
    """16 bytes at system scope, one single-copy access. `order` may be "acquire"."""
    code = (
        f"{{ .reg .b64 lo, hi; .reg .b128 all; ld.{order}.sys.global.b128 all, [$4];"
        " mov.b128 {lo, hi}, all; mov.b64 {$0, $1}, lo; mov.b64 {$2, $3}, hi; }"
    )
    return _asm(code, [Uint32] * 4, [Int64(addr)])


def touch(addr: Int64) -> None:
    """Load 4 bytes and drop them, so that the translation of `addr` is at hand later."""
    _asm("{ .reg .b32 drop; ld.volatile.global.b32 drop, [$0]; }", [], [Int64(addr)])


# Stores.


def store_b8(addr: Int64, value: Uint32) -> None:
    """Low byte of `value`, weak."""
    _asm("st.global.b8 [$0], $1;", [], [Int64(addr), Uint32(value)])


def store_b16(addr: Int64, value: Uint32) -> None:
    """Low half of `value`, weak."""
    _asm("st.global.b16 [$0], $1;", [], [Int64(addr), Uint16(value)])


def store_b32(addr: Int64, value: Uint32, order: str = "weak", scope: str = "sys") -> None:
    """4 bytes. "release": what this thread did or saw before is visible to who acquires it."""
    code = f"st{_ordered(order, scope)}.global.b32 [$0], $1;"
    _asm(code, [], [Int64(addr), Uint32(value)])


def store_b64(addr: Int64, value: Int64) -> None:
    """8 bytes, weak."""
    _asm("st.global.b64 [$0], $1;", [], [Int64(addr), Int64(value)])


def store_v2(addr: Int64, values: tuple[Uint32, Uint32]) -> None:
    """8 bytes, weak."""
    _asm("st.global.v2.b32 [$0], {$1, $2};", [], [Int64(addr), *map(Uint32, values)])


def store_v4(addr: Int64, values: Vec4, order: str = "weak", scope: str = "sys") -> None:
    """16 bytes as four words; not one single-copy access."""
    code = f"st{_ordered(order, scope)}.global.v4.b32 [$0], {{$1, $2, $3, $4}};"
    _asm(code, [], [Int64(addr), *map(Uint32, values)])


def store_b128(addr: Int64, values: Vec4) -> None:
    """16 bytes, relaxed at system scope, one single-copy access."""
    code = (
        "{ .reg .b64 lo, hi; .reg .b128 all; mov.b64 lo, {$1, $2}; mov.b64 hi, {$3, $4};"
        " mov.b128 all, {lo, hi}; st.relaxed.sys.global.b128 [$0], all; }"
    )
    _asm(code, [], [Int64(addr), *map(Uint32, values)])


# Fences, atomics and barriers.


def fence_acq_rel(scope: str) -> None:
    """Order what this thread did and saw before against what it does after, at `scope`."""
    _asm(f"fence.acq_rel.{scope};", [], [])


def atom_inc(addr: Int64, limit: Uint32, order: str = "relaxed", scope: str = "gpu") -> Uint32:
    """Add 1, or go back to 0 from `limit`; gives the value before. Any `order`."""
    code = f"atom.{order}.{scope}.global.inc.u32 $0, [$1], $2;"
    return _asm(code, [Uint32], [Int64(addr), Uint32(limit)])


def atom_exch(addr: Int64, value: Uint32, order: str = "relaxed", scope: str = "gpu") -> Uint32:
    """Replace a word of own memory; gives the value before."""
    code = f"atom.{order}.{scope}.global.exch.b32 $0, [$1], $2;"
    return _asm(code, [Uint32], [Int64(addr), Uint32(value)])


def atom_or(addr: Int64, value: Uint32, order: str = "relaxed", scope: str = "gpu") -> Uint32:
    """Set bits of a word of own memory; gives the value before."""
    code = f"atom.{order}.{scope}.global.or.b32 $0, [$1], $2;"
    return _asm(code, [Uint32], [Int64(addr), Uint32(value)])


def red_add(addr: Int64, value: Uint32, order: str = "relaxed", scope: str = "gpu") -> None:
    """Add and ask for nothing back. `order` may be "release"."""
    _asm(f"red.{order}.{scope}.global.add.u32 [$0], $1;", [], [Int64(addr), Uint32(value)])


def barrier() -> None:
    """CTA barrier: all threads; orders their memory accesses within the CTA."""
    cute.arch.sync_threads()


@dsl_user_op
def barrier_all(holds: Boolean, *, loc: Any = None, ip: Any = None) -> Boolean:
    """CTA barrier that also says whether `holds` was true in every thread."""
    every = nvvm.barrier_cta_red(
        Boolean(holds).ir_value(loc=loc, ip=ip),
        Int32(0).ir_value(loc=loc, ip=ip),
        nvvm.BarrierReduxKind.AND,
        aligned=True,
        loc=loc,
        ip=ip,
    )
    return Boolean(every)


def sync_warp() -> None:
    """Warp barrier; orders the lanes' memory accesses, which shuffles and votes do not."""
    cute.arch.sync_warp()


# Warp exchange: every lane must take part. These and the barriers come from the compiler's own
# operations, which it knows not to duplicate or move into divergent code.


def shfl(value: Any, lane: Int32) -> Any:
    """Value of `lane`; 32 or 64 bits. Orders no memory."""
    return cute.arch.shuffle_sync(value, lane)


def shfl_xor(value: Any, distance: int) -> Any:
    """Value of the lane whose index differs in the bits of `distance`."""
    return cute.arch.shuffle_sync_bfly(value, distance)


def shfl_down(value: Any, distance: int) -> Any:
    """Value of the lane `distance` above; the top lanes keep theirs."""
    return cute.arch.shuffle_sync_down(value, distance)


def redux_or(value: Uint32) -> Uint32:
    """Bitwise or over the warp."""
    return cute.arch.warp_redux_sync(Uint32(value), "or")


def redux_max(value: Uint32) -> Uint32:
    """Greatest unsigned value of the warp."""
    return cute.arch.warp_redux_sync(Uint32(value), "umax")


def ballot(holds: Boolean) -> Uint32:
    """Bit l: `holds` in lane l."""
    return Uint32(cute.arch.vote_ballot_sync(holds))


def vote_all(holds: Boolean) -> Boolean:
    """Whether `holds` in every lane."""
    return cute.arch.vote_all_sync(holds)


def match_any(value: Uint32) -> Uint32:
    """Bit l: lane l has the same value as this one."""
    return cute.arch.match_sync(0xFFFFFFFF, Uint32(value), "any")


def lowest_bit(mask: Uint32) -> Int32:
    """Index of the lowest bit set; -1 where there is none."""
    code = "{ .reg .b32 r; brev.b32 r, $1; bfind.shiftamt.u32 $0, r; }"
    return _asm(code, [Int32], [Uint32(mask)], pure=True)


# Time and launches.


def globaltimer() -> Uint64:
    """Nanoseconds; the clock ticks about once a microsecond."""
    return _asm("mov.u64 $0, %globaltimer;", [Uint64], [])


def globaltimer_after(value: Uint32) -> Uint64:
    """The same, read once `value` is there."""
    code = (
        "{ .reg .pred p; setp.ne.b32 p, $1, 0x9e3779b9; mov.b64 $0, 0;"
        " @p mov.u64 $0, %globaltimer; }"
    )
    return _asm(code, [Uint64], [Uint32(value)])


def griddepcontrol_wait() -> None:
    """Wait until the kernels this one depends on have ended and their writes are visible."""
    _asm("griddepcontrol.wait;", [], [])


def griddepcontrol_launch_dependents() -> None:
    """Let the next kernel of the stream start once every CTA has said so or ended."""
    _asm("griddepcontrol.launch_dependents;", [], [])


# Arithmetic. Explicit rounding: the compiler may neither fuse nor flush subnormals.


def add_f32(a: Float32, b: Float32) -> Float32:
    """`a + b`, to nearest even."""
    return _asm("add.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], pure=True)


def mul_f32(a: Float32, b: Float32) -> Float32:
    """`a * b`, to nearest even."""
    return _asm("mul.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], pure=True)


def fma_f32(a: Float32, b: Float32, c: Float32) -> Float32:
    """`a * b + c` with one rounding, to nearest even."""
    operands = [Float32(a), Float32(b), Float32(c)]
    return _asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], operands, pure=True)


def div_f32(a: Float32, b: Float32) -> Float32:
    """`a / b`, to nearest even."""
    return _asm("div.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], pure=True)


def min_f32(a: Float32, b: Float32) -> Float32:
    """Smaller of two; the other one where one is NaN."""
    return _asm("min.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], pure=True)


def rsqrt_approx_f32(a: Float32) -> Float32:
    """`a ** -0.5` within 2 ulp; +Inf for +0, +0 for +Inf."""
    return _asm("rsqrt.approx.f32 $0, $1;", [Float32], [Float32(a)], pure=True)


def max_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Greater of two BF16 pairs, half by half; the other one where one is NaN."""
    return _asm("max.bf16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], pure=True)


def cvt_e4m3x2(lo: Float32, hi: Float32) -> Uint32:
    """Two FP32 as E4M3 bytes in the low half, to nearest even, saturating."""
    code = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }"
    return _asm(code, [Uint32], [Float32(lo), Float32(hi)], pure=True)


def cvt_bf16x2(lo: Float32, hi: Float32) -> Uint32:
    """Two FP32 as a BF16 pair, to nearest even; every NaN becomes 0x7fff."""
    return _asm("cvt.rn.bf16x2.f32 $0, $2, $1;", [Uint32], [Float32(lo), Float32(hi)], pure=True)


def cvt_f32x2(pair: Uint32) -> tuple[Float32, Float32]:
    """BF16 pair as FP32, exactly."""
    return as_f32(pair << 16), as_f32(pair & 0xFFFF0000)


def as_f32(bits: Uint32) -> Float32:
    """FP32 value of a word."""
    return _asm("mov.b32 $0, $1;", [Float32], [Uint32(bits)], pure=True)


def as_bits(value: Float32) -> Uint32:
    """Word of an FP32 value."""
    return _asm("mov.b32 $0, $1;", [Uint32], [Float32(value)], pure=True)
