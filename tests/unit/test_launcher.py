"""Launcher variables, as each launcher sets them."""

import pytest

from ep import BootstrapError
from ep.bootstrap.address import parse_address, rendezvous_of
from ep.bootstrap.launcher import Launch, detect, is_started_by_srun
from ep.errors import ConfigError
from ep.settings import choice, is_set

OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "16"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
STEP = SLURM | {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "nvl[0-1]"}
TYPED = {"EP_RANK": "5", "EP_RANKS": "6", "EP_RENDEZVOUS": "head:29500"}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
ELASTIC = PLAIN | {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0"}


LAUNCH_OF_SLURM = Launch("slurm", 1, 8)


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
        # Or one of Slurm's own: the script, the shell of salloc.
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, None),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, None),
        # What somebody typed wins, then torchrun's own run, then whoever started MPI.
        (TYPED | OPENMPI | SLURM | ELASTIC, Launch("ep", 5, 6)),
        (ELASTIC | OPENMPI | MPICH | SLURM, Launch("torchrun", 1, 2)),
        (PLAIN | OPENMPI | SLURM, Launch("openmpi", 3, 16)),
        (PLAIN | SLURM, Launch("torchrun", 1, 2)),
        # Scripts export these for programs that count by Slurm's variables.
        ({"MASTER_ADDR": "head", "MASTER_PORT": "1", "WORLD_SIZE": "8"} | SLURM, LAUNCH_OF_SLURM),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        # Another address for ranks that Slurm has started.
        (SLURM | {"EP_RENDEZVOUS": "head:1"}, LAUNCH_OF_SLURM),
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
        ({"EP_RANK": "1"}, "EP_RANKS='' is no number; set EP_RANK"),
        ({"EP_RANKS": "2"}, "EP_RANKS is set, but nothing says which rank this is; set EP_RANK"),
        ({"EP_LOCAL_RANK": "0"}, "EP_LOCAL_RANK is set, but nothing says which rank"),
        ({"EP_RENDEZVOUS": "head:1"}, "EP_RENDEZVOUS is set, but nothing says which rank"),
        (TYPED | {"EP_RANK": "6"}, "EP_RANK=6 and EP_RANKS=6 do not fit"),
        (TYPED | {"EP_LOCAL_RANK": "x"}, "EP_LOCAL_RANK='x' is no number"),
        (ELASTIC | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number, though torchrun"),
        (SLURM | {"SLURM_NTASKS": ""}, "SLURM_NTASKS='' is not a number"),
    ],
)
def test_nonsense_is_refused_in_words(environ, message):
    with pytest.raises(BootstrapError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("environ", "launch", "want"),
    [
        (SLURM, Launch("slurm", 1, 8), True),
        (SLURM | {"PMI_RANK": "1"}, Launch("mpich", 1, 8), True),
        # mpirun inside of a step whose variables have leaked.
        (SLURM, Launch("mpich", 2, 8), False),
        (SLURM, Launch("mpich", 1, 4), False),
        (SLURM, Launch("openmpi", 1, 8), False),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, Launch("mpich", 1, 8), False),
    ],
)
def test_who_was_started_by_srun_itself(environ, launch, want):
    assert is_started_by_srun(environ, launch) is want


# Where they meet.


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("head:29500", "head", (29500,)),
        ("10.0.0.1:1", "10.0.0.1", (1,)),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", (65535,)),
        ("[::1]:80", "::1", (80,)),
        ("a-b.c_d:7000-7003", "a-b.c_d", (7000, 7001, 7002, 7003)),
    ],
)
def test_an_address(text, host, ports):
    assert parse_address(text) == (host, ports)


@pytest.mark.parametrize(
    "text",
    [
        *("", "head", ":1", "head:", "head:0", "head:65536", "head:x", "head:1-0", "head:1-99"),
        *("head:65530-65536", "::1:80", "[head]:80", "[::1]", "he ad:1", "head:1 ", "head:-1"),
        *("h:٣", "a" * 300 + ":1", "http://head:1", "head:1,2"),
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(BootstrapError, match=r"EP_RENDEZVOUS=.* is no address of rank 0; allowed"):
        parse_address(text)


def test_where_typed_ranks_meet():
    found = rendezvous_of(TYPED, Launch("ep", 5, 6))
    assert (found.host, found.ports, found.source) == ("head", (29500,), "EP_RENDEZVOUS")
    assert not found.is_local
    assert rendezvous_of(TYPED | {"EP_RENDEZVOUS": "127.0.0.1:5"}, Launch("ep", 5, 6)).is_local
    with pytest.raises(BootstrapError, match="EP_RENDEZVOUS='' is no address"):
        rendezvous_of({}, Launch("ep", 0, 2))


def test_where_ranks_of_torchrun_meet():
    plain = rendezvous_of(PLAIN, Launch("torchrun", 1, 2))
    assert (plain.host, plain.ports[0]) == ("head", 29500)
    elastic = rendezvous_of(ELASTIC, Launch("torchrun", 1, 2))
    # At that one torchrun listens itself.
    assert 29500 not in elastic.ports
    assert elastic.job == "torchrun run head:29500"
    assert rendezvous_of(PLAIN | {"MASTER_ADDR": "::1"}, Launch("torchrun", 1, 2)).host == "::1"


@pytest.mark.parametrize(
    "environ",
    [{"MASTER_ADDR": ""}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "0"}, {"MASTER_PORT": "1-2"}],
)
def test_a_master_that_is_none(environ):
    with pytest.raises(BootstrapError, match=r"MASTER_ADDR=.* and MASTER_PORT=.* are no host and"):
        rendezvous_of(PLAIN | environ, Launch("torchrun", 1, 2))


def test_where_ranks_of_slurm_meet():
    found = rendezvous_of(STEP, LAUNCH_OF_SLURM)
    assert found.host == "nvl0"
    assert len(set(found.ports)) == len(found.ports) == 8
    assert all(18000 <= port < 32000 for port in found.ports)
    # Of another step they are others, and so is the name that ranks prove.
    other = rendezvous_of(STEP | {"SLURM_STEP_ID": "1"}, LAUNCH_OF_SLURM)
    assert other.job != found.job
    assert other.ports != found.ports
    reserved = STEP | {"SLURM_STEP_RESV_PORTS": "12000-12002,12005"}
    assert rendezvous_of(reserved, LAUNCH_OF_SLURM).ports == (12000, 12001, 12002, 12005)
    typed = rendezvous_of(STEP | {"EP_RENDEZVOUS": "other:5"}, LAUNCH_OF_SLURM)
    assert (typed.host, typed.ports, typed.job) == ("other", (5,), found.job)
    # srun that offers PMI: the same place.
    assert rendezvous_of(STEP, Launch("mpich", 1, 8)) == found


@pytest.mark.parametrize("ports", ["", "x", "5-4", "0", "70000", "1,"])
def test_reserved_ports_that_are_none(ports):
    environ = STEP | {"SLURM_STEP_RESV_PORTS": ports}
    with pytest.raises(BootstrapError, match=r"SLURM_STEP_RESV_PORTS=.* are no ports"):
        rendezvous_of(environ, LAUNCH_OF_SLURM)


def test_tcp_under_mpirun_needs_an_address():
    with pytest.raises(BootstrapError, match="nothing says where the 16 ranks of openmpi meet"):
        rendezvous_of(OPENMPI, Launch("openmpi", 3, 16))


@pytest.mark.parametrize(("text", "value"), [("", "auto"), ("TCP", "tcp"), ("mpi", "mpi")])
def test_a_choice(text, value):
    assert choice("EP_BOOTSTRAP", ("auto", "mpi", "tcp"), {"EP_BOOTSTRAP": text}) == value


def test_what_is_no_choice_is_refused():
    with pytest.raises(
        ConfigError, match="EP_BOOTSTRAP='udp' is not allowed: one of auto, mpi, tcp"
    ):
        choice("EP_BOOTSTRAP", ("auto", "mpi", "tcp"), {"EP_BOOTSTRAP": "udp"})


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
