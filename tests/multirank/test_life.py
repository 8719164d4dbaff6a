"""An exchange's life, from first to last, among real MPI processes: no leak, no hang, no file."""

import os
import sys
from pathlib import Path

import pytest

from tests.mpi import ROOT, mpirun
from tests.multirank import life

LIFE = life.__file__
pytestmark = pytest.mark.ranks
PYTHONS = [Path(sys.executable)]
if "EP_TEST_OPENMPI" in os.environ:
    PYTHONS.append(Path(os.environ["EP_TEST_OPENMPI"]) / "bin" / "python")
BOUND_S = 20
"""Far below the 60 s of the steps that others are in, far above what a busy machine takes."""
OPEN = "rank 1 of 4 exits with its world open; ranks that wait for it will time out"


@pytest.fixture
def play(tmp_path):
    def run(*words, python=PYTHONS[0]):
        env = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        job = mpirun(4, LIFE, *words, env=env | {"EP_SHM_DIR": str(tmp_path)}, python=python)
        assert not list(tmp_path.iterdir()), job
        return job

    return run


def test_two_hundred_exchanges_leak_nothing(play):
    job = play("rounds")
    assert "passed rounds" in job.out, job
    print(job.out)


@pytest.mark.parametrize(
    ("case", "python"),
    [
        *((case, PYTHONS[0]) for case in ("several", "dropped", "resets")),
        # What MPI itself has a part in.
        *((case, python) for case in ("closed_early", "worlds") for python in PYTHONS),
    ],
    ids=str,
)
def test_the_job_goes_on(play, case, python):
    job = play(case, python=python)
    assert job.code == 0, job
    assert f"passed {case}" in job.out, job
    print(job.out)


def test_the_others_say_whom_they_wait_for_in_vain_when_one_closes_early(play):
    job = play("closed_early_uncaught")
    assert job.code != 0, job
    assert job.seconds < BOUND_S, job
    assert "dispatch of step 1 waited 0.4 s for rank 1" in job.err, job


@pytest.mark.parametrize("where", ["step", "between", "body"])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(play, where):
    job = play("fails", where)
    assert job.code == 1, job
    assert job.seconds < BOUND_S, job
    assert job.err.count(f"Broken: {where}") == 1, job
    assert "rank 1 of 4 failed and ends the job" in job.err, job


@pytest.mark.parametrize("case", ["signalled", "signalled_while_made"])
@pytest.mark.parametrize(
    ("name", "words"), [("SIGTERM", "signal 15"), ("SIGINT", "failed and ends the job")]
)
def test_a_signal_to_one_rank_ends_the_job(play, case, name, words):
    job = play(case, name)
    assert job.code != 0, job
    assert job.seconds < BOUND_S, job
    assert words in job.out + job.err, job


@pytest.mark.parametrize(
    ("code", "python"), [("0", PYTHONS[0]), *(("3", python) for python in PYTHONS)], ids=str
)
def test_one_rank_that_exits_with_all_open_says_so(play, code, python):
    job = play("leaves", code, python=python)
    assert job.code != 0, job
    assert job.seconds < BOUND_S, job
    assert OPEN in job.err, job
    assert "dispatch of step 2 waited 0.5 s for rank 1" in job.err, job


@pytest.mark.parametrize("code", ["_5", "_0"])
def test_one_rank_that_ends_without_python_ends_the_job(play, code):
    job = play("leaves", code)
    assert job.code != 0, job
    assert job.seconds < BOUND_S, job


@pytest.mark.parametrize("code", ["3", "0"])
def test_all_ranks_may_exit_with_all_open(play, code):
    job = play("all_leave", code)
    assert job.code == int(code), job
    assert job.seconds < BOUND_S, job
    assert OPEN in job.err, job


@pytest.mark.parametrize(
    ("where", "python"),
    [("kept", PYTHONS[0]), ("step", PYTHONS[0]), *(("barrier", python) for python in PYTHONS)],
    ids=str,
)
def test_the_end_of_the_interpreter_waits_for_nobody(play, where, python):
    job = play("shutdown", where, python=python)
    assert job.code == 0, job
    assert job.seconds < BOUND_S, job
    assert job.out.count(f"left {where}") == 4, job
    assert OPEN in job.err, job
