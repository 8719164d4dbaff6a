"""The memory model: what PTX allows is seen under some seed, what it forbids under none."""

import pytest

from tests.ptx.litmus import on, outcomes
from tests.ptx.machine import Mode

WEAK = (Mode.RANDOM, Mode.ADVERSARIAL)
ALLOWED, FORBIDDEN = True, False


PATIENCE = 400
"""Seeds of each mode in which something allowed must show."""


def check(ctas, results, outcome, allowed):
    if allowed:
        assert outcome in outcomes(ctas, results, WEAK, PATIENCE)
        benign = set(outcomes(ctas, results, (Mode.BENIGN,), 10))
        assert outcome not in benign, "benign, and yet weak"
    else:
        found = set(outcomes(ctas, results, WEAK))
        assert outcome not in found
        assert len(found) > 1, "the threads never met in different orders"


SEND = "mov.b32 %a0, 1; st.global.b32 [x], %a0;"
RAISE = "mov.b32 %a1, 1; st.{}.global.b32 [y], %a1;"
SEE = "ld.{}.global.b32 %a0, [y];"
LOOK = "ld.global.b32 %a1, [x];"
SYS, GPU, CTA = "fence.acq_rel.sys;", "fence.acq_rel.gpu;", "fence.acq_rel.cta;"


def writer(fence, flag="relaxed.sys"):
    return SEND + fence + RAISE.format(flag)


def reader(flag="acquire.sys", fence=""):
    return SEE.format(flag) + fence + LOOK


@pytest.mark.parametrize(
    ("write", "read", "other_rank", "weak"),
    [
        (writer(""), reader(), 1, ALLOWED),
        (writer(SYS), reader(), 1, FORBIDDEN),
        (writer(GPU), reader(), 1, ALLOWED),
        (writer(GPU), reader(), 0, FORBIDDEN),
        (writer(CTA), reader(), 0, ALLOWED),
        (writer("", "release.sys"), reader(), 1, FORBIDDEN),
        (writer("", "release.gpu"), reader(), 1, ALLOWED),
        (writer("", "release.gpu"), reader(), 0, FORBIDDEN),
        (writer(SYS), reader("relaxed.sys"), 1, ALLOWED),
        (writer(SYS), reader("relaxed.sys", SYS), 1, FORBIDDEN),
        (writer(SYS), reader("relaxed.sys", GPU), 1, ALLOWED),
        (writer(SYS), reader("acquire.gpu"), 1, ALLOWED),
        (writer(SYS), reader("acquire.gpu"), 0, FORBIDDEN),
        (writer(SYS, "relaxed.gpu"), reader(), 1, ALLOWED),
    ],
)
def test_message_passing(write, read, other_rank, weak):
    check([on(0, write), on(other_rank, read)], ["1.0.a0", "1.0.a1"], (1, 0), weak)


def test_weak_flags_pass_nothing_on():
    weak_store = SEND + SYS + "mov.b32 %a1, 1; st.global.b32 [y], %a1;"
    check([on(0, weak_store), on(1, reader())], ["1.0.a0", "1.0.a1"], (1, 0), ALLOWED)
    weak_load = "ld.global.b32 %a0, [y];" + SYS + LOOK
    check([on(0, writer(SYS)), on(1, weak_load)], ["1.0.a0", "1.0.a1"], (1, 0), ALLOWED)


@pytest.mark.parametrize(
    ("order", "weak"),
    [
        ("acq_rel", FORBIDDEN),
        ("release", FORBIDDEN),
        ("acquire", ALLOWED),
        ("relaxed", ALLOWED),
    ],
)
def test_atomics_release(order, weak):
    count = SEND + f"mov.b32 %a1, 9; atom.{order}.gpu.global.inc.u32 %a2, [y], %a1;"
    check([on(0, count), on(0, reader())], ["1.0.a0", "1.0.a1"], (1, 0), weak)


@pytest.mark.parametrize(
    ("order", "weak"),
    [("acq_rel", FORBIDDEN), ("acquire", FORBIDDEN), ("release", ALLOWED), ("relaxed", ALLOWED)],
)
def test_atomics_acquire(order, weak):
    count = f"mov.b32 %a2, 9; atom.{order}.gpu.global.inc.u32 %a0, [y], %a2;" + LOOK
    check([on(0, writer(GPU)), on(0, count)], ["1.0.a0", "1.0.a1"], (1, 0), weak)


def test_an_atomic_between_passes_on_what_was_released():
    count = "mov.b32 %a2, 9; atom.relaxed.gpu.global.inc.u32 %a0, [y], %a2;"
    ctas = [on(0, writer(GPU)), on(0, count), on(0, reader())]
    check(ctas, ["1.0.a0", "2.0.a0", "2.0.a1"], (1, 2, 0), FORBIDDEN)


@pytest.mark.parametrize(
    ("fence", "weak"),
    [
        ("", ALLOWED),
        (SYS, ALLOWED),
        ("fence.sc.gpu;", ALLOWED),
        ("fence.sc.sys;", FORBIDDEN),
    ],
)
def test_store_buffering(fence, weak):
    first = "mov.b32 %a1, 1; st.relaxed.sys.global.b32 [x], %a1;"
    first += fence + "ld.relaxed.sys.global.b32 %a0, [y];"
    second = "mov.b32 %a1, 1; st.relaxed.sys.global.b32 [y], %a1;"
    second += fence + "ld.relaxed.sys.global.b32 %a0, [x];"
    check([on(0, first), on(1, second)], ["0.0.a0", "1.0.a0"], (0, 0), weak)


@pytest.mark.parametrize(("fence", "weak"), [(SYS, ALLOWED), ("fence.sc.sys;", FORBIDDEN)])
def test_independent_reads_of_independent_writes(fence, weak):
    stores = [f"mov.b32 %a0, 1; st.relaxed.sys.global.b32 [{at}], %a0;" for at in "xy"]
    loads = [
        f"ld.relaxed.sys.global.b32 %a0, [{at}];{fence}ld.relaxed.sys.global.b32 %a1, [{then}];"
        for at, then in ("xy", "yx")
    ]
    ctas = [on(0, stores[0]), on(1, stores[1]), on(2, loads[0]), on(3, loads[1])]
    results = ["2.0.a0", "2.0.a1", "3.0.a0", "3.0.a1"]
    check(ctas, results, (1, 0, 1, 0), weak)


@pytest.mark.parametrize(("fence", "weak"), [("", ALLOWED), (GPU, ALLOWED), (SYS, FORBIDDEN)])
def test_write_to_read_causality(fence, weak):
    first = "mov.b32 %a0, 1; st.relaxed.sys.global.b32 [x], %a0;"
    middle = "ld.relaxed.sys.global.b32 %a0, [x];" + fence + RAISE.format("relaxed.sys")
    ctas = [on(0, first), on(1, middle), on(2, reader())]
    check(ctas, ["1.0.a0", "2.0.a0", "2.0.a1"], (1, 1, 0), weak)


def test_one_fence_after_a_barrier_covers_the_whole_cta():
    """The pattern of `Fences.CTA`: others store, this thread fences and raises the flag."""
    raising = "barrier;" + SYS + RAISE.format("relaxed.sys")
    ctas = [on(0, SEND + "barrier;", raising), on(1, reader())]
    check(ctas, ["1.0.a0", "1.0.a1"], (1, 0), FORBIDDEN)
    unfenced = [on(0, SEND + "barrier;", "barrier;" + RAISE.format("relaxed.sys"))]
    check([*unfenced, on(1, reader())], ["1.0.a0", "1.0.a1"], (1, 0), ALLOWED)


def test_a_chain_over_a_counter_is_cumulative():
    """A CTA that only counts in is covered by the flag of the last one, on another rank."""
    arrive = "mov.b32 %a2, 9; atom.acq_rel.gpu.global.inc.u32 %a3, [z], %a2;"
    ctas = [on(0, SEND + arrive), on(0, arrive + SYS + RAISE.format("relaxed.sys"))]
    results = ["1.0.a3", "2.0.a0", "2.0.a1"]
    check([*ctas, on(1, reader())], results, (1, 1, 0), FORBIDDEN)


def test_a_flag_read_in_another_width_passes_nothing_on():
    wide = (
        SEND + SYS + "mov.b32 %a1, 1; mov.b64 %q0, {%a1, %a1}; st.relaxed.sys.global.b64 [y], %q0;"
    )
    check([on(0, wide), on(1, reader())], ["1.0.a0", "1.0.a1"], (1, 0), ALLOWED)


@pytest.mark.parametrize(("what", "weak"), [("red", ALLOWED), ("atom", FORBIDDEN)])
def test_a_reduction_acquires_nothing(what, weak):
    to = "%a3, " if what == "atom" else ""
    count = f"mov.b32 %a2, 1; {what}.relaxed.gpu.global.add.u32 {to}[y], %a2;" + GPU + LOOK
    ctas = [on(0, writer("", "release.gpu")), on(0, count)]
    check(ctas, ["y", "1.0.a1"], (2, 0), weak)


@pytest.mark.parametrize(("scope", "weak"), [("cta", ALLOWED), ("gpu", FORBIDDEN)])
def test_atomics_that_do_not_include_each_other_lose_updates(scope, weak):
    counts = [
        f"mov.b32 %a2, 9; atom.relaxed.{one}.global.inc.u32 %a3, [x], %a2;"
        for one in ("gpu", scope)
    ]
    found = set(outcomes([on(0, counts[0]), on(0, counts[1])], ["x"], WEAK, 100))
    assert found == ({(1,), (2,)} if weak else {(2,)})


@pytest.mark.parametrize(("order", "weak"), [("relaxed", ALLOWED), ("acquire", FORBIDDEN)])
def test_an_atomic_may_come_before_a_store_that_its_thread_does_not_know(order, weak):
    first = (
        "mov.b32 %a1, 2; st.relaxed.sys.global.b32 [x], %a1;" + SYS + RAISE.format("relaxed.sys")
    )
    then = (
        SEE.format(f"{order}.sys")
        + "mov.b32 %a1, 1; atom.relaxed.sys.global.exch.b32 %a2, [x], %a1;"
    )
    check([on(0, first), on(1, then)], ["1.0.a0", "x"], (1, 2), weak)


@pytest.mark.parametrize(
    ("order", "weak"),
    [("ld.relaxed.sys", FORBIDDEN), ("ld.relaxed.gpu", ALLOWED), ("ld", ALLOWED)],
)
def test_reads_of_one_address_go_back_only_where_weak(order, weak):
    twice = "mov.b32 %a0, 1; st.relaxed.sys.global.b32 [x], %a0;"
    twice += "mov.b32 %a1, 2; st.relaxed.sys.global.b32 [x], %a1;"
    reads = f"{order}.global.b32 %a0, [x]; {order}.global.b32 %a1, [x];"
    found = set(outcomes([on(0, twice), on(1, reads)], ["1.0.a0", "1.0.a1", "x"], WEAK))
    assert {final for _, _, final in found} == {2}
    assert any(first > second for first, second, _ in found) == weak


@pytest.mark.parametrize(("order", "weak"), [("ld.relaxed.sys", FORBIDDEN), ("ld", ALLOWED)])
def test_a_weak_store_comes_after_a_write_that_its_thread_has_read_strongly(order, weak):
    """Whatever its width: so a thread puts back what it has polled."""
    sent = "mov.b32 %a1, 1; st.relaxed.sys.global.b32 [x], %a1;"
    back = f"{order}.global.b32 %a0, [x]; mov.b32 %a1, 2; st.global.b32 [x], %a1;"
    check([on(0, sent), on(1, back)], ["1.0.a0", "x"], (1, 1), weak)
    if not weak:
        four = "mov.b32 %a5, 2; st.global.v4.b32 [x], {%a5, %a5, %a5, %a5};"
        check([on(0, ONE), on(1, READ_ONE + four)], ["1.0.a0", "x+12"], (1, 1), weak)


def test_unordered_stores_may_end_in_either_order():
    first = "mov.b32 %a0, 1; st.relaxed.sys.global.b32 [x], %a0;"
    first += "mov.b32 %a1, 2; st.relaxed.sys.global.b32 [y], %a1;"
    second = "mov.b32 %a0, 1; st.relaxed.sys.global.b32 [y], %a0;"
    second += "mov.b32 %a1, 2; st.relaxed.sys.global.b32 [x], %a1;"
    check([on(0, first), on(1, second)], ["x", "y"], (1, 1), ALLOWED)


FOUR = "mov.b32 %a0, 1; st.relaxed.sys.global.v4.b32 [x], {%a0, %a0, %a0, %a0};"
ONE = (
    "mov.b32 %a0, 1; mov.b64 %q0, {%a0, %a0}; mov.b128 %b0, {%q0, %q0};"
    "st.relaxed.sys.global.b128 [x], %b0;"
)
READ_FOUR = "ld.relaxed.sys.global.v4.b32 {%a0, %a1, %a2, %a3}, [x];"
HALVES = (
    "mov.b32 %a0, 1; mov.b64 %q0, {%a0, %a0}; st.relaxed.sys.global.b64 [x], %q0;"
    "st.relaxed.sys.global.b64 [x+8], %q0;"
)
READ_ONE = (
    "ld.relaxed.sys.global.b128 %b0, [x]; mov.b128 {%q0, %q1}, %b0;"
    "mov.b64 {%a0, %a1}, %q0; mov.b64 {%a2, %a3}, %q1;"
)


@pytest.mark.parametrize(
    ("write", "read", "torn"),
    [
        (FOUR, READ_FOUR, ALLOWED),
        (FOUR, READ_ONE, ALLOWED),
        (ONE, READ_FOUR, ALLOWED),
        (HALVES, READ_ONE, ALLOWED),
        (ONE, READ_ONE.replace("sys", "gpu"), ALLOWED),
        (ONE.replace("sys", "gpu"), READ_ONE, ALLOWED),
        (ONE, READ_ONE, FORBIDDEN),
    ],
)
def test_only_b128_at_system_scope_is_whole(write, read, torn):
    results = [f"1.0.a{word}" for word in range(4)]
    found = set(outcomes([on(0, write), on(1, read)], results, WEAK, 100))
    assert any(len(set(words)) > 1 for words in found) == torn
    assert torn or found == {(0, 0, 0, 0), (1, 1, 1, 1)}


def whole(place, value):
    return ONE.replace("[x]", f"[{place}]").replace("%a0, 1", f"%a0, {value}")


def test_b128_stores_may_end_in_either_order_and_whole():
    first, second = whole("x", 1) + whole("y", 2), whole("y", 1) + whole("x", 2)
    results = [f"{place}+{4 * word}" for place in "xy" for word in range(4)]
    found = set(outcomes([on(0, first), on(1, second)], results, WEAK, 200))
    assert found == {(x,) * 4 + (y,) * 4 for x in (1, 2) for y in (1, 2)}


@pytest.mark.parametrize(("fence", "weak"), [("", ALLOWED), (SYS, FORBIDDEN)])
def test_a_b128_store_may_come_before_a_reset_that_its_thread_does_not_know(fence, weak):
    """All of it, or some of its words: the reset is not whole."""
    reset = "mov.b32 %a0, 7; st.global.v4.b32 [x], {%a0, %a0, %a0, %a0};" + fence
    ctas = [
        on(0, reset + RAISE.format("relaxed.sys")),
        on(1, SEE.format("relaxed.sys").replace("a0", "a3") + fence + whole("x", 1)),
    ]
    found = set(outcomes(ctas, ["1.0.a3", "x", "x+12"], WEAK, 200))
    final = {(first, last) for flag, first, last in found if flag == 1}
    assert final == ({(1, 1), (1, 7), (7, 1), (7, 7)} if weak else {(1, 1)})
