"""Times on GPUs: chains of pairs in a CUDA graph or eagerly, and the floor of the machine."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ep.bench.timing import Floor
from ep.config import Protocol
from ep.gpu.graph import Events, Graph
from ep.kernels.compile import Kind, Launcher, get_image
from ep.kernels.options import KernelOptions, Pdl
from ep.memory import cuda
from ep.memory.local import LocalMemory
from ep.memory.nvshmem import NvshmemMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from ep.bench.chain import Chain
    from ep.bootstrap import World
    from ep.layout import EpLayout
    from ep.memory import SymmetricMemory

    Times = dict[str, npt.NDArray[np.float64]]

EMPTY_KERNELS = 200
COPY_BYTES = 32 << 20
COPIES = 8
ROUNDS = 2000
PROBES = 9


def time_graphs(
    chains: Sequence[Chain], pairs: int, num_timed: int, num_warmup: int
) -> list[Times]:
    """Replay a graph of `pairs` pairs of each chain in turn; the mean of each replay, in ns a pair.

    Dispatch and combine apart come from a second graph with a stamp between any two kernels. A
    stamp keeps the next kernel from starting early, so their sum exceeds a pair.
    """
    stream = chains[0].bridge.stream
    graphs = [Graph.capture(stream, partial(chain.run, pairs)) for chain in chains]
    for _ in range(num_warmup):
        for graph in graphs:
            graph.launch(stream)
    chains[0].meet()
    stamps = Events(num_timed * len(graphs) + 1)
    stamps.record(0, stream)
    for number in range(num_timed * len(graphs)):
        graphs[number % len(graphs)].launch(stream)
        stamps.record(number + 1, stream)
    cuda.driver("StreamSynchronize", stream)
    spans = [stamps.elapsed_ns(n, n + 1) / pairs for n in range(num_timed * len(graphs))]
    for graph in graphs:
        graph.close()
    stamps.close()
    times = []
    for index, chain in enumerate(chains):
        dispatch, combine = _apart(chain, pairs, max(1, num_timed // pairs))
        pair = np.array(spans[index :: len(graphs)])
        times.append({"pair": pair, "dispatch": dispatch, "combine": combine})
    return times


def time_eager(chain: Chain, num_timed: int, num_warmup: int) -> Times:
    """Enqueue pair after pair from the host, stamps in between, in ns."""
    stream = chain.bridge.stream
    stamps = Events(2 * num_timed + 1)
    chain.run(num_warmup)
    chain.meet()
    stamps.record(0, stream)
    chain.run(num_timed, lambda index: stamps.record(index + 1, stream))
    cuda.driver("StreamSynchronize", stream)
    at = np.array([stamps.elapsed_ns(0, index) for index in range(2 * num_timed + 1)])
    stamps.close()
    return {
        "pair": at[2::2] - at[:-2:2],
        "dispatch": at[1::2] - at[:-1:2],
        "combine": at[2::2] - at[1::2],
    }


HOST_PAIRS, HOST_BATCHES = 20, 21
"""Pairs that the host enqueues before it waits for the GPU, and how often."""
HOST_STEPS = HOST_PAIRS * HOST_BATCHES
"""That each way of calling makes."""


def host_costs(chain: Chain) -> dict[str, float]:
    """What a pair costs the host, in us, by the names of `ep.bench.record.HOST_COSTS`. Medians.

    Collective. In C, too, where every rank has a C compiler that works, and with the fence-free
    protocol.
    """
    costs = {}
    for name, run in (("calls", chain.run), ("prepared", chain.run_prepared)):
        costs[name] = _host_us(chain, partial(_timed_ns, run))
    if chain.exchange.config.protocol is Protocol.FENCE_FREE:
        from ep.bench.c_loop import c_loop

        with c_loop(chain) as loop:
            if loop is not None:
                costs["c"] = _host_us(chain, loop)
    return costs


def _timed_ns(run: Callable[[int], object], pairs: int) -> int:
    start_ns = time.perf_counter_ns()
    run(pairs)
    return time.perf_counter_ns() - start_ns


def _host_us(chain: Chain, run: Callable[[int], int]) -> float:
    times_ns = []
    for _ in range(HOST_BATCHES):
        times_ns.append(run(HOST_PAIRS))
        cuda.driver("StreamSynchronize", chain.bridge.stream)
    # The first one also prepares.
    return float(np.median(times_ns[1:])) / HOST_PAIRS / 1e3


def _apart(
    chain: Chain, pairs: int, replays: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    stream = chain.bridge.stream
    stamps = Events(2 * pairs + 1)

    def enqueue() -> None:
        stamps.record(0, stream, captured=True)
        chain.run(pairs, lambda index: stamps.record(index + 1, stream, captured=True))

    graph = Graph.capture(stream, enqueue)
    spans = []
    for _ in range(replays):
        graph.launch(stream)
        cuda.driver("StreamSynchronize", stream)
        spans.append([stamps.elapsed_ns(index, index + 1) for index in range(2 * pairs)])
    graph.close()
    stamps.close()
    # The first pair also waits for the ranks to meet.
    values = np.array(spans)[:, 2:] if pairs > 1 else np.array(spans)
    return values[:, ::2].ravel(), values[:, 1::2].ravel()


def measure_floor(world: World, layout: EpLayout) -> Floor:
    """Measure the floor, ranks 2i and 2i + 1 with each other; the slowest counts. Collective."""
    device = world.device
    assert device is not None
    from ep.bench.bridge import GpuBridge

    bridge = GpuBridge(device)
    arch = device.arch
    home = LocalMemory if world.is_one_process else NvshmemMemory
    memory: SymmetricMemory = home.allocate(world, device, 2 * COPY_BYTES)
    world.barrier("measuring the floor")
    launch_us = _empty_kernel_us(layout, arch, bridge.stream)
    one_way = [_one_way_us(world, layout, arch, memory, bridge.stream) for _ in range(PROBES)]
    copy_gbs = _copy_gbs(world, memory, bridge.stream)
    cuda.driver("StreamSynchronize", bridge.stream)
    world.barrier("measuring the floor")
    memory.close()
    bridge.close()
    own = [launch_us, float(np.median(one_way)), copy_gbs]
    launches, ways, rates = zip(*world.allgather(own, "gathering the floor"), strict=True)
    # A rank without a peer has no rate.
    return Floor(max(launches), max(ways), min((rate for rate in rates if rate), default=0.0))


def _copy_gbs(world: World, memory: SymmetricMemory, stream: int) -> float:
    """GB/s of copies of the first half here to the second half there, both ways at once."""
    peer = world.rank ^ 1
    own, there = memory.addresses[-1], memory.addresses[min(peer, world.size - 1)]
    stamps = Events(2)
    rates = []
    for _ in range(PROBES):
        world.barrier("measuring the floor")
        if peer >= world.size:
            continue
        stamps.record(0, stream)
        for _ in range(COPIES):
            cuda.driver("MemcpyDtoDAsync", there + COPY_BYTES, own, COPY_BYTES, stream)
        stamps.record(1, stream)
        cuda.driver("StreamSynchronize", stream)
        rates.append(COPIES * COPY_BYTES / stamps.elapsed_ns(0, 1))
    stamps.close()
    return float(np.median(rates)) if rates else 0.0


def _empty_kernel_us(layout: EpLayout, arch: str, stream: int) -> float:
    image = get_image(Kind.EMPTY, layout, KernelOptions(pdl=Pdl.EARLY), arch)
    launcher = Launcher(image, pdl=True)
    launcher.load()

    def enqueue() -> None:
        for _ in range(EMPTY_KERNELS):
            launcher(stream, 1, 0)

    graph = Graph.capture(stream, enqueue)
    stamps = Events(2)
    times = []
    for _ in range(PROBES):
        stamps.record(0, stream)
        graph.launch(stream)
        stamps.record(1, stream)
        cuda.driver("StreamSynchronize", stream)
        times.append(stamps.elapsed_ns(0, 1) / EMPTY_KERNELS / 1e3)
    graph.close()
    stamps.close()
    return float(np.median(times))


def _one_way_us(
    world: World, layout: EpLayout, arch: str, memory: SymmetricMemory, stream: int
) -> float:
    peer = world.rank ^ 1
    cuda.fill(memory.addresses[-1], 128, 0, stream)
    world.barrier("measuring the floor")
    if peer >= world.size:
        world.barrier("measuring the floor")
        return 0.0
    image = get_image(Kind.PING_PONG, layout, KernelOptions(pdl=Pdl.OFF), arch)
    launcher = Launcher(image, pdl=False)
    launcher.load()
    addresses = (memory.addresses[-1], memory.addresses[peer])
    launcher(stream, 1, *addresses, int(layout.config.timeout_s * 1e9), ROUNDS, 1 - world.rank % 2)
    took_ns = cuda.download(memory.addresses[-1], (2,), np.uint32, stream)[1]
    world.barrier("measuring the floor")
    return float(took_ns) / (2 * ROUNDS) / 1e3
