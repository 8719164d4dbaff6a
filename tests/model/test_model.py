"""The flag protocol, checked by Spin over every interleaving: it holds, and no rule can go.

A counterexample by hand: the three commands of `search`, then `pan -r -g` in the same folder.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin, a Debian package"),
]

MODEL = Path(__file__).with_name("flags.pml")
DEPTH = 1_000_000
MEGABYTES = 3500

# Macros, and the fewest states of which a search would be believable.
CLEAN = [
    ("N=2 TOKENS=1 ROUTES=3", 500_000),
    ("N=2 TOKENS=2 NO_OWN_FLAG", 1_000_000),
    ("N=2 TOKENS=2 ROUTES=3 EXTREMES", 1_000_000),
    ("N=3 TOKENS=1 EXTREMES", 2_000_000),
    ("N=3 TOKENS=2 MOST=1 EXTREMES", 5_000_000),
    ("N=2 TOKENS=1 LATE_LOWER", 50_000),
    ("N=2 TOKENS=1 THREAD_FENCES", 50_000),
    ("N=2 TOKENS=2 LATE_LOWER EXTREMES", 100_000),
]
ASSERTION, DEADLOCK = "assertion violated", "invalid end state"
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


def search(folder, macros, kind="SAFETY", options=(), level="-O2"):
    """What Spin's search says. It stops at the first error."""

    def run(*command):
        job = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
        assert job.returncode == 0, (command, job.stdout, job.stderr)
        return job.stdout

    run("spin", "-a", *(f"-D{macro}" for macro in macros.split()), str(MODEL))
    run("gcc", level, "-w", f"-D{kind}", "-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}", "-opan", "pan.c")
    out = run("./pan", f"-m{DEPTH}", "-w24", *options)
    # Neither the depth nor the memory may have cut it short.
    assert "max search depth too small" not in out, out
    assert "out of memory" not in out, out
    return out


def num_errors(out):
    (errors,) = re.findall(r"errors: (\d+)", out)
    return int(errors)


def num_states(out):
    (states,) = re.findall(r"^ *(\d+) states, stored", out, re.MULTILINE)
    return int(states)


@pytest.mark.parametrize(("macros", "least"), CLEAN)
def test_it_holds(macros, least, tmp_path):
    out = search(tmp_path, macros)
    print(f"{macros}: {num_states(out)} states")
    assert num_errors(out) == 0, out
    assert "Search not completed" not in out, out
    assert num_states(out) >= least, out
    # Every statement was reached, but for the ends of the endless loops.
    idle = re.findall(r"\((\d+) of \d+ states\)", out)
    assert idle
    assert set(idle) == {"1"}, out


def test_a_rank_goes_on(tmp_path):
    macros = "N=2 TOKENS=2 EXTREMES WATCHED=0"
    out = search(tmp_path, macros, "NP", ["-l"])
    print(f"{macros}: {num_states(out)} states")
    assert num_errors(out) == 0, out
    assert "Search not completed" not in out, out


def test_a_rank_that_does_not_go_on_is_found(tmp_path):
    out = search(tmp_path, "N=2 TOKENS=2 EXTREMES WATCHED=2", "NP", ["-l"], "-O0")
    assert "non-progress cycle" in out, out


@pytest.mark.parametrize("times", ["EXTREMES", "LINKS"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, times, tmp_path):
    out = search(tmp_path, f"N=2 TOKENS=2 {times} BUG={bug}", level="-O0")  # found at once
    assert num_errors(out) == 1, out
    assert BUGS[bug] in out, out


def test_every_bug_of_the_model_is_planted():
    assert set(re.findall(r"BUG_[A-Z_]*[A-Z]", MODEL.read_text())) == set(BUGS)
