"""Ranks as threads: what comes back, and which error is told."""

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


@pytest.mark.parametrize("ranks", [0, -1, 73])
def test_impossible_numbers_of_ranks(ranks):
    with pytest.raises(ep.ArgumentError, match=f"{ranks} ranks are not allowed: 1..72"):
        run_ranks(ranks, lambda world: None)


@pytest.mark.parametrize("error", [ValueError("cause"), SystemExit(3)])
def test_the_cause_is_told_not_the_others_timeouts(error):
    config: dict[str, Any] = {
        "hidden": 32,
        "experts": 4,
        "top_k": 1,
        "max_tokens": 2,
        "timeout_s": 0.3,
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


def test_a_wrong_world_or_config_is_told():
    with ep.World.connect(backend="host") as world:
        wrong: Any = "kimi_k3"
        with pytest.raises(ep.ArgumentError, match=r"Exchange\(World, str\): allowed is"):
            ep.Exchange(world, wrong)
        config = ep.EpConfig.load("kimi_k3", ranks=1, max_tokens=1)
        with pytest.raises(ep.ArgumentError, match="kernel_options are for the GPU backend"):
            ep.Exchange(world, config, kernel_options=KernelOptions())
