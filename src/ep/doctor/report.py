"""What people see, and what `--json` holds."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

import ep
from ep.doctor.reach import LEGEND
from ep.doctor.result import Mark, Result
from ep.errors import name_ranks
from ep.files import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ep.doctor.result import Options

STYLES = {
    Mark.PASS: "green",
    Mark.WARN: "yellow",
    Mark.FAIL: "bold red",
    Mark.SKIP: "dim",
}
LEAST_WIDTH = 120
"""Of a pipe or a narrow terminal, in characters."""


def to_json(
    document: dict[str, Any], results: Sequence[Result], options: Options, output: str
) -> dict[str, Any]:
    """Complete the document of a job, or of a rank that did not join one."""
    counts = {str(mark): sum(result.finding.mark is mark for result in results) for mark in Mark}
    return {
        "ep": ep.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "options": {
            "backend": options.backend,
            "config": options.config,
            "max_tokens": options.max_tokens,
            "steps": options.steps,
            "timeout_s": options.timeout_s,
        },
        "counts": counts,
        **document,
        "results": [result.to_json() for result in results],
        "output": output,
    }


def write(path: str, document: dict[str, Any]) -> None:
    """Write one document to a file, or to stdout where `path` is "-"; raises `OSError`."""
    if path == "-":
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
        return
    write_text(Path(path), json.dumps(document, indent=1) + "\n")


def show(document: dict[str, Any], results: Sequence[Result]) -> None:
    """Print the table, where the ranks are, what reaches what, and what to do."""
    console = Console(highlight=False)
    console.width = max(console.width, LEAST_WIDTH)
    size = len(document.get("ranks", []))
    parts: list[RenderableType] = [_table(results, size)]
    if size:
        parts += ["", _placement(document)]
    if any(set(row) - {"="} for row in document.get("reach", [])):
        parts += ["", *_reach(document["reach"])]
    told = list(remedies(results, size))
    if told:
        parts += ["", *(Text(line) for line in told)]
    counts = [f"{sum(r.finding.mark is mark for r in results)} {mark}" for mark in Mark]
    console.print(Group(*parts, "", ", ".join(counts)))


def _table(results: Sequence[Result], size: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("", overflow="fold")
    area = ""
    for result in results:
        if result.area != area:
            area = result.area
            table.add_row("", Text(area, "bold"), "")
        mark = result.finding.mark
        words = Text(sentence(result, size))
        table.add_row(Text(mark, STYLES[mark]), Text(f"  {result.name}"), words)
    return table


def sentence(result: Result, size: int) -> str:
    """Words of a result, and whose they are where that is not every rank."""
    if not result.ranks or len(result.ranks) == size or size <= 1:
        return result.finding.words
    return f"{name_ranks(list(result.ranks))}: {result.finding.words}"


def _placement(document: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    ranks = document["ranks"]
    columns = {
        "rank": [str(told["rank"]) for told in ranks],
        "node": [told["node"] for told in ranks],
        "local": [str(told["local_rank"]) for told in ranks],
        "process": [str(told["process"]) for told in ranks],
        "CPUs": [_spans(told["cpus"]) for told in ranks],
        "NUMA": [_spans(told["numa"]) for told in ranks],
    }
    if any(told["gpu"] for told in ranks):
        gpus = [told["gpu"] or {} for told in ranks]
        fabrics = [gpu.get("fabric") or {} for gpu in gpus]
        columns |= {
            "GPU": [str(gpu.get("ordinal", "-")) for gpu in gpus],
            "UUID": [gpu.get("uuid", "-")[:8] for gpu in gpus],
            "bus": [gpu.get("bus_id", "-") for gpu in gpus],
            "its NUMA": [str(gpu.get("numa", "-")) for gpu in gpus],
            "cluster": [fabric.get("cluster", "-")[:8] for fabric in fabrics],
            "clique": [str(fabric.get("clique", "-")) for fabric in fabrics],
        }
    for name in columns:
        table.add_column(name, no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _spans(numbers: list[int]) -> str:
    return name_ranks(numbers).split(" ", 1)[1] if numbers else "-"


def _reach(rows: Sequence[str]) -> list[RenderableType]:
    used = [f"{letter} {words}" for letter, words in LEGEND.items() if letter in "".join(rows)]
    head = f"how each rank's GPU (a row) reaches each other's: {', '.join(used)}"
    return [Text(head), *(Text(f"{rank:4} {row}") for rank, row in enumerate(rows))]


def remedies(results: Sequence[Result], size: int) -> list[str]:
    """Lines that say what to do: first for fails, then for warnings."""
    lines = []
    for mark in (Mark.FAIL, Mark.WARN):
        for result in results:
            if result.finding.mark is mark:
                lines.append(f"{mark}  {result.area}, {result.name}: {sentence(result, size)}")
                lines.append(f"      -> {result.finding.remedy}")
    return lines


def tell_alone(rank: int, results: Sequence[Result], output: str) -> None:
    """Say on stderr, in one piece, what one rank of several found that is not well."""
    lines = [f"rank {rank}: {line}" for line in remedies(results, 1)]
    lines += [f"rank {rank}: | {line}" for line in output.splitlines()[-10:]]
    click.echo("\n".join(lines), err=True)
