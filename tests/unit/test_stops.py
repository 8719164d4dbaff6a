"""What stops an exchange or a world: then they say so, let go of memory and leave nothing."""

import contextlib
import gc
import os
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ep
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.bootstrap.channel import SingleChannel
from ep.host import HostEngine
from ep.memory.host import HostMemory
from ep.testing import run_ranks

BF16 = ml_dtypes.bfloat16


def config(ranks, **fields):
    shape = {"hidden": 64, "experts": 4, "top_k": 2, "max_tokens": 3, "grace_s": 0}
    return ep.EpConfig(ranks=ranks, **(shape | fields))


@pytest.fixture
def world():
    with ep.World.connect(backend="host") as world:
        yield world


def inputs(exchange, number=0):
    return Case(config=exchange.config).step(number, 2).inputs(exchange.world.rank)


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def num_segments():
    return Path("/proc/self/maps").read_text().count(".memory")


class Stop(BaseException):
    """As a handler of a signal may raise it."""


def stop(*arguments):
    raise Stop("now")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ep.StateError, ep.ArgumentError])
@pytest.mark.parametrize(
    ("where", "phase"),
    [
        ((HostMemory, "ring"), "dispatch"),
        ((HostMemory, "wait"), "dispatch"),
        ((HostMemory, "ring"), "combine"),
        ((HostEngine, "_reduce"), "combine"),
    ],
)
def test_whatever_ends_a_step_stops_the_exchange(world, monkeypatch, where, phase, error):
    exchange = ep.Exchange(world, config(1))
    x, ids, weights = inputs(exchange)
    partials = np.ones((exchange.layout.rows, 64), BF16)

    def fail(*arguments):
        raise error("from anywhere")

    if phase == "combine":
        exchange.dispatch(x, ids, weights)
    calls = {
        "dispatch": lambda: exchange.dispatch(x, ids, weights),
        "combine": lambda: exchange.combine(partials, ids),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*where, fail)
        with pytest.raises(error):
            calls[phase]()
    words = f"this Exchange stopped at: {phase}, ended by {error.__name__}\\('from anywhere'\\)"
    for call in (*calls.values(), exchange.poll):
        with pytest.raises(ep.StateError, match=words):
            call()
    exchange.close()


def test_an_argument_that_is_refused_stops_nothing(world):
    with ep.Exchange(world, config(1)) as exchange:
        x, ids, weights = inputs(exchange)
        with pytest.raises(ep.ArgumentError):
            exchange.dispatch(x, ids, weights.astype(np.float64))
        exchange.poll()
        assert run_checked_step(exchange, Case(config=exchange.config).step(1, 3)) is None


def test_a_wait_that_is_cut_short_keeps_the_rings_it_has_read():
    def play(world):
        memory = HostMemory.allocate(world, 4096)
        world.barrier()
        if world.rank:
            memory.ring(0, 0, 1)
        world.barrier()
        if world.rank == 0:
            memory.ring(0, 1, 7)
            polls = iter([[1], Stop])
            real = memory._poll

            class Poll:
                def poll(self, timeout_ms):
                    if next(polls) is Stop:
                        raise Stop
                    return real.poll(timeout_ms)

            memory._poll = Poll()  # type: ignore[assignment]
            with pytest.raises(Stop):
                memory.wait({0, 1, 2}, 0, 1, 5, "dispatch")
            memory._poll = real
            # At once: they are here, though the time is up.
            memory.wait({1, 2}, 0, 1, 0, "dispatch")
            memory.wait({0}, 1, 7, 0, "combine")
            assert memory._early == []
            with pytest.raises(ep.EpTimeout):
                memory.wait({1}, 0, 1, 0, "dispatch")
        memory.close()

    run_ranks(3, play)


def test_rings_that_lie_in_the_bell_count_when_the_time_is_up(world):
    memory = HostMemory.allocate(world, 4096)
    memory.ring(0, 0, 1)
    memory.wait({0}, 0, 1, 0, "dispatch")
    memory.close()


def test_an_expired_step_is_noted_for_the_exit(monkeypatch):
    noted = []

    def play(world):
        monkeypatch.setattr(world._channel, "note_timeout", lambda: noted.append(world.rank))
        exchange = ep.Exchange(world, config(2, timeout_s=0.2))
        if world.rank == 0:
            with pytest.raises(ep.EpTimeout):
                exchange.dispatch(*inputs(exchange))
            with pytest.raises(ep.EpTimeout):
                exchange.poll()
        exchange.close()

    run_ranks(2, play)
    assert noted == [0]


def test_calls_that_differ_are_told_on_every_rank():
    def play(world):
        if world.rank == 1:
            with pytest.raises(ep.CollectiveError) as caught:
                ep.Exchange(world, config(3))
        else:
            with pytest.raises(ep.CollectiveError) as caught:
                world.barrier("closing an exchange")
        return str(caught.value), caught.value.on_every_rank

    said = run_ranks(3, play)
    assert len(set(said)) == 1
    assert said[0][1]
    assert "ranks 0, 2: 'closing an exchange'" in said[0][0]
    assert 'rank 1: "an Exchange\'s configuration"' in said[0][0]


def test_a_world_whose_collective_was_cut_short_refuses_the_next(monkeypatch):
    world = ep.World.connect(backend="host")
    with monkeypatch.context() as patched:
        patched.setattr(SingleChannel, "allgather", stop)
        with pytest.raises(Stop):
            world.barrier("the first")
    with pytest.raises(ep.StateError, match=r"this World stopped at: the first, ended by Stop"):
        world.barrier()


def test_a_forked_child_leaves_the_world_alone(world, monkeypatch):
    exchange = ep.Exchange(world, config(1))
    pid = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pid + 1)
        for call in (lambda: exchange.dispatch(*inputs(exchange)), exchange.close, world.barrier):
            with pytest.raises(ep.StateError, match=f"that of process {pid}, and this is a forked"):
                call()
        world.close()
    exchange.close()
    world.barrier()


def test_an_exchange_in_use_is_not_closed():
    exchanges = {}

    def play(world):
        exchange = exchanges[world.rank] = ep.Exchange(world, config(2, timeout_s=20))
        x, ids, weights = inputs(exchange)
        world.barrier()
        if world.rank == 1:
            while not exchanges[0]._calls:
                threading.Event().wait(0.001)
            with pytest.raises(ep.StateError, match="in use by another thread"):
                exchanges[0].close()
        exchange.dispatch(x, ids, weights)
        exchange.combine(np.ones((exchange.layout.rows, 64), BF16), ids)
        exchange.close()

    run_ranks(2, play)


@pytest.mark.parametrize("after", range(1, 40))
def test_an_interrupt_at_any_line_leaves_the_exchange_free(world, after):
    """As a signal's handler may raise it: between any two lines of the calls' own bookkeeping."""
    exchange = ep.Exchange(world, config(1))
    files = {ep.lifecycle.__file__, contextlib.__file__}
    lines = iter(range(1, 10**6))

    def trace(frame, event, argument):
        if frame.f_code.co_filename in files and event == "line" and next(lines) == after:
            raise Stop
        return trace

    sys.settrace(trace)
    try:
        exchange.poll()
    except Stop:
        pass
    finally:
        sys.settrace(None)
    exchange._broken = None
    assert run_checked_step(exchange, Case(config=exchange.config).step(1, 3)) is None
    exchange.close()


def test_memory_goes_with_the_last_view(world):
    before = num_segments()
    exchange = ep.Exchange(world, config(1))
    received = exchange.dispatch(*inputs(exchange))
    assert num_segments() == before + 2
    exchange.close()
    assert num_segments() == before + 1
    del received
    assert num_segments() == before
    assert exchange._engine is None


def test_a_timeout_that_is_kept_holds_no_memory():
    before = num_segments()

    def play(world):
        exchange = ep.Exchange(world, config(2, timeout_s=0.1))
        if world.rank == 0:
            with pytest.raises(ep.EpTimeout):
                exchange.dispatch(*inputs(exchange))
        exchange.close()
        return exchange

    kept = run_ranks(2, play)
    gc.collect()
    assert isinstance(kept[0]._broken, ep.EpTimeout)
    assert num_segments() == before


def test_an_exchange_that_is_dropped_leaves_no_descriptor(world):
    before = num_descriptors()
    for _ in range(3):
        ep.Exchange(world, config(1))
    gc.collect()
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [(HostEngine, "_empty"), (HostMemory, "array"), (HostMemory, "__init__")],
)
def test_an_exchange_that_cannot_be_made_leaves_no_descriptor(world, monkeypatch, owner, name):
    before = num_descriptors(), num_segments()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stop)
        with pytest.raises(Stop):
            ep.Exchange(world, config(1))
    gc.collect()
    assert (num_descriptors(), num_segments()) == before


def test_an_exchange_whose_last_barrier_fails_leaves_no_descriptor(world, monkeypatch):
    before = num_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(ep.World, "barrier", stop)
        with pytest.raises(Stop):
            ep.Exchange(world, config(1))
    gc.collect()
    assert num_descriptors() == before
