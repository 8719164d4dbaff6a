"""Where the time of a step goes: stamps of the kernels' CTAs, from builds made for that.

The clock of a GPU ticks in steps of its own, often of 32 ns and on some of about 1 us: medians over
many replays are finer than it. Stamps cost stores, so that such a build is a little slower.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from ep.bench.bridge import GpuBridge
from ep.bench.chain import Chain
from ep.exchange import Exchange
from ep.gpu.graph import Graph
from ep.kernels.compile import Kind
from ep.kernels.grid import HERALDS
from ep.kernels.options import KernelOptions, Pdl
from ep.record import Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ep.bench.cases import Case
    from ep.bootstrap import World
    from ep.config import EpConfig

PAIRS = 3
"""Steps of a graph; the last one counts, which meets the others in full swing."""
ROLES = {
    Kind.DISPATCH: ("herald", "send", "receive"),
    Kind.COMBINE: ("herald", "send", "reduce"),
}
"""What CTAs do, in the order of their numbers."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """When the CTAs of a role came to a point, in us after the first CTA of dispatch began."""

    kernel: Kind
    role: str
    stamp: Stamp
    first_us: float
    median_us: float
    last_us: float


def table(num_tokens: int, marks: Sequence[Mark]) -> Table:
    """Marks for people: when the first, the median and the last CTA got how far."""
    made = Table(
        title=f"{num_tokens} tokens: us after dispatch began, this rank's CTAs with stamps",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    made.add_column("kernel")
    made.add_column("CTAs")
    made.add_column("point")
    for name in ("first", "median", "last"):
        made.add_column(name, justify="right")
    for mark in marks:
        times = (mark.first_us, mark.median_us, mark.last_us)
        name = mark.stamp.name.lower()
        made.add_row(mark.kernel, mark.role, name, *(f"{time:.2f}" for time in times))
    return made


def to_json(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """Marks as JSON holds them."""
    return [
        {
            "kernel": str(mark.kernel),
            "ctas": mark.role,
            "point": mark.stamp.name.lower(),
            "first": round(mark.first_us, 3),
            "median": round(mark.median_us, 3),
            "last": round(mark.last_us, 3),
        }
        for mark in marks
    ]


def measure(
    world: World, config: EpConfig, case: Case, num_tokens: int, replays: int
) -> list[Mark]:
    """Run steps with stamps and give this rank's marks, medians over `replays`. Collective.

    Raises
    ------
    ArgumentError
        On every rank, if the protocol of `config` has no stamps.
    """
    options = KernelOptions(pdl=Pdl.LATE if world.shares_gpus else Pdl.EARLY, stamps=True)
    bridge = GpuBridge(world.device)
    with Exchange(world, config, kernel_options=options) as exchange:
        engine: Any = exchange._engine  # noqa: SLF001 - stamps are no part of the public surface
        steps = [case.step(number, num_tokens) for number in range(PAIRS)]
        chain = Chain(exchange, bridge, steps)

        def enqueue() -> None:
            chain.run(PAIRS - 1)
            engine.clear_stamps(bridge.stream)
            chain.run(1)

        graph = Graph.capture(bridge.stream, enqueue)
        tokens = steps[0].counts[world.rank]
        senders = {kind: engine.grid(kind, tokens, norm=case.norm).senders for kind in ROLES}
        cuts = {kind: [HERALDS, HERALDS + senders[kind]] for kind in ROLES}
        found: list[dict[tuple[Kind, str, Stamp], tuple[float, float, float]]] = []
        for _ in range(replays):
            chain.meet()
            graph.launch(bridge.stream)
            taken = {kind: engine.stamps(kind, bridge.stream) for kind in ROLES}
            found.append(dict(_marks(taken, cuts)))
        chain.meet()
        graph.close()
    bridge.close()
    keys = found[-1].keys()
    values = {
        key: np.median([one[key] for one in found if key in one], axis=0).tolist() for key in keys
    }
    return [Mark(*key, *times) for key, times in values.items()]


def _marks(
    taken: dict[Kind, npt.NDArray[np.uint64]], cuts: dict[Kind, list[int]]
) -> Iterator[tuple[tuple[Kind, str, Stamp], tuple[float, float, float]]]:
    starts = taken[Kind.DISPATCH][:, Stamp.START]
    origin = int(starts[starts > 0].min())
    for kind, stamps in taken.items():
        parts = np.split(stamps, cuts[kind])
        for role, lines in zip(ROLES[kind], parts, strict=True):
            for stamp in Stamp:
                times = lines[:, stamp]
                times = times[times > 0]
                if len(times):
                    us = (times.astype(np.int64) - origin) / 1e3
                    yield (kind, role, stamp), (us.min(), float(np.median(us)), us.max())
