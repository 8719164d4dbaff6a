"""What ranks prove themselves by: a secret, or munge, which a toy plays."""

import os

import pytest

import ep
from ep.bootstrap.address import Rendezvous
from ep.bootstrap.proof import Munge, Refused, authenticator_of
from tests.plain import free_port
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
    one = munge(os.geteuid() + 1)
    with pytest.raises(Refused):
        one.accept(one.claim(b"b" * 32)[1], b"b" * 32)


def test_munge_that_fails_is_told_before_anybody_waits(munge):
    with pytest.raises(ep.BootstrapError, match="munge gives no credential"):
        munge(os.geteuid(), end=3)
    with pytest.raises(Refused):
        Munge().accept(b"x", b"b" * 32)


def test_ranks_meet_by_munge(munge):
    place = Rendezvous("job", "127.0.0.1", (free_port(),), "here")
    # Of one rank at a time: the toy has one credential.
    one = munge(os.geteuid())
    found = meet(2, place, secrets=dict.fromkeys(range(2), one))
    check_mesh(found, 2)
    close(found)
