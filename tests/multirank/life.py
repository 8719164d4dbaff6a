"""What each rank does in tests of an exchange's life, from first to last: `python life.py CASE`."""

import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ep
import ep.memory.host as host
from ep.bench.cases import Case
from ep.memory.host import HostMemory
from tests.footprint import Footprint
from tests.multirank.worker import BF16, check, config, raises

KEPT: list[Any] = []
"""Until the interpreter ends."""


def make(world, **fields):
    return ep.Exchange(world, config(world, "tiny", 6, **({"timeout_s": 20} | fields)))


def use(world, exchange, number):
    """A checked step; in a run of them T goes down to nothing and up again."""
    case = Case(config=exchange.config, uneven=number % 3 == 1, norm=number % 2 == 0)
    check(world, exchange, case.step(number, (5, 2, 0, 6)[number % 4]))


def begin(exchange):
    """Dispatch, unchecked, and what combine then takes."""
    given = Case(config=exchange.config).step(0, 6).inputs(exchange.world.rank)
    exchange.dispatch(*given)
    return np.ones((exchange.layout.rows, exchange.config.hidden), BF16), given.ids


def step(exchange):
    exchange.combine(*begin(exchange))


def compare(world, before, rounds):
    """Fail on every rank if one has grown since `before`; rank 0 prints all. Collective."""
    after = Footprint.now()
    said = world.allgather([before.growth(after, rounds), str(before), str(after)], "comparing")
    if world.rank == 0:
        for rank, (_, *both) in enumerate(said):
            print(f"rank {rank}: {' -> '.join(both)} in {rounds} rounds", flush=True)
    grown = [words for words, *_ in said if words]
    assert not grown, "\n".join(grown)
    assert not list(Path(os.environ["EP_SHM_DIR"]).iterdir())


def rounds(world, num_rounds=200, first=20):
    """Exchanges made, used and closed leave nothing behind."""
    before = None
    for number in range(num_rounds):
        if number == first:
            before = Footprint.now()
        with make(world) as exchange:
            use(world, exchange, number)
    compare(world, before, num_rounds - first)


def several(world, num_rounds=10, first=4):
    """Several alive at a time, closed in any order that is the same on all ranks."""
    orders = list(itertools.permutations(range(3)))
    before = None
    for number in range(num_rounds):
        if number == first:
            before = Footprint.now()
        alive = {index: make(world) for index in range(3)}
        for index in orders[number % len(orders)]:
            use(world, alive[(index + 1) % 3] if len(alive) == 3 else alive[index], number)
            alive.pop(index).close()
    compare(world, before, num_rounds - first)


def worlds(world, num_rounds=10, first=4):
    """Worlds connected and closed share one communicator, of which MPI has not many."""
    before, last = None, None
    for number in range(num_rounds):
        if number == first:
            before = Footprint.now()
        with ep.World.connect(backend="host", timeout_s=20) as another:
            assert another._channel is not world._channel
            assert last in (None, another._channel)
            last = another._channel
            with make(another) as exchange:
                use(another, exchange, number)
    compare(world, before, num_rounds - first)


def resets(world, num_rounds=40, first=8):
    """Resets leave nothing behind, nor do exchanges that could not be made."""
    with make(world) as exchange:
        before = None
        for number in range(num_rounds):
            if number == first:
                before = Footprint.now()
            exchange.reset()
            if number % 4 == 0:
                with raises(ep.CollectiveError, "EpConfig.top_k differs"):
                    make(world, top_k=1 + (world.rank == 2))
                with raises(ep.HeapError, "cannot map"):
                    refused(world)
            use(world, exchange, number)
        compare(world, before, num_rounds - first)


def refused(world):
    """An exchange that one rank cannot map."""
    real = host._map
    if world.rank == 2:
        host._map = no_map
    try:
        make(world)
    finally:
        host._map = real


def no_map(*arguments):
    raise OSError("no")


def dropped(world, num_rounds=10, first=4):
    """References dropped without `close`, on each rank in an order and at a time of its own."""
    draw = random.Random(world.rank)
    gc.disable()
    before = None
    with make(world) as other:
        for number in range(num_rounds):
            if number == first:
                before = Footprint.now()
            alive = [make(world) for _ in range(3)]
            for index, exchange in enumerate(alive):
                use(world, exchange, number + index)
                # In a cycle some go only when the collector comes by, here inside of a step.
                if draw.random() < 0.5:
                    exchange.myself = exchange
            del exchange
            draw.shuffle(alive)
            while alive:
                alive.pop()
                if draw.random() < 0.5:
                    gc.collect()
                use(world, other, number + len(alive))
        compare(world, before, num_rounds - first)


def closed_early(world):
    """Rank 1 closes where the others are in a step; they meet it in their own `close`."""
    for phase in ("dispatch", "combine"):
        exchange = make(world, timeout_s=0.4, grace_s=0)
        use(world, exchange, 3)
        begun = begin(exchange) if phase == "combine" else None
        world.barrier()
        if world.rank != 1:
            start = time.monotonic()
            with raises(ep.EpTimeout, rf"{phase} of step 2 waited 0.4 s for rank 1 "):
                exchange.combine(*begun) if begun else begin(exchange)
                begin(exchange)
            assert time.monotonic() - start < 5
        exchange.close()
        with raises(ep.StateError, "this Exchange is closed"):
            step(exchange)
    # And where the others are at another collective call: all are told at once.
    exchange = make(world)
    start = time.monotonic()
    with raises(ep.CollectiveError, "rank 1: 'closing an exchange'"):
        if world.rank == 1:
            exchange.close()
        else:
            world.barrier()
    assert time.monotonic() - start < 5
    with make(world) as again:
        use(world, again, 0)


def closed_early_uncaught(world):
    exchange = make(world, timeout_s=0.4, grace_s=0)
    if world.rank == 1:
        exchange.close()
    step(exchange)


class Broken(Exception):
    """What no part of the library raises."""


def fails(world, where):
    """An exception on one rank, while the others are in a step that would wait long."""
    with make(world, timeout_s=60) as exchange:
        use(world, exchange, 0)
        if world.rank == 1 and where == "body":
            raise Broken(where)
        if world.rank == 1 and where == "step":
            HostMemory.ring = stop  # type: ignore[method-assign]
        begun = begin(exchange)
        if world.rank == 1:
            raise Broken(where)
        exchange.combine(*begun)
        begin(exchange)


def stop(*arguments):
    raise Broken("step")


def signalled(world, name):
    """A signal to one rank inside of a step that would wait long; the others are in one, too."""
    with make(world, timeout_s=60) as exchange:
        use(world, exchange, 0)
        if world.rank == 1:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), getattr(signal, name)))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            begin(exchange)
            begin(exchange)
        if world.rank == 2:
            time.sleep(60)
        step(exchange)


def signalled_while_made(world, name):
    """A signal to rank 0, which has the folder, while the shared files have names."""
    if world.rank == 0:
        real = HostMemory.__init__

        def end(self, *arguments):
            os.kill(os.getpid(), getattr(signal, name))
            real(self, *arguments)

        HostMemory.__init__ = end  # type: ignore[method-assign]
    step(make(world, timeout_s=60))


def leaves(world, code):
    """One rank exits with nothing closed, by `sys.exit` or at once; the others are in a step."""
    exchange = make(world, timeout_s=0.5, grace_s=0)
    use(world, exchange, 0)
    if world.rank == 1:
        if code.startswith("_"):
            os._exit(int(code[1:]))
        sys.exit(int(code))
    step(exchange)
    step(exchange)


def all_leave(world, code):
    """Every rank exits with everything open."""
    KEPT.append(make(world))
    use(world, KEPT[0], 0)
    sys.exit(int(code))


def shutdown(world, where):
    """The end of the interpreter finds everything open; no rank calls for another."""
    exchange = make(world, timeout_s=60)
    use(world, exchange, 0)
    if where == "kept":
        KEPT.extend([exchange, begin(exchange)])
        in_cycle, in_thread = make(world), make(world)
        in_cycle.myself = [world, in_cycle]
        gc.disable()
        hold = threading.Event()
        threading.Thread(target=lambda kept: hold.wait(), args=(in_thread,), daemon=True).start()
    elif world.rank != 1:
        # Waits for rank 1, which never comes.
        call = partial(step, exchange) if where == "step" else world.barrier
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.2)
    for name in ("allgather", "regroup", "abort"):
        setattr(type(world._channel), name, forbidden)
    print(f"left {where}", flush=True)


def forbidden(*arguments):
    os.write(2, b"a collective call at exit\n")
    os._exit(9)


CASES: dict[str, Any] = {
    function.__name__: function
    for function in (
        rounds,
        several,
        worlds,
        resets,
        dropped,
        closed_early,
        closed_early_uncaught,
        fails,
        signalled,
        signalled_while_made,
        leaves,
        all_leave,
        shutdown,
    )
}
OPEN = ("leaves", "all_leave", "shutdown")
"""These leave the world open."""


def main(name, *arguments):
    world = ep.World.connect(backend="host", timeout_s=20)
    if name in OPEN:
        CASES[name](world, *arguments)
        return
    with world:
        CASES[name](world, *arguments)
        world.barrier("the end")
        if world.rank == 0:
            print(f"passed {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
