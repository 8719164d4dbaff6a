"""An exchange's life on GPUs: made and closed many times, closed at odd moments, dropped."""

import gc
from functools import partial
from typing import Any

import numpy as np

import ep
from ep.bench.bridge import GpuBridge
from ep.bench.cases import Case
from ep.bench.chain import Chain
from ep.bench.check import run_checked_step
from ep.gpu.graph import Graph
from ep.memory.cuda import driver
from tests.footprint import Footprint
from tests.gpu.common import agree, config_of
from tests.multirank.worker import raises

SLACK_BYTES = 4 << 20
"""The driver takes and gives memory in blocks of 2 MiB."""


def step_of(config, number):
    """Steps whose T goes down to nothing and up again."""
    case = Case(config=config, uneven=number % 3 == 1, norm=number % 2 == 0)
    return case.step(number, (5, 2, 0, 6)[number % 4])


def held(world):
    """What the process holds, and bytes free on this rank's GPU, while every rank is quiet."""
    world.device.use()
    driver("CtxSynchronize")
    world.barrier("before measuring")
    seen = Footprint.now(), int(driver("MemGetInfo")[0])
    world.barrier("after measuring")
    return seen


def lifetimes(world, rounds=200, first=20, **fields):
    """Exchanges made, used and closed leave nothing: on the GPU, in pinned memory, on the host."""
    config = config_of(world, "tiny", 6, **fields)
    bridge = GpuBridge(world.device)
    before = None
    for number in range(rounds):
        if number == first:
            before = held(world)
        with ep.Exchange(world, config) as exchange:
            agree(world, run_checked_step(exchange, step_of(config, number), bridge))
            engine: Any = exchange._engine
            record = engine._record
        assert not record._host, "the record's pinned memory was not given back"
        del exchange, engine, record
    after = held(world)
    assert before is not None
    if world.rank == 0:
        for (footprint, free), rounds_done in ((before, first), (after, rounds)):
            print(f"after {rounds_done} rounds: {footprint}, {free} bytes free", flush=True)
    # Ranks of one process measure the same process, and the driver's pools grow a little.
    grown = before[0].growth(after[0], rounds - first, slack_kib=8192)
    lost = before[1] - after[1]
    if lost > SLACK_BYTES:
        grown = f"{grown or ''} {lost} bytes of GPU memory were lost in {rounds - first} rounds"
    agree(world, grown)
    bridge.close()


def odd_ends(world):
    """Closed with graphs alive or with work enqueued, dropped without `close`; then all is well."""
    bridge = GpuBridge(world.device)
    config = config_of(world, "tiny", 6)
    for graph_first in (True, False):
        with_a_graph(world, bridge, config, graph_first=graph_first)
    with_work_enqueued(world, bridge, config)
    dropped(world, bridge, config)
    with ep.Exchange(world, config) as exchange:
        agree(world, run_checked_step(exchange, step_of(config, 0), bridge))
    bridge.close()


def with_a_graph(world, bridge, config, *, graph_first):
    """A graph may be released before or after the exchange is closed; only not launched after."""
    exchange = ep.Exchange(world, config)
    chain = Chain(exchange, bridge, [Case(config=config).step(n, 5) for n in range(3)])
    spare = [bridge.put(np.zeros(8, np.int32))]
    graph = Graph.capture(bridge.stream, partial(capture, chain, spare))
    world.barrier()
    for _ in range(2):
        graph.launch(bridge.stream)
    world.barrier()
    agree(world, chain.complaint())
    if graph_first:
        graph.close()
    exchange.close()
    with raises(ep.StateError, "this Exchange is closed; make a new one"):
        chain.run(1)
    if not graph_first:
        graph.close()
    driver("CtxSynchronize")


def capture(chain, spare):
    """Memory that the collector frees in the middle does not spoil a capture."""
    chain.run(1)
    spare.clear()
    gc.collect()
    chain.run(3)


def with_work_enqueued(world, bridge, config):
    """Closing waits for what is enqueued: its results are right."""
    exchange = ep.Exchange(world, config)
    chain = Chain(exchange, bridge, [Case(config=config).step(n, 6) for n in range(4)])
    world.barrier()
    chain.run(40)
    # Ranks of one process must not wait for the device before each has enqueued its part.
    world.barrier()
    exchange.close()
    agree(world, chain.complaint())


def dropped(world, bridge, config):
    """References dropped on each rank at a time of its own; other exchanges do not notice.

    Memory of NVSHMEM then stays until the world is closed: to give it back is collective.
    """
    with ep.Exchange(world, config) as other:
        alive = [ep.Exchange(world, config) for _ in range(2)]
        for number, exchange in enumerate(alive):
            agree(world, run_checked_step(exchange, step_of(config, number), bridge))
        del exchange
        for number in range(4):
            if number % world.size == world.rank % 4:
                alive.clear()
                gc.collect()
            world.barrier()
            agree(world, run_checked_step(other, step_of(config, number), bridge))
