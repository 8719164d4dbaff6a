"""Spin's search of a model. A counterexample by hand: the three commands, then `pan -r -g`."""

import re
import subprocess

DEPTH = 1_000_000
MEGABYTES = 3500
ASSERTION, DEADLOCK = "assertion violated", "invalid end state"


def search(model, folder, macros, kind="SAFETY", options=(), level="-O2"):
    """What Spin's search in `folder` says of the model. It stops at the first error."""

    def run(*command):
        job = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
        assert job.returncode == 0, (command, job.stdout, job.stderr)
        return job.stdout

    run("spin", "-a", *(f"-D{macro}" for macro in macros.split()), str(model))
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


def assert_holds(out, least):
    """Nothing wrong in all of at least `least` states."""
    assert num_errors(out) == 0, out
    assert "Search not completed" not in out, out
    assert num_states(out) >= least, out


def assert_all_reached(out):
    """Every statement was reached, but for the ends of the endless loops."""
    idle = re.findall(r"\((\d+) of \d+ states\)", out)
    assert idle
    assert set(idle) == {"1"}, out


def bugs_of(*models):
    """Names of the bugs that are planted in these files."""
    return {bug for model in models for bug in re.findall(r"BUG_[A-Z_]*[A-Z]", model.read_text())}
