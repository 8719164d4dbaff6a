"""Options, exit codes, and who says what: every rank runs this, rank 0 speaks and writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
from ep.bench.sweep import Plan
from ep.bootstrap import Backend, World
from ep.config import MAX_TOKENS, TUNING_FILE, EpConfig, Protocol, configs_dir
from ep.errors import CollectiveError, ConfigError, EpError, HeapError
from ep.exchange import Exchange
from ep.kernels.tuning import MAX_PER_SM, ROLES, Point, Tuning, table_path
from ep.routing import Routing
from ep.tune.report import Report, measured
from ep.tune.table import check_writable, merge
from ep.tune.trials import Sweep, TunePlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep.gpu import GpuEngine
    from ep.tune.search import Choice
    from ep.tune.trials import Imposing


class PerSmValues(click.ParamType[tuple[float, ...]]):
    """CTAs for each SM, with commas between."""

    name = "values"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """See click."""
        if isinstance(value, tuple):
            return value
        try:
            values = tuple(map(float, value.split(",")))
        except ValueError:
            values = (0.0,)
        if not all(0 < number <= MAX_PER_SM for number in values):
            self.fail(
                f"{value[:60]!r} is not allowed: numbers above 0, at most {MAX_PER_SM}, with "
                "commas between",
                param,
                ctx,
            )
        return values


@click.command()
@click.option(
    "--config",
    "source",
    metavar="NAME|FILE",
    default="kimi_k3",
    show_default=True,
    help="Model shape, as ep.bench takes it.",
)
@click.option(
    "--tokens",
    type=TokenCounts(),
    metavar="T,...",
    default="1,8,32,64,128,256",
    show_default=True,
    help="Tokens a rank sends in a step, a row of the entry each. The rows replace all that the "
    "table has for this architecture.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    help="Most tokens the buffer has room for.  [default: the largest of --tokens]",
)
@click.option(
    "--per-sm",
    type=PerSmValues(),
    metavar="X,...",
    default="0.0625,0.125,0.25,0.5,1,2,4",
    show_default=True,
    help="CTAs for each SM that each role is tried with, beside the formula's.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 50),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="By how much a choice must be faster than the present one.",
)
@click.option(
    "--routing",
    type=click.Choice([routing.value for routing in Routing]),
    default=Routing.UNIFORM.value,
    show_default=True,
    help="How tokens choose their experts.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_STEPS),
    default=50,
    show_default=True,
    help="Timed replays of a graph a candidate.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, MAX_STEPS),
    default=5,
    show_default=True,
    help="Replays before them.",
)
@click.option(
    "--pairs",
    type=click.IntRange(1, MAX_PAIRS),
    default=20,
    show_default=True,
    help="Steps in a graph.",
)
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of all data."
)
@click.option("--norm/--no-norm", default=True, show_default=True, help="RMSNorm in combine.")
@click.option(
    "--share-gpus", is_flag=True, default=None, help="Let several ranks use one GPU, to try it out."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Table to put the entry into, made if missing.  [default: the table in use; of one rank, "
    "or of ranks that share a GPU, no table]",
)
@click.option("--dry-run", is_flag=True, help="Write no table.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append each measured candidate to FILE, as one JSON object a line.",
)
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    tokens: tuple[int, ...],
    max_tokens: int | None,
    per_sm: tuple[float, ...],
    margin: float,
    routing: str,
    *,
    steps: int,
    warmup: int,
    pairs: int,
    seed: int,
    norm: bool,
    share_gpus: bool | None,
    output: Path | None,
    dry_run: bool,
    json_path: Path | None,
) -> None:
    """Measure which grids of the kernels are fast on these GPUs, and put them into the table.

    Candidates are checked against the oracle and timed in turn, in CUDA graphs. One takes the place
    of the present choice if it is faster by the margin. Exits with 1 if a check failed; nothing
    is written then. One process a GPU:

    mpirun -np 2 python -m ep.tune
    """
    tokens = tuple(sorted(set(tokens)))
    if tokens[0] < 1:
        raise click.BadParameter(
            "0 is not allowed: there is nothing to send", param_hint="--tokens"
        )
    if max_tokens is not None and max_tokens < tokens[-1]:
        raise click.BadParameter(
            f"{max_tokens} is below the {tokens[-1]} of --tokens", param_hint="--max-tokens"
        )
    config = _load(source, max_tokens or tokens[-1])
    case = Case(config=config, routing=Routing(routing), norm=norm, seed=seed)
    if not math.isfinite(margin):
        raise click.BadParameter(f"{margin} is no number", param_hint="--margin")
    plan = TunePlan(Plan(source, case, tokens, steps, warmup, pairs=pairs), per_sm, margin)
    try:
        world = connect(Backend.GPU, share_gpus=share_gpus)
    except EpError as error:
        raise click.ClickException(
            f"only the kernels of the GPU backend have grids to tune: {error}"
        ) from error
    with world:
        target = None if dry_run else output or default_output(world)
        code = run(world, plan, target, json_path)
    ctx.exit(code)


def _load(source: str, max_tokens: int) -> EpConfig:
    config = load_config(source, max_tokens)
    if config.protocol is not Protocol.FENCE_FREE:
        raise click.BadParameter(
            f"protocol is {config.protocol}; only the grids of fence_free are tuned",
            param_hint="--config",
        )
    return config


def default_output(world: World) -> Path | None:
    """Table that an entry goes to, where none is named; none if it forecasts nothing."""
    if world.size == 1 or world.shares_gpus:
        return None
    return table_path() or configs_dir() / TUNING_FILE


def run(
    world: World, plan: TunePlan, output: Path | None = None, json_path: Path | None = None
) -> int:
    """Sweep, report and write. Collective.

    Parameters
    ----------
    world : World
    plan : TunePlan
    output : Path, optional
        Table to put the entry into.
    json_path : Path, optional

    Returns
    -------
    int
        Exit code, the same on every rank: 1 if a check failed, ranks could not begin, or a file
        could not be written.
    """
    if world.backend is not Backend.GPU:
        if world.rank == 0:
            click.echo("Error: the host backend has no grids to tune; run on GPUs", err=True)
        return 1
    try:
        world.agree_on(plan.facts(), "the options of ep.tune")
        # Before the sweep, not after it.
        problem = _obstacle(output, json_path) if world.rank == 0 else None
        world.agree(problem, "opening the files to write")
        exchange = Exchange(world, plan.bench.case.config)
    except (CollectiveError, HeapError) as error:
        # Raised alike on every rank, so that all may leave in peace.
        if world.rank == 0:
            click.echo(f"Error: {error}", err=True)
        return 1
    with exchange:
        code = _sweep(exchange, plan, output, json_path)
        codes: list[int] = world.allgather(code, "ending ep.tune")
        return max(codes)


def _obstacle(output: Path | None, json_path: Path | None) -> Exception | None:
    """Say why the files cannot be written."""
    try:
        if output is not None:
            check_writable(output)
    except (ConfigError, OSError) as error:
        return error
    return None if json_path is None else obstacle(json_path)


def _sweep(exchange: Exchange, plan: TunePlan, output: Path | None, json_path: Path | None) -> int:
    from ep.bench.gpu_timing import measure_floor, time_graphs

    world = exchange.world
    # No business of users, so that an Exchange does not offer it.
    engine = cast("GpuEngine", exchange._engine)  # noqa: SLF001
    try:
        agree_on_devices(world, engine, plan)
    except CollectiveError as error:
        if world.rank == 0:
            click.echo(f"Error: {error}", err=True)
        return 1
    report = Report(world, plan, json_path) if world.rank == 0 else None
    floor = measure_floor(world, exchange.layout)
    tell = report.tell if report else lambda _trials: None
    sweep = Sweep(exchange, engine, plan, time_graphs, tell, floor)
    code = sweep_and_write(sweep, world, plan, report, output)
    sweep.close()
    return code


def agree_on_devices(world: World, engine: Imposing, plan: TunePlan) -> None:
    """Fail on every rank unless all would look at the same candidates. Collective."""
    device = world.device
    assert device is not None
    present = [[engine.per_sm(kind, count) for kind in ROLES] for count in plan.bench.tokens]
    facts = {
        "architecture": device.arch,
        "SMs": device.num_sms,
        "ranks on a GPU": world.ranks_on_gpu,
        "present choice": present,
    }
    world.agree_on(facts, "what is tuned")


def sweep_and_write(
    sweep: Sweep, world: World, plan: TunePlan, report: Report | None, output: Path | None
) -> int:
    """Sweep; where all is right, rank 0, which has a report, writes. Gives an exit code."""
    chosen: dict[int, Choice] = {}
    for num_tokens, choice in sweep.choices():
        if choice is None:
            if report:
                click.echo("Error: a check failed, so that no table is written", err=True)
            return 1
        chosen[num_tokens] = choice
        if report:
            report.chosen(num_tokens, choice)
    return _write(world, plan, chosen, report, output) if report else 0


def _write(
    world: World,
    plan: TunePlan,
    chosen: Mapping[int, Choice],
    report: Report,
    output: Path | None,
) -> int:
    assert world.device is not None
    arch = world.device.arch
    dispatch, combine = (
        tuple(Point(count, choice[kind]) for count, choice in chosen.items()) for kind in ROLES
    )
    problem: Exception | None = report.problem
    if problem is not None:
        click.echo(f"Error: --json lacks lines: {problem}", err=True)
    if output is None:
        click.echo("\nno table was written (--output FILE names one)")
        return int(problem is not None)
    try:
        merge(output, arch, Tuning(dispatch, combine, measured(world, plan)))
    except (ConfigError, OSError) as error:
        click.echo(f"Error: the table was not written: {error}", err=True)
        return 1
    click.echo(f"\nthe entry {arch} of {output} was written")
    return int(problem is not None)


def main() -> None:
    """Run the command."""
    run_command(command, "python -m ep.tune")
