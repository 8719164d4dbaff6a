"""Play several ranks in one process, for tests of code that uses `ep`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ep.bootstrap import World
from ep.bootstrap.channel import ThreadChannel, ThreadGroup
from ep.bootstrap.ranks import check_backend
from ep.config import MAX_RANKS
from ep.errors import ArgumentError, EpTimeout, shown

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def run_ranks(
    size: int,
    function: Callable[[World], T],
    *,
    backend: str = "host",
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `function` once for each of `size` ranks, a thread each, and wait for all.

    Parameters
    ----------
    size : int
    function : callable
        Called with the rank's `World`, which is closed when it returns.
    backend : str
        As in `World.connect`. Ranks share the GPUs that the process sees.
    timeout_s : float
        Bound of each wait during set-up.

    Returns
    -------
    list
        What `function` returned, in rank order.

    Raises
    ------
    Exception
        The first error, once every thread has ended; it ends the set-up waits of the others, while
        those inside of a step last until `EpConfig.timeout_s`.
    """
    given: object = size
    if not isinstance(given, int) or not 1 <= size <= MAX_RANKS:
        raise ArgumentError(f"{shown(size)} ranks are not allowed: 1..{MAX_RANKS}")
    check_backend(backend)
    group = ThreadGroup(size)
    failures: list[tuple[ThreadChannel, BaseException]] = []

    def play(rank: int) -> T:
        channel = ThreadChannel(group, rank)
        try:
            # Not as a context, which would log each rank's end: only the cause is told, by raising.
            world = World(channel, backend, timeout_s, share_gpus=True)
            result = function(world)
            world.close()
        except BaseException as error:
            failures.append((channel, error))
            channel.abort(1)
            raise
        return result

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(play, rank) for rank in range(size)]
    if failures:
        raise _cause(failures)
    return [future.result() for future in futures]


def _cause(failures: list[tuple[ThreadChannel, BaseException]]) -> BaseException:
    """Give what came first, but for what only follows from it.

    A rank that waits in a step for one that failed has a timeout, which may come before the others'
    errors. One whose wait outside of steps was cut short is never the cause, not even of a timeout.
    """
    return min(
        failures, key=lambda failed: (failed[0].was_cut_short, isinstance(failed[1], EpTimeout))
    )[1]
