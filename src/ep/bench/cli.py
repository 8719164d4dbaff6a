"""Options, exit codes, and who says what: every rank runs this, rank 0 speaks."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ep.bench.cases import Case
from ep.bench.command import (
    MAX_PAIRS,
    MAX_SEED,
    MAX_STEPS,
    TokenCounts,
    connect,
    load_config,
    obstacle,
    run_command,
)
from ep.bench.record import append, to_json
from ep.bench.sweep import Plan, Sweep
from ep.bootstrap import Backend, World
from ep.config import MAX_TOKENS, EpConfig
from ep.errors import ArgumentError, CollectiveError, ConfigError, EpError, HeapError
from ep.exchange import Exchange
from ep.routing import Routing

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command()
@click.option(
    "--config",
    "source",
    metavar="NAME|FILE",
    default="kimi_k3",
    show_default=True,
    help=f"Model shape: {', '.join(EpConfig.available())}, or a .toml file; its ranks and "
    "max_tokens, if any, do not count here.",
)
@click.option(
    "--tokens",
    type=TokenCounts(),
    metavar="T,...",
    default="1,5,8,16,64",
    show_default=True,
    help="Tokens a rank sends in a step, a row of the table each.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    help="Most tokens the buffer has room for.  [default: the largest of --tokens]",
)
@click.option(
    "--routing",
    type=click.Choice([routing.value for routing in Routing]),
    default=Routing.UNIFORM.value,
    show_default=True,
    help="How tokens choose their experts.",
)
@click.option(
    "--uneven", is_flag=True, help="Ranks send 0 to T tokens, differing by rank and step."
)
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_STEPS),
    default=100,
    show_default=True,
    help="Timed steps a row.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, MAX_STEPS),
    default=10,
    show_default=True,
    help="Steps before them.",
)
@click.option(
    "--graph/--eager",
    default=True,
    show_default=True,
    help="On GPUs: replay CUDA graphs (a step of --steps is a replay), or enqueue each step.",
)
@click.option(
    "--pairs",
    type=click.IntRange(1, MAX_PAIRS),
    default=20,
    show_default=True,
    help="Steps in a graph.",
)
@click.option(
    "--share-gpus",
    is_flag=True,
    default=None,
    help="Let several ranks use one GPU; start CUDA MPS, or it is very slow.",
)
@click.option(
    "--compare",
    multiple=True,
    metavar="BUILD",
    help="On GPUs, several times: time these builds of the kernels in turn, each 'default' or "
    "like 'protocol=flags,fences=thread,pdl=late'.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="On GPUs: also say when the CTAs of the default build got how far, from a build with "
    "time stamps.",
)
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of all data."
)
@click.option("--norm/--no-norm", default=True, show_default=True, help="RMSNorm in combine.")
@click.option(
    "--backend",
    type=click.Choice(["auto", *(backend.value for backend in Backend)]),
    default="auto",
    show_default=True,
    help="What moves the tokens.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append each row to FILE, as one JSON object a line.",
)
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    tokens: tuple[int, ...],
    max_tokens: int | None,
    routing: str,
    *,
    uneven: bool,
    steps: int,
    warmup: int,
    graph: bool,
    pairs: int,
    share_gpus: bool | None,
    compare: tuple[str, ...],
    breakdown: bool,
    seed: int,
    norm: bool,
    backend: str,
    json_path: Path | None,
) -> None:
    """Check and time dispatch and combine.

    Every rank's rows and results are compared with the oracle bit for bit, before and after the
    timing. Exits with 1 if any differ. Run it alone, or with one process a rank:

    mpirun -np 16 python -m ep.bench
    """
    most = max(*tokens, 1)
    if max_tokens is not None and max_tokens < most:
        raise click.BadParameter(
            f"{max_tokens} is below the {most} of --tokens", param_hint="--max-tokens"
        )
    config = load_config(source, max_tokens or most)
    case = Case(config=config, routing=Routing(routing), uneven=uneven, norm=norm, seed=seed)
    try:
        world = connect(backend, share_gpus=share_gpus)
    except EpError as error:
        raise click.ClickException(str(error)) from error
    with world:
        plan = Plan(
            source,
            case,
            tokens,
            steps,
            warmup,
            eager=not graph,
            pairs=pairs,
            breakdown=breakdown,
            variants=tuple(name.replace("default", "") for name in compare or ("",)),
        )
        code = run(world, plan, json_path)
    ctx.exit(code)


def run(world: World, plan: Plan, json_path: Path | None = None) -> int:
    """Check, time, report. Collective.

    Returns
    -------
    int
        Exit code, the same on every rank: 1 if a check failed, ranks could not begin, or rows
        could not be appended to `json_path`.
    """
    try:
        world.agree_on(plan.facts(), "the benchmark's options")
        plan.check(world.backend)
        # Before an hour of work, not after it.
        problem = obstacle(json_path) if world.rank == 0 and json_path is not None else None
        world.agree(problem, "opening the file of --json")
        exchanges = [_open(world, plan.case.config, variant) for variant in plan.variants]
    except (CollectiveError, HeapError, ArgumentError) as error:
        # Raised alike on every rank, so that all may leave in peace.
        if world.rank == 0:
            click.echo(f"Error: {error}", err=True)
        return 1
    with contextlib.ExitStack() as stack:
        for exchange in exchanges:
            stack.enter_context(exchange)
        if world.rank == 0:
            code = _run_and_report(exchanges, plan, json_path)
        else:
            sweep = Sweep(exchanges, plan, lambda _num_tokens, _phase: None)
            rows = list(sweep.rows())
            code = int(any(row.complaints for row in rows))
        codes: list[int] = world.allgather(code, "ending the benchmark")
        return max(codes)


def _open(world: World, config: EpConfig, variant: str) -> Exchange:
    """Make an exchange as `variant` says: of which protocol, and how its kernels are built."""
    parts = [part.strip() for part in variant.split(",") if part.strip()]
    chosen: dict[str, Any] = dict(
        part.split("=", 1) for part in parts if part.startswith("protocol=")
    )
    try:
        config = dataclasses.replace(config, **chosen)
    except ConfigError as error:
        raise ArgumentError(str(error)) from error
    build = ",".join(part for part in parts if not part.startswith("protocol="))
    if not build:
        return Exchange(world, config)
    from ep.kernels.options import KernelOptions

    return Exchange(world, config, kernel_options=KernelOptions.parse(build))


def _run_and_report(exchanges: Sequence[Exchange], plan: Plan, json_path: Path | None) -> int:
    # Only here: the other ranks need nothing of it.
    from ep.bench.report import Report

    world = exchanges[0].world
    report = Report(world, plan)
    failed = False
    problem: OSError | None = None
    with report:
        for row in Sweep(exchanges, plan, report.tell).rows():
            failed |= bool(row.complaints)
            report.add(row)
            if json_path is not None and problem is None:
                # The other ranks know nothing of it, and the table is still to come.
                try:
                    append(json_path, to_json(row, plan, world))
                except OSError as error:
                    problem = error
    report.show()
    if problem is not None:
        click.echo(f"Error: --json lacks rows of this table: {json_path}: {problem}", err=True)
    return int(failed or problem is not None)


def main() -> None:
    """Run the command."""
    run_command(command, "python -m ep.bench")
