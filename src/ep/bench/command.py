"""What the commands of `ep` share: options, joining the other ranks, exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ep.bootstrap import Backend, World
from ep.bootstrap.launcher import detect
from ep.bootstrap.ranks import in_words
from ep.config import MAX_TOKENS, EpConfig
from ep.errors import ConfigError, EpError
from ep.files import append_text

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 300.0
"""Bound of waits outside of steps: the oracle takes its time where ranks outnumber cores."""
MAX_STEPS = 1_000_000
"""Their times are kept: 16 bytes each."""
MAX_PAIRS = 10_000
"""A graph has two nodes for each."""
MAX_SEED = 2**63 - 1
MAX_EXPERTS = 1 << 16
"""The routing draws a number for each, for 1024 tokens at once."""


class TokenCounts(click.ParamType[tuple[int, ...]]):
    """Numbers with commas between."""

    name = "counts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """See click."""
        if isinstance(value, tuple):
            return value
        counts = tuple(map(_count, value.split(",")))
        if not all(0 <= count <= MAX_TOKENS for count in counts):
            said = value if len(value) <= 60 else f"{value[:60]}..."
            self.fail(
                f"{said!r} is not allowed: numbers 0..{MAX_TOKENS} with commas between", param, ctx
            )
        return counts


def _count(text: str) -> int:
    try:
        return int(text) if text.strip().isdecimal() else -1
    except ValueError:
        # Python reads no number of thousands of digits.
        return -1


def load_config(source: str, max_tokens: int) -> EpConfig:
    """Read the shape that `--config` names, for as many ranks as the launcher started. Local.

    Raises
    ------
    click.ClickException
    """
    try:
        launch = detect(os.environ)
        ranks = 1 if launch is None else launch.size
        config = EpConfig.load(source, ranks=ranks, max_tokens=max_tokens)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error
    except EpError as error:
        raise click.ClickException(str(error)) from error
    if config.experts > MAX_EXPERTS:
        raise click.BadParameter(
            f"experts={config.experts} is not allowed here: 1..{MAX_EXPERTS}", param_hint="--config"
        )
    return config


def connect(backend: str, *, share_gpus: bool | None) -> World:
    """Join the other ranks once all have read their options. Collective.

    Raises
    ------
    EpError
        As `World.connect` does.
    click.exceptions.Exit
        If another rank has a mistake in its options; it is told.
    """
    if settle(None):
        raise click.exceptions.Exit(click.UsageError.exit_code)
    return World.connect(backend, timeout_s=TIMEOUT_S, share_gpus=share_gpus)


def settle(error: click.UsageError | None) -> bool:
    """Let every rank know of a mistake in the options of one, and tell it once. Collective.

    Without that the others would start MPI and wait for a rank that has left.

    Parameters
    ----------
    error : click.UsageError, optional
        What is wrong on this rank.

    Returns
    -------
    bool
        Whether anything is wrong, on any rank.

    Raises
    ------
    EpError
        If the ranks cannot meet.
    """
    launch = detect(os.environ)
    if launch is None or launch.size == 1:
        if error is not None:
            error.show()
        return error is not None
    own = None if error is None else error.format_message()
    with World.connect(Backend.HOST, timeout_s=TIMEOUT_S) as world:
        said = world.allgather(own, "reading the options")
    wrong = {rank: words for rank, words in enumerate(said) if words is not None}
    if wrong and world.rank == 0:
        if error is not None and set(said) == {own}:
            error.show()
        else:
            click.echo(f"Error: options are wrong on {in_words(wrong)}", err=True)
    return bool(wrong)


def obstacle(path: Path) -> OSError | None:
    """Say why nothing can be appended to `path`."""
    try:
        append_text(path, "")
    except OSError as error:
        return error
    return None


def run_command(command: click.Command, name: str) -> NoReturn:
    """Run a command that every rank runs, and exit; what every rank meets is told once."""
    try:
        sys.exit(command.main(prog_name=name, standalone_mode=False))
    except click.UsageError as error:
        try:
            settle(error)
        except EpError:
            error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        if _tells(error.__cause__):
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(1)


def _tells(error: BaseException | None) -> bool:
    """Whether this rank is the one to tell it, of all that met the same."""
    launch = None
    with contextlib.suppress(EpError):
        launch = detect(os.environ)
    if launch is None or not isinstance(error, EpError):
        return True
    if error.on_whole_node:
        # Of the launcher itself alone: by another's left variables no rank may be the first.
        local = {"slurm": "SLURM_LOCALID", "torchrun": "LOCAL_RANK"}.get(launch.launcher, "")
        return os.environ.get(local, "0") == "0"
    return not error.on_every_rank or launch.rank == 0
