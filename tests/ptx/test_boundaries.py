"""What is known, and passed on, where a kernel ends and the next one of its stream starts."""

import pytest

from tests.ptx.litmus import on, outcomes
from tests.ptx.machine import Mode
from tests.ptx.test_litmus import ALLOWED, FORBIDDEN, LOOK, PATIENCE, RAISE, SEE, SEND, SYS, WEAK
from tests.ptx.views import Boundary

PDL = pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
NEXT = "boundary;"
FLAG = RAISE.format("relaxed.sys")
POLL = SEE.format("relaxed.sys")
WRITE_AGAIN = "mov.b32 %a2, 2; st.relaxed.sys.global.b32 [x], %a2;"


def check(ctas, results, outcome, allowed, boundary):
    if allowed:
        assert outcome in outcomes(ctas, results, WEAK, PATIENCE, boundary)
        assert outcome not in set(outcomes(ctas, results, (Mode.BENIGN,), 10, boundary))
    else:
        found = set(outcomes(ctas, results, WEAK, 60, boundary))
        assert outcome not in found
        assert len(found) > 1, "the threads never met in different orders"


@PDL
@pytest.mark.parametrize(
    ("boundary", "before", "after", "weak"),
    [
        (Boundary.PLAIN, "", "", ALLOWED),
        (Boundary.PLAIN, SYS, "", ALLOWED),
        (Boundary.PLAIN, "", SYS, ALLOWED),
        (Boundary.PLAIN, SYS, SYS, FORBIDDEN),
        (Boundary.ORDERS, "", "", FORBIDDEN),
    ],
)
def test_message_passing(boundary, before, after, weak, pdl):
    """A load after the poll's kernel, or a store there, must come after the first kernel's store.

    `before` is what the second kernel does before it raises the flag, `after` what the polling one
    does after its poll: a fence of the thread itself is enough in each.
    """
    ctas = [on(0, SEND + NEXT + before + FLAG, pdl=pdl), on(1, POLL + after + NEXT + LOOK, pdl=pdl)]
    check(ctas, ["1.0.a0", "1.0.a1"], (1, 0), weak, boundary)
    ctas[1] = on(1, POLL + after + NEXT + WRITE_AGAIN, pdl=pdl)
    check(ctas, ["1.0.a0", "x"], (1, 1), weak, boundary)


def test_flags_between_the_kernels_of_a_step_and_the_next():
    """The chain of a buffer that a peer stores into again, with a wait in each kernel."""
    reset = "mov.b32 %a0, 1; st.global.v4.b32 [x], {%a0, %a0, %a0, %a0};"
    again = (
        "mov.b32 %a2, 2; mov.b64 %q0, {%a2, %a2}; mov.b128 %b0, {%q0, %q0};"
        "st.relaxed.sys.global.b128 [x], %b0;"
    )
    ctas = [on(0, reset + NEXT + FLAG), on(1, POLL + NEXT + again)]
    for boundary, weak in ((Boundary.PLAIN, ALLOWED), (Boundary.ORDERS, FORBIDDEN)):
        check(ctas, ["1.0.a0", "x"], (1, 1), weak, boundary)


@PDL
@pytest.mark.parametrize("boundary", Boundary)
def test_what_any_thread_of_a_kernel_stored_or_saw_is_known_to_the_next(boundary, pdl):
    ctas = [on(0, SEND + NEXT, "" + NEXT + LOOK, pdl=pdl)]
    assert set(outcomes(ctas, ["0.1.a1"], WEAK, 60, boundary)) == {(1,)}
    strong = SEND.replace("st.", "st.relaxed.sys.")
    seen = POLL.replace("[y]", "[x]") + NEXT
    ctas = [on(0, strong), on(1, seen, NEXT + LOOK, pdl=pdl)]
    check(ctas, ["1.0.a0", "1.1.a1"], (1, 0), FORBIDDEN, boundary)


@pytest.mark.parametrize("boundary", Boundary)
def test_nothing_is_known_before_the_wait(boundary):
    early = "griddepcontrol.launch_dependents;" + SEND + "ld.global.b32 %a1, [y];"
    peer = "mov.b32 %a0, 1; st.relaxed.sys.global.b32 [y], %a0;"
    assert (1,) in set(outcomes([on(0, early), on(1, peer)], ["0.0.a1"], WEAK, 60, boundary))
    # A store before the boundary and one after it, seen from elsewhere, come in either order.
    for flag in (FLAG, ""):
        ctas = [on(0, SEND + flag + NEXT), on(1, POLL + LOOK)]
        assert ((1, 0) in set(outcomes(ctas, ["1.0.a0", "1.0.a1"], WEAK, 100, boundary))) == bool(
            flag
        )


def test_a_boundary_orders_nothing_of_other_streams():
    ctas = [on(0, SEND), on(0, NEXT + FLAG), on(1, POLL + NEXT + LOOK)]
    check(ctas, ["2.0.a0", "2.0.a1"], (1, 0), ALLOWED, Boundary.ORDERS)
