"""Both kernels as compiled for the GB300, run under weak memory, bit for bit against the oracle."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from ep.bench.cases import Case
from ep.config import EpConfig, Protocol
from ep.kernels.options import Boundaries, Fences, KernelOptions, Pdl
from ep.record import HangRecord, Phase
from ep.routing import Routing
from tests.ptx.machine import Mode
from tests.ptx.steps import AllOnesStep
from tests.ptx.waits import TICK_NS, TIMEOUT_NS, Lame, impatient, news_after
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
TOKENS = (1, 2, 0, 1, 3)
FREE = [
    KernelOptions(pdl=Pdl.LATE),
    KernelOptions(pdl=Pdl.EARLY),
    KernelOptions(pdl=Pdl.LATE, boundaries=Boundaries.TRUSTED),
    KernelOptions(pdl=Pdl.EARLY, boundaries=Boundaries.TRUSTED),
]
FLAGS = [
    KernelOptions(pdl=Pdl.LATE, fences=Fences.CTA),
    KernelOptions(pdl=Pdl.EARLY, fences=Fences.THREAD),
]
NAMES = [f"{options.pdl}-{options.boundaries}" for options in FREE]
FLAG_NAMES = [f"{options.pdl}-{options.fences}" for options in FLAGS]
WEAK = (Mode.RANDOM, Mode.ADVERSARIAL)
NOT_BENIGN = (*WEAK, Mode.UNFAIR)
PROTOCOLS = pytest.mark.parametrize("protocol", Protocol)


def with_flags(config):
    return dataclasses.replace(config, protocol=Protocol.FLAGS)


def steps_of(case, tokens):
    """Odd steps, every fourth of them all ones."""
    return [
        (AllOnesStep if number % 4 == 1 else OddStep).of(case.step(number, most))
        for number, most in enumerate(tokens)
    ]


def run(config, options, seed, mode, tokens, *, data=0, **kwargs):
    case = Case(
        config=config,
        routing=list(Routing)[(seed + 4) % 5],
        uneven=seed % 4 != 3,
        norm=seed % 3 != 2,
        seed=data,
    )
    plan = Plan(experts=seed % 2 == 0, **kwargs)
    World(case, options, seed, mode, plan=plan).run(steps_of(case, tokens))


@PROTOCOLS
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_target(arch, protocol):
    config = dataclasses.replace(THREE, protocol=protocol)
    case = Case(config=config, routing=Routing.MASKED, uneven=True)
    world = World(case, KernelOptions(), 0, Mode.RANDOM, arch=arch)
    world.run(steps_of(case, TOKENS[:3]))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("options", FREE, ids=NAMES)
def test_twenty_steps(options, mode):
    """Each of two and three ranks meets all options and all modes, though not all pairs."""
    nth = FREE.index(options) + list(Mode).index(mode)
    run((TWO, THREE)[nth % 2], options, nth, mode, TOKENS * 4)


@pytest.mark.parametrize("mode", WEAK)
@pytest.mark.parametrize("options", FLAGS, ids=FLAG_NAMES)
def test_twenty_steps_with_flags(options, mode):
    nth = FLAGS.index(options) + WEAK.index(mode)
    run(with_flags((TWO, THREE)[nth % 2]), options, nth, mode, TOKENS * 4)


@pytest.mark.parametrize("mode", NOT_BENIGN)
@pytest.mark.parametrize("options", FREE, ids=NAMES)
def test_many_seeds(options, mode):
    """Three steps at least: only then a place of dispatch is used again."""
    for seed in range(100, 107):
        tokens = ((1, 2, 1), (2, 0, 1), (1, 1, 2))[seed % 3]
        run(TWO, options, seed, mode, tokens, data=seed % 4, resident=2 + seed % 3)


@pytest.mark.parametrize("mode", NOT_BENIGN)
def test_some_seeds_with_flags(mode):
    for seed in range(100, 104):
        run(with_flags(TWO), FLAGS[seed % 2], seed, mode, TOKENS[:3], data=seed % 4)


@PROTOCOLS
@pytest.mark.parametrize("mode", WEAK)
def test_k3(mode, protocol):
    config = dataclasses.replace(K3, protocol=protocol)
    nth = WEAK.index(mode)
    run(config, FREE[nth], nth, mode, (2, 1, 2), settle_each=3)


@pytest.mark.parametrize("hidden", [96, 64, 384, 256, 512])
def test_scale_rows_of_every_width(hidden):
    """Rows of scales that are stored 1, 2, 4, 8 and 16 bytes at a time."""
    config = dataclasses.replace(TWO, hidden=hidden)
    run(config, FREE[hidden == 96], 0, Mode.RANDOM, (2, 2))


@PROTOCOLS
@pytest.mark.parametrize("mode", WEAK)
def test_ctas_that_loop_over_rows_and_tokens(mode, protocol):
    case = Case(config=dataclasses.replace(WIDE, protocol=protocol), uneven=True)
    World(case, KernelOptions(), 0, mode, plan=Plan(resident=2)).run(steps_of(case, (8,)))


@pytest.mark.parametrize(
    ("mode", "resident"),
    [(Mode.RANDOM, 4), (Mode.ADVERSARIAL, 2), (Mode.UNFAIR, 34)],
)
def test_sixteen_ranks(mode, resident):
    """A receiver for several sources, and several receivers for each."""
    run(SIXTEEN, FREE[resident == 2], resident, mode, (2, 1), resident=resident)


def test_sixteen_ranks_with_flags():
    run(with_flags(SIXTEEN), FLAGS[0], 4, Mode.RANDOM, TOKENS[:3])


def test_the_whole_rack():
    run(ALL, FREE[0], 4, Mode.RANDOM, (1,))


def test_one_rank():
    run(dataclasses.replace(TWO, ranks=1), FREE[1], 0, Mode.RANDOM, TOKENS)


@pytest.mark.parametrize(
    ("fields", "norm"),
    [
        ({"ranks": 10, "experts": 20, "top_k": 20}, False),
        ({"hidden": 512, "experts": 64, "top_k": 32}, False),
        ({"hidden": 4352, "top_k": 1}, True),
        ({"hidden": 8448, "top_k": 1}, True),
    ],
    ids=str,
)
def test_more_than_a_batch_of_ranks_or_a_pass_of_chunks(fields, norm):
    config = dataclasses.replace(TWO, **fields)
    case = Case(config=config, norm=norm)
    World(case, FREE[1], 0, Mode.BENIGN).run(steps_of(case, (3, 2)))


@pytest.mark.parametrize("counts", [(20, 20, 20), (1, 1, 20)])
def test_a_sender_with_more_rows_than_lanes(counts):
    config = dataclasses.replace(THREE, max_tokens=24)
    case = Case(config=config)
    step = OddStep(case, 0, counts)
    World(case, FREE[1], 0, Mode.BENIGN, plan=Plan(resident=2)).run([step])


@PROTOCOLS
@pytest.mark.parametrize(
    ("ranks", "absent", "mode"),
    [(3, (1,), Mode.RANDOM), (3, (0, 2), Mode.ADVERSARIAL), (35, (17, 33), Mode.BENIGN)],
)
@pytest.mark.parametrize("phase", Phase)
def test_a_wait_that_expires_is_recorded(phase, ranks, absent, mode, protocol):
    case = Case(config=dataclasses.replace(TWO, ranks=ranks, experts=41, protocol=protocol))
    options = KernelOptions()
    # The others have the kernels as they are, with a look at the clock each 1024 polls.
    is_quick = protocol is Protocol.FENCE_FREE and absent != (1,)
    ptx, tick_ns = (impatient(case, options), TICK_NS) if is_quick else (None, 10**6)
    world = World(case, options, 0, mode, ptx=ptx, tick_ns=tick_ns, timeout_ns=TIMEOUT_NS)
    world.machine.idle_steps = 10**6
    step = case.step(0, 1)
    found = world.run_until_expired(step, phase, absent)
    for rank, record in enumerate(found):
        awaited = absent
        if protocol is Protocol.FENCE_FREE and phase is Phase.COMBINE:
            # It waits for those alone that have the rank's tokens.
            awaited = tuple(peer for peer in absent if step.rows_to(rank)[peer])
        if rank in absent or not awaited:
            assert record is None
        else:
            assert record is not None
            assert record.waited_us >= 10**5
            assert record == HangRecord(phase, 1, rank, record.waited_us, awaited)


@pytest.mark.parametrize(
    ("mode", "norm"), [(Mode.BENIGN, False), (Mode.RANDOM, True), (Mode.ADVERSARIAL, True)]
)
@pytest.mark.parametrize("phase", Phase)
def test_what_follows_an_expired_wait_sends_nothing_and_gives_nothing(phase, mode, norm):
    case = Case(config=dataclasses.replace(TWO, ranks=3, experts=41), norm=norm)
    options = KernelOptions()
    world = World(
        *(case, options, 0, mode),
        ptx=impatient(case, options),
        plan=Plan(experts=False),
        tick_ns=TICK_NS,
        timeout_ns=TIMEOUT_NS,
    )
    world.machine.idle_steps = 10**6
    assert world.run_until_expired(case.step(0, 3), phase, (1,))[0] is not None
    assert news_after(world, 0) is None


@pytest.mark.parametrize("mode", [Mode.BENIGN, Mode.RANDOM])
def test_rows_that_never_came_are_no_news(mode):
    """Rank 2 waits for rows of rank 1, which is in the step but sends none, or only heads."""
    case = Case(config=dataclasses.replace(TWO, ranks=3, experts=41))
    options = KernelOptions()
    world = Lame(
        *(case, options, 0, mode),
        ptx=impatient(case, options),
        tick_ns=TICK_NS,
        timeout_ns=TIMEOUT_NS,
    )
    world.no_senders = (1,)
    world.machine.idle_steps = 10**6
    step = case.step(0, 3)
    # Of a step before, which must not be taken for this one's.
    for name in ("x", "scales"):
        field = world.layout.fields[name]
        stale = np.full(field.size_bytes, 0x38, np.uint8)
        world.memory.write(world.own[2] + field.offset_bytes, stale)
    world.machine.run()
    assert world.run_until_expired(step, Phase.DISPATCH, ())[2] is not None
    assert world.stale_rows(2) is None
    rows = world._rows(world.memory.peek(world.own[2], world.layout.total_bytes))
    stride = world.layout.stride
    assert (rows.source[stride : 2 * stride] == -1).all()


@pytest.mark.parametrize(
    ("ranks", "mode"), [*((3, mode) for mode in NOT_BENIGN), (10, Mode.RANDOM), (35, Mode.BENIGN)]
)
def test_excluded_ranks_are_skipped(ranks, mode):
    case = Case(config=dataclasses.replace(TWO, ranks=ranks, experts=41), uneven=True)
    dead = (0,) if ranks == 3 else (1, ranks - 1)
    for options in FREE[:2] if ranks == 3 else FREE[:1]:
        world = World(case, options, 3, mode, excluded=dead)
        tokens = (3, 1) if ranks > 3 else (3, 0, 2, 3)
        steps = [case.step(number, most) for number, most in enumerate(tokens)]
        world.run([OddStep.of(step).without(dead) for step in steps])


def test_the_first_step_waits_longer():
    case = Case(config=dataclasses.replace(TWO, ranks=3, experts=41))
    options = KernelOptions()
    world = World(
        *(case, options, 0, Mode.BENIGN),
        ptx=impatient(case, options),
        tick_ns=TICK_NS,
        timeout_ns=TIMEOUT_NS,
        grace_ns=2 * TIMEOUT_NS,
    )
    world.machine.idle_steps = 10**6
    record = world.run_until_expired(case.step(0, 1), Phase.DISPATCH, (1,))[0]
    assert record is not None
    assert record.waited_us * 1000 >= 3 * TIMEOUT_NS
