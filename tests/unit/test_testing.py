"""Ranks as threads: what comes back, and which error is told."""

import dataclasses
import time
from typing import Any

import pytest

import ep
import ep.bench.cases
from ep.kernels.options import KernelOptions
from ep.testing import run_ranks


def test_results_come_in_rank_order():
    assert run_ranks(3, lambda world: (world.rank, world.size, world.local_rank)) == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]


@pytest.mark.parametrize(
    "ranks", [0, -1, 73, 2.5, "2", None, [], pytest.param(10**5000, id="huge")]
)
def test_impossible_numbers_of_ranks(ranks):
    with pytest.raises(ep.ArgumentError, match=r"ranks are not allowed: 1..72"):
        run_ranks(ranks, lambda world: None)


def test_a_backend_that_is_none():
    with pytest.raises(ep.ArgumentError, match="backend='tpu': allowed are auto, host, gpu"):
        run_ranks(2, lambda world: None, backend="tpu")


def test_what_every_rank_raises_alike_says_so():
    config = ep.EpConfig.load("kimi_k3", ranks=3, max_tokens=1)

    def wrong_ranks(world):
        ep.Exchange(world, config)

    def wrong_options(world):
        ep.Exchange(world, dataclasses.replace(config, ranks=2), kernel_options=KernelOptions())

    def apart(world):
        world.places = [
            dataclasses.replace(place, machine=str(rank)) for rank, place in enumerate(world.places)
        ]
        ep.Exchange(world, dataclasses.replace(config, ranks=2))

    for play, kind in (
        (wrong_ranks, ep.CollectiveError),
        (wrong_options, ep.ArgumentError),
        (apart, ep.HeapError),
    ):
        with pytest.raises(kind) as caught:
            run_ranks(2, play)
        assert caught.value.on_every_rank


@pytest.mark.parametrize("error", [ValueError("cause"), SystemExit(3)])
def test_the_cause_is_told_not_the_others_timeouts(error, caplog):
    config: dict[str, Any] = {
        "hidden": 32,
        "experts": 4,
        "top_k": 1,
        "max_tokens": 2,
        "timeout_s": 0.3,
        "grace_s": 0,
    }

    def play(world):
        exchange = ep.Exchange(world, ep.EpConfig(ranks=3, **config))
        if world.rank == 2:
            time.sleep(0.5)
            raise error
        step = ep.bench.cases.Case(config=exchange.config).step(0, 2)
        exchange.dispatch(*step.inputs(world.rank))

    with pytest.raises(type(error)) as caught:
        run_ranks(3, play)
    assert caught.value is error
    # Nor are they logged, as the ends of ranks that are processes are.
    assert not caplog.records


def test_a_timeout_is_told_not_the_closing_that_it_cut_short():
    config = ep.EpConfig(
        ranks=2, hidden=32, experts=4, top_k=1, max_tokens=2, timeout_s=0.3, grace_s=0
    )

    def play(world):
        with ep.Exchange(world, config) as exchange:
            if world.rank == 0:
                step = ep.bench.cases.Case(config=config).step(0, 2)
                exchange.dispatch(*step.inputs(0))

    with pytest.raises(ep.EpTimeout) as caught:
        run_ranks(2, play)
    assert (caught.value.phase, caught.value.rank, caught.value.awaited) == ("dispatch", 0, (1,))


@pytest.mark.parametrize("error", [ValueError("the engine's"), SystemExit(3)])
def test_an_embedded_world_leaves_words_to_its_engine_too(error, caplog):
    def play(world):
        def allgather(payload):
            return [words.encode() for words in world.allgather(payload.decode())]

        with ep.World.embedded(world.rank, world.size, allgather, backend="host"):
            raise error

    with pytest.raises(type(error)) as caught:
        run_ranks(2, play)
    assert caught.value is error
    # The log of another World says that it ends the job.
    assert not caplog.records


def test_a_wrong_world_or_config_is_told():
    with ep.World.connect(backend="host") as world:
        wrong: Any = "kimi_k3"
        with pytest.raises(ep.ArgumentError, match=r"Exchange\(World, str\): allowed is"):
            ep.Exchange(world, wrong)
        config = ep.EpConfig.load("kimi_k3", ranks=1, max_tokens=1)
        with pytest.raises(ep.ArgumentError, match="kernel_options are for the GPU backend"):
            ep.Exchange(world, config, kernel_options=KernelOptions())
