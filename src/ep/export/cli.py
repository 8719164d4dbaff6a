"""Options and exit codes of the export."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from ep.config import MAX_RANKS, MAX_TOKENS, EpConfig, Protocol
from ep.errors import ConfigError, EpError
from ep.export.library import build_library, find_compiler, write_sources
from ep.export.plan import ExportPlan
from ep.kernels.compile import ARCHES
from ep.kernels.options import Pdl

MOST_NAME = 40
"""Characters of a shape's name."""


class Arches(click.ParamType[tuple[str, ...]]):
    """Architectures with commas between."""

    name = "arches"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """See click."""
        arches = value if isinstance(value, tuple) else tuple(value.split(","))
        if not set(arches) <= set(ARCHES) or len(set(arches)) < len(arches):
            self.fail(f"{value[:60]!r} is not allowed: {', '.join(ARCHES)}, each once", param, ctx)
        return arches


@click.command()
@click.option(
    "--config",
    "source",
    metavar="NAME|FILE",
    default="kimi_k3",
    show_default=True,
    help="Model shape, as ep.bench takes it; a file's timeout_s and grace_s are the defaults of "
    "EP_OPTIONS_INIT.",
)
@click.option(
    "--ranks", type=click.IntRange(1, MAX_RANKS), required=True, help="Ranks of the exchange."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    required=True,
    help="Most tokens that a rank sends in a step.",
)
@click.option(
    "--arch",
    "arches",
    type=Arches(),
    metavar="ARCH,...",
    default=",".join(ARCHES),
    show_default=True,
    help="GPUs that the library serves; it takes the right one when it is opened.",
)
@click.option(
    "--sharing/--no-sharing",
    default=True,
    show_default=True,
    help="With kernels for ranks that share a GPU, or without.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    required=True,
    help="Folder of libep.so and ep.h; made where missing.",
)
@click.option(
    "--sources",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write what the library is made of here, to build it elsewhere.",
)
def command(
    source: str,
    ranks: int,
    max_tokens: int,
    arches: tuple[str, ...],
    *,
    sharing: bool,
    output: Path,
    sources: Path | None,
) -> None:
    """Write one shared library and one C header of an exchange. Needs no GPU.

    The library needs the CUDA driver when it is opened, and neither Python, torch nor a compiler.
    The C compiler here is CC, or cc. docs/embedding.md has the rules of its use.
    """
    try:
        config = EpConfig.load(source, ranks=ranks, max_tokens=max_tokens)
        if config.protocol is not Protocol.FENCE_FREE:
            config = dataclasses.replace(config, protocol=Protocol.FENCE_FREE)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error
    # It stands in comments and strings of C, and in errors, which are cut.
    name = re.sub(r"[^\w.+-]", "_", Path(source).stem, flags=re.ASCII)[:MOST_NAME]
    try:
        pdls = (Pdl.EARLY, Pdl.LATE) if sharing else (Pdl.EARLY,)
        _export(ExportPlan(name, config, arches, pdls), output, sources)
    except (EpError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _export(plan: ExportPlan, output: Path, sources: Path | None) -> None:
    if sources is None:
        # Before the kernels, which take minutes. The sources are of use without one.
        find_compiler()
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling kernels")

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        images = plan.images(tell)
    if sources is not None:
        sources.mkdir(parents=True, exist_ok=True)
        write_sources(plan, images, sources)
    library, header = build_library(plan, images, output)
    click.echo(f"{library}: {library.stat().st_size / 1e6:.1f} MB for {', '.join(plan.arches)}")
    click.echo(f"{header}: {plan.layout.total_bytes} bytes a buffer, config {plan.config_id}")


def main() -> None:
    """Run the command."""
    # As an interrupt from the keyboard: what is half made goes.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    command(prog_name="python -m ep.export")
