"""What people see of a sweep, on rank 0 alone, and what goes to `--json`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import click

from ep.bench.record import append, commit, to_json, versions
from ep.kernels.tuning import FORMULA, ROLES
from ep.tune.search import winner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ep.bootstrap import World
    from ep.kernels.compile import Kind
    from ep.kernels.tuning import PerSm
    from ep.tune.search import Choice
    from ep.tune.trials import Trial, TunePlan

_WIDTHS = (20, 12, 20, 12, 10, 9)
MAX_COMPLAINTS = 8


class Report:
    """Prints each run as it ends, and appends its trials to a file.

    Parameters
    ----------
    world : World
    plan : TunePlan
    json_path : Path, optional
    """

    def __init__(self, world: World, plan: TunePlan, json_path: Path | None = None) -> None:
        assert world.device is not None
        self._world = world
        self._plan = plan
        self._json_path = json_path
        self.problem: OSError | None = None
        """Why lines are missing in the file."""
        shared = " SHARED BY RANKS" if world.shares_gpus else ""
        config = plan.bench.case.config
        click.echo(
            f"ep {versions()['ep']}: {world.device.name} ({world.device.arch}, "
            f"{world.device.num_sms} SMs), {config.ranks} ranks on {world.num_gpus} GPUs{shared}\n"
            f"{plan.bench.shape}: hidden {config.hidden}, {config.experts} experts, "
            f"top {config.top_k}, at most {config.max_tokens} tokens\n"
            f"us of a dispatch + combine, the slowest rank's median; a choice must be "
            f"{plan.margin_percent:g} % faster to take another's place"
        )

    def tell(self, trials: Sequence[Trial]) -> None:
        """Show the trials of a run."""
        row = trials[0].row
        click.echo(f"\n{row.tokens} tokens: {trials[0].words}")
        heads = ("dispatch, per SM", "CTAs", "combine, per SM", "CTAs", "us", "change")
        click.echo(_line(heads))
        timed = [trial for trial in trials if trial.row.timing is not None]
        kept: Choice | None = None
        if timed == list(trials):
            times = [trial.pair_us for trial in trials]
            kept = winner([t.choice for t in trials], times, self._plan.margin_percent / 100)
        for trial in trials:
            click.echo(_line(_cells(trial, trials[0])) + ("  <" if trial.choice is kept else ""))
        complaints = [words for trial in trials for words in trial.row.complaints]
        for words in complaints[:MAX_COMPLAINTS]:
            click.echo(f"check failed: {words}", err=True)
        if self._json_path is not None and self.problem is None:
            # The other ranks know nothing of it, and are on their way to the next run.
            try:
                for trial in trials:
                    append(self._json_path, self._fields(trial))
            except OSError as error:
                self.problem = error

    def chosen(self, num_tokens: int, choice: Choice) -> None:
        """Show what was chosen for a number of tokens."""
        words = "; ".join(f"{kind} {in_words(kind, choice[kind])}" for kind in ROLES)
        click.echo(f"\n{num_tokens} tokens, chosen: {words}")

    def _fields(self, trial: Trial) -> dict[str, Any]:
        device = self._world.device
        assert device is not None
        return to_json(trial.row, self._plan.bench, self._world) | {
            "arch": device.arch,
            "sms": device.num_sms,
            "varied": trial.words,
            "per_sm": {
                str(kind): dict(zip(ROLES[kind], trial.choice[kind], strict=True)) for kind in ROLES
            },
            "ctas": {
                str(kind): dict(zip(ROLES[kind], (grid.senders, grid.waiters), strict=True))
                for kind, grid in trial.grids.items()
            },
        }


def in_words(kind: Kind, per_sm: PerSm) -> str:
    """Give limits as people read them."""
    if per_sm == FORMULA:
        return "as the formula says"
    chosen = zip(ROLES[kind], per_sm, strict=True)
    return ", ".join(f"{role} {most:g}/SM" for role, most in chosen if most is not None)


def measured(world: World, plan: TunePlan) -> dict[str, Any]:
    """Give how an entry of the table came to be. Local."""
    bench, device = plan.bench, world.device
    assert device is not None
    case, config = bench.case, bench.case.config
    return {
        "commit": commit() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": device.name,
        "gpus": world.num_gpus,
        "sms": device.num_sms,
        "ranks": config.ranks,
        "config": bench.shape,
        "hidden": config.hidden,
        "experts": config.experts,
        "top_k": config.top_k,
        "max_tokens": config.max_tokens,
        "routing": str(case.routing),
        "norm": case.norm,
        "seed": case.seed,
        "steps": bench.steps,
        "pairs": bench.pairs,
        "margin_percent": plan.margin_percent,
        "versions": {name: text for name, text in versions().items() if text is not None},
    }


def _cells(trial: Trial, first: Trial) -> tuple[str, ...]:
    cells: list[str] = []
    for kind, grid in trial.grids.items():
        cells.append(
            " + ".join("-" if most is None else f"{most:g}" for most in trial.choice[kind])
        )
        cells.append(f"{grid.senders} + {grid.waiters}")
    if trial.row.timing is None:
        return (*cells, "-", "failed" if trial.row.complaints else "-")
    change = 100 * (trial.pair_us / first.pair_us - 1)
    return (
        *cells,
        f"{trial.pair_us:.2f}",
        "failed" if trial.row.complaints else "" if trial is first else f"{change:+.1f}%",
    )


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
