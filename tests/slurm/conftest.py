"""One Slurm for all tests of this folder."""

import pytest

from tests.slurm.lab import started


@pytest.fixture(scope="session")
def lab():
    with started() as lab:
        yield lab
