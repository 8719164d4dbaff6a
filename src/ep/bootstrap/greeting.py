"""How two ranks that meet over TCP make sure of each other, before the first frame.

The one that listens speaks first, so that a stranger's service which happens to listen there is
told nothing: `hello` with a nonce; then `claim` with the other's nonce, rank, size and proof; then
`answer`, with a proof or a refusal. All have a fixed size, but for the credential in the claim.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

from ep.bootstrap.frames import Opener, Sealer
from ep.bootstrap.proof import MAX_CREDENTIAL, Authenticator, Refused, prove

MAGIC = b"ep-meet\n"
VERSION = 1
NONCE_BYTES = 32
HELLO = struct.Struct(f"!8sHBI{NONCE_BYTES}s")
"""Magic, version, scheme, rank, nonce."""
CLAIM = struct.Struct(f"!8sHHIIH32s{NONCE_BYTES}s32s")
"""Magic, version, bytes of the credential, rank, size, port, job, nonce, proof; the credential."""
ANSWER = struct.Struct("!8sB32s")
"""Magic, `Reply`, proof."""


class Reply(IntEnum):
    """What the listening side says to a claim."""

    WELCOME = 0
    UNPROVEN = 1
    OTHER_JOB = 2
    OTHER_SIZE = 3
    NOT_AWAITED = 4
    HERE_ALREADY = 5


class Party(NamedTuple):
    """What a rank knows of itself and the job when it meets others.

    Attributes
    ----------
    rank, size : int
    job : str
    authenticator : Authenticator
    port : int
        Where it listens itself.
    """

    rank: int
    size: int
    job: str
    authenticator: Authenticator
    port: int = 0

    @property
    def job_digest(self) -> bytes:
        """What is said of the job in clear."""
        return hashlib.sha256(self.job.encode(errors="surrogateescape")).digest()


class Keys(NamedTuple):
    """What two ranks that trust each other share.

    Attributes
    ----------
    sealer, opener
        Of the two directions, from the view of the side that has this.
    pad : bytes
        32 bytes that hide one key, sent once.
    """

    sealer: Sealer
    opener: Opener
    pad: bytes

    def __repr__(self) -> str:
        # The pad hides a key: not for logs and debuggers.
        return "Keys()"


class Claim(NamedTuple):
    """What came with a claim that holds."""

    rank: int
    port: int
    keys: Keys


class Unwelcome(Exception):
    """A greeting that ends here.

    Attributes
    ----------
    reply : Reply or None
        What to answer; None where the other side does not even speak the protocol.
    """

    def __init__(self, words: str, reply: Reply | None = None) -> None:
        super().__init__(words)
        self.reply = reply


def hello(party: Party) -> bytes:
    """Give the first words of the side that listens."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return HELLO.pack(MAGIC, VERSION, party.authenticator.scheme, party.rank, nonce)


def claim(party: Party, host: int, said: bytes) -> tuple[bytes, bytes, bytes]:
    """Answer the `hello` of rank `host`.

    Returns
    -------
    tuple of bytes
        The claim, the key, and what it is bound to, for `check_answer`.

    Raises
    ------
    Unwelcome
        If `said` is no hello, or not one that this rank could answer.
    """
    magic, version, scheme, rank, _ = HELLO.unpack(said)
    if magic != MAGIC:
        raise Unwelcome("what listens there is no rank of ep")
    if version != VERSION:
        raise Unwelcome(f"the rank there meets by version {version}, this one by {VERSION}")
    if rank != host:
        raise Unwelcome(f"rank {rank} listens there, not rank {host}")
    if scheme != party.authenticator.scheme:
        raise Unwelcome(
            f"the rank there does not prove {party.authenticator.name}: set EP_SECRET alike"
        )
    core = CLAIM.pack(
        *(MAGIC, VERSION, 0, party.rank, party.size, party.port, party.job_digest),
        *(secrets.token_bytes(NONCE_BYTES), b""),
    )
    bound = _bound(said, core)
    key, credential = party.authenticator.claim(bound)
    assert len(credential) <= MAX_CREDENTIAL
    fields = list(CLAIM.unpack(core))
    fields[2], fields[-1] = len(credential), prove(key, b"claims", bound)
    return CLAIM.pack(*fields) + credential, key, bound


def claim_bytes(came: bytes | bytearray) -> int:
    """Give how many bytes a claim has that begins with `came`.

    Raises
    ------
    Unwelcome
        As soon as it can be no claim.
    """
    if not MAGIC.startswith(came[: len(MAGIC)]):
        raise Unwelcome("it spoke another protocol")
    if len(came) < CLAIM.size:
        return CLAIM.size
    _, version, length, *_ = CLAIM.unpack_from(came)
    if version != VERSION:
        raise Unwelcome(f"it meets by version {version}, this rank by {VERSION}")
    if length > MAX_CREDENTIAL:
        raise Unwelcome("it spoke another protocol")
    return CLAIM.size + int(length)


def check_claim(party: Party, hello_: bytes, came: bytes) -> tuple[bytes, Claim]:
    """Check a whole claim, and give the answer and what it proved.

    Raises
    ------
    Unwelcome
    """
    fields = list(CLAIM.unpack_from(came))
    _, _, length, rank, size, port, job, _, proof = fields
    fields[2], fields[-1] = 0, b""
    bound = _bound(hello_, CLAIM.pack(*fields))
    name = party.authenticator.name
    if job != party.job_digest:
        raise Unwelcome("a rank of another job", Reply.OTHER_JOB)
    try:
        key = party.authenticator.accept(came[CLAIM.size : CLAIM.size + length], bound)
    except Refused:
        key = b""
    if not key or not hmac.compare_digest(proof, prove(key, b"claims", bound)):
        raise Unwelcome(f"a rank that could not prove {name}", Reply.UNPROVEN)
    if size != party.size:
        raise Unwelcome(f"rank {rank} of {size}, not of {party.size},", Reply.OTHER_SIZE)
    answer = ANSWER.pack(MAGIC, Reply.WELCOME, prove(key, b"answers", bound))
    return answer, Claim(rank, port, _keys(key, bound, is_host=True))


def refusal(reply: Reply) -> bytes:
    """Give the answer to a claim that does not hold. It proves nothing, and is only a hint."""
    return ANSWER.pack(MAGIC, reply, b"")


def check_answer(party: Party, key: bytes, bound: bytes, said: bytes) -> Keys:
    """Check what the listening side answered.

    Raises
    ------
    Unwelcome
    """
    magic, reply, proof = ANSWER.unpack(said)
    name = party.authenticator.name
    hints = {
        Reply.UNPROVEN: f"the rank there does not take this one's proof of {name}: set it alike",
        Reply.OTHER_JOB: "a rank of another job listens there",
        Reply.OTHER_SIZE: f"the rank there is not of {party.size} ranks",
        Reply.NOT_AWAITED: f"the rank there does not await rank {party.rank}",
        Reply.HERE_ALREADY: f"the rank there has a rank {party.rank} already",
    }
    if magic == MAGIC and reply in hints:
        raise Unwelcome(hints[Reply(reply)])
    if magic != MAGIC or reply or not hmac.compare_digest(proof, prove(key, b"answers", bound)):
        raise Unwelcome(f"what listens there could not prove {name}")
    return _keys(key, bound, is_host=False)


def _bound(hello_: bytes, core: bytes) -> bytes:
    return hashlib.sha256(hello_ + core).digest()


def _keys(key: bytes, bound: bytes, *, is_host: bool) -> Keys:
    ways = [prove(key, purpose, bound) for purpose in (b"from host", b"to host")]
    mine, theirs = ways if is_host else ways[::-1]
    return Keys(Sealer(mine), Opener(theirs), prove(key, b"pad", bound))
