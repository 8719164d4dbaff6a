"""What ranks prove themselves by: a secret, or munge, which a toy plays."""

import os
import sys

import click
import pytest

import ep
from ep.bench.command import run_command
from ep.bootstrap.address import Rendezvous
from ep.bootstrap.proof import Munge, Refused, authenticator_of
from tests.plain import free_port
from tests.unit.test_launcher import ELASTIC, STEP, TYPED
from tests.unit.test_rendezvous import check_mesh, close, meet


def test_a_secret_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for environ in ({}, {"SLURM_JOB_ID": "1"}):
        with pytest.raises(ep.BootstrapError, match=r"export EP_SECRET=\$\(openssl rand -hex 32\)"):
            authenticator_of(environ)


@pytest.mark.parametrize("secret", ["", "tooshort", "x" * 5000])
def test_what_is_no_secret_is_not_shown(secret):
    with pytest.raises(ep.ConfigError, match="16 to 4096 random characters") as caught:
        authenticator_of({"EP_SECRET": secret})
    assert not secret or secret not in str(caught.value)


@pytest.fixture
def munge(tmp_path, monkeypatch):
    """munge and unmunge of a toy that keeps what it was given in files."""

    def make(uid, end=0):
        tools = {
            "munge": f'cat > "{tmp_path}/given"; echo MUNGE:toy:; exit {end}',
            "unmunge": f'cat > "{tmp_path}/asked"; printf "UID:   {uid}\\n\\n"; '
            f'cat "{tmp_path}/given"; exit {end}',
        }
        for name, script in tools.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        found = authenticator_of({"SLURM_JOB_ID": "1"})
        assert isinstance(found, Munge)
        return found

    return make


def test_munge_carries_a_key(munge, tmp_path):
    one = munge(os.geteuid())
    key, credential = one.claim(b"b" * 32)
    assert one.accept(credential, b"b" * 32) == key
    assert (tmp_path / "asked").read_bytes() == credential == b"MUNGE:toy:"
    with pytest.raises(Refused):
        one.accept(credential, b"c" * 32)


def test_a_credential_of_another_user_proves_nothing(munge):
    with pytest.raises(ep.BootstrapError, match="unmunge does not open what munge gives") as caught:
        munge(os.geteuid() + 1)
    assert caught.value.on_whole_node
    one = Munge()
    with pytest.raises(Refused):
        one.accept(one.claim(b"b" * 32)[1], b"b" * 32)


def test_munge_that_fails_is_told_before_anybody_waits(munge):
    with pytest.raises(ep.BootstrapError, match="munge gives no credential") as caught:
        munge(os.geteuid(), end=3)
    assert caught.value.on_whole_node
    with pytest.raises(Refused):
        Munge().accept(b"x", b"b" * 32)


@pytest.mark.parametrize(
    ("environ", "tells"),
    [
        (STEP | {"SLURM_LOCALID": "0"}, True),
        (STEP | {"SLURM_LOCALID": "3"}, False),
        # Left of a launcher around it.
        (STEP | {"LOCAL_RANK": "3"}, True),
        (ELASTIC | {"LOCAL_RANK": "1"}, False),
        (TYPED | {"SLURM_LOCALID": "3", "LOCAL_RANK": "1"}, True),
    ],
    ids=str,
)
def test_one_rank_of_a_node_tells_that_there_is_no_proof(monkeypatch, environ, tells, capsys):
    monkeypatch.setattr(os, "environ", environ)

    @click.command
    def command():
        try:
            authenticator_of({})
        except ep.EpError as error:
            raise click.ClickException(str(error)) from error

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as ended:
        run_command(command, "command")
    assert ended.value.code == 1
    assert ("have nothing to prove themselves by" in capsys.readouterr().err) == tells


def test_ranks_meet_by_munge(munge):
    place = Rendezvous("job", "127.0.0.1", (free_port(),), "here")
    # Of one rank at a time: the toy has one credential.
    one = munge(os.geteuid())
    found = meet(2, place, secrets=dict.fromkeys(range(2), one))
    check_mesh(found, 2)
    close(found)
