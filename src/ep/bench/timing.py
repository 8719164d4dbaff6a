"""How long dispatch, combine and both together take, on the slowest rank.

Steps run back to back, as in a decoder without experts. There is no barrier between them: it would
leave the ranks less aligned than the exchange itself does, where nobody leaves a dispatch or a
combine before everybody has come to it.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ep.bench.cases import EPS
from ep.layout import SOURCE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from ep.bench.cases import Step
    from ep.bootstrap import World
    from ep.exchange import Exchange
    from ep.reference import BFloat16Array

_PERCENTILES = {"median": 50, "p10": 10, "p90": 90, "p99": 99, "max": 100}


@dataclasses.dataclass(frozen=True)
class Stats:
    """One rank's times of one thing, in us, interpolated linearly between steps."""

    median: float
    p10: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, times_ns: npt.ArrayLike) -> Stats:
        """Summarize times in ns, at least one."""
        values = np.percentile(np.asarray(times_ns) / 1e3, list(_PERCENTILES.values()))
        return cls(**{name: float(us) for name, us in zip(_PERCENTILES, values, strict=True)})


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a timed run gave, over all ranks.

    Attributes
    ----------
    pair, dispatch, combine : Stats
        Each of the rank whose median of it is the largest: an exchange is as fast as its last rank.
    skew_us : float
        Median of a pair on the slowest rank, less that on the fastest.
    """

    pair: Stats
    dispatch: Stats
    combine: Stats
    skew_us: float

    @classmethod
    def of_ranks(cls, ranks: Sequence[dict[str, Stats]]) -> Timing:
        """Pick the slowest rank; `ranks` holds each rank's pair, dispatch and combine."""
        slowest = {
            name: max((rank[name] for rank in ranks), key=lambda stats: stats.median)
            for name in ("pair", "dispatch", "combine")
        }
        fastest_us = min(rank["pair"].median for rank in ranks)
        return cls(**slowest, skew_us=slowest["pair"].median - fastest_us)


def time_steps(
    exchange: Exchange, steps: Sequence[Step], *, num_timed: int, num_warmup: int
) -> Timing:
    """Time `num_timed` steps after `num_warmup` others, their inputs those of `steps` in turn.

    Collective; every rank gets the same.
    """
    start, between, end = _run(exchange, steps, num_timed, num_warmup).T
    times_ns = {"pair": end - start, "dispatch": between - start, "combine": end - between}
    return gather(exchange.world, times_ns)


def gather(world: World, times_ns: Mapping[str, npt.ArrayLike]) -> Timing:
    """Summarize each rank's times of "pair", "dispatch" and "combine". Collective."""
    own = {name: dataclasses.asdict(Stats.of(times)) for name, times in times_ns.items()}
    said = world.allgather(own, "gathering times")
    return Timing.of_ranks(
        [{name: Stats(**fields) for name, fields in rank.items()} for rank in said]
    )


def _run(
    exchange: Exchange, steps: Sequence[Step], num_timed: int, num_warmup: int
) -> npt.NDArray[np.int64]:
    """Read the clock before, between and after the two calls of each timed step: `[steps, 3]`."""
    rank = exchange.world.rank
    inputs = [step.inputs(rank) for step in steps]
    results = [
        np.empty((step.counts[rank], exchange.config.hidden), ml_dtypes.bfloat16) for step in steps
    ]
    partials = _partials(exchange, steps)
    norm_weight = steps[0].case.norm_weight
    clock = time.perf_counter_ns
    times_ns = np.empty((num_timed, 3), np.int64)
    exchange.world.barrier("starting the clock")
    with _no_collection():
        for number in range(-num_warmup, num_timed):
            x, ids, weights = inputs[number % len(inputs)]
            start = clock()
            exchange.dispatch(x, ids, weights)
            between = clock()
            exchange.combine(partials, ids, norm_weight, EPS, results[number % len(inputs)])
            end = clock()
            # Warm-up steps write where timed ones will: the indices are negative.
            times_ns[number % num_timed] = start, between, end
    return times_ns


def _partials(exchange: Exchange, steps: Sequence[Step]) -> BFloat16Array:
    """Partials for whatever row may be live in `steps`, so that one array serves them all."""
    layout = exchange.layout
    partials = np.empty((layout.rows, exchange.config.hidden), ml_dtypes.bfloat16)
    for src in range(exchange.config.ranks):
        token_idx = np.arange(max(step.counts[src] for step in steps), dtype=np.int32)
        block = partials[layout.row(src, 0) :][: len(token_idx)]
        block[:] = steps[0].partials(exchange.world.rank, src << SOURCE_BITS | token_idx)
    return partials


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the times."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
