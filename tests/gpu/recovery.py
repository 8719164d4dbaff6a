"""Exchanges on GPUs that go on after a wait that expired."""

import time
from functools import partial

import numpy as np

import ep
from ep.bench.bridge import GpuBridge
from ep.bench.cases import Case
from ep.bench.chain import Chain
from ep.bench.check import run_checked_step
from ep.config import Protocol
from ep.gpu.graph import Graph
from ep.memory.cuda import driver
from tests.gpu.common import agree, config_of
from tests.multirank.worker import raises

TIMEOUT_S = 0.5
PAIRS = 20


class Traffic:
    """Steps of changing size, and a graph of many, on one exchange."""

    def __init__(self, world, exchange, bridge):
        self.world, self.exchange, self.bridge = world, exchange, bridge
        case = Case(config=exchange.config, uneven=True)
        self.chain = Chain(exchange, bridge, [case.step(40 + n, 5) for n in range(4)])
        self.graph = Graph.capture(bridge.stream, partial(self.chain.run, PAIRS))

    def check(self, first, dead=()):
        """Eager steps and replays are right; graphs were captured before anybody died."""
        for number in range(4):
            case = Case(config=self.exchange.config, uneven=number % 2 == 1, norm=number != 2)
            step = case.step(first + number, (3, 0, 8, 1)[number]).without(dead)
            agree(self.world, run_checked_step(self.exchange, step, self.bridge))
        self.chain.steps = [step.without(dead) for step in self.chain.steps]
        self.chain.forget()
        for _ in range(2):
            self.graph.launch(self.bridge.stream)
        self.world.barrier()
        agree(self.world, self.chain.complaint())

    def fail(self, names, timeout_s=TIMEOUT_S):
        """Replays that wait in vain end in time, all of them."""
        start = time.monotonic()
        if self.exchange.config.protocol is Protocol.FLAGS:
            # There the kernels behind it wait, too, each as long.
            self.exchange.dispatch(*self.chain._inputs[0], self.bridge.stream)
        else:
            for _ in range(3):
                self.graph.launch(self.bridge.stream)
        with raises(ep.EpTimeout, names) as caught:
            self.exchange.check()
        took_s = time.monotonic() - start
        assert timeout_s * 0.9 < took_s < timeout_s + 1, took_s
        return took_s, caught.error

    def results(self):
        return [self.bridge.get(result).astype(np.float32) for result in self.chain._results]

    def close(self):
        driver("StreamSynchronize", self.bridge.stream)
        self.graph.close()


def resets(world, **fields):
    """A late rank ends the others' replays; after a reset all goes on, the old graphs, too."""
    if world.size < 2:
        return
    config = config_of(world, "kimi_k3", 8, timeout_s=TIMEOUT_S, grace_s=0, **fields)
    bridge = GpuBridge(world.device)
    with ep.Exchange(world, config) as exchange:
        traffic = Traffic(world, exchange, bridge)
        for attempt in range(3):
            traffic.check(10 * attempt)
            late = attempt % world.size
            traffic.chain.forget()
            world.barrier()
            if world.rank != late:
                _, error = traffic.fail(f"dispatch of step .* for rank {late} ")
                assert error.seen == (error.step - 1,), error
                if config.protocol is Protocol.FENCE_FREE:
                    assert all(np.isnan(result).all() for result in traffic.results())
                with raises(ep.EpTimeout, f"for rank {late} "):
                    exchange.poll()
            exchange.reset()
        traffic.check(50)
        traffic.close()
    bridge.close()
