"""Every example that needs no GPU runs, and its own checks hold."""

from pathlib import Path

import pytest

from tests.mpi import mpirun

LINES = {"01_host_exchange.py": 3, "02_moe_layer.py": 1}
"""What each rank says."""
pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", LINES)
def test_example(name, ranks):
    job = mpirun(ranks, Path("examples", name))
    assert job.code == 0, job
    assert job.out.count("came back right") == LINES[name] * ranks, job
