"""How a rank that fails ends: its exit code, and what it says."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

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


def at_uncaught_error(end: Callable[[], None]) -> None:
    """Have `end` called after the traceback of an exception that ends this process.

    At exit MPI would wait for all ranks, and so this one's traceback for their timeouts.
    """
    hook = sys.excepthook

    def end_job(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        hook(kind, error, trace)
        end()

    sys.excepthook = end_job
