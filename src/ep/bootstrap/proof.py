"""How ranks prove to each other that they are of one job: a secret, or Slurm's munge.

A rank that connects sends a *claim*, from which the other learns a key that nobody else has; each
then proves the key over what both have said, nonces included. No secret is ever sent or logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import shutil
import subprocess
from typing import TYPE_CHECKING, Protocol

from ep.errors import BootstrapError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_BYTES = 32
LEAST_SECRET, MOST_SECRET = 16, 4096
"""Characters of EP_SECRET: what can be guessed can be tried out on a recorded meeting."""
MAX_CREDENTIAL = 4096
MUNGE_TIMEOUT_S = 3.0


class Refused(Exception):
    """The other side could not prove what it should."""


class Authenticator(Protocol):
    """Makes and checks claims.

    Attributes
    ----------
    scheme : int
        Said in clear, so that ranks which use different ones can say so.
    name : str
        What is proven, in words.
    """

    scheme: int
    name: str

    def claim(self, bound: bytes) -> tuple[bytes, bytes]:
        """Give a key, and the credential from which the other side gets it, for this meeting."""
        ...

    def accept(self, credential: bytes, bound: bytes) -> bytes:
        """Give the key of a credential; raise `Refused` if it proves nothing here."""
        ...


def prove(key: bytes, purpose: bytes, data: bytes) -> bytes:
    """Give HMAC-SHA256 under `key`; purposes keep apart what one key is used for."""
    return hmac.digest(key, len(purpose).to_bytes(1) + purpose + data, "sha256")


class SharedSecret:
    """All ranks have one secret; the credential is empty."""

    scheme = 1

    def __init__(self, secret: bytes, name: str = "EP_SECRET") -> None:
        self.name = name
        self._key = prove(hashlib.sha256(secret).digest(), b"ep meeting", b"")

    def claim(self, bound: bytes) -> tuple[bytes, bytes]:
        """See `Authenticator`."""
        return prove(self._key, b"claim", bound), b""

    def accept(self, credential: bytes, bound: bytes) -> bytes:
        """See `Authenticator`."""
        if credential:
            raise Refused
        return prove(self._key, b"claim", bound)


class Munge:
    """The credential is munge's, and holds a fresh key: this user alone can open it."""

    scheme = 2
    name = "its user by munge"

    def __init__(self, socket_path: str | None = None) -> None:
        self._options = [f"--socket={socket_path}"] if socket_path else []
        self._uid = os.geteuid()

    def claim(self, bound: bytes) -> tuple[bytes, bytes]:
        """See `Authenticator`.

        Raises
        ------
        BootstrapError
            If munge gives none.
        """
        key = secrets.token_bytes(KEY_BYTES)
        words = [f"--restrict-uid={self._uid}"]
        done = self._call("munge", words, (key + bound).hex().encode())
        if done.returncode:
            told = done.stderr.decode(errors="replace").strip()[:200]
            raise BootstrapError(
                f"munge gives no credential ({told}); export the same random EP_SECRET to every "
                "rank instead, as by: export EP_SECRET=$(openssl rand -hex 32)"
            )
        return key, done.stdout.strip()

    def accept(self, credential: bytes, bound: bytes) -> bytes:
        """See `Authenticator`."""
        try:
            done = self._call("unmunge", ["--keys=UID", "--numeric"], credential)
        except BootstrapError as error:
            raise Refused(str(error)) from error
        head, _, payload = done.stdout.partition(b"\n\n")
        uid = re.match(rb"UID:\s+(\d+)(?!\S)", head)
        if done.returncode or uid is None or int(uid[1]) != self._uid:
            told = done.stderr.decode(errors="replace").strip()[:200]
            raise Refused(told or "it is another user's")
        try:
            opened = bytes.fromhex(payload.decode().strip())
        except ValueError as error:
            raise Refused from error
        if not hmac.compare_digest(opened[KEY_BYTES:], bound):
            raise Refused
        return opened[:KEY_BYTES]

    def try_own(self) -> None:
        """Make a credential, and open it again. Local.

        Raises
        ------
        BootstrapError
            If either fails.
        """
        bound = bytes(KEY_BYTES)
        _, credential = self.claim(bound)
        try:
            self.accept(credential, bound)
        except Refused as error:
            raise BootstrapError(
                f"unmunge does not open what munge gives ({error}); export the same random "
                "EP_SECRET to every rank instead, as by: export EP_SECRET=$(openssl rand -hex 32)"
            ) from error

    def _call(
        self, tool: str, words: list[str], given: bytes
    ) -> subprocess.CompletedProcess[bytes]:
        path = shutil.which(tool)
        try:
            return subprocess.run(
                [path or tool, *self._options, *words],
                input=given,
                capture_output=True,
                timeout=MUNGE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BootstrapError(
                f"{tool} does not run ({error}); export the same random EP_SECRET to every rank "
                "instead, as by: export EP_SECRET=$(openssl rand -hex 32)"
            ) from error


def authenticator_of(environ: Mapping[str, str]) -> Authenticator:
    """Choose how the ranks of this job prove themselves, alike on all of them. Local.

    Raises
    ------
    BootstrapError
        If there is nothing to prove it by, or munge does not work.
    ConfigError
        If EP_SECRET is too short to be one.
    """
    secret = environ.get("EP_SECRET")
    if secret is not None:
        if not LEAST_SECRET <= len(secret) <= MOST_SECRET:
            raise ConfigError(
                "EP_SECRET",
                f"({len(secret)} characters)",
                f"{LEAST_SECRET} to {MOST_SECRET} random characters, the same on every rank, as by "
                "openssl rand -hex 32",
            )
        return SharedSecret(secret.encode(errors="surrogateescape"))
    if "SLURM_JOB_ID" in environ and shutil.which("munge") and shutil.which("unmunge"):
        munge = Munge(environ.get("EP_MUNGE_SOCKET"))
        try:
            # Where it does not work, no rank shall wait for one that has found out, nor rank 0,
            # which opens what others claim, take them for strangers.
            munge.try_own()
        except BootstrapError as error:
            error.on_whole_node = True
            raise
        return munge
    nothing = BootstrapError(
        "ranks meet over TCP, where anybody may come, and have nothing to prove themselves by; "
        "export the same random EP_SECRET to every rank before the launch, as by: "
        "export EP_SECRET=$(openssl rand -hex 32)"
    )
    nothing.on_whole_node = True
    raise nothing
