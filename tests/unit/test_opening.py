"""Which channel ranks open, by what started them and what is installed."""

import pytest

import ep
from ep.bootstrap import opening
from ep.bootstrap.channel import SingleChannel
from tests.unit.test_launcher import MPICH, OPENMPI, PLAIN, SLURM, STEP, TYPED

BY_SRUN = STEP | {"PMI_RANK": "1", "PMI_SIZE": "8"}
BY_PMIX = STEP | {"PMIX_RANK": "1"}
SECRET = {"EP_SECRET": "0123456789abcdef"}
MPI, TCP = {"EP_BOOTSTRAP": "mpi"}, {"EP_BOOTSTRAP": "tcp"}


@pytest.fixture
def opened(monkeypatch):
    """The names of the channels that are opened; MPI is there, and mpi4py."""
    names = []

    def open_mpi(launch, timeout_s):
        names.append("mpi")
        return "mpi"

    def open_tcp(launch, rendezvous, authenticator, timeout_s):
        names.append("tcp")
        return "tcp"

    monkeypatch.setattr(opening, "open_mpi_channel", open_mpi)
    monkeypatch.setattr(opening, "open_tcp_channel", open_tcp)
    monkeypatch.setattr(opening, "find_spec", lambda name: name)
    return names


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        (OPENMPI, "mpi"),
        (MPICH, "mpi"),
        (OPENMPI | STEP | PLAIN, "mpi"),
        (MPICH | STEP, "mpi"),
        (TYPED, "tcp"),
        (TYPED | OPENMPI | BY_SRUN, "tcp"),
        (PLAIN, "tcp"),
        (STEP, "tcp"),
        (BY_SRUN, "mpi"),
        (BY_PMIX, "mpi"),
        (STEP | MPI, "mpi"),
        (TYPED | MPI, "mpi"),
        (BY_SRUN | TCP, "tcp"),
        (OPENMPI | TCP | {"EP_RENDEZVOUS": "head:1"}, "tcp"),
    ],
    ids=str,
)
def test_the_route(opened, environ, want):
    opening.open_channel(environ | SECRET, 1)
    assert opened == [want]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        MPI,
        TCP,
        {"EP_RANK": "0", "EP_RANKS": "1"},
        SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        PLAIN | {"RANK": "0", "WORLD_SIZE": "1"},
    ],
    ids=str,
)
def test_one_rank_needs_nothing(opened, environ):
    assert isinstance(opening.open_channel(environ, 1), SingleChannel)
    assert opened == []


@pytest.mark.parametrize("environ", [BY_SRUN, BY_PMIX], ids=str)
def test_srun_offers_mpi_but_mpi4py_is_not_there(opened, monkeypatch, environ):
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    opening.open_channel(environ | SECRET, 1)
    assert opened == ["tcp"]


@pytest.mark.parametrize("environ", [BY_SRUN, BY_PMIX], ids=str)
def test_srun_offers_another_mpi_than_is_there(opened, monkeypatch, environ, caplog):
    def alone(launch, timeout_s):
        raise ep.BootstrapError("MPI says rank 0 of 1")

    monkeypatch.setattr(opening, "open_mpi_channel", alone)
    opening.open_channel(environ | SECRET, 1)
    assert opened == ["tcp"]
    assert "rank 1 meets the others over TCP, since MPI says rank 0 of 1" in caplog.text
    # Where MPI was asked for, or another launcher started it, that is an error.
    for asked in (environ | MPI, MPICH, OPENMPI | STEP):
        with pytest.raises(ep.BootstrapError, match="rank 0 of 1"):
            opening.open_channel(asked | SECRET, 1)


def test_tcp_is_refused_before_anybody_waits(opened, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ep.BootstrapError, match="export the same random EP_SECRET"):
        opening.open_channel(TYPED, 1)
    with pytest.raises(ep.ConfigError, match="EP_BOOTSTRAP='udp'"):
        opening.open_channel({"EP_BOOTSTRAP": "udp"}, 1)
    assert opened == []


@pytest.mark.parametrize(
    "left",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        PLAIN | {"RANK": "0", "WORLD_SIZE": "1"},
    ],
    ids=str,
)
def test_a_world_of_one_among_tasks_of_srun_is_told(opened, left, caplog):
    opening.open_channel(STEP | left, 1)
    assert "this rank is the only one, though srun started '8' tasks" in caplog.text
    caplog.clear()
    for meant in (left, STEP | left | {"SLURM_NTASKS": "1"}, SLURM | left | TYPED | SECRET):
        opening.open_channel(meant, 1)
    assert not caplog.records


def test_a_size_beyond_any_mesh_is_refused_at_once(opened):
    with pytest.raises(ep.BootstrapError, match=r"999999999 ranks of ep .*allowed are 1024"):
        opening.open_channel(TYPED | SECRET | {"EP_RANKS": "999999999"}, 1)
    assert opened == []
