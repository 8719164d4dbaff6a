"""The table of measured grids: which of them a launch has, by architecture and number of tokens.

`python -m ep.tune` makes it. Where it says nothing, the formula of `ep.kernels.grid` is the choice.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ep.config import MAX_TOKENS, TUNING_FILE, configs_dir
from ep.errors import ConfigError, cut
from ep.files import read_text
from ep.kernels.compile import Kind
from ep.kernels.grid import Limits
from ep.settings import OFF

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ep.config import EpConfig

ROLES = {Kind.DISPATCH: ("senders", "receivers"), Kind.COMBINE: ("senders", "reducers")}
"""Names of the roles of each kernel, those that send first."""
MAX_PER_SM = 32
"""CTAs that an SM holds at most."""
MAX_NUMBER = 1 << 63
"""Integers of a table are below; TOML knows no greater ones."""
MEASURED: dict[str, type] = {
    "commit": str,
    "date": str,
    "gpu": str,
    "gpus": int,
    "sms": int,
    "ranks": int,
    "config": str,
    "hidden": int,
    "experts": int,
    "top_k": int,
    "max_tokens": int,
    "routing": str,
    "norm": bool,
    "seed": int,
    "steps": int,
    "pairs": int,
    "margin_percent": float,
    "versions": dict,
}
"""How an entry came to be: every field is there."""
_WORDS = {str: "text", int: "an integer", bool: "true or false", float: "a number", dict: "a table"}


class PerSm(NamedTuple):
    """Most CTAs for each SM that take a role; None leaves it to the formula."""

    senders: float | None = None
    waiters: float | None = None

    def limits(self, num_sms: float) -> Limits:
        """CTAs on `num_sms` SMs, a part of one where ranks share a device; at least 1 each."""
        ctas = (None if most is None else max(1, int(most * num_sms)) for most in self)
        return Limits(*ctas)


FORMULA = PerSm()


class Point(NamedTuple):
    """A choice for launches with `up_to` tokens at most."""

    up_to: int
    per_sm: PerSm


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The entry of an architecture.

    Attributes
    ----------
    dispatch, combine : tuple of Point
        `up_to` rises. Launches with more tokens than the last have the formula's grid.
    measured : dict
        The fields of `MEASURED`.
    """

    dispatch: tuple[Point, ...] = ()
    combine: tuple[Point, ...] = ()
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)

    def fits(self, config: EpConfig) -> bool:
        """Whether it was measured with as many ranks and rows of this kind; else it is no guide."""
        alike = ("ranks", "hidden", "top_k")
        return all(self.measured.get(name) == getattr(config, name) for name in alike)

    def find(self, kind: Kind, num_tokens: int) -> PerSm:
        """Limits of a launch with `num_tokens` tokens."""
        points = self.dispatch if kind is Kind.DISPATCH else self.combine
        return next((point.per_sm for point in points if num_tokens <= point.up_to), FORMULA)


def table_path() -> Path | None:
    """File of the table: `EP_TUNING`, else the one that is shipped; None if it is "off"."""
    chosen = os.environ.get("EP_TUNING")
    if not chosen:
        return configs_dir() / TUNING_FILE
    # A home that is not found is told when the file is read.
    return None if chosen.lower() in OFF else Path(os.path.expanduser(chosen))  # noqa: PTH111


def load_table() -> dict[str, Tuning]:
    """Read the table in use, by architecture. Local.

    Raises
    ------
    ConfigError
        As `read_table` does.
    """
    path = table_path()
    return {} if path is None else read_table(path)


def read_table(path: Path) -> dict[str, Tuning]:
    """Read a table, by architecture. Local.

    Raises
    ------
    ConfigError
        Naming the file, the field and what is allowed.
    """
    try:
        table = tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(
            "tuning table", str(path), 'a file that exists (EP_TUNING names it; "off": none)'
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "tuning table", str(path), f"a readable TOML file ({cut(str(error))})"
        ) from error
    entries = {}
    for arch, fields in table.items():
        if not re.fullmatch(r"sm_[0-9]+[a-z]?", arch):
            raise ConfigError(f"{path}: entry", arch, 'an architecture, as "sm_90a"')
        entries[arch] = _entry(fields, f"{path}: {arch}")
    return entries


def _entry(fields: Any, where: str) -> Tuning:
    _check_names(fields, ("measured",), ROLES, where)
    measured = fields["measured"]
    _check_names(measured, MEASURED, (), f"{where}.measured")
    for name, kind in MEASURED.items():
        value = measured[name]
        # An integer is a number too, but neither is a truth.
        good = isinstance(value, (int, float) if kind is float else kind)
        if kind in (int, float) and good:
            good = abs(value) < (MAX_NUMBER if isinstance(value, int) else math.inf)
        if not good or (kind is not bool and isinstance(value, bool)):
            raise ConfigError(f"{where}.measured.{name}", value, _WORDS[kind])
    for name, value in measured["versions"].items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.measured.versions.{name}", value, _WORDS[str])
    points = {kind: _points(fields.get(kind, []), kind, f"{where}.{kind}") for kind in ROLES}
    return Tuning(points[Kind.DISPATCH], points[Kind.COMBINE], measured)


def _points(rows: Any, kind: Kind, where: str) -> tuple[Point, ...]:
    if not isinstance(rows, list):
        raise ConfigError(where, rows, "an array of tables with up_to")
    points: list[Point] = []
    for index, row in enumerate(rows):
        here = f"{where}[{index}]"
        _check_names(row, ("up_to",), ROLES[kind], here)
        up_to, least = row["up_to"], points[-1].up_to + 1 if points else 1
        if type(up_to) is not int or not least <= up_to <= MAX_TOKENS:
            raise ConfigError(
                f"{here}.up_to", up_to, f"an integer {least}..{MAX_TOKENS}, rising from row to row"
            )
        per_sm = (_per_sm(row.get(role), f"{here}.{role}") for role in ROLES[kind])
        points.append(Point(up_to, PerSm(*per_sm)))
    return tuple(points)


def _per_sm(value: Any, where: str) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value <= MAX_PER_SM):
        raise ConfigError(where, value, f"CTAs for each SM, above 0 and at most {MAX_PER_SM}")
    return float(value)


def _check_names(fields: Any, needed: Iterable[str], optional: Iterable[str], where: str) -> None:
    """Raise unless `fields` is a table of just these."""
    needed = tuple(needed)
    allowed = (*needed, *optional)
    if not isinstance(fields, dict):
        raise ConfigError(where, fields, f"a table of {', '.join(allowed)}")
    for name in fields:
        if name not in allowed:
            raise ConfigError(f"{where}.{name}", fields[name], f"fields are {', '.join(allowed)}")
    missing = [str(name) for name in needed if name not in fields]
    if missing:
        raise ConfigError(where, sorted(fields), f"it lacks {', '.join(missing)}")
