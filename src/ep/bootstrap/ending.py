"""How a rank that fails ends: its exit code, and what it says."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

logger = logging.getLogger(__name__)


def exit_code(error: BaseException) -> int:
    """Give the code that a process should end with because of `error`."""
    if not isinstance(error, SystemExit):
        return 1
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    # The system keeps 8 bits, and a job that ends so has not succeeded.
    return code and (code & 0xFF or 1)


def log_end(error: BaseException, rank: int, size: int) -> None:
    """Say why a rank ends before the others."""
    if not isinstance(error, SystemExit):
        logger.critical("rank %d of %d failed and ends the job", rank, size, exc_info=error)
        return
    logger.critical(
        "rank %d of %d left by sys.exit(%s) while the world was open; %s",
        rank,
        size,
        error.code,
        "it ends the job" if exit_code(error) else "ranks that wait for it will time out",
    )


class _Watched(NamedTuple):
    """A world whose end in disorder is told."""

    is_open: Callable[[], bool]
    end_job: Callable[[], None]
    rank: int
    size: int
    process: int


_watched: list[_Watched] = []
_uncaught: list[type[BaseException]] = []
_installed: list[Any] = []
"""The hook that this module has put into `sys.excepthook` last."""


def watch(is_open: Callable[[], bool], end_job: Callable[[], None], rank: int, size: int) -> None:
    """Have `end_job` called after the traceback of an exception that ends this process.

    At exit MPI would wait for all ranks, and so this one's traceback for their timeouts. `sys.exit`
    and the end of the program pass that by: where they find the world open, it is said.
    """
    if not _installed:
        atexit.register(_tell_open)
    if [sys.excepthook] != _installed:
        _install(sys.excepthook)
    # Those that are closed are let go: a process may connect for ever.
    _watched[:] = [one for one in _watched if one.is_open()]
    _watched.append(_Watched(is_open, end_job, rank, size, os.getpid()))


def end_at_once() -> NoReturn:
    """End this process where its normal end would hang: files are flushed, no more is torn down.

    With code 1 after an uncaught exception. What `sys.exit` was told nobody knows any more.
    """
    for one in gc.get_objects():
        # Closed, or a pipe that nobody reads any more.
        with suppress(OSError, ValueError, AttributeError):
            if isinstance(one, io.IOBase) and not one.closed:
                one.flush()
    os._exit(1 if _uncaught else 0)


def _install(hook: Any) -> None:
    def end_jobs(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        hook(kind, error, trace)
        _uncaught.append(kind)
        for one in _watched:
            one.end_job()

    _installed[:] = [end_jobs]
    sys.excepthook = end_jobs


def _tell_open() -> None:
    for one in _watched:
        if one.is_open() and one.process == os.getpid():
            logger.warning(
                "rank %d of %d exits with its world open; ranks that wait for it will time out: "
                "close the World on every rank, or use it as a context manager",
                one.rank,
                one.size,
            )
