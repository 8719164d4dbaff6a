"""What each rank of a GPU test does, whether a thread or a process plays it."""

import dataclasses
import random
import time
from functools import partial
from typing import Any

import numpy as np

import ep
from ep.bench.bridge import GpuBridge, received_rows
from ep.bench.cases import Case
from ep.bench.chain import Chain
from ep.bench.check import check_result, check_rows, run_checked_step
from ep.config import Protocol
from ep.gpu.graph import Graph
from ep.kernels.options import Fences, KernelOptions, Pdl, Warm
from ep.memory.cuda import driver
from ep.routing import Routing
from tests.gpu.capi import hang_in_c, same_bytes
from tests.gpu.common import agree, config_of, installed, where
from tests.gpu.life import lifetimes, odd_ends
from tests.gpu.limits import limits
from tests.gpu.long_runs import consumers, long_run, neighbour
from tests.gpu.recovery import resets
from tests.multirank.worker import AllOnesStep, OddStep, raises


def steps(world, shape="tiny", num_steps=40, max_tokens=6, options=None, **fields):
    """Steps of every routing with T that changes, some ranks or all without tokens."""
    config = config_of(world, shape, max_tokens, **fields)
    bridge = GpuBridge(world.device)
    cases = [
        Case(config=config, routing=routing, uneven=uneven, norm=norm, seed=seed)
        for seed, (routing, uneven, norm) in enumerate(
            (routing, uneven, norm)
            for routing in Routing
            for uneven in (False, True)
            for norm in (True, False)
        )
    ]
    with ep.Exchange(world, config, kernel_options=options) as exchange:
        for number in range(num_steps):
            tokens = min(max_tokens, (5, 2, 1, 0, max_tokens)[number // 2 % 5])
            step = cases[number % len(cases)].step(number, tokens)
            prepared = number % 3 == 2
            agree(world, run_checked_step(exchange, step, bridge, prepared=prepared))
    bridge.close()


def odd_payloads(world, **fields):
    """NaN, Inf, subnormals, -0 and all-ones everywhere; then clean rows on the same buffer."""
    config = config_of(world, "gpt_oss_120b", 7, hidden=288, **fields)
    bridge = GpuBridge(world.device)
    with ep.Exchange(world, config) as exchange:
        for number in range(12):
            case = Case(config=config, norm=number % 2 == 1, seed=3)
            step = case.step(number, (7, 4, 1)[number % 3])
            kind = (OddStep, AllOnesStep, OddStep, type(step))[number % 4]
            step = kind(**{f.name: getattr(step, f.name) for f in dataclasses.fields(step)})
            agree(world, run_checked_step(exchange, step, bridge))
    bridge.close()


def graphs(world, shape="kimi_k3", num_ops=60, options=None, pairs=3, **fields):
    """Graphs of several T replayed in random order, mixed with eager steps."""
    config = config_of(world, shape, 8, **fields)
    bridge = GpuBridge(world.device)
    order = random.Random(7)
    with ep.Exchange(world, config, kernel_options=options) as exchange:
        agree(world, run_checked_step(exchange, Case(config=config).step(0, 8), bridge))
        chains = {}
        for tokens in (0, 1, 5, 8):
            case = Case(config=config, uneven=tokens == 5, seed=tokens)
            chain = Chain(exchange, bridge, [case.step(tokens + n, tokens) for n in range(pairs)])
            chains[tokens] = chain, Graph.capture(bridge.stream, partial(chain.run, pairs))
        for number in range(num_ops):
            tokens = order.choice(list(chains))
            chain, graph = chains[tokens]
            if order.random() < 0.3:
                step = Case(config=config, uneven=True).step(100 + number, tokens)
                agree(world, run_checked_step(exchange, step, bridge))
                continue
            chain.forget()
            for _ in range(order.randint(1, 3)):
                graph.launch(bridge.stream)
            world.barrier()
            agree(world, chain.complaint())
        driver("StreamSynchronize", bridge.stream)
        for _, graph in chains.values():
            graph.close()
    bridge.close()


def several_exchanges(world):
    """Two instances used unevenly: A A B A B B."""
    first, second = config_of(world, "tiny", 5), config_of(world, "gpt_oss_120b", 3)
    bridge = GpuBridge(world.device)
    with ep.Exchange(world, first) as a, ep.Exchange(world, second) as b:
        for number, which in enumerate("AABABB" * 3):
            exchange, case = (a, Case(config=first)) if which == "A" else (b, Case(config=second))
            step = case.step(number, 1 + number % 3)
            agree(world, run_checked_step(exchange, step, bridge))
    bridge.close()


def kernel_options(world):
    """Every way to build the kernels gives the same bits."""
    builds: list[tuple[Protocol, dict[str, Any]]]
    builds = [(Protocol.FENCE_FREE, {"warm": warm}) for warm in Warm]
    builds += [(Protocol.FLAGS, {"fences": fences}) for fences in Fences]
    for pdl in Pdl:
        if pdl is Pdl.EARLY and world.shares_gpus:
            continue
        for protocol, chosen in builds:
            options = KernelOptions(pdl=pdl, **chosen)
            steps(world, "kimi_k3", 12, options=options, protocol=protocol)
            graphs(world, num_ops=12, options=options, protocol=protocol)


def many_tokens(world, tokens=300, **fields):
    """More tokens than CTAs of combine fit."""
    steps(world, "kimi_k3", num_steps=6, max_tokens=tokens, **fields)


def wrong_use(world, monkeypatch=None):
    """Errors at the edge, after which the exchange still works."""
    config = config_of(world, "tiny", 4)
    bridge, other = GpuBridge(world.device), GpuBridge(world.device)
    step = Case(config=config).step(0, 4)
    inputs = step.inputs(world.rank)
    x, ids, weights = map(bridge.put, inputs)
    with ep.Exchange(world, config) as exchange:
        with raises(ep.ArgumentError, "x is a ndarray; the GPU backend takes a C-contiguous array"):
            exchange.dispatch(inputs.x, ids, weights, bridge.stream)
        with raises(ep.ArgumentError, r"x is int32 \[4, 3\]; allowed is .* bfloat16"):
            exchange.dispatch(ids, ids, weights, bridge.stream)
        with raises(ep.ArgumentError, "stream is a str; allowed are None"):
            exchange.dispatch(x, ids, weights, "stream")
        with raises(ep.StateError, "combine without a dispatch"):
            exchange.combine(x, ids)
        agree(world, run_checked_step(exchange, step, bridge))
        partials = bridge.put(step.partials(world.rank, step.expected_rows(world.rank).source))
        out = bridge.put(np.zeros((4, 32), inputs.x.dtype))
        world.barrier()
        exchange.dispatch(x, ids, weights, bridge.stream)
        with raises(ep.StateError, "pass the same stream to both|still at work on stream"):
            exchange.combine(partials, ids, out=out, stream=other.stream)
        y = bridge.get(exchange.combine(partials, ids, out=out, stream=bridge.stream))
        assert y.shape == (4, 32)
        world.barrier()
        agree(world, run_checked_step(exchange, step, other))
    bridge.close()
    other.close()


def absent_from_combine(world, **fields):
    """The same where it misses combine: whoever awaits its partials says so and gives no number."""
    config = config_of(world, "tiny", 4, timeout_s=0.5, grace_s=0, **fields)
    bridge = GpuBridge(world.device)
    exchange = ep.Exchange(world, config)
    step = Case(config=config, routing=Routing.UNIFORM).step(0, 4)
    x, ids, weights = map(bridge.put, step.inputs(world.rank))
    partials = bridge.put(step.partials(world.rank, step.expected_rows(world.rank).source))
    out = bridge.put(np.zeros((4, config.hidden), step.inputs(world.rank).x.dtype))
    owners = config.owner_of(step.inputs(world.rank).ids)
    world.barrier()
    exchange.dispatch(x, ids, weights, bridge.stream)
    if world.rank != 1:
        exchange.combine(partials, ids, out=out, stream=bridge.stream)
        driver("StreamSynchronize", bridge.stream)
        if (owners == 1).any():
            with raises(ep.EpTimeout, "combine of step 1 waited 0.5 s for rank 1 "):
                exchange.poll()
            got = bridge.get(out).astype(np.float32)
            assert np.isnan(got[(owners == 1).any(axis=1)]).all()
            assert not np.isnan(got[(owners != 1).all(axis=1)]).any()
    driver("StreamSynchronize", bridge.stream)
    world.barrier()
    exchange.close()
    bridge.close()


def absent_rank(world, **fields):
    """A rank that never comes ends the others' wait in time, by name; the context survives."""
    config = config_of(world, "tiny", 4, timeout_s=0.5, grace_s=0, **fields)
    bridge = GpuBridge(world.device)
    exchange = ep.Exchange(world, config)
    agree(world, run_checked_step(exchange, Case(config=config).step(0, 4), bridge))
    x, ids, weights = map(bridge.put, Case(config=config).step(1, 4).inputs(world.rank))
    if world.rank != 1:
        start = time.monotonic()
        exchange.dispatch(x, ids, weights, bridge.stream)
        driver("StreamSynchronize", bridge.stream)
        assert 0.4 <= time.monotonic() - start < 3
        # Whatever the stream is at when it is noticed.
        with raises(ep.EpTimeout, "dispatch of step 2 waited 0.5 s for rank 1 .* step: 1"):
            Graph.capture(bridge.stream, lambda: exchange.combine(x, ids, out=x))
        with raises(
            ep.EpTimeout, "dispatch of step 2 waited 0.5 s for rank 1 .* step: 1"
        ) as caught:
            exchange.poll()
        assert caught.error.awaited == (1,)
        with raises(ep.StateError, "this Exchange stopped at"):
            exchange.combine(x, ids, stream=bridge.stream)
        np.testing.assert_array_equal(bridge.get(bridge.put(np.arange(5))), np.arange(5))
    world.barrier()
    exchange.close()
    with ep.Exchange(world, config) as again:
        agree(world, run_checked_step(again, Case(config=config).step(2, 4), bridge))
    bridge.close()


def foreign_arrays(world):
    """Arrays of torch, CuPy and JAX, and torch's streams and graphs, where they are installed."""
    config = config_of(world, "kimi_k3", 8)
    step = Case(config=config).step(0, 5)
    inputs, rank = step.inputs(world.rank), world.rank
    rows, want = step.expected_rows(rank), step.expected_result(rank)
    partials, gains = step.partials(rank, rows.source), step.case.norm_weight
    bridge = GpuBridge(world.device)
    outs = [bridge.put(np.full_like(want, np.nan)) for _ in range(4)]
    with ep.Exchange(world, config) as exchange:
        for name, put in foreign(world, bridge):
            x, ids, weights, p, g = map(put, (*inputs, partials, gains))
            world.barrier()
            received = exchange.dispatch(x, ids, weights, bridge.stream)
            agree(world, check_rows(received_rows(bridge, received), rows, where(world), 8))
            y = exchange.combine(p, ids, g, 1e-5, outs.pop(), bridge.stream)
            world.barrier()
            agree(world, check_result(bridge.get(y), want, where(world)))
            print(f"{name} on rank {rank}", flush=True)
        torch = installed("torch")
        if torch is not None:
            with_torch(world, exchange, (*inputs, partials, gains), want)
    bridge.close()


def foreign(world, bridge):
    """Ways to put NumPy data on this rank's GPU: a name, and how."""
    ordinal = world.device.ordinal
    torch, cupy, jax = map(installed, ("torch", "cupy", "jax"))
    if torch is not None:

        def to_torch(array):
            raw = {2: np.int16, 4: np.int32}[array.dtype.itemsize]
            kinds = {"bfloat16": torch.bfloat16, "int32": torch.int32, "float32": torch.float32}
            tensor = torch.from_numpy(array.view(raw).copy()).view(kinds[array.dtype.name])
            return tensor.to(f"cuda:{ordinal}")

        yield "torch", to_torch
        yield "torch by DLPack", lambda array: OnlyDlpack(to_torch(array))
        # What the receive rows look like from outside.
        probe = bridge.put(np.arange(6, dtype=np.float32).reshape(2, 3))
        assert torch.from_dlpack(probe).tolist() == [[0, 1, 2], [3, 4, 5]]
    if cupy is not None:

        def to_cupy(array):
            with cupy.cuda.Device(ordinal):
                return cupy.asarray(array) if array.dtype.kind in "if" else bridge.put(array)

        yield "CuPy", to_cupy
    if jax is not None:
        yield "JAX", lambda array: jax.device_put(array, jax.devices("gpu")[ordinal])


class OnlyDlpack:
    """A tensor that hides everything but DLPack."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def with_torch(world, exchange, arrays, want):
    """A torch stream, out in a torch tensor, and a torch CUDA graph."""
    import torch

    torch.cuda.set_device(world.device.ordinal)
    put = next(put for name, put in foreign(world, GpuBridge(world.device)) if name == "torch")
    x, ids, weights, partials, gains = map(put, arrays)
    out = torch.full_like(x, float("nan"))
    stream = torch.cuda.Stream()

    def pair():
        exchange.dispatch(x, ids, weights, stream)
        assert exchange.combine(partials, ids, gains, out=out, stream=stream) is out

    world.barrier()
    with torch.cuda.stream(stream):
        pair()
    world.barrier()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        pair()
        with raises(ep.StateError, "nothing is allocated during graph capture"):
            exchange.dispatch(x, ids, weights, stream)
            exchange.combine(partials, ids, gains, stream=stream)
        exchange.combine(partials, ids, gains, out=out, stream=stream)
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    world.barrier()
    for _ in range(3):
        graph.replay()
    world.barrier()
    torch.cuda.synchronize()
    got = out.view(torch.int16).cpu().numpy().view(want.dtype)
    agree(world, check_result(got, want, where(world)))


def first_call_in_a_capture(world):
    """A graph captured before any eager call: everything was loaded when the exchange was made."""
    config = config_of(world, "kimi_k3", 8)
    bridge = GpuBridge(world.device)
    with ep.Exchange(world, config) as exchange:
        chain = Chain(exchange, bridge, [Case(config=config).step(n, 5) for n in range(3)])
        graph = Graph.capture(bridge.stream, partial(chain.run, 3))
        world.barrier()
        for _ in range(3):
            graph.launch(bridge.stream)
        world.barrier()
        agree(world, chain.complaint())
        graph.close()
    bridge.close()


def nvshmem_elsewhere(world):
    """NVSHMEM that somebody else has initialised is shared, and left running."""
    import nvshmem.core
    from cuda.core import Device

    from ep.memory.nvshmem import load

    bindings = load()
    device = Device(world.device.ordinal)
    device.set_current()
    uid = nvshmem.core.get_unique_id(empty=world.rank != 0)
    raw = uid._data.view("u1").ravel()
    raw[:] = world.allgather(raw.tolist())[0]
    nvshmem.core.init(
        device=device, uid=uid, rank=world.rank, nranks=world.size, initializer_method="uid"
    )
    steps(world, "tiny", 6)
    assert bindings.my_pe() == world.rank
    world.barrier()
    nvshmem.core.finalize()
    # And one of our own after that one has ended.
    steps(world, "tiny", 6)


CASES: dict[str, Any] = {
    "first_call_in_a_capture": first_call_in_a_capture,
    "long_run": long_run,
    "consumers": consumers,
    "neighbour": neighbour,
    "limits": limits,
    "lifetimes": lifetimes,
    "odd_ends": odd_ends,
    "foreign_arrays": foreign_arrays,
    "steps": steps,
    "steps_k3": lambda world: steps(world, "kimi_k3"),
    "steps_gpt": lambda world: steps(world, "gpt_oss_120b"),
    "odd_payloads": odd_payloads,
    "graphs": graphs,
    "several_exchanges": several_exchanges,
    "kernel_options": kernel_options,
    "many_tokens": many_tokens,
    "wrong_use": wrong_use,
    "absent_rank": absent_rank,
    "absent_from_combine": absent_from_combine,
    "absent_in_c": hang_in_c,
    "same_bytes": same_bytes,
    "same_bytes_k3": lambda world: same_bytes(world, "kimi_k3"),
    "resets": resets,
    **{
        f"{name}_flags": partial(case, protocol=Protocol.FLAGS)
        for name, case in {
            "steps": steps,
            "odd_payloads": odd_payloads,
            "graphs": graphs,
            "many_tokens": many_tokens,
            "absent_rank": absent_rank,
            "resets": resets,
        }.items()
    },
}
PROCESS_CASES: dict[str, Any] = {
    "nvshmem_elsewhere": nvshmem_elsewhere,
    "million": partial(long_run, num_steps=1_000_000),
    "consumers_long": partial(consumers, replays=100_000),
    "long_run_flags": partial(long_run, protocol=Protocol.FLAGS),
}
"""Only for ranks that are processes."""
