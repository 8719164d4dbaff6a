"""Grids under limits, as `ep.tune` imposes them."""

import random
from typing import Any

import ep
from ep.bench.bridge import GpuBridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.kernels.tuning import ROLES, PerSm
from tests.gpu.common import agree, config_of

VALUES = (None, 0.001, 0.03, 0.1, 0.5, 32.0)


def limits(world, num_steps=40):
    """Any limits give the same bits; ranks need not have the same, nor the next step."""
    config = config_of(world, "tiny", 40)
    bridge = GpuBridge(world.device)
    draw = random.Random(world.rank)
    with ep.Exchange(world, config) as exchange:
        engine: Any = exchange._engine
        for number in range(num_steps):
            engine.impose({kind: PerSm(draw.choice(VALUES), draw.choice(VALUES)) for kind in ROLES})
            case = Case(config=config, uneven=number % 3 == 0, norm=number % 2 == 0)
            step = case.step(number, (40, 7, 0, 1)[number % 4])
            agree(world, run_checked_step(exchange, step, bridge))
    bridge.close()
