"""What each rank does in tests of ranks that are killed: `python deaths.py CASE`."""

import os
import signal
import sys
import time
from pathlib import Path

import ep
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.host import HostEngine
from ep.memory.host import HostMemory
from tests.multirank.worker import config, raises

TIMEOUT_S = 1.0


def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def run_steps(world, exchange, first, dead=(), num_steps=5):
    for number in range(num_steps):
        case = Case(config=exchange.config, uneven=number % 2 == 1, norm=number % 3 == 0)
        step = case.step(first + number, (3, 0, 4, 1)[number % 4]).without(dead)
        complaint = run_checked_step(exchange, step)
        said = world.allgather(complaint and str(complaint))
        assert not any(said), said


def take_part(exchange, number):
    """One step more, as an engine that does not know."""
    step = Case(config=exchange.config).step(number, 3)
    rank = exchange.world.rank
    inputs = step.inputs(rank)
    exchange.dispatch(*inputs)
    partials = step.partials(rank, step.expected_rows(rank).source)
    if number == 102 and rank == 3:
        die()
    exchange.combine(partials, inputs.ids)


def expect_timeout(world, exchange, number, dead):
    """The step ends in the contract's words, in time; then a call on top of it says the same."""
    start, node = time.monotonic(), world.places[dead].node
    with raises(ep.EpTimeout, f"rank {dead}'s process on node {node} is gone") as caught:
        # A rank that needs nothing of the dead one hears of it in the step after.
        take_part(exchange, number)
        start = time.monotonic()
        take_part(exchange, 200)
    took_s = time.monotonic() - start
    assert dead in caught.error.awaited, caught.error
    assert caught.error.gone[dead] == node, caught.error
    assert took_s < TIMEOUT_S + 1, took_s
    print(f"rank {world.rank}: told in {took_s:.2f} s: {caught.error}", flush=True)


def in_steps(world):
    """Rank 2 dies in mid-dispatch, later rank 3 between dispatch and combine."""
    fields = {"timeout_s": TIMEOUT_S, "grace_s": 0}
    exchange = ep.Exchange(world, config(world, "tiny", 4, **fields))
    run_steps(world, exchange, 0)
    if world.rank == 2:
        # Rows have been sent, and no flag is up.
        HostEngine._raise_flags = die  # type: ignore[method-assign]
    expect_timeout(world, exchange, 101, dead=2)
    exchange.exclude([2])
    run_steps(world, exchange, 10, dead=(2,))
    expect_timeout(world, exchange, 102, dead=3)
    exchange.exclude([3])
    run_steps(world, exchange, 20, dead=(2, 3))
    exchange.close()


def in_bootstrap(world):
    """Rank 2 dies while shared memory is made; the others say so in the World's time."""
    if world.rank == 2:
        HostMemory.allocate = die  # type: ignore[method-assign]
    world._timeout_s = TIMEOUT_S
    start = time.monotonic()
    with raises(ep.EpTimeout, "for rank 2; rank 2's process on node .* is gone"):
        ep.Exchange(world, config(world, "tiny", 4))
    took_s = time.monotonic() - start
    assert took_s < TIMEOUT_S + 1, took_s
    world.regroup([2])


def main(name):
    world = ep.World.connect(backend="host", timeout_s=20)
    {"in_steps": in_steps, "in_bootstrap": in_bootstrap}[name](world)
    world.barrier("the end")
    if world.rank == 0:
        print(f"passed {name}", flush=True)
        Path(os.environ["EP_TEST_DONE"]).touch()
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
