"""Load buffering: what a load may give that was stored after a later store of its thread."""

import pytest

from tests.ptx.litmus import on, outcomes
from tests.ptx.machine import Mode
from tests.ptx.test_litmus import ALLOWED, FORBIDDEN, SYS, WEAK, check

DEPENDENT = "st.relaxed.sys.global.b32 [{to}], %a0;"
PLAIN = "mov.b32 %a1, 1; st.relaxed.sys.global.b32 [{to}], %a1;"
AFTER_BRANCH = "setp.eq.b32 %p1, %a0, 0; @%p1 bra $S{to}; " + PLAIN + " $S{to}:"


def copy(source, to, between="", store=PLAIN, load="ld.relaxed.sys.global.b32"):
    return f"{load} %a0, [{source}];" + between + store.format(to=to)


@pytest.mark.parametrize(
    ("first", "second", "weak"),
    [
        ({}, {}, ALLOWED),
        ({"load": "ld.global.b32"}, {"load": "ld.volatile.global.b32"}, ALLOWED),
        ({"store": DEPENDENT}, {}, ALLOWED),
        ({"store": AFTER_BRANCH}, {}, ALLOWED),
        ({"between": SYS}, {}, ALLOWED),
        ({"between": SYS}, {"between": SYS}, FORBIDDEN),
        ({"between": SYS}, {"between": "barrier;" + SYS}, FORBIDDEN),
    ],
)
def test_load_buffering(first, second, weak):
    rest = "mov.b32 %a3, 1;" + 4 * "st.global.b32 [z], %a3;"
    ctas = [on(0, copy("x", "y", **first)), on(1, copy("y", "x", **second) + rest)]
    check(ctas, ["0.0.a0", "1.0.a0"], (1, 1), weak)


@pytest.mark.parametrize("store", [DEPENDENT, AFTER_BRANCH])
def test_nothing_comes_out_of_thin_air(store):
    ctas = [on(0, copy("x", "y", store=store)), on(1, copy("y", "x", store=store))]
    assert set(outcomes(ctas, ["0.0.a0", "1.0.a0", "x", "y"], WEAK, 100)) == {(0, 0, 0, 0)}


def test_a_load_gives_no_later_store_of_its_thread():
    for load in ("ld.relaxed.sys.global.b32", "ld.global.b32"):
        assert set(outcomes([on(0, copy("x", "x", load=load))], ["0.0.a0"], WEAK, 100)) == {(0,)}
    inside = "mov.b32 %a1, 1; st.global.b32 [x+8], %a1;"
    four = "ld.global.v4.b32 {%a0, %a2, %a3, %a4}, [x];" + inside
    assert set(outcomes([on(0, four)], ["0.0.a3"], WEAK, 100)) == {(0,)}


def test_operands_are_kept_for_a_load_that_waits():
    moved = "mov.b64 %q0, %c0; ld.global.b32 %a0, [%q0+128]; mov.b64 %q0, %c1;" + PLAIN
    other = copy("x", "y")
    found = set(outcomes([on(0, moved.format(to="x")), on(1, other)], ["0.0.a0"], WEAK, 100))
    assert found == {(0,), (1,)}


def test_a_load_that_waits_ends_with_its_kernel():
    """Its kernel's end comes before the store of the next one, so the load does not see it."""
    first = "ld.relaxed.sys.global.b32 %a0, [x]; boundary; mov.b32 %a1, 1; st.global.b32 [x], %a1;"
    assert set(outcomes([on(0, first)], ["0.0.a0"], (*WEAK, Mode.UNFAIR), 50)) == {(0,)}
