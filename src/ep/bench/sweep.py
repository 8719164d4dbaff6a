"""Check, time and check again, for one number of tokens after the other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from ep.bench.bridge import open_bridge
from ep.bench.chain import Chain
from ep.bench.check import Complaint, run_checked_step
from ep.bench.record import Row, gather_traffic
from ep.bench.timing import Timing, gather, time_host
from ep.bootstrap import Backend
from ep.config import Protocol
from ep.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ep.bench.cases import Case
    from ep.bench.timing import Floor
    from ep.exchange import Exchange

PHASES = ("checking", "timing", "checking again")
BREAKDOWNS = 100
"""Replays with stamps, of which the medians count."""
NUM_INPUTS = 4
"""Steps whose inputs the timed ones use in turn: one draw of a routing may be lucky."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes
    ----------
    shape : str
        Name or file of the config, for people.
    case : Case
    tokens : tuple of int
        A row each: most that a rank sends in a step.
    steps, warmup : int
        Timed ones, and those before them; on graphs, replays of `pairs` steps each.
    eager : bool
        On GPUs: enqueue each step from the host, instead of replaying a graph.
    pairs : int
        Steps in a graph.
    variants : tuple of str
        Protocols and builds of the kernels to compare, as `--compare` takes them; "": the default.
    breakdown : bool
        On GPUs: also run a build with stamps, to see where the time goes.
    """

    shape: str
    case: Case
    tokens: tuple[int, ...]
    steps: int
    warmup: int
    eager: bool = False
    pairs: int = 20
    variants: tuple[str, ...] = ("",)
    breakdown: bool = False

    def mode(self, backend: Backend) -> Literal["host", "eager", "graph"]:
        """How steps are timed."""
        if backend is Backend.HOST:
            return "host"
        return "eager" if self.eager else "graph"

    def check(self, backend: Backend) -> None:
        """Raise `ArgumentError` for what `backend` or the protocol has not."""
        if backend is Backend.HOST:
            for option, is_given in (("--breakdown", self.breakdown), ("--compare", self.compares)):
                if is_given:
                    raise ArgumentError(f"{option} is for GPUs; leave it out on the host backend")
        if self.breakdown and self.case.config.protocol is Protocol.FLAGS:
            raise ArgumentError("--breakdown has no stamps of the flag protocol; choose fence_free")

    @property
    def compares(self) -> bool:
        """Whether builds are named."""
        return self.variants != ("",)

    def steps_in_a_run(self, mode: str) -> int:
        """Steps that every run of a chain has at least."""
        return self.pairs if mode == "graph" else self.steps

    def facts(self) -> dict[str, Any]:
        """Give what must be the same on every rank; the config is the exchange's to compare."""
        case = self.case
        return {
            "tokens": self.tokens,
            "routing": case.routing,
            "uneven": case.uneven,
            "norm": case.norm,
            "seed": case.seed,
            "steps": self.steps,
            "warmup": self.warmup,
            "eager": self.eager,
            "pairs": self.pairs,
            "variants": self.variants,
            "breakdown": self.breakdown,
        }


class Sweep:
    """Runs a plan.

    Parameters
    ----------
    exchanges : sequence of Exchange
        One for each of the plan's variants, fresh: their steps are counted here, so that a
        complaint and a timeout name the same step.
    plan : Plan
    tell : callable
        Told of each phase before it begins, with the number of tokens and the phase's name.
    """

    def __init__(
        self, exchanges: Sequence[Exchange], plan: Plan, tell: Callable[[int, str], None]
    ) -> None:
        self._exchanges = exchanges
        self._world = exchanges[0].world
        self._plan = plan
        self._tell = tell
        self._mode = plan.mode(self._world.backend)
        self._steps_done = 0
        self._bridge = open_bridge(exchanges[0])
        self._floor: Floor | None = None

    def rows(self) -> Iterator[Row]:
        """Measure; ends after the first row whose check fails. Collective, alike on every rank."""
        if self._world.backend is Backend.GPU:
            from ep.bench.gpu_timing import measure_floor

            self._floor = measure_floor(self._world, self._exchanges[0].layout)
        for num_tokens in self._plan.tokens:
            rows = self._measure(num_tokens)
            yield from rows
            if any(row.complaints for row in rows):
                return

    def _measure(self, num_tokens: int) -> list[Row]:
        plan = self._plan
        before, timed, after = PHASES
        steps = [
            plan.case.step(self._steps_done + index, num_tokens)
            for index in range(1, 1 + min(NUM_INPUTS, plan.steps_in_a_run(self._mode)))
        ]
        traffic = gather_traffic(self._world, plan.case.config, steps)
        self._tell(num_tokens, before)
        # Fewer tokens each time: a row that combine did not empty would be found.
        complaints = self._check(num_tokens, num_tokens // 2, min(num_tokens, 1))
        timings: list[Timing | None] = [None] * len(self._exchanges)
        costs: list[dict[str, float] | None] = [None] * len(self._exchanges)
        if not any(complaints):
            self._tell(num_tokens, timed)
            chains = [Chain(exchange, self._bridge, steps) for exchange in self._exchanges]
            timings = [gather(self._world, times) for times in self._time(chains)]
            if self._mode == "eager":
                costs = [self._host_costs(chain) for chain in chains]
            self._tell(num_tokens, after)
            complaints = [self._say(chain.complaint()) for chain in chains]
            if not any(complaints):
                complaints = self._check(num_tokens)
        rows = [
            Row(num_tokens, said, timing, traffic, self._floor, variant, host_us=cost)
            for said, timing, variant, cost in zip(
                complaints, timings, plan.variants, costs, strict=True
            )
        ]
        if plan.breakdown and not any(complaints):
            from ep.bench.breakdown import measure

            marks = measure(self._world, plan.case.config, plan.case, num_tokens, BREAKDOWNS)
            rows[0] = dataclasses.replace(rows[0], marks=tuple(marks))
        return rows

    def _time(self, chains: Sequence[Chain]) -> list[dict[str, Any]]:
        plan = self._plan
        if self._mode == "graph":
            from ep.bench.gpu_timing import time_graphs

            # Of the graph with stamps, too, there are as many pairs as timed replays.
            self._steps_done += plan.pairs * (plan.warmup + plan.steps)
            self._steps_done += plan.pairs * max(1, plan.steps // plan.pairs)
            return time_graphs(chains, plan.pairs, plan.steps, plan.warmup)
        self._steps_done += plan.steps + plan.warmup
        if self._mode == "eager":
            from ep.bench.gpu_timing import time_eager

            return [time_eager(chain, plan.steps, plan.warmup) for chain in chains]
        return [time_host(chain, plan.steps, plan.warmup) for chain in chains]

    def _host_costs(self, chain: Chain) -> dict[str, float]:
        from ep.bench.gpu_timing import HOST_STEPS, host_costs

        costs = host_costs(chain)
        self._steps_done += len(costs) * HOST_STEPS
        told = self._world.allgather(costs, "gathering what the host costs")
        return {name: max(costs[name] for costs in told) for name in told[0]}

    def _check(self, *counts: int) -> list[tuple[str, ...]]:
        """Run a checked step for each of `counts` until one fails; complaints of each variant."""
        complaints: list[tuple[str, ...]] = [()] * len(self._exchanges)
        for num_tokens in counts:
            self._steps_done += 1
            step = self._plan.case.step(self._steps_done, num_tokens)
            complaints = [
                self._say(run_checked_step(exchange, step, self._bridge))
                for exchange in self._exchanges
            ]
            if any(complaints):
                break
        return complaints

    def _say(self, complaint: Complaint | None) -> tuple[str, ...]:
        """Give every rank's complaint."""
        own = None if complaint is None else str(complaint)
        said = self._world.allgather(own, "comparing with the oracle")
        return tuple(words for words in said if words is not None)
