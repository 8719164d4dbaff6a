"""N ranks that run this library's kernels on the machine, step after step, against the oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from ep import reference
from ep.bench.cases import EPS, Case, Inputs, Step
from ep.bench.check import Where, check_result, check_rows
from ep.config import Protocol
from ep.kernels.compile import Image, Kind, build
from ep.kernels.grid import HERALDS, combine_ctas, combine_grid, dispatch_ctas, dispatch_grid
from ep.kernels.options import Boundaries, KernelOptions, Pdl
from ep.layout import EpLayout
from ep.record import RECORD_WORDS, HangRecord, Phase
from ep.reference import Rows
from tests.armed import armed_bytes
from tests.ptx.codegen import Program, load
from tests.ptx.machine import Machine, Mode
from tests.ptx.views import Boundary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep.config import EpConfig

TARGET = "sm_103a"
"""The GB300."""
TIMEOUT_NS = 10**10


class Wrong(Exception):
    """What the kernels gave is not what the oracle gives."""


@functools.cache
def image(kind: Kind, config: EpConfig, options: KernelOptions, arch: str = TARGET) -> Image:
    return build(kind, EpLayout(config), options, arch)


EDGES = (0x0001, 0x0020, 0x3C00, 0x43E0, 0x43E1, 0x7F60, 0x7F61, 0x7F7F, 0x7F80, 0x8000, 0xFFFF)
"""BF16 words about which MXFP8, or the wire, could be wrong by one."""


class OddStep(Step):
    """A step with NaN, Inf, subnormals and edges in tokens and partials, and ids of nobody."""

    def inputs(self, rank: int) -> Any:
        made = super().inputs(rank)
        rng = np.random.default_rng([self.number, rank, 1])
        x = made.x.copy()
        words = x.view(np.uint16)
        odd = np.asarray(rng.random(x.shape) < 0.05)
        words[odd] = rng.integers(0, 1 << 16, int(odd.sum()))
        for token in range(len(x)):
            # Each block has one word of the edges, or NaN in all even elements, or everywhere.
            for block in range(0, x.shape[1], 32):
                kind = rng.integers(0, 8)
                if kind < 4:
                    words[token, block : block + 32] = rng.choice(EDGES)
                elif kind == 4:
                    words[token, block + rng.integers(0, 2) : block + 32 : 2] = 0x7FC0
        return made._replace(x=x)

    def route(self, rank: int) -> Any:
        ids, weights = super().route(rank)
        rng = np.random.default_rng([self.number, rank, 3])
        nobody = np.asarray(rng.random(ids.shape) < 0.1)
        experts = self.case.config.experts
        strange = np.array([experts, experts + 1, -2, -(1 << 31), (1 << 31) - 1], np.int32)
        ids = ids.copy()
        ids[nobody] = rng.choice(strange, int(nobody.sum()))
        return ids, weights

    def partials(self, rank: int, source: Any) -> Any:
        rows = super().partials(rank, source)
        words = rows.view(np.uint16)
        for row in np.flatnonzero(source >= 0).tolist():
            # The oracle asks for rows in other places: a row follows from its source word alone.
            word = int(source[row])
            rng = np.random.default_rng([self.number, rank, 2, word])
            rows[row] = rng.standard_normal(rows.shape[1])
            # A norm over an Inf is 0 or NaN whatever the sums are: few tokens have any.
            kind = word % 4 if not self.case.norm or word % 4 == 1 else 3
            if kind < 2:
                odd = rng.random((rows.shape[1],)) < 0.02
                words[row, odd] = rng.integers(0, 1 << 16, int(odd.sum()))
            if kind == 1:
                words[row, 6::16] = 0xFFFF
                words[row, 12::16] = words[row, 13::16] = 0xFFFF
            if kind == 2:
                words[row] = 0x8000
        return rows

    @classmethod
    def of(cls, step: Step) -> OddStep:
        return cls(step.case, step.number, step.counts)


class Oracle(NamedTuple):
    """What goes into a step and what must come of it, by rank."""

    inputs: list[Inputs]
    rows: list[Rows]
    partials: list[Any]
    results: list[Any]


@functools.lru_cache(maxsize=64)
def oracle(step: Step) -> Oracle:
    config = step.case.config
    geometry: dict[str, Any] = {
        "ranks": config.ranks,
        "experts": config.experts,
        "stride": EpLayout(config).stride,
    }
    inputs = [step.inputs(rank) for rank in range(config.ranks)]
    ids = [one.ids for one in inputs]
    rows = reference.dispatch(
        [one.x for one in inputs], ids, [one.weights for one in inputs], **geometry
    )
    partials = [step.partials(rank, one.source) for rank, one in enumerate(rows)]
    gains = step.case.norm_weight
    answered = [step.answered_ids(rank) for rank in range(config.ranks)]
    results = reference.combine(partials, answered, norm_weight=gains, eps=EPS, **geometry)
    return Oracle(inputs, rows, partials, results)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the application does between the kernels.

    `experts` puts a kernel of its own, which checks the rows, between dispatch and combine;
    without, combine follows dispatch at once and only results are checked.
    """

    experts: bool = True
    settle_each: int = 5
    resident: int = 4


class World:
    """Buffers of all ranks of a case on a machine.

    Parameters
    ----------
    case : Case
    options : KernelOptions
    seed : int
    mode : Mode
    ptx : dict
        Texts that replace the kernels', by kind: mutants.
    plan : Plan
    boundary : Boundary or None
        None: the weakest that the protocol is made for.
    excluded : tuple of int
        Ranks that are dead, and that the others skip.
    """

    def __init__(
        self,
        case: Case,
        options: KernelOptions,
        seed: int,
        mode: Mode,
        *,
        ptx: dict[Kind, str] | None = None,
        plan: Plan | None = None,
        tick_ns: int = 100,
        timeout_ns: int = TIMEOUT_NS,
        grace_ns: int = 0,
        arch: str = TARGET,
        boundary: Boundary | None = None,
        excluded: tuple[int, ...] = (),
    ) -> None:
        self.case, self.options, self.plan = case, options, plan or Plan()
        config = self.config = case.config
        self.layout = EpLayout(config)
        self.timeout_ns, self.grace_ns = timeout_ns, grace_ns
        if boundary is None:
            trusted = options.boundaries is Boundaries.TRUSTED
            is_free = config.protocol is Protocol.FENCE_FREE
            boundary = Boundary.ORDERS if is_free and trusted else Boundary.PLAIN
        self.machine = Machine(config.ranks, seed, mode, tick_ns, boundary)
        self.memory = self.machine.memory
        self.programs: dict[Kind, Program] = {}
        self.threads: dict[Kind, int] = {}
        for kind in (Kind.DISPATCH, Kind.COMBINE):
            made = image(kind, config, dataclasses.replace(options, norm=case.norm), arch)
            self.programs[kind] = load((ptx or {}).get(kind, made.ptx))
            self.threads[kind] = made.threads
        ranks = range(config.ranks)
        self.own = [self.memory.allocate(armed_bytes(self.layout, rank), rank) for rank in ranks]
        peers = [self.memory.alias(self.own[rank], rank) for rank in ranks]
        for rank in excluded:
            peers[rank] = 0
        tables = [np.array([*peers, self.own[rank]], np.int64) for rank in ranks]
        self.present = [rank for rank in ranks if rank not in excluded]
        self.tables = [self.memory.allocate(tables[rank], rank) for rank in ranks]
        record = np.zeros(RECORD_WORDS, np.uint32)
        self.records = [self.memory.allocate(record, rank) for rank in ranks]
        gains = case.norm_weight
        self.gains = [0 if gains is None else self.memory.allocate(gains, rank) for rank in ranks]
        self.streams = [self.machine.stream(rank) for rank in ranks]
        self.num_steps = 0
        self._given: list[tuple[int, Any]] = []

    def run(self, steps: Sequence[Step]) -> None:
        """Run steps; raises `Wrong`, `Hang` or `Fault` on the first thing that is not right."""
        each, ranks = self.plan.settle_each, self.present
        for start in range(0, len(steps), each):
            results = []
            for step in steps[start : start + each]:
                results += [(step, rank, self._enqueue(step, rank)) for rank in ranks]
                self.num_steps += 1
            self.machine.run()
            for step, rank, at in results:
                self._check_result(step, rank, at)
            self._check_given()
            for rank in ranks:
                self._check_buffer(steps[min(start + each, len(steps)) - 1], rank)

    def run_until_expired(
        self, step: Step, phase: Phase, absent: tuple[int, ...]
    ) -> list[HangRecord | None]:
        """Run a step that some ranks leave at a phase; gives what the host then reads."""
        for rank in range(self.config.ranks):
            if rank not in absent or phase is Phase.COMBINE:
                only_dispatch = rank in absent or phase is Phase.DISPATCH
                self._enqueue(step, rank, only_dispatch=only_dispatch)
        self.machine.run(settle=False)
        return [self._poll_record(rank) for rank in range(self.config.ranks)]

    def _poll_record(self, rank: int) -> HangRecord | None:
        for _ in range(64):
            words = self.memory.poll(self.records[rank], 4 * RECORD_WORDS).view(np.uint32)
            record = HangRecord.read(words)
            if record is not None:
                return record
        return None

    def _enqueue(self, step: Step, rank: int, *, only_dispatch: bool = False) -> int:
        """Give the address of the result."""
        memory, stream = self.memory, self.streams[rank]
        num_tokens = step.counts[rank]
        truth = oracle(step)
        x, ids, weights = (memory.allocate(array, rank) for array in truth.inputs[rank])
        self._given += zip((x, ids, weights), truth.inputs[rank], strict=True)
        want, rows = truth.rows[rank], truth.partials[rank]
        out = memory.allocate(
            np.full((num_tokens, self.config.hidden), np.nan, ml_dtypes.bfloat16), rank
        )
        pdl, eps = self.options.pdl != Pdl.OFF, int(np.float32(EPS).view(np.uint32))
        is_free = self.config.protocol is Protocol.FENCE_FREE
        bounds = [self.timeout_ns, self.grace_ns] if is_free else [self.timeout_ns]
        extra, ctas = self._grid(Kind.DISPATCH, num_tokens)
        stream.launch(
            self.programs[Kind.DISPATCH],
            ctas,
            self.threads[Kind.DISPATCH],
            [
                *(self.tables[rank], x, ids, weights, self.records[rank], *bounds),
                *(rank, num_tokens, *extra),
            ],
            pdl=pdl,
        )
        if only_dispatch:
            return out
        if self.plan.experts:
            partials = memory.allocate(np.full_like(rows, np.nan), rank)
            given = np.full_like(rows, np.nan)
            given[want.source >= 0] = rows[want.source >= 0]
            self._given.append((partials, given))
            live = np.flatnonzero(want.source >= 0).tolist()
            row_bytes = 2 * self.config.hidden

            def experts(view: int) -> list[int]:
                self._check_rows(step, rank, want, view)
                return [memory.write(partials + row * row_bytes, rows[row]) for row in live]

            stream.call(experts)
        else:
            partials = memory.allocate(rows, rank)
            self._given.append((partials, rows))
        extra, ctas = self._grid(Kind.COMBINE, num_tokens)
        stream.launch(
            self.programs[Kind.COMBINE],
            ctas,
            self.threads[Kind.COMBINE],
            [
                *(self.tables[rank], partials, ids, self.gains[rank], out, self.records[rank]),
                *(*bounds, eps, rank, num_tokens, *extra),
            ],
            pdl=pdl,
        )
        return out

    def _grid(self, kind: Kind, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """Arguments that the protocol adds, and CTAs."""
        resident = self.plan.resident
        if self.config.protocol is Protocol.FENCE_FREE:
            plan = dispatch_grid if kind is Kind.DISPATCH else combine_grid
            grid = plan(self.config, num_tokens, resident)
            return (grid.senders, 0), HERALDS + grid.ctas
        if kind is Kind.DISPATCH:
            return (), dispatch_ctas(num_tokens)
        return (), combine_ctas(self.config, num_tokens, resident)

    def _not_taken(self, buffer: Any) -> list[Any]:
        """What should be 0: the inverse of all chunks that a reader makes empty."""
        chunks = self._field(buffer, "staging")
        # The head of a row stays, with the number of its step.
        chunks = chunks[..., : 4 * (self.layout.row_chunks - 1)]
        return [~chunks, ~self._field(buffer, "slots").view(np.uint16)]

    def _field(self, buffer: Any, name: str) -> Any:
        field = self.layout.source if name == "source" else self.layout.fields[name]
        kind = np.dtype(getattr(ml_dtypes, field.dtype, None) or field.dtype)
        return np.ndarray(field.shape, kind, buffer.data, field.offset_bytes, field.strides_bytes)

    def _rows(self, buffer: Any) -> Rows:
        names = [field.name for field in dataclasses.fields(Rows)]
        return Rows(**{name: self._field(buffer, name) for name in names})

    def _check_rows(self, step: Step, rank: int, want: Rows, view: int) -> None:
        last = self.layout.fields["header"]
        buffer = np.zeros(self.layout.total_bytes, np.uint8)
        size = last.offset_bytes + last.size_bytes
        buffer[:size] = self.memory.read(self.own[rank], size, view)
        where = Where(rank, step.number, "dispatch")
        complaint = check_rows(self._rows(buffer), want, where, self.layout.stride)
        if complaint:
            raise Wrong(str(complaint))

    def _check_result(self, step: Step, rank: int, at: int) -> None:
        want = oracle(step).results[rank]
        got = self.memory.peek(at, want.nbytes).view(ml_dtypes.bfloat16).reshape(want.shape)
        complaint = check_result(got, want, Where(rank, step.number, "combine"))
        if complaint:
            raise Wrong(str(complaint))

    def _check_given(self) -> None:
        """What the caller gave is as it was."""
        given, self._given = self._given, []
        for at, want in given:
            words = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
            if words.size and (self.memory.peek(at, words.size) != words).any():
                raise Wrong("a kernel has stored into what the caller gave")

    def _check_buffer(self, step: Step, rank: int) -> None:
        """Between steps all is as it was, but for the number of the step."""
        buffer = self.memory.peek(self.own[rank], self.layout.total_bytes)
        where = Where(rank, step.number, "combine")
        complaint = check_rows(self._rows(buffer), step.empty_rows(rank), where, self.layout.stride)
        if complaint:
            raise Wrong(str(complaint))
        control = self._field(buffer, "control").copy()
        num_steps, control[0, 0] = int(control[0, 0]), 0
        left = [
            control,
            *(self._field(buffer, name) for name in ("dispatch_flags", "combine_flags")),
        ]
        if self.config.protocol is Protocol.FENCE_FREE:
            control[1, 0] = int(control[1, 0]) != num_steps
            left += self._not_taken(buffer)
        if num_steps != self.num_steps or any(array.any() for array in left):
            raise Wrong(f"rank {rank}, after step {step.number}: counters or flags are not back")
        if self.memory.peek(self.records[rank], 4 * RECORD_WORDS).any():
            raise Wrong(f"rank {rank}, after step {step.number}: a wait expired")
