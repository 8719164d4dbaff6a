"""Every fence, barrier, order, scope and re-arm of the kernels is needed, or it is said why not."""

import dataclasses
import importlib.util

import pytest

from ep.bench.cases import Case
from ep.config import EpConfig, Protocol
from ep.kernels.compile import Kind
from ep.kernels.options import Fences, KernelOptions, Pdl
from ep.record import HangRecord, Phase
from ep.routing import Routing
from tests.ptx.arena import Fault
from tests.ptx.machine import Hang, Mode
from tests.ptx.mutations import mutants
from tests.ptx.world import OddStep, Plan, World, Wrong, image

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
    ),
    pytest.mark.timeout(600),
]

# Two warps in each CTA of both kernels, and CTAs that loop over rows and tokens.
CONFIG = EpConfig(ranks=2, hidden=288, experts=7, top_k=3, max_tokens=20, protocol=Protocol.FLAGS)
SEEDS = 4
MOST_SEEDS = 24
"""Some of what must show shows in few of the interleavings."""
TOKENS = (3, 2)
REPORTING = ("claim", "step", "store", "state")
"""What takes part in the report of a wait that has expired."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Mutants of one kernel."""

    name: str
    kind: Kind
    options: KernelOptions
    places: frozenset[str] | None = None


CTA = KernelOptions(pdl=Pdl.EARLY, fences=Fences.CTA)
THREAD = KernelOptions(pdl=Pdl.LATE, fences=Fences.THREAD)
FENCE = frozenset({"fence"})
GROUPS = [
    Group("dispatch", Kind.DISPATCH, CTA),
    Group("combine", Kind.COMBINE, CTA),
    Group("dispatch-thread", Kind.DISPATCH, THREAD, FENCE),
    Group("combine-thread", Kind.COMBINE, THREAD, FENCE),
]

_CUMULATIVE = (
    "An option, kept for comparison: the barrier, the arrival and the fence before the flags order "
    "every thread's stores, since fences are cumulative."
)
_CLAIM = (
    "One CTA of dispatch waits. Its claim keeps kernels after it from the record, and those are "
    "ordered by the stream."
)
_STEP = (
    "One thread a kernel counts, and kernels of a stream are ordered: nobody contends. The scope "
    "costs nothing; a load and a store instead would put the load's latency before the wait."
)
_SLOT = (
    "The acquired flag orders it. The model has no L1; relaxed at system scope, the load is not "
    "served by one on any GPU either."
)
_TRIGGER = "It only lets the next kernel start sooner."
_EARLY = "The next kernel waits for this one to end, which is after this one's own wait."

_BOTH = {"trigger 0 removed": _TRIGGER, "trigger after the wait 0 moved before": _EARLY}
_THREAD = {"fence 0 removed": _CUMULATIVE, "fence 0 gpu": _CUMULATIVE}
SURVIVORS: dict[str, dict[str, str]] = {
    "dispatch": {**_BOTH, "claim 0 cta": _CLAIM, "step 0 cta": _STEP},
    "combine": {
        **_BOTH,
        **{f"slot {number} {change}": _SLOT for number in (0, 1) for change in ("weak", "gpu")},
    },
    "dispatch-thread": _THREAD,
    "combine-thread": _THREAD,
}
"""Mutants that nothing shows, and why that is right. Whoever changes a kernel keeps it exact."""


def mutants_of(group):
    options = dataclasses.replace(group.options, norm=True)
    text = image(group.kind, CONFIG, options).ptx
    return list(mutants(text, group.places))


def runs(group, mutant):
    """Give how a mutant fares, run by run: None where nothing shows."""
    ptx = {group.kind: mutant.ptx}
    for seed in range(SEEDS):
        yield failure(group, ptx, seed)
    if mutant.name.startswith(REPORTING):
        yield expiry_failure(group, ptx)
    if mutant.name.startswith("store"):
        # More positions than one look at the headers covers.
        yield failure(group, ptx, 0, (20,), Plan(resident=1))
    if mutant.name not in SURVIVORS[group.name]:
        for seed in range(SEEDS, MOST_SEEDS):
            yield failure(group, ptx, seed)


def first_failure(group, mutant):
    """Give how a mutant first showed, or None."""
    return next(filter(None, runs(group, mutant)), None)


def failure(group, ptx, seed, tokens=TOKENS, plan=None):
    case = Case(config=CONFIG, routing=Routing.UNIFORM, uneven=seed % 2 == 1, seed=seed % 2)
    mode = (Mode.RANDOM, Mode.ADVERSARIAL, Mode.UNFAIR)[seed % 3]
    plan = plan or Plan(experts=seed % 4 < 2, resident=2 + seed % 3)
    world = World(case, group.options, seed, mode, ptx=ptx, plan=plan)
    steps = [OddStep.of(case.step(number, most)) for number, most in enumerate(tokens)]
    try:
        world.run(steps)
    except (Wrong, Hang, Fault) as problem:
        return f"seed {seed}: {type(problem).__name__}: {problem}"
    return None


def expiry_failure(group, ptx):
    case = Case(config=CONFIG, seed=1)
    phase = Phase.DISPATCH if group.kind is Kind.DISPATCH else Phase.COMBINE
    for seed in range(2):
        mode = Mode.RANDOM if seed else Mode.ADVERSARIAL
        world = World(case, group.options, seed, mode, ptx=ptx, tick_ns=10**6, timeout_ns=10**8)
        world.machine.idle_steps = 10**6
        rank = seed
        try:
            record = world.run_until_expired(case.step(0, 2), phase, (1 - rank,))[rank]
        except ValueError as problem:
            return f"expiry: {problem}"
        waited_us = record.waited_us if record else 0
        if waited_us < 10**5 or record != HangRecord(phase, 1, rank, waited_us, (1 - rank,)):
            return f"expiry: {record}"
        state = world.memory.slots(world.memory.word_range(world.records[rank], 4))
        if world.memory.count[state] != 2:
            return "expiry: it was not one CTA that reported"
    return None


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_only_known_mutants_survive(group):
    found = {mutant.name for mutant in mutants_of(group) if first_failure(group, mutant) is None}
    assert found == set(SURVIVORS[group.name])


@pytest.mark.parametrize("group", GROUPS[1:3], ids=lambda group: group.name)
def test_the_kernels_themselves_pass(group):
    for seed in range(SEEDS):
        assert failure(group, None, seed) is None
    assert expiry_failure(group, None) is None
