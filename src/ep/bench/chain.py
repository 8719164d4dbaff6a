"""Steps back to back on one exchange, as in a decoder without experts, and their results."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ep.bench.cases import EPS, Step
from ep.bench.check import Complaint, Where, check_result
from ep.layout import SOURCE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from ep.bench.bridge import Bridge
    from ep.exchange import Exchange
    from ep.prepared import PreparedStep
    from ep.reference import BFloat16Array


@dataclasses.dataclass(frozen=True)
class _ChainStep(Step):
    """A step whose partials are those of another: one array serves the whole chain."""

    first: Step = dataclasses.field(kw_only=True)

    def partials(self, rank: int, source: npt.NDArray[np.int32]) -> BFloat16Array:
        return self.first.partials(rank, source)


class Chain:
    """The calls of `steps` in turn, with all data made and moved beforehand.

    Parameters
    ----------
    exchange : Exchange
    bridge : Bridge
    steps : sequence of Step
    """

    def __init__(self, exchange: Exchange, bridge: Bridge, steps: Sequence[Step]) -> None:
        rank, hidden = exchange.world.rank, exchange.config.hidden
        self.exchange = exchange
        self.bridge = bridge
        self.steps = steps
        self._inputs = [tuple(map(bridge.put, step.inputs(rank))) for step in steps]
        shapes = [(step.counts[rank], hidden) for step in steps]
        nothing = [np.full(shape, np.nan, ml_dtypes.bfloat16) for shape in shapes]
        self._results = [bridge.put(array) for array in nothing]
        self._partials = bridge.put(_partials(exchange, steps))
        gains = steps[0].case.norm_weight
        self._norm_weight = None if gains is None else bridge.put(gains)

    def run(self, pairs: int, stamp: Callable[[int], object] | None = None) -> None:
        """Enqueue `pairs` steps; `stamp` is called after each call, with 0, 1, 2 and so on."""
        stream = self.bridge.stream
        dispatch, combine = self.exchange.dispatch, self.exchange.combine
        partials, norm_weight = self._partials, self._norm_weight
        for number in range(pairs):
            index = number % len(self.steps)
            x, ids, weights = self._inputs[index]
            dispatch(x, ids, weights, stream)
            if stamp is not None:
                stamp(2 * number)
            combine(partials, ids, norm_weight, EPS, self._results[index], stream)
            if stamp is not None:
                stamp(2 * number + 1)

    @cached_property
    def prepared(self) -> list[PreparedStep]:
        """The steps, each prepared."""
        prepare, stream = self.exchange.prepare, self.bridge.stream
        partials, gains = self._partials, self._norm_weight
        return [
            prepare(x, ids, weights, partials, gains, EPS, result, stream)
            for (x, ids, weights), result in zip(self._inputs, self._results, strict=True)
        ]

    def run_prepared(self, pairs: int) -> None:
        """Do as `run`, by prepared steps."""
        for number in range(pairs):
            step = self.prepared[number % len(self.steps)]
            step.dispatch()
            step.combine()

    def addresses(self) -> tuple[list[tuple[int, ...]], int, int]:
        """Device addresses of each step's x, ids, weights and result, and its tokens.

        Then those of the partials, and of the norm weight, or 0.
        """
        steps = [
            (*(array.address for array in (*inputs, result)), result.shape[0])
            for inputs, result in zip(self._inputs, self._results, strict=True)
        ]
        gains = self._norm_weight
        return steps, self._partials.address, 0 if gains is None else gains.address

    def forget(self) -> None:
        """Overwrite all results with NaN, so that those of the next run must be new."""
        for result in self._results:
            self.bridge.poison(result)

    def meet(self) -> None:
        """Let all ranks begin together. Collective."""
        self.exchange.world.barrier("starting the clock")

    def complaint(self) -> Complaint | None:
        """Compare the results of the last run of each step with the oracle."""
        rank = self.exchange.world.rank
        for step, result, want in zip(self.steps, self._results, self.expected(), strict=True):
            got: Any = self.bridge.get(result)
            complaint = check_result(got, want, Where(rank, step.number, "timed combine"))
            if complaint is not None:
                return complaint
        return None

    def expected(self) -> Iterator[BFloat16Array]:
        """Give what the oracle says of each step's result on this rank."""
        for step in self.steps:
            fields = (step.case, step.number, step.counts, step.excluded)
            chained = _ChainStep(*fields, first=self.steps[0])
            yield chained.expected_result(self.exchange.world.rank)


def _partials(exchange: Exchange, steps: Sequence[Step]) -> BFloat16Array:
    """Partials for whatever row may be live in `steps`."""
    layout = exchange.layout
    partials = np.zeros((layout.rows, exchange.config.hidden), ml_dtypes.bfloat16)
    for src in range(exchange.config.ranks):
        token_idx = np.arange(max(step.counts[src] for step in steps), dtype=np.int32)
        block = partials[layout.row(src, 0) :][: len(token_idx)]
        block[:] = steps[0].partials(exchange.world.rank, src << SOURCE_BITS | token_idx)
    return partials
