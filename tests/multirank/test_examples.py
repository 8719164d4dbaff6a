"""Every example runs, and its own checks hold."""

from pathlib import Path

import pytest

from tests.mpi import ROOT, mpirun

EXAMPLES = sorted(Path(ROOT, "examples").glob("*host*.py"))
pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, ranks):
    job = mpirun(ranks, path)
    assert job.code == 0, job
    assert job.out.count("came back right") == 3 * ranks, job
