"""From segments to Python functions over arrays, one element a thread.

A 32-bit value is an array of uint32, or of float32 as long as only FP32 instructions use it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx import arith
from tests.ptx.accesses import form_of
from tests.ptx.late import Needs, needs_of
from tests.ptx.parse import Instr, Parsed, Segment, UnknownPtx, is_access, parse

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {"pred": "pred", "b16": "u16", "b32": "u32", "b64": "u64", "b128": "u128"}
_DTYPES = {
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "s32": np.int32,
    "s64": np.int64,
    "f32": np.float32,
}
_INTEGER = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul.lo": "{0} * {1}",
    "mad.lo": "{0} * {1} + {2}",
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

PURE: dict[str, tuple[str, str, str]] = {
    # instruction: kind of the result, kinds of the operands, expression
    "mov.b16": ("u16", "u16", "{0}"),
    "mov.u32": ("u32", "u32", "{0}"),
    "mov.u64": ("u64", "u64", "{0}"),
    "not.pred": ("pred", "pred", "~{0}"),
    "not.b32": ("u32", "u32", "~{0}"),
    "not.b64": ("u64", "u64", "~{0}"),
    "and.pred": ("pred", "pred pred", "{0} & {1}"),
    "or.pred": ("pred", "pred pred", "{0} | {1}"),
    "mov.pred": ("pred", "pred", "{0}"),
    "selp.b32": ("u32", "u32 u32 pred", "np.where({2}, {0}, {1})"),
    "selp.b64": ("u64", "u64 u64 pred", "np.where({2}, {0}, {1})"),
    "selp.f32": ("f32", "f32 f32 pred", "np.where({2}, {0}, {1})"),
    "cvt.u16.u32": ("u16", "u32", "{0}.astype(np.uint16)"),
    "cvt.u32.u16": ("u32", "u16", "{0}.astype(np.uint32)"),
    "cvt.u64.u16": ("u64", "u16", "{0}.astype(np.uint64)"),
    "cvt.u32.u64": ("u32", "u64", "{0}.astype(np.uint32)"),
    "cvt.u64.u32": ("u64", "u32", "{0}.astype(np.uint64)"),
    "cvt.s64.s32": ("s64", "s32", "{0}.astype(np.int64)"),
    "mul.wide.u16": ("u32", "u16 u16", "{0}.astype(np.uint32) * {1}.astype(np.uint32)"),
    "cvt.u16.u64": ("u16", "u64", "{0}.astype(np.uint16)"),
    "mul.wide.u32": ("u64", "u32 u32", "{0}.astype(np.uint64) * {1}.astype(np.uint64)"),
    "mul.wide.s32": ("s64", "s32 s32", "{0}.astype(np.int64) * {1}.astype(np.int64)"),
    "mul.hi.u32": ("u32", "u32 u32", "arith.mul_hi_u32({0}, {1})"),
    "mul.hi.u64": ("u64", "u64 u64", "arith.mul_hi_u64({0}, {1})"),
    "min.s32": ("s32", "s32 s32", "np.minimum({0}, {1})"),
    "max.s32": ("s32", "s32 s32", "np.maximum({0}, {1})"),
    "min.u64": ("u64", "u64 u64", "np.minimum({0}, {1})"),
    "min.u32": ("u32", "u32 u32", "np.minimum({0}, {1})"),
    "max.u32": ("u32", "u32 u32", "np.maximum({0}, {1})"),
    "max.s64": ("s64", "s64 s64", "np.maximum({0}, {1})"),
    "shr.s32": ("s32", "s32 u32", "{0} >> np.minimum({1}, 31).astype(np.int32)"),
    "prmt.b32": ("u32", "u32 u32 u32", "arith.prmt({0}, {1}, {2})"),
    "dp2a.lo.u32.u32": ("u32", "u32 u32 u32", "arith.dp2a_lo({0}, {1}, {2})"),
    "brev.b32": ("u32", "u32", "arith.brev({0})"),
    "bfind.shiftamt.u32": ("u32", "u32", "arith.bfind_shiftamt({0})"),
    "neg.s32": ("s32", "s32", "-{0}"),
    "neg.f32": ("u32", "u32", "{0} ^ np.uint32(0x80000000)"),
    "add.rn.f32": ("f32", "f32 f32", "{0} + {1}"),
    "mul.rn.f32": ("f32", "f32 f32", "{0} * {1}"),
    "div.rn.f32": ("f32", "f32 f32", "{0} / {1}"),
    "fma.rn.f32": ("f32", "f32 f32 f32", "arith.fma({0}, {1}, {2})"),
    "min.f32": ("f32", "f32 f32", "arith.min_f32({0}, {1})"),
    "rsqrt.approx.f32": ("f32", "f32", "arith.rsqrt({0}, M.rng)"),
    "max.bf16x2": ("u32", "u32 u32", "arith.max_bf16x2({0}, {1})"),
    "cvt.rn.bf16x2.f32": ("u32", "f32 f32", "arith.cvt_bf16x2({0}, {1})"),
    "cvt.rn.satfinite.e4m3x2.f32": ("u16", "f32 f32", "arith.cvt_e4m3x2({0}, {1})"),
    "match.any.sync.b32": ("u32", "u32", "arith.match_any({0})"),
    "vote.sync.all.pred": ("pred", "pred", "arith.vote_all({0})"),
    "vote.sync.ballot.b32": ("u32", "pred", "arith.ballot({0})"),
    "redux.sync.or.b32": ("u32", "u32", "arith.redux(np.bitwise_or, {0})"),
    "redux.sync.max.u32": ("u32", "u32", "arith.redux(np.maximum, {0})"),
    "shfl.sync.idx.b32": ("u32", "u32 u32", "arith.shfl_idx({0}, {1})"),
    "shfl.sync.bfly.b32": ("u32", "u32 const", "arith.shfl_bfly({0}, {1})"),
    "shfl.sync.down.b32": ("u32", "u32 const", "arith.shfl_down({0}, {1})"),
}
for _width in (16, 32, 64):
    for _name, _code in _INTEGER.items():
        _kind = f"u{_width}"
        PURE[f"{_name}.s{_width}"] = (_kind, " ".join([_kind] * (_code.count("{"))), _code)
    for _left in (True, False):
        _name = f"shl.b{_width}" if _left else f"shr.u{_width}"
        PURE[_name] = (f"u{_width}", f"u{_width} u32", f"arith.shift({{0}}, {{1}}, left={_left})")
for _width in (16, 32, 64):
    for _name, _sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        PURE[f"{_name}.b{_width}"] = (
            f"u{_width}",
            f"u{_width} u{_width}",
            f"{{0}} {_sign} {{1}}",
        )
    for _name, _sign in _COMPARE.items():
        for _type in ("b", "u", "s"):
            _kind = f"{'s' if _type == 's' else 'u'}{_width}"
            PURE[f"setp.{_name}.{_type}{_width}"] = (
                "pred",
                f"{_kind} {_kind}",
                f"{{0}} {_sign} {{1}}",
            )
_WARP_TAIL = {"vote": ("-1",), "matc": ("-1",), "redu": ("-1",), "shfl": ("31", "-1")}
_FENCE = re.compile(r"fence\.(acq_rel|sc)\.(cta|gpu|sys)")


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel ready to run: `functions[i](pool, lanes, machine)` runs segment i."""

    parsed: Parsed
    index: dict[str, int]
    counts: dict[str, int]
    functions: list[Callable[..., Any]]
    needs: list[Needs]

    @property
    def segments(self) -> list[Segment]:
        return self.parsed.segments


@functools.lru_cache(maxsize=256)
def load(ptx: str) -> Program:
    """Translate a module; the same text gives the same object."""
    parsed = parse(ptx)
    counts = dict.fromkeys(KINDS.values(), 0)
    index = {}
    for name, kind in parsed.registers.items():
        index[name] = counts[KINDS[kind]]
        counts[KINDS[kind]] += 1
    writers = [_Writer(parsed, segment) for segment in parsed.segments]
    needed = {name for writer in writers for name in writer.live_in}
    scope: dict[str, Any] = {"np": np, "arith": arith, "K": _constant}
    source = "\n".join(writer.function(index, needed) for writer in writers)
    exec(compile(source, parsed.name, "exec"), scope)
    functions = [scope[f"segment_{segment.idx}"] for segment in parsed.segments]
    needs = [needs_of(parsed, segment) for segment in parsed.segments]
    return Program(parsed, index, counts, functions, needs)


@functools.cache
def _constant(kind: str, text: str) -> Any:
    if text.startswith("0f"):
        word = np.uint32(int(text.removeprefix("0f"), 16))
        return word.view(np.float32) if kind == "f32" else word
    value = int(text.removesuffix("U"), 0)
    if kind == "pred":
        return np.bool_(value != 0)
    if kind == "f32":
        return np.uint32(value & 0xFFFFFFFF).view(np.float32)
    width = int(kind[1:])
    value &= (1 << width) - 1
    if kind[0] == "s" and value >> (width - 1):
        value -= 1 << width
    return _DTYPES[kind](value)


class _Writer:
    """Writes the function of one segment."""

    def __init__(self, parsed: Parsed, segment: Segment) -> None:
        self.parsed, self.segment = parsed, segment
        self.live_in: dict[str, None] = {}
        self.written: dict[str, str] = {}
        self.lines: list[str] = []
        self.params = {name: idx for idx, (name, _) in enumerate(parsed.params)}
        for instr in segment.body:
            try:
                self._write(instr)
            except (KeyError, IndexError, ValueError) as error:
                raise UnknownPtx(f"{parsed.name}: {instr}") from error
        self.taken = "None"
        if segment.branch and segment.branch.guard:
            guard = self._use(segment.branch.guard, "pred")
            self.taken = guard if segment.branch.wanted else f"~{guard}"

    def function(self, index: dict[str, int], needed: set[str]) -> str:
        head = [f"def segment_{self.segment.idx}(P, S, M):"]
        for name in self.live_in:
            copy = ".copy()" if name in self.written else ""
            kind = self._kind(name)
            head.append(f"    {_local(name)} = P.{kind}[{index[name]}, S]{copy}")
        tail = []
        for name in self.written:
            if name in needed:
                kind = self._kind(name)
                tail.append(f"    P.{kind}[{index[name]}, S] = {self._use(name, kind)}")
        return "\n".join([*head, *self.lines, *tail, f"    return {self.taken}"])

    def _kind(self, name: str) -> str:
        return KINDS[self.parsed.registers[name]]

    def _use(self, text: str, kind: str) -> str:
        """Give an operand as an expression of `kind`."""
        if kind == "const":
            return str(int(text, 0))
        if text in self.parsed.shared:
            return f"P.shared(S, {self.parsed.shared[text]})"
        specials = {
            "%tid.x": "P.tid[S]",
            "%ctaid.x": "P.ctaid[S]",
            "%nctaid.x": "P.nctaid[S]",
            "%laneid": "P.laneid[S]",
            "%globaltimer": "M.globaltimer(P, S)",
        }
        if text in specials:
            return specials[text]
        if text not in self.parsed.registers:
            return f"K({kind!r}, {text!r})"
        have = self.written.get(text)
        if have is None:
            self.live_in[text] = None
            have = self._kind(text)
        name = _local(text)
        if have == kind:
            return name
        if have == "f32":
            return self._as(f"arith.bits({name})", "u32", kind)
        return self._as(name, have, kind)

    @staticmethod
    def _as(code: str, have: str, want: str) -> str:
        if have == want:
            return code
        if have[1:] != want[1:]:
            raise ValueError(f"{have} as {want}")
        return f"{code}.view(np.{_DTYPES[want].__name__})"

    def _set(self, name: str, code: str, kind: str, guard: str = "") -> None:
        if name == "_":
            return
        register = self._kind(name)
        if kind[0] == "s":
            code, kind = f"({code}).view(np.{_DTYPES[register].__name__})", register
        if {kind, register} not in ({kind}, {"f32", "u32"}):
            raise ValueError(f"{kind} into {register}")
        if guard:
            both = f"({guard})[:, None]" if kind == "u128" else guard
            code = f"np.where({both}, {code}, {self._use(name, kind)})"
        self.lines.append(f"    {_local(name)} = {code}")
        self.written[name] = kind

    def _write(self, instr: Instr) -> None:
        op, args = instr.op, instr.args
        guard = ""
        if instr.guard:
            guard = self._use(instr.guard, "pred")
            guard = guard if instr.wanted else f"~{guard}"
            if op not in PURE and not op.startswith(("mov.", "ld.")):
                raise ValueError(op)
        if op in {"mov.b32", "mov.b64", "mov.b128"}:
            self._move(op, args, guard)
        elif op in PURE:
            kind, kinds, code = PURE[op]
            wants = kinds.split()
            rest = args[1 + len(wants) :]
            tail = _WARP_TAIL.get(op[:4], ())
            if tail and rest[-1:] and rest[-1] in self.parsed.registers:
                self.lines.append(f"    M.check_mask({self._use(rest[-1], 'u32')})")
                rest = (*rest[:-1], "-1")
            if rest != tail:
                raise ValueError(op)
            operands = [self._use(text, want) for text, want in zip(args[1:], wants, strict=False)]
            self._set(args[0], code.format(*operands), kind, guard)
        elif op.startswith("ld.param."):
            self._param(args)
        elif op == "bar.warp.sync" and args == ("-1",):
            self.lines.append("    M.memory.join(P, S, 32)")
        elif op in {"bar.sync", "bar.red.and.pred"}:
            if args[op != "bar.sync"] != "0":
                raise ValueError(op)
            if op != "bar.sync":
                # The machine calls this once the barrier is complete, with one whole CTA.
                self._set(args[0], f"M.reduce_and({self._use(args[2], 'pred')})", "pred")
        elif op in {"griddepcontrol.wait", "nanosleep.u32"}:
            pass
        elif op == "griddepcontrol.launch_dependents":
            self.lines.append("    M.launch_dependents(P, S)")
        elif fence := _FENCE.fullmatch(op):
            self.lines.append(f"    M.memory.fence(P, S, {fence[1]!r}, {fence[2]!r})")
        elif is_access(op):
            self._access(instr, guard)
        else:
            raise KeyError(op)

    def _move(self, op: str, args: tuple[str, ...], guard: str) -> None:
        to, source = args
        width = int(op[5:])
        half = f"u{width // 2}"
        if to.startswith("{"):
            low, high = (name.strip() for name in to[1:-1].split(","))
            if width == 128:
                for half_idx, name in enumerate((low, high)):
                    self._set(name, f"{self._use(source, 'u128')}[:, {half_idx}]", half, guard)
                return
            code = self._use(source, f"u{width}")
            shift = f"({code} >> np.uint{width}({width // 2}))"
            cast = f".astype(np.uint{width // 2})"
            self.lines.append(f"    low, high = {code}{cast}, {shift}{cast}")
            self._set(low, "low", half, guard)
            self._set(high, "high", half, guard)
        elif source.startswith("{"):
            low, high = (self._use(name.strip(), half) for name in source[1:-1].split(","))
            if width == 128:
                self._set(to, f"np.stack(({low}, {high}), -1)", "u128", guard)
            else:
                wide = f"np.uint{width}"
                code = f"{low}.astype({wide}) | ({high}.astype({wide}) << {wide}({width // 2}))"
                self._set(to, code, f"u{width}", guard)
        else:
            kind = self.written.get(source, f"u{width}")
            code = self._use(source, kind)
            if source not in self.parsed.registers:
                code = f"np.full(P.size(S), {code})"
            self._set(to, code, kind, guard)

    def _param(self, args: tuple[str, ...]) -> None:
        number = self.params[args[1][1:-1]]
        kind = self._kind(args[0])
        self._set(args[0], f"P.param[{number}, S].astype(np.uint{kind[1:]})", kind)

    def _access(self, instr: Instr, guard: str) -> None:
        form = form_of(instr)
        if form.space == "shared":
            addr = f"P.shared_at(S, {self._use(form.base, 'u32')})"
        else:
            addr = self._use(form.base, "u64")
        if form.offset:
            addr = f"({addr} + np.uint64({form.offset}))"
        how = f"{form.order!r}, {form.scope!r}"
        if form.what in {"atom", "red"}:
            value = self._use(instr.args[-1], "u32")
            reads = form.what == "atom"
            call = f"M.memory.atomic(P, S, {addr}, {form.how!r}, {value}, {how}, reads={reads})"
            if reads:
                self._set(instr.args[0], call, "u32")
            else:
                self.lines.append(f"    {call}")
            return
        width, vector = form.width, form.vector
        names = [name.strip() for name in instr.args[form.what == "st"].strip("{}").split(",")]
        if len(names) != vector or (vector > 1 and width != 32):
            raise ValueError(instr.op)
        whole = vector == 1
        if form.what == "st":
            values = self._stored(names, width)
            self.lines.append(
                f"    M.memory.store(P, S, {addr}, [{values}], {form.num_bytes}, {how}, {whole})"
            )
            return
        if width < 32:
            raise ValueError(instr.op)
        words = form.num_bytes // 4
        call = f"M.memory.load(P, S, {addr}, {words}, {how}, {whole}, {guard or 'None'})"
        self.lines.append(f"    loaded = {call}")
        if width == 32:
            for nth, name in enumerate(names):
                self._set(name, f"loaded[{nth}]", "u32", guard)
        elif width == 64:
            self._set(names[0], "arith.wide(loaded, 0)", "u64", guard)
        else:
            both = "np.stack((arith.wide(loaded, 0), arith.wide(loaded, 2)), -1)"
            self._set(names[0], both, "u128", guard)

    def _stored(self, names: list[str], width: int) -> str:
        if width <= 32:
            kind = "u16" if width == 16 else "u32"
            return ", ".join(f"{self._use(name, kind)}" for name in names)
        if width == 64:
            return f"*arith.narrow({self._use(names[0], 'u64')})"
        both = self._use(names[0], "u128")
        return f"*arith.narrow({both}[:, 0]), *arith.narrow({both}[:, 1])"


def _local(name: str) -> str:
    return name.replace("%", "r_")
