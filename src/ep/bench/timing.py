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

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from ep.bench.chain import Chain
    from ep.bootstrap import World

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


@dataclasses.dataclass(frozen=True)
class Floor:
    """What no exchange on this machine can beat, in us.

    Attributes
    ----------
    launch : float
        An empty kernel after another in a graph.
    one_way : float
        A word from a rank's store to its peer's poll, half of a round trip; 0 for one rank.
    copy_gbs : float
        GB/s of a copy to the peer while the peer copies here; 0 for one rank.
    """

    launch: float
    one_way: float
    copy_gbs: float = 0.0

    @property
    def pair(self) -> float:
        """Two launches and two crossings."""
        return 2 * (self.launch + self.one_way)


def time_host(chain: Chain, num_timed: int, num_warmup: int) -> dict[str, npt.NDArray[np.int64]]:
    """Read the clock before, between and after the two calls of each timed step, in ns."""
    clock = time.perf_counter_ns
    stamps = np.empty(2 * num_timed + 1, np.int64)

    def stamp(index: int) -> None:
        stamps[index + 1] = clock()

    chain.run(num_warmup)
    chain.meet()
    with _no_collection():
        stamps[0] = clock()
        chain.run(num_timed, stamp)
    start, between, end = stamps[:-1:2], stamps[1::2], stamps[2::2]
    return {"pair": end - start, "dispatch": between - start, "combine": end - between}


def gather(world: World, times_ns: Mapping[str, npt.ArrayLike]) -> Timing:
    """Summarize each rank's times of "pair", "dispatch" and "combine". Collective."""
    own = {name: dataclasses.asdict(Stats.of(times)) for name, times in times_ns.items()}
    said = world.allgather(own, "gathering times")
    return Timing.of_ranks(
        [{name: Stats(**fields) for name, fields in rank.items()} for rank in said]
    )


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
