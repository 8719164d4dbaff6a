"""Launcher variables, as each launcher sets them."""

import pytest

from ep import BootstrapError
from ep.bootstrap.launcher import Launch, detect
from ep.errors import ConfigError
from ep.settings import is_set

OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "16"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (OPENMPI, Launch("openmpi", 3, 16)),
        (MPICH, Launch("mpich", 2, 4)),
        (SLURM, Launch("slurm", 1, 8)),
        (OPENMPI | SLURM, Launch("openmpi", 3, 16)),
        (MPICH | SLURM, Launch("mpich", 2, 4)),
        # In a batch script itself there is no step.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, None),
    ],
)
def test_detect(environ, launch):
    assert detect(environ) == launch


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMI_RANK": "0"}, "PMI_SIZE='' is not a number, though mpich seems"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "4"}, "PMI_RANK='-1' is not a number"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK=4 and PMI_SIZE=4 do not fit"),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "'x' is not a number"),
    ],
)
def test_nonsense_is_refused_in_words(environ, message):
    with pytest.raises(BootstrapError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("on", True), ("TRUE", True), ("", False), ("0", False), ("No", False)],
)
def test_a_switch(monkeypatch, text, value):
    monkeypatch.setenv("EP_CHECK", text)
    assert is_set("EP_CHECK") is value


@pytest.mark.parametrize("text", ["2", "yess", " 1"])
def test_what_is_no_switch_is_refused(monkeypatch, text):
    monkeypatch.setenv("EP_CHECK", text)
    with pytest.raises(ConfigError, match=r"EP_CHECK='.*' is not allowed: 1 or 0"):
        is_set("EP_CHECK")
