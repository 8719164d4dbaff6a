"""What the fence-free kernels order and empty is needed, or it is said why not."""

import dataclasses
import importlib.util
import re

import pytest

from ep.bench.cases import Case
from ep.config import EpConfig
from ep.kernels.compile import Kind, build
from ep.kernels.options import Boundaries, KernelOptions, Pdl
from ep.layout import EpLayout
from ep.record import HangRecord, Phase
from tests.ptx.arena import Fault
from tests.ptx.machine import Hang, Mode
from tests.ptx.mutations import FREE_RULES, ORDERING, mutants
from tests.ptx.steps import AllOnesStep
from tests.ptx.views import Boundary
from tests.ptx.waits import TICK_NS, TIMEOUT_NS, Lame, impatient, news_after
from tests.ptx.world import TARGET, OddStep, Plan, World, Wrong, image

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
    ),
    pytest.mark.timeout(600),
]

# Two warps in each CTA of both kernels, and chunks of scales that are full.
CONFIG = EpConfig(ranks=2, hidden=512, experts=7, top_k=3, max_tokens=40)
# Each token is for one rank alone, so that CTAs wait for different ranks.
THREE = EpConfig(ranks=3, hidden=512, experts=7, top_k=1, max_tokens=4)
EARLY, LATE = KernelOptions(pdl=Pdl.EARLY), KernelOptions(pdl=Pdl.LATE)
REPORTING = frozenset({"claim", "bits", "step read", "state", "stop"})
"""What only waits that expire come to."""
WEAKEST = ("removed", "weak", "weak words")
"""Ends of the names of changes that allow all that others at their place do."""
STEPPING = frozenset(place for place, *_ in FREE_RULES) - REPORTING


@dataclasses.dataclass(frozen=True)
class Group:
    """Mutants of one kernel."""

    name: str
    kind: Kind
    options: KernelOptions
    places: frozenset[str] | None = None
    config: EpConfig = CONFIG


@dataclasses.dataclass(frozen=True)
class Try:
    """A run that may show a mutant: T by step, and the CTAs that the GPU has room for."""

    seed: int
    mode: Mode
    tokens: tuple[int, ...] = (3, 2, 0, 3)
    resident: int = 2
    settle_each: int = 8
    experts: bool = True
    step: type[OddStep] = OddStep


UNFAIR = Try(0, Mode.UNFAIR, resident=2, step=AllOnesStep)
SOON = Try(1, Mode.RANDOM, (3, 2), resident=4, settle_each=1)
OLD = Try(2, Mode.ADVERSARIAL, resident=2, experts=False)
RANDOM = Try(3, Mode.RANDOM, (2, 3, 1, 2), resident=3, experts=False)
TRIES = (UNFAIR, SOON, OLD, RANDOM)
MANY = Try(5, Mode.UNFAIR, (0, 40), resident=1, experts=False)
"""One rank sends more than a look at the headers covers, and the other one does not."""
RISING = Try(4, Mode.ADVERSARIAL, (0, 40), resident=1, experts=False)
"""For the count of a peer's tokens: who takes an older one than the step's finds fewer rows."""
HALTED = tuple(Try(seed, Mode.UNFAIR, (3, 3), resident=2 + seed % 4) for seed in range(10, 22))
"""For barriers: one warp goes on while another one of its CTA stands still."""
RECYCLING = tuple(
    Try(seed, mode, (1, 1, 1, 1, 1, 1), resident=2, experts=False)
    for seed in range(4)
    for mode in (Mode.RANDOM, Mode.ADVERSARIAL)
)
"""For what orders a step's reads before the peers' next writes to the same places."""

GROUPS = [
    Group("dispatch", Kind.DISPATCH, EARLY, STEPPING),
    Group("combine", Kind.COMBINE, EARLY, STEPPING),
    Group("dispatch-late", Kind.DISPATCH, LATE, frozenset(ORDERING)),
    Group("combine-late", Kind.COMBINE, LATE, frozenset(ORDERING)),
    Group("dispatch-report", Kind.DISPATCH, LATE, REPORTING, THREE),
    Group("combine-report", Kind.COMBINE, LATE, REPORTING, THREE),
]
_TAKE = (
    "The machine lets no access of a thread come before a write that it has seen there. PTX says so"
    " of morally strong ones only, so that a weak store, or one in pieces, could be lost."
)
_CLAIM = "Threads that all claim the record write the same words into it, but for the time."
_CLAIM_OF_COMBINE = (
    "It also stops the next combine, which finds no rows after a dispatch that has stopped, and "
    "whose waits end at once."
)
_STOPPED = (
    "Kernels behind this one see it by the order of the stream; for one under way either value is "
    "right. Strong, so that it is no race."
)
_LOOK = "Who does not hear that another one gave up does so by its own clock."
_BITS = "Many threads set each bit, and the machine remembers but the last writes of a word."
_TRIGGER = "It only lets the next kernel start sooner."
_EARLY = "The next kernel waits for this one to end, which is after this one's own wait."

SURVIVORS: dict[str, dict[str, str]] = {
    "dispatch": {
        "chunk store 7 weak words": _TAKE,
        **{f"trigger {number} removed": _TRIGGER for number in range(3)},
        **{f"trigger after the wait {number} moved before": _EARLY for number in range(3)},
    },
    "combine": {
        **{f"chunk store {number} weak words": _TAKE for number in (2, 3)},
        **{f"trigger {number} removed": _TRIGGER for number in range(3)},
        **{f"trigger after the wait {number} moved before": _EARLY for number in range(3)},
    },
    "dispatch-late": {},
    "combine-late": {},
    "dispatch-report": {
        "claim 0 cta": _CLAIM,
        **{f"step read {number} weak": _LOOK for number in range(2)},
        **{f"stop {number} removed": _LOOK for number in range(2)},
        "stop 2 weak": _STOPPED,
        **{f"bits {number} cta": _BITS for number in range(2)},
    },
    "combine-report": {
        "claim 0 removed": _CLAIM_OF_COMBINE,
        "step read 0 weak": _LOOK,
        "stop 0 removed": _LOOK,
        "stop 1 weak": _STOPPED,
        **{f"bits {number} cta": _BITS for number in range(2)},
    },
}
"""Mutants that nothing shows, and why that is right. Whoever changes a kernel keeps it exact."""


def mutants_of(group):
    """Weakest first, as `survivors_of` needs it."""
    text = image(group.kind, group.config, dataclasses.replace(group.options, norm=True)).ptx
    found = list(mutants(text, group.places, FREE_RULES))
    return sorted(found, key=lambda mutant: not mutant.name.endswith(WEAKEST))


def survivors_of(group):
    """Names; where the weakest change of an instruction survives, of its changes that alone."""
    survivors: set[str] = set()
    for mutant in mutants_of(group):
        place = re.sub(r"(\d+ ).*", r"\1", mutant.name)
        if not any(name.startswith(place) for name in survivors) and not first_failure(
            group, mutant
        ):
            survivors.add(mutant.name)
    return survivors


def first_failure(group, mutant):
    """Give how a mutant first showed, or None."""
    ptx = {group.kind: mutant.ptx}
    if mutant.name.startswith(tuple(REPORTING)):
        return expiry_failure(group, ptx)
    tries: tuple[Try, ...] = TRIES
    if mutant.name.startswith("barrier"):
        tries = (*HALTED, *TRIES)
    elif mutant.name.startswith(("fence", "poll")):
        tries = RECYCLING
    elif mutant.name.startswith("trigger"):
        tries = (UNFAIR, OLD)
    elif mutant.name.startswith(("chunk", "acquired")) and not mutant.name.endswith("removed"):
        tries = (*TRIES[1:], RISING) if mutant.name.startswith("chunk load") else TRIES[1:]
    elif mutant.name.startswith("store"):
        problem = failure(group.options, ptx, UNFAIR) or expiry_failure(group, ptx)
        if problem:
            return problem
        tries = (MANY, *TRIES[1:])
    for one in tries:
        problem = failure(group.options, ptx, one)
        if problem:
            return problem
    return None


def failure(options, ptx, one, boundary=Boundary.PLAIN):
    case = Case(config=CONFIG, uneven=one.seed % 2 == 1, seed=one.seed % 2)
    plan = Plan(experts=one.experts, resident=one.resident, settle_each=one.settle_each)
    world = World(case, options, one.seed, one.mode, ptx=ptx, plan=plan, boundary=boundary)
    world.machine.idle_steps = 2500
    steps = [one.step.of(case.step(number, most)) for number, most in enumerate(one.tokens)]
    try:
        world.run(steps)
    except (Wrong, Hang, Fault) as problem:
        return f"{one.mode.value} {one.seed}: {type(problem).__name__}: {problem}"
    return None


def expiry_failure(group, ptx):
    """The last rank waits for all others in vain, each token for another one."""
    config, is_dispatch = group.config, group.kind is Kind.DISPATCH
    case = Case(config=config, seed=0)
    phase = Phase.DISPATCH if is_dispatch else Phase.COMBINE
    last, others = config.ranks - 1, tuple(range(config.ranks - 1))
    texts = impatient(case, group.options, ptx)
    for seed in range(3):
        mode = (Mode.ADVERSARIAL if is_dispatch else Mode.RANDOM, Mode.ADVERSARIAL, Mode.BENIGN)[
            seed
        ]
        plan = Plan(resident=8, experts=False)
        world = Lame(
            case,
            group.options,
            seed,
            mode,
            ptx=texts,
            plan=plan,
            tick_ns=TICK_NS,
            timeout_ns=TIMEOUT_NS,
        )
        world.machine.idle_steps = 10**5
        absent = others
        if is_dispatch and seed:
            # They are in the step, and no row comes of them.
            absent, world.no_senders = (), others
        elif is_dispatch:
            world.no_receivers = (last,)
        try:
            record = world.run_until_expired(case.step(0, 4), phase, absent)[last]
        except (Hang, ValueError) as problem:
            return f"expiry {seed}: {problem}"
        waited_us = record.waited_us if record else 0
        if waited_us < TIMEOUT_NS // 1000 or record != HangRecord(
            phase, 1, last, waited_us, others
        ):
            return f"expiry {seed}: {record}"
        try:
            news = world.stale_rows(last) if is_dispatch and seed else None
            world.no_receivers = ()
            news = news or news_after(world, last)
        except Hang as problem:
            news = str(problem)
        if news:
            return f"after expiry {seed}: {news}"
    return None


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_only_known_mutants_survive(group):
    assert survivors_of(group) == set(SURVIVORS[group.name])


@pytest.mark.parametrize("group", GROUPS[1:3], ids=lambda group: group.name)
def test_the_kernels_themselves_pass(group):
    for one in (*TRIES, *RECYCLING[::2], *(HALTED[::3] if group.options == EARLY else ())):
        assert failure(group.options, None, one) is None


@pytest.mark.parametrize("group", [*GROUPS[:2], *GROUPS[4:]], ids=lambda group: group.name)
def test_expired_waits_of_the_kernels_themselves_are_recorded(group):
    assert expiry_failure(group, {}) is None


def test_one_half_for_all_steps_is_not_enough(monkeypatch):
    from cutlass import Uint32

    from ep.device import wire

    monkeypatch.setattr(wire, "parity", lambda step: Uint32(0))
    options = dataclasses.replace(EARLY, norm=True)
    text = build(Kind.DISPATCH, EpLayout(CONFIG), options, TARGET).ptx
    assert any(failure(EARLY, {Kind.DISPATCH: text}, one) for one in RECYCLING)


def test_scales_that_are_not_sealed_look_like_nothing():
    text = image(Kind.DISPATCH, CONFIG, dataclasses.replace(EARLY, norm=True)).ptx
    text = re.sub(r"(add\.s\d\d\s+%rd?\d+, %rd?\d+, )-?67372036;", r"\g<1>0;", text)
    assert failure(EARLY, {Kind.DISPATCH: text}, UNFAIR)


def test_boundaries_that_are_trusted_need_to_be():
    """Without fences the kernels fail where boundaries order no more than the manual says."""
    trusted = dataclasses.replace(EARLY, boundaries=Boundaries.TRUSTED)
    problems = [failure(trusted, None, one) for one in RECYCLING]
    assert any(problems)
    assert not any(failure(trusted, None, one, boundary=Boundary.ORDERS) for one in RECYCLING[:4])
