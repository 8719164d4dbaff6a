"""Check and time candidates on an exchange, and sweep the numbers of tokens with them."""

from __future__ import annotations

import copy
import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ep.bench.bridge import open_bridge
from ep.bench.cases import Step
from ep.bench.chain import Chain
from ep.bench.check import run_checked_step
from ep.bench.record import Row, gather_traffic
from ep.bench.sweep import NUM_INPUTS
from ep.bench.timing import gather
from ep.kernels.tuning import ROLES
from ep.tune.search import search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from ep.bench.cases import Inputs
    from ep.bench.check import Complaint
    from ep.bench.record import Traffic
    from ep.bench.sweep import Plan
    from ep.bench.timing import Floor, Timing
    from ep.exchange import Exchange
    from ep.kernels.compile import Kind
    from ep.kernels.grid import Grid
    from ep.kernels.tuning import PerSm
    from ep.reference import BFloat16Array, Rows
    from ep.tune.search import Choice

    Timer = Callable[[Sequence[Chain], int, int, int], list[dict[str, npt.NDArray[Any]]]]


class Imposing(Protocol):
    """What a sweep needs of `ep.gpu.GpuEngine`."""

    def impose(self, choice: Mapping[Kind, PerSm] | None) -> None:
        """Use these limits; None: those of the tuning table."""
        ...

    def per_sm(self, kind: Kind, tokens: int) -> PerSm:
        """Limits that a launch has."""
        ...

    def grid(self, kind: Kind, tokens: int, *, norm: bool) -> Grid:
        """Grid that a launch has."""
        ...


@dataclasses.dataclass(frozen=True)
class TunePlan:
    """What is swept.

    Attributes
    ----------
    bench : Plan
        How each candidate is timed; `tokens` rises.
    per_sm : tuple of float
        CTAs for each SM that each role is tried with.
    margin_percent : float
        By how much a candidate must be faster to take another's place.
    """

    bench: Plan
    per_sm: tuple[float, ...]
    margin_percent: float

    def facts(self) -> dict[str, Any]:
        """Give what must be the same on every rank."""
        return self.bench.facts() | {
            "per_sm": self.per_sm,
            "margin_percent": self.margin_percent,
        }


class Trial(NamedTuple):
    """A candidate that was measured."""

    words: str
    """What was varied."""
    choice: Choice
    grids: dict[Kind, Grid]
    row: Row

    @property
    def pair_us(self) -> float:
        """The slowest rank's median."""
        assert self.row.timing is not None
        return self.row.timing.pair.median


class Sweep:
    """Looks for the best limits, for one number of tokens after the other.

    Parameters
    ----------
    exchange : Exchange
        Fresh.
    engine : Imposing
        Its engine.
    plan : TunePlan
    timer : callable
        As `ep.bench.gpu_timing.time_graphs`.
    tell : callable
        Told of the trials of each run, the first one being what the others must beat. Local.
    floor : Floor, optional
        Of the machine, for the record.
    """

    def __init__(
        self,
        exchange: Exchange,
        engine: Imposing,
        plan: TunePlan,
        timer: Timer,
        tell: Callable[[Sequence[Trial]], None],
        floor: Floor | None = None,
    ) -> None:
        self._exchange = exchange
        self._engine = engine
        self._plan = plan
        self._timer = timer
        self._tell = tell
        self._floor = floor
        self._bridge = open_bridge(exchange)
        self._steps_made = 0

    def choices(self) -> Iterator[tuple[int, Choice | None]]:
        """Give the choice for each number of tokens; None, and no more, where a check failed.

        Collective, alike on every rank: what decides is gathered.
        """
        plan = self._plan
        try:
            for num_tokens in plan.bench.tokens:
                choice = self._choose(num_tokens)
                yield num_tokens, choice
                if choice is None:
                    return
        finally:
            self._engine.impose(None)

    def close(self) -> None:
        """Release the stream."""
        self._bridge.close()

    def _choose(self, num_tokens: int) -> Choice | None:
        plan = self._plan
        self._engine.impose(None)
        present = {kind: self._engine.per_sm(kind, num_tokens) for kind in ROLES}
        # In a shorter graph some results would never come.
        steps = [self._step(num_tokens) for _ in range(min(NUM_INPUTS, plan.bench.pairs))]
        run = _Run(
            _ImposedChain(self._exchange, self._bridge, steps, self._engine),
            gather_traffic(self._exchange.world, plan.bench.case.config, steps),
            # Fewer tokens in the second: a row that combine did not empty would be found.
            [_KnownStep.of(self._step(count)) for count in (num_tokens, num_tokens // 2)],
        )

        def grids(choice: Choice) -> tuple[Grid, ...]:
            return tuple(self._grids(choice, num_tokens).values())

        def measure(field: Sequence[Choice], words: str) -> list[float] | None:
            trials = self._measure(field, words, num_tokens, run)
            self._tell(trials)
            if any(trial.row.complaints for trial in trials):
                return None
            return [trial.pair_us for trial in trials]

        return search(present, plan.per_sm, grids, measure, plan.margin_percent / 100)

    def _measure(
        self, field: Sequence[Choice], words: str, num_tokens: int, run: _Run
    ) -> list[Trial]:
        """Check every candidate, time them in turn, then check the results and the fastest."""
        plan, world = self._plan.bench, self._exchange.world
        complaints = [self._check(choice, run.checked) for choice in field]
        timings: list[Timing | None] = [None] * len(field)
        if not any(complaints):
            run.chain.forget()
            chains = [run.chain.imposing(choice) for choice in field]
            times = self._timer(chains, plan.pairs, plan.steps, plan.warmup)
            # A wait that has expired would only be told at the next call.
            self._exchange.poll()
            timings = [gather(world, spans) for spans in times]
            complaints[-1] = self._say(run.chain.complaint())
            fastest = min(range(len(field)), key=lambda index: _median_us(timings[index]))
            complaints[fastest] += self._check(field[fastest], run.checked)
        return [
            Trial(
                words,
                choice,
                self._grids(choice, num_tokens),
                Row(num_tokens, said, timing, run.traffic, self._floor),
            )
            for choice, said, timing in zip(field, complaints, timings, strict=True)
        ]

    def _grids(self, choice: Choice, num_tokens: int) -> dict[Kind, Grid]:
        norm = self._plan.bench.case.norm
        self._engine.impose(choice)
        return {kind: self._engine.grid(kind, num_tokens, norm=norm) for kind in ROLES}

    def _check(self, choice: Choice, steps: Sequence[Step]) -> tuple[str, ...]:
        """Run checked steps until one fails, and give every rank's complaint."""
        self._engine.impose(choice)
        said: tuple[str, ...] = ()
        for step in steps:
            said = said or self._say(run_checked_step(self._exchange, step, self._bridge))
        return said

    def _say(self, complaint: Complaint | None) -> tuple[str, ...]:
        own = None if complaint is None else str(complaint)
        said = self._exchange.world.allgather(own, "comparing with the oracle")
        return tuple(words for words in said if words is not None)

    def _step(self, num_tokens: int) -> Step:
        self._steps_made += 1
        return self._plan.bench.case.step(self._steps_made, num_tokens)


class _Run(NamedTuple):
    """What all candidates of a number of tokens are measured with."""

    chain: _ImposedChain
    traffic: Traffic
    checked: Sequence[Step]


class _ImposedChain(Chain):
    """A chain that runs under limits; several share one's data."""

    def __init__(
        self, exchange: Exchange, bridge: Any, steps: Sequence[Step], engine: Imposing
    ) -> None:
        super().__init__(exchange, bridge, steps)
        self._engine = engine
        self.choice: Choice | None = None

    def imposing(self, choice: Choice) -> _ImposedChain:
        """Give this chain under `choice`."""
        chain = copy.copy(self)
        chain.choice = choice
        return chain

    def run(self, pairs: int, stamp: Callable[[int], object] | None = None) -> None:
        """See `Chain`."""
        self._engine.impose(self.choice)
        super().run(pairs, stamp)


@dataclasses.dataclass(frozen=True)
class _KnownStep(Step):
    """A step whose oracle is asked once, since every candidate is checked with it."""

    @classmethod
    def of(cls, step: Step) -> _KnownStep:
        return cls(step.case, step.number, step.counts)

    @cached_property
    def _known(self) -> dict[tuple[str, int], Any]:
        return {}

    def _once(self, name: str, rank: int) -> Any:
        if (name, rank) not in self._known:
            self._known[name, rank] = getattr(super(), name)(rank)
        return self._known[name, rank]

    def inputs(self, rank: int) -> Inputs:
        inputs: Inputs = self._once("inputs", rank)
        return inputs

    def expected_rows(self, rank: int) -> Rows:
        rows: Rows = self._once("expected_rows", rank)
        return rows

    def expected_result(self, rank: int) -> BFloat16Array:
        result: BFloat16Array = self._once("expected_result", rank)
        return result

    def empty_rows(self, rank: int) -> Rows:
        rows: Rows = self._once("empty_rows", rank)
        return rows


def _median_us(timing: Timing | None) -> float:
    assert timing is not None
    return timing.pair.median
