"""The folder of compiled kernels, used only if nobody but this user and root can have filled it.

A file from here becomes code on the GPU. So folder and files must belong to this user or to root,
and group and others must not be able to write them; a sticky folder as /tmp is refused too. What is
checked is what is open, by descriptor: whoever can swap a path reaches nothing but other files of
this user, and those give themselves away by their digest (`ep.kernels.compile.Image`).

A cache that cannot be used costs time and a warning, never the exchange.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""Above any kernel's; more is not read into memory."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | _SAFELY
_TO_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY


def cache_dir() -> Path:
    """Folder of compiled kernels: `EP_CACHE_DIR`, else `ep` in the user's cache folder. Local.

    Raises
    ------
    ConfigError
        If the folder is in a home that cannot be found.
    """
    chosen = os.environ.get("EP_CACHE_DIR", "")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ep"
    except RuntimeError as error:
        raise ConfigError(
            "EP_CACHE_DIR", chosen, f"a folder, but not in a home that is not found ({error})"
        ) from error


def read(name: str) -> bytes | None:
    """Read a file of the cache; None if there is none, or none to be trusted. Local."""
    try:
        with _folder(cache_dir()) as folder:
            return _read(folder, name)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as problem:
        _warn(str(problem))
        return None


def write(name: str, data: bytes) -> None:
    """Make a file of the cache, readable by this user alone, appear in one piece. Local."""
    try:
        path = cache_dir()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _folder(path) as folder:
            _write(folder, name, data)
    except (OSError, ConfigError) as problem:
        _warn(str(problem))


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    # Links are followed to here: a home may be one, and what is at the end is checked.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_private(descriptor, str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _check_private(descriptor: int, name: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"{name} belongs to user {status.st_uid}; remove it, or set EP_CACHE_DIR to a folder "
            "of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(
            f"{name} can be written by others; chmod go-w it if you trust what is in it, or set "
            "EP_CACHE_DIR to a folder of your own"
        )
    return status


def _read(folder: int, name: str) -> bytes:
    descriptor = os.open(name, _TO_READ, dir_fd=folder)
    try:
        status = _check_private(descriptor, name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise OSError(f"{name} is no file of a compiled kernel; remove it")
        with open(descriptor, "rb", closefd=False) as file:
            # Of one that grows meanwhile the digest tells.
            return file.read(MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def _write(folder: int, name: str, data: bytes) -> None:
    scratch = f".{name}.{secrets.token_hex(8)}"
    descriptor = os.open(scratch, _TO_MAKE, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - by descriptor
            file.write(data)
        os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch, dir_fd=folder)
        raise


@functools.cache
def _warn(problem: str) -> None:
    """Say it once a process: every kernel meets it."""
    logger.warning("the cache of compiled kernels is not used: %s", problem)
