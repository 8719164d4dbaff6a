"""Write the tuning table. `ep.kernels.tuning` reads it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep.bootstrap.channel import poll_until
from ep.kernels.tuning import ROLES, Tuning, read_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ep.kernels.compile import Kind
    from ep.kernels.tuning import Point

LOCK_TIMEOUT_S = 30.0
"""A merge takes milliseconds; who holds the lock longer is stopped."""
HEADER = """\
# Grids of the GPU kernels that were measured to be faster than the formula's (ep.kernels.grid), or
# not slower. `python -m ep.tune` makes this file and writes it anew: nothing else in it is kept.
#
# [[ARCH.dispatch]], [[ARCH.combine]]: how many CTAs for each SM take each role at most, in launches
# with `up_to` tokens at most. A role without a number has the formula's, and so have launches with
# more tokens than the last row, and architectures without an entry.
# [ARCH.measured]: where the numbers come from.
"""


def dumps(table: Mapping[str, Tuning]) -> str:
    """Give a table as TOML, alike however its entries are ordered."""
    return HEADER + "".join(
        f"\n{line}" if line.startswith("[") else line
        for arch in sorted(table)
        for line in _entry(arch, table[arch])
    )


def merge(path: Path, arch: str, tuning: Tuning) -> None:
    """Replace the entry of `arch` in the file, or add it; the file appears in one piece. Local.

    Processes that do so at once wait for each other, so that no entry is lost.

    Raises
    ------
    ConfigError
        If the file exists and is no table; it stays as it is.
    OSError
        If it cannot be written, or another process keeps it locked for `LOCK_TIMEOUT_S`.
    """
    # A link stays one.
    path = path.resolve()
    with (
        _locked(path),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch,
    ):
        new = Path(scratch) / path.name
        # Unlike a temporary file, it has the permissions that any file here gets.
        new.write_text(dumps(read_if_there(path) | {arch: tuning}), encoding="utf-8")
        new.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A file of its own, which stays: the table's is another one after each merge, and who removes a
    # lock may take it from one who waits.
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def taken() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # A file system without locks: nobody there can do better.
            pass
        return True

    try:
        if not poll_until(taken, LOCK_TIMEOUT_S):
            raise TimeoutError(f"another process has kept {lock} locked for {LOCK_TIMEOUT_S:g} s")
        yield
    finally:
        os.close(descriptor)


def read_if_there(path: Path) -> dict[str, Tuning]:
    """Read a table; an empty one if there is no file."""
    return read_table(path) if path.exists() else {}


def check_writable(path: Path) -> None:
    """Raise what `merge` would raise, as far as can be known before. Local.

    Raises
    ------
    ConfigError, OSError
    """
    read_if_there(path)
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is no folder that can be written to")


def _entry(arch: str, tuning: Tuning) -> Iterator[str]:
    measured = dict(tuning.measured)
    versions = measured.pop("versions", {})
    yield from _section(f"[{arch}.measured]", measured)
    yield from _section(f"[{arch}.measured.versions]", versions)
    for kind, points in zip(ROLES, (tuning.dispatch, tuning.combine), strict=True):
        for point in points:
            yield from _section(f"[[{arch}.{kind}]]", _row(kind, point))


def _row(kind: Kind, point: Point) -> dict[str, Any]:
    chosen = zip(ROLES[kind], point.per_sm, strict=True)
    return {"up_to": point.up_to} | {role: most for role, most in chosen if most is not None}


def _section(head: str, fields: Mapping[str, Any]) -> Iterator[str]:
    yield f"{head}\n"
    for name, value in fields.items():
        yield f"{_key(name)} = {_value(value)}\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: str | float) -> str:
    """Give a value as TOML; JSON writes text, numbers and truths alike, but for one character."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
