"""Processes that share their memory themselves, and talk by an all-gather of their own."""

import os

import pytest

from tests.mpi import ROOT, mpirun
from tests.multirank import own_memory

pytestmark = pytest.mark.ranks


def test_two_exchanges_in_one_file_of_each_rank(tmp_path):
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    job = mpirun(4, own_memory.__file__, tmp_path, env=env | {"EP_SHM_DIR": str(tmp_path)})
    assert job.code == 0, job
    assert job.out.count("passed on rank") == 4, job
    assert not list(tmp_path.iterdir())


def test_the_example_on_memory_of_the_host():
    job = mpirun(4, "examples/07_own_memory.py", "--memory", "host")
    assert job.code == 0, job
    assert job.out.count("6 steps on memory of host came back right") == 4, job
