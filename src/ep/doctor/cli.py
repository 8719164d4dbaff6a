"""Options and exit codes: every rank runs this; rank 0 speaks, and each if they do not meet."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console

from ep.bench.command import run_command
from ep.bootstrap import Backend
from ep.bootstrap.launcher import detect
from ep.config import MAX_TOKENS, EpConfig
from ep.doctor import report
from ep.doctor.result import Options, Result
from ep.doctor.supervise import is_fail, supervise
from ep.errors import BootstrapError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep.doctor.supervise import Outcome

LINGER_S = 3.0
"""How long a rank takes to tell what it knows."""


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
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=128,
    show_default=True,
    help="Most tokens the buffer has room for.",
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Steps of the self-check; 0: none.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", *(backend.value for backend in Backend)]),
    default="auto",
    show_default=True,
    help="What shall move the tokens.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 3600),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Bound of each check and of each wait for other ranks.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write one JSON document to FILE; -: to stdout, instead of the table.",
)
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    max_tokens: int,
    steps: int,
    backend: str,
    timeout_s: float,
    json_path: str | None,
) -> None:
    """Say what is wrong with this machine or job, and what to do.

    Exits with 1 if a check failed. Run it alone, or as the job that does not work was started:

    mpirun -np 16 python -m ep.doctor
    """
    rank, size = _place()
    try:
        EpConfig.load(source, ranks=size, max_tokens=max_tokens)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error
    if math.isnan(timeout_s):
        raise click.BadParameter("nan is not allowed: a number of seconds", param_hint="--timeout")
    options = Options(backend, source, max_tokens, steps, timeout_s)
    with _progress(shown=rank == 0) as tell:
        outcome = supervise(options, tell)
    ctx.exit(_report(outcome, options, rank, size, json_path))


def _place() -> tuple[int, int]:
    # Nonsense is a finding of the launcher's check, not an end of all others.
    launch = None
    with contextlib.suppress(BootstrapError):
        launch = detect(os.environ)
    return (0, 1) if launch is None else (launch.rank, launch.size)


@contextlib.contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    stderr = Console(stderr=True)
    if not shown or not stderr.is_terminal:
        yield lambda _stage: None
        return
    with stderr.status("starting") as status:
        yield status.update


def _report(outcome: Outcome, options: Options, rank: int, size: int, json_path: str | None) -> int:
    """Tell what came out, and give the exit code of this rank."""
    document, results = outcome.document, outcome.results
    met = document is not None
    if document is None:
        document = {"rank": rank, "size": size, "ranks": [], "facts": outcome.facts}
    else:
        late = [result for result in results if result.area == "job"]
        results = [*map(Result.from_json, document["results"]), *late]
        if rank:
            # Rank 0 tells it, and its exit code is the job's.
            return 0 if document["in_order"] else _linger(0.0)
    problem = None
    if json_path is not None:
        path = json_path if rank == 0 or json_path == "-" else f"{json_path}.{rank}"
        try:
            report.write(path, report.to_json(document, results, options, outcome.output))
        except OSError as error:
            problem = error
    if rank:
        report.tell_alone(rank, results, outcome.output)
    elif json_path != "-":
        report.show(document, results)
        if is_fail(results) and outcome.output:
            click.echo(f"\nthe end of what libraries said:\n{outcome.output}", err=True)
    if problem is not None:
        click.echo(f"Error: --json was not written: {problem}", err=True)
    if sys.stdout is not None:
        sys.stdout.flush()
    if size > 1 and not met:
        return _linger(outcome.others_until)
    return int(problem is not None or is_fail(results))


def _linger(until: float) -> int:
    # Launchers end all ranks at the first that fails: the others are to tell theirs before.
    time.sleep(max(0.0, until - time.monotonic()) + LINGER_S)
    return 1


def main() -> None:
    """Run the command."""
    run_command(command, "python -m ep.doctor")
