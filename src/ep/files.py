"""Files that users name: whatever lies there, opening it ends, and what is read has a bound."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_TEXT_BYTES = 1 << 20
"""Above any shape's or table's."""
# A FIFO that nobody has at its other end would block for ever.
_NO_WAIT = os.O_NONBLOCK | os.O_CLOEXEC


def read_text(path: Path) -> str:
    """Read a plain file of UTF-8, with or without a byte order mark. Local.

    Raises
    ------
    OSError
        Also for a FIFO, a folder, a device, and for more than `MAX_TEXT_BYTES`.
    ValueError
        If it is no UTF-8, or the path is none.
    """
    descriptor = os.open(path, os.O_RDONLY | _NO_WAIT)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no plain file")
        if status.st_size > MAX_TEXT_BYTES:
            raise OSError(f"{path} has {status.st_size} bytes, above {MAX_TEXT_BYTES}")
        with open(descriptor, encoding="utf-8-sig", closefd=False) as file:
            # One that tells no size, as those of /proc, has a bound too.
            return file.read(MAX_TEXT_BYTES)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Do as `append_text`, in place of what is in the file. Local."""
    _write(path, text, os.O_TRUNC)


def append_text(path: Path, text: str) -> None:
    """Append to a file, made if missing; to a pipe or terminal as much as it takes now. Local.

    Raises
    ------
    OSError
        Also for a pipe without a reader or with one that does not keep up, and for a disk.
    """
    _write(path, text, os.O_APPEND)


def _write(path: Path, text: str, how: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | how | os.O_CREAT | _NO_WAIT, 0o666)
    with open(descriptor, "a", encoding="utf-8") as file:  # noqa: PTH123 - by descriptor
        if stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is a disk")
        file.write(text)
