"""What people see, on rank 0 alone: progress on stderr while it runs, then a table on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ep.bench.record import HOST_COSTS, mps_runs, versions
from ep.bench.sweep import PHASES
from ep.bootstrap.placement import nodes_of, placement_lines

if TYPE_CHECKING:
    from types import TracebackType

    from ep.bench.record import Row
    from ep.bench.sweep import Plan
    from ep.bootstrap import World

MAX_COMPLAINTS = 8
_TIMES = ("dispatch", "combine", "pair", "p10", "p90", "p99", "max", "skew")


class Report:
    """Shows a run. A context manager while rows are still to come.

    Parameters
    ----------
    world : World
    plan : Plan
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._rows: list[Row] = []
        stderr = Console(stderr=True)
        # No thread that refreshes by itself: it would run while steps are timed.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
            auto_refresh=False,
            transient=True,
            disable=not stderr.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=len(PHASES) * len(plan.tokens))
        self._phases_begun = 0

    def tell(self, num_tokens: int, phase: str) -> None:
        """Show that a phase begins."""
        self._progress.update(
            self._task, completed=self._phases_begun, description=f"{num_tokens} tokens: {phase}"
        )
        self._phases_begun += 1
        self._progress.refresh()

    def add(self, row: Row) -> None:
        """Take a row for the table."""
        self._rows.append(row)

    def show(self) -> None:
        """Print the table, then what is wrong, if anything is."""
        console = Console(highlight=False)
        table = self._table()
        options = console.options.update(width=1000)
        # Neither a pipe nor a narrow terminal may cost digits.
        console.width = max(console.width, Measurement.get(console, options, table).maximum)
        for line in self._head():
            console.print(line, soft_wrap=True, markup=False)
        console.print(table)
        for row in self._rows:
            if row.marks:
                from ep.bench.breakdown import table as marks_table

                console.print()
                console.print(marks_table(row.tokens, row.marks))
        complaints = [words for row in self._rows for words in row.complaints]
        if complaints:
            sys.stdout.flush()
            stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
            for words in complaints[:MAX_COMPLAINTS]:
                stderr.print(f"check failed: {words}")
            if len(complaints) > MAX_COMPLAINTS:
                stderr.print(f"and {len(complaints) - MAX_COMPLAINTS} more ranks")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def _head(self) -> tuple[str, ...]:
        plan, places = self._plan, self._world.places
        case, config = plan.case, plan.case.config
        where = f"{_count(config.ranks, 'rank')} on {_count(len(nodes_of(places)), 'node')}"
        shape = (
            f"{plan.shape}: hidden {config.hidden}, {config.experts} experts, top {config.top_k}"
        )
        kind = ", ".join(
            (
                f"{case.routing} routing",
                f"{'uneven' if case.uneven else 'even'} tokens, at most {config.max_tokens}",
                "norm" if case.norm else "no norm",
                _count(plan.steps, "step"),
                f"seed {case.seed}",
            )
        )
        return (
            f"ep {versions()['ep']}, {self._world.backend} backend, {where}",
            *placement_lines(places, self._world.seats),
            f"{shape}; {kind}",
            "us on the slowest rank: medians, then all of pair; KB sent by the busiest rank",
            *self._gpu_lines(),
            "",
        )

    def _gpu_lines(self) -> tuple[str, ...]:
        world, floor = self._world, next((row.floor for row in self._rows if row.floor), None)
        if world.device is None or floor is None:
            return ()
        mode = self._plan.mode(world.backend)
        how = f"graphs of {_count(self._plan.pairs, 'pair')}" if mode == "graph" else "eager"
        shared = ""
        if world.shares_gpus:
            mps = "MPS runs" if mps_runs() else "without MPS"
            shared = f", shared by {world.size} ranks ({mps}): no forecast of more GPUs"
        return (
            f"{_count(world.num_gpus, 'GPU')}, {world.device.name}{shared}; {how}",
            (
                f"floor {floor.pair:.2f} us a pair: 2 launches of {floor.launch:.2f}, "
                f"2 crossings of {floor.one_way:.2f}; a copy to the peer: {floor.copy_gbs:.0f} GB/s"
            ),
        )

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        columns = {"tokens": [str(row.tokens) for row in self._rows]}
        if len(self._plan.variants) > 1:
            columns["build"] = [row.variant or "default" for row in self._rows]
        for name in _TIMES:
            columns[name] = ["-" if row.timing is None else _times(row)[name] for row in self._rows]
        if any(row.floor for row in self._rows):
            columns["x floor"] = [
                "-" if row.x_floor is None else f"{row.x_floor:.2f}" for row in self._rows
            ]
        copy_gbs = next((row.floor.copy_gbs for row in self._rows if row.floor), 0.0)
        if copy_gbs:
            for name in ("dispatch", "combine"):
                columns[f"{name}, % of copy"] = [
                    f"{100 * row.rates_gbs()[name] / copy_gbs:.0f}" if row.timing else "-"
                    for row in self._rows
                ]
        if any(row.host_us for row in self._rows):
            for name in HOST_COSTS:
                costs = [(row.host_us or {}).get(name) for row in self._rows]
                columns[f"host, {name}"] = [
                    "-" if cost is None else f"{cost:.1f}" for cost in costs
                ]
        columns["KB/rank"] = [_digits(row.traffic.busiest / 1e3) for row in self._rows]
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("check", no_wrap=True)
        for row, cells in zip(self._rows, zip(*columns.values(), strict=True), strict=True):
            colour = "green" if row.check == "passed" else "bold red"
            table.add_row(*cells, Text(row.check, colour))
        return table


def _times(row: Row) -> dict[str, str]:
    assert row.timing is not None
    timing, pair = row.timing, row.timing.pair
    values = (
        timing.dispatch.median,
        timing.combine.median,
        pair.median,
        pair.p10,
        pair.p90,
        pair.p99,
        pair.max,
        timing.skew_us,
    )
    return {name: _digits(value) for name, value in zip(_TIMES, values, strict=True)}


def _digits(number: float) -> str:
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
