"""Ranks that are stopped, killed, interrupted or forked: the others end in time, and say why."""

import os
import sys
from pathlib import Path

import pytest

from tests.mpi import ROOT, mpirun
from tests.multirank import failures, worker

FAILURES = failures.__file__
pytestmark = pytest.mark.ranks
PYTHONS = [Path(sys.executable)]
if "EP_TEST_OPENMPI" in os.environ:
    PYTHONS.append(Path(os.environ["EP_TEST_OPENMPI"]) / "bin" / "python")


def play(case, python=PYTHONS[0], env=None):
    return mpirun(4, FAILURES, case, env={"PYTHONPATH": str(ROOT)} | (env or {}), python=python)


@pytest.mark.parametrize("case", ["interrupted", "forked", "cut_short", "mixed"])
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_the_job_goes_on(case, python):
    job = play(case, python)
    assert job.code == 0, job
    assert f"passed {case}" in job.out, job


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_a_stopped_rank_does_not_hang_the_end(python):
    job = play("stopped", python)
    assert job.code != 0, job
    assert job.seconds < 20, job
    assert "the end waited 2.0 s for rank 1" in job.err, job
    assert "passed" not in job.out, job


@pytest.mark.parametrize("case", ["stopped_and_caught", "missing_and_caught", "unsent"])
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_a_timeout_that_is_caught_does_not_hang_the_exit(case, python):
    job = play(case, python)
    assert job.code != 0, job
    assert job.seconds < 20, job
    assert "named" in job.out if case == "unsent" else "caught" in job.out, job
    assert "exits after a wait that expired, with its world open: it ends the job" in job.err, job


def test_a_rank_that_is_killed_leaves_files_that_the_next_job_removes(tmp_path):
    job = play("killed", env={"EP_SHM_DIR": str(tmp_path)})
    assert job.code != 0, job
    assert job.seconds < 20, job
    assert list(tmp_path.iterdir())
    job = mpirun(4, worker.__file__, "late_rank", env={"EP_SHM_DIR": str(tmp_path)})
    assert job.code == 0, job
    assert not list(tmp_path.iterdir())


def test_a_code_of_256_is_a_failure():
    job = play("leave_with_256")
    assert job.code == 1, job
    assert "rank 1 of 4 left by sys.exit(256)" in job.err, job
