"""Many steps, compared on the device, so that comparing does not slow them down. Needs torch."""

import dataclasses
import random
from functools import partial
from typing import Any

import numpy as np

import ep
from ep.bench.bridge import GpuBridge
from ep.bench.cases import Case
from ep.bench.chain import Chain
from ep.gpu.graph import Graph
from ep.kernels import compile as compiler
from ep.kernels.options import KernelOptions
from ep.memory.cuda import driver
from tests.gpu.common import agree, config_of, installed

COPY: Any = "copy"
compiler._CLASSES[COPY] = ("tests.gpu.consumer", "EpCopy")
SLEEP_CYCLES = 10_000
"""Longest delay inside of a graph: some 5 us, about a step."""


def sometimes_sleep(torch, delays, _index=0):
    """Hold the stream up for a while, or not."""
    if delays.random() < 0.3:
        torch.cuda._sleep(delays.randrange(SLEEP_CYCLES))


def long_run(world, num_steps=100_000, pairs=20, **fields):
    """Many steps in graphs, compared on the device: every result of every graph, some rows.

    T changes from graph to graph. Each rank is delayed at random between graphs, and in them
    between dispatch and combine.
    """
    torch = installed("torch")
    torch.cuda.set_device(world.device.ordinal)
    config = config_of(world, "kimi_k3", 8, **fields)
    bridge = GpuBridge(world.device)
    stream = torch.cuda.ExternalStream(bridge.stream)
    order, delays = random.Random(11), random.Random(world.rank)
    exchange = ep.Exchange(world, config)
    with exchange, torch.cuda.stream(stream):
        wrong = torch.zeros(2, dtype=torch.int64, device=f"cuda:{world.device.ordinal}")
        chains = []
        for tokens in (1, 3, 5, 8):
            case = Case(config=config, uneven=tokens == 5, seed=tokens)
            chain = Chain(exchange, bridge, [case.step(tokens + n, tokens) for n in range(4)])
            delay = partial(sometimes_sleep, torch, delays)
            graph = Graph.capture(bridge.stream, partial(chain.run, pairs, delay))
            chains.append((chain, graph, OnDevice(torch, bridge, chain)))
        world.barrier()
        for _ in range(num_steps // (pairs + 1)):
            chain, graph, device = order.choice(chains)
            if delays.random() < 0.2:
                torch.cuda._sleep(delays.randrange(100_000))
            device.forget()
            graph.launch(bridge.stream)
            wrong[0] += device.wrong_results()
            received = device.dispatch()
            wrong[1] += device.wrong_rows(received)
            device.combine()
        stream.synchronize()
        agree(world, str(wrong.tolist()) if wrong.any() else None)
        for _, graph, _ in chains:
            graph.close()
    bridge.close()


class OnDevice:
    """A chain's results and rows, and what they must be, as torch tensors of raw bits."""

    def __init__(self, torch, bridge, chain):
        self.torch, self.bridge, self.chain = torch, bridge, chain
        exchange, rank = chain.exchange, chain.exchange.world.rank
        self.results = [self.bits(array) for array in chain._results]
        self.wanted = [self.bits(bridge.put(want)) for want in chain.expected()]
        rows = chain.steps[0].expected_rows(rank)
        self.live = torch.from_numpy(np.flatnonzero(rows.source >= 0)).to(self.results[0].device)
        self.rows = {
            name: self.bits(bridge.put(getattr(rows, name)))
            for name in ("source", "ids", "weights", "x", "scales")
        }
        self.exchange = exchange

    def bits(self, array):
        kind = {1: "uint8", 2: "int16", 4: "int32"}[array.itemsize]
        raw = dataclasses.replace(array, dtype=kind)
        return self.torch.from_dlpack(raw)

    def forget(self):
        for result in self.results:
            result.fill_(-1)

    def wrong_results(self):
        pairs = zip(self.results, self.wanted, strict=True)
        return sum((got != want).sum() for got, want in pairs)

    def dispatch(self):
        return self.exchange.dispatch(*self.chain._inputs[0], self.bridge.stream)

    def wrong_rows(self, received):
        wrong = 0
        for name, want in self.rows.items():
            got = self.bits(getattr(received, name))
            if name in ("x", "scales"):
                wrong += (got[self.live] != want[self.live]).sum()
            else:
                wrong += (got != want).sum()
        return wrong

    def combine(self):
        chain = self.chain
        _, ids, _ = chain._inputs[0]
        out = chain._results[0]
        self.exchange.combine(
            chain._partials, ids, chain._norm_weight, out=out, stream=self.bridge.stream
        )


def consumers(world, replays=20_000, pairs=5):
    """Kernels that start early and read rows and results as soon as they may."""
    torch = installed("torch")
    torch.cuda.set_device(world.device.ordinal)
    config = config_of(world, "kimi_k3", 8)
    bridge = GpuBridge(world.device)
    stream = torch.cuda.ExternalStream(bridge.stream)
    image = compiler.get_image(COPY, ep.EpLayout(config), KernelOptions(), world.device.arch)
    copy = compiler.Launcher(image, pdl=True)
    copy.load()
    delays = random.Random(world.rank)
    with ep.Exchange(world, config) as exchange, torch.cuda.stream(stream):
        chain = Chain(exchange, bridge, [Case(config=config).step(n, 5) for n in range(4)])
        device = OnDevice(torch, bridge, chain)
        assert exchange._engine is not None
        x = exchange._engine.buffers.own("x")
        seen = [bridge.put(np.zeros(x.shape, np.uint8)) for _ in range(pairs)]
        taken = [bridge.put(np.zeros((5, config.hidden), np.int16)) for _ in range(pairs)]

        def consume(index):
            step, of_combine = divmod(index, 2)
            if of_combine:
                result = chain._results[step % len(chain.steps)]
                copy(
                    bridge.stream, 8, result.address, taken[step].address, 10 * config.hidden // 16
                )
            else:
                num_chunks = int(np.prod(x.shape)) // 16
                copy(bridge.stream, 64, x.address, seen[step].address, num_chunks)

        graph = Graph.capture(bridge.stream, partial(chain.run, pairs, consume))
        rows = [step.expected_rows(world.rank) for step in chain.steps]
        live = [np.flatnonzero(one.source >= 0) for one in rows]
        want_x = [
            torch.from_numpy(one.x.view(np.uint8)[at]) for one, at in zip(rows, live, strict=True)
        ]
        place = device.results[0].device
        want_x = [one.to(place) for one in want_x]
        live = [torch.from_numpy(one).to(place) for one in live]
        seen = [device.bits(array) for array in seen]
        taken = [device.bits(array) for array in taken]
        wrong = torch.zeros(2, dtype=torch.int64, device=place)
        world.barrier()
        for _ in range(replays):
            if delays.random() < 0.2:
                torch.cuda._sleep(delays.randrange(100_000))
            for array in (*seen, *taken):
                array.fill_(0xFF if array.dtype == torch.uint8 else -1)
            graph.launch(bridge.stream)
            for nth in range(pairs):
                at = nth % len(chain.steps)
                wrong[0] += (seen[nth][live[at]] != want_x[at]).sum()
                wrong[1] += (taken[nth] != device.wanted[at]).sum()
        stream.synchronize()
        agree(world, str(wrong.tolist()) if wrong.any() else None)
        graph.close()
    bridge.close()


def neighbour(world, num_graphs=200, pairs=20):
    """A kernel on another stream that fills every SM again and again slows steps, no more."""
    torch = installed("torch")
    torch.cuda.set_device(world.device.ordinal)
    config = config_of(world, "kimi_k3", 8)
    bridge = GpuBridge(world.device)
    place = f"cuda:{world.device.ordinal}"
    other = torch.cuda.Stream()
    big = torch.randn(8192, 8192, device=place, dtype=torch.bfloat16)
    product = torch.empty_like(big)
    torch.cuda.synchronize()
    with ep.Exchange(world, config) as exchange:
        chain = Chain(exchange, bridge, [Case(config=config).step(n, 5) for n in range(4)])
        graph = Graph.capture(bridge.stream, partial(chain.run, pairs))
        world.barrier()
        for _ in range(num_graphs):
            with torch.cuda.stream(other):
                torch.mm(big, big, out=product)
            graph.launch(bridge.stream)
        driver("StreamSynchronize", bridge.stream)
        other.synchronize()
        world.barrier()
        agree(world, chain.complaint())
        graph.close()
    bridge.close()
