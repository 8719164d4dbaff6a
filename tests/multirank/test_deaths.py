"""Ranks that are killed: the others say so in time, and can go on without them."""

from pathlib import Path

import pytest

from tests.mpi import ROOT, mpirun
from tests.multirank import deaths
from tests.multirank.test_failures import PYTHONS

pytestmark = pytest.mark.ranks
SURVIVING = Path(__file__).with_name("surviving.sh")


@pytest.mark.parametrize("case", ["in_steps", "in_bootstrap"])
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_survivors_go_on(case, python, tmp_path):
    done, shared = tmp_path / "done", tmp_path / "shared"
    shared.mkdir()
    env = {"PYTHONPATH": str(ROOT), "EP_TEST_DONE": str(done), "EP_SHM_DIR": str(shared)}
    job = mpirun(6, deaths.__file__, case, env=env, python=python, under=[SURVIVING])
    # The launcher may take a rank that leaves without MPI_Finalize for one that failed.
    assert f"passed {case}" in job.out, job
    assert "Traceback" not in job.err, job
    assert job.seconds < 30, job
    if case == "in_steps":
        assert job.out.count("told in") == 5 + 4, job
        assert not list(shared.iterdir()), job
