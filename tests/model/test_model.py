"""The flag protocol, checked by Spin over every interleaving: it holds, and no rule can go."""

import shutil
from pathlib import Path

import pytest

from tests.model.spin import (
    ASSERTION,
    DEADLOCK,
    assert_all_reached,
    assert_holds,
    bugs_of,
    num_errors,
    num_states,
    search,
)

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin, a Debian package"),
]

MODEL = Path(__file__).with_name("flags.pml")

# Macros, and the fewest states of which a search would be believable.
CLEAN = [
    ("N=2 TOKENS=1 ROUTES=3", 500_000),
    ("N=2 TOKENS=1 NO_OWN_FLAG", 10_000),
    ("N=2 TOKENS=2 ROUTES=3 EXTREMES", 1_000_000),
    ("N=3 TOKENS=1 EXTREMES", 2_000_000),
    ("N=2 TOKENS=1 LATE_LOWER", 50_000),
    ("N=2 TOKENS=1 THREAD_FENCES", 50_000),
    ("N=2 TOKENS=2 LATE_LOWER EXTREMES", 100_000),
]
BUGS = {
    "BUG_COMBINE_FIRST_ARRIVAL": ASSERTION,
    "BUG_COMBINE_NOT_LOWERED": ASSERTION,
    "BUG_COMBINE_NO_FENCE": ASSERTION,
    "BUG_DISPATCH_FIRST_ARRIVAL": ASSERTION,
    "BUG_DISPATCH_NOT_LOWERED": ASSERTION,
    "BUG_DISPATCH_NO_FENCE": ASSERTION,
    "BUG_EMPTIED_AFTER_FLAG": ASSERTION,
    "BUG_FIRST_DEPARTURE": DEADLOCK,
    "BUG_FLAGS_NOT_FENCED": ASSERTION,
    "BUG_IDLE_COMBINE": ASSERTION,
    "BUG_IDLE_DISPATCH": ASSERTION,
    "BUG_NOT_RESIDENT": DEADLOCK,
    "BUG_NO_ACQUIRE": ASSERTION,
    "BUG_OVERLAP": ASSERTION,
    "BUG_PAYLOAD_NOT_FENCED": ASSERTION,
    "BUG_RELAXED_ARRIVAL": ASSERTION,
}


@pytest.mark.parametrize(("macros", "least"), CLEAN)
def test_it_holds(macros, least, tmp_path):
    out = search(MODEL, tmp_path, macros)
    print(f"{macros}: {num_states(out)} states")
    assert_holds(out, least)
    assert_all_reached(out)


def test_a_rank_goes_on(tmp_path):
    macros = "N=2 TOKENS=2 EXTREMES WATCHED=0"
    out = search(MODEL, tmp_path, macros, "NP", ["-l"])
    print(f"{macros}: {num_states(out)} states")
    assert_holds(out, least=1)


def test_a_rank_that_does_not_go_on_is_found(tmp_path):
    out = search(MODEL, tmp_path, "N=2 TOKENS=2 EXTREMES WATCHED=2", "NP", ["-l"], "-O0")
    assert "non-progress cycle" in out, out


@pytest.mark.parametrize("times", ["EXTREMES", "LINKS"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, times, tmp_path):
    macros = f"N=2 TOKENS=2 {times} BUG={bug}"
    out = search(MODEL, tmp_path, macros, level="-O0")  # found at once
    assert num_errors(out) == 1, out
    assert BUGS[bug] in out, out


def test_every_bug_of_the_model_is_planted():
    assert bugs_of(MODEL) == set(BUGS)
