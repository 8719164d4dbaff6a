"""Both kernels as compiled for the GB300, run under weak memory, bit for bit against the oracle."""

import dataclasses
import importlib.util
import itertools

import pytest

from ep.bench.cases import Case
from ep.config import EpConfig
from ep.kernels.options import Fences, KernelOptions, Pdl
from ep.record import HangRecord, Phase
from ep.routing import Routing
from tests.ptx.machine import Mode
from tests.ptx.world import OddStep, Plan, World

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
    ),
    pytest.mark.timeout(600),
]

TWO = EpConfig(ranks=2, hidden=64, experts=7, top_k=3, max_tokens=3)
THREE = dataclasses.replace(TWO, ranks=3, hidden=96)
K3 = EpConfig(ranks=2, hidden=3584, experts=896, top_k=16, max_tokens=4)
WIDE = EpConfig(ranks=3, hidden=1056, experts=30, top_k=7, max_tokens=40)
SIXTEEN = dataclasses.replace(TWO, ranks=16, experts=37)
ALL = dataclasses.replace(TWO, ranks=72, experts=97)
TOKENS = (1, 3, 2, 0, 3)
OPTIONS = [
    KernelOptions(pdl=pdl, fences=fences)
    for pdl, fences in itertools.product((Pdl.LATE, Pdl.EARLY), Fences)
]
NAMES = [f"{options.pdl}-{options.fences}" for options in OPTIONS]
MODES = tuple(Mode)
WEAK = (Mode.RANDOM, Mode.ADVERSARIAL)
NOT_BENIGN = (*WEAK, Mode.UNFAIR)


def steps_of(case, count):
    return [OddStep.of(case.step(number, TOKENS[number % 5])) for number in range(count)]


def run(config, options, seed, mode, count, *, data=0, **kwargs):
    case = Case(
        config=config,
        routing=list(Routing)[(seed + 4) % 5],
        uneven=seed % 4 != 3,
        norm=seed % 3 != 2,
        seed=data,
    )
    plan = Plan(experts=seed % 2 == 0, **kwargs)
    World(case, options, seed, mode, plan=plan).run(steps_of(case, count))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_target(arch):
    case = Case(config=THREE, routing=Routing.MASKED, uneven=True)
    world = World(case, KernelOptions(), 0, Mode.RANDOM, arch=arch)
    world.run(steps_of(case, 5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [TWO, THREE], ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_twenty_steps(config, options, mode):
    run(config, options, OPTIONS.index(options) + (mode is Mode.RANDOM), mode, 20)


@pytest.mark.parametrize("mode", NOT_BENIGN)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_many_seeds(options, mode):
    for seed in range(100, 117):
        run(TWO, options, seed, mode, 4, data=seed % 4)


@pytest.mark.parametrize("mode", WEAK)
def test_k3(mode):
    for seed in range(2):
        run(K3, OPTIONS[seed], seed, mode, 3, settle_each=1)


@pytest.mark.parametrize("mode", WEAK)
def test_ctas_that_loop_over_rows_and_tokens(mode):
    case = Case(config=WIDE, uneven=True)
    plan = Plan(resident=2, settle_each=1)
    steps = [OddStep.of(case.step(number, 12)) for number in range(2)]
    World(case, KernelOptions(), 0, mode, plan=plan).run(steps)


@pytest.mark.parametrize("mode", WEAK)
def test_sixteen_ranks(mode):
    run(SIXTEEN, OPTIONS[mode is Mode.RANDOM], 4 + (mode is Mode.RANDOM), mode, 4)


@pytest.mark.parametrize("mode", WEAK)
def test_the_whole_rack(mode):
    run(ALL, OPTIONS[mode is Mode.RANDOM], 4, mode, 2)


@pytest.mark.parametrize(
    ("ranks", "absent", "mode"),
    [(3, (1,), Mode.RANDOM), (3, (0, 2), Mode.ADVERSARIAL), (35, (1, 33), Mode.BENIGN)],
)
@pytest.mark.parametrize("phase", Phase)
def test_a_wait_that_expires_is_recorded(phase, ranks, absent, mode):
    case = Case(config=dataclasses.replace(TWO, ranks=ranks, experts=41))
    world = World(case, KernelOptions(), 0, mode, tick_ns=10**6, timeout_ns=10**8)
    world.machine.idle_steps = 10**6
    found = world.run_until_expired(case.step(0, 1), phase, absent)
    for rank, record in enumerate(found):
        if rank in absent:
            assert record is None
        else:
            assert record is not None
            assert record.waited_us >= 10**5
            assert record == HangRecord(phase, 1, rank, record.waited_us, absent)
