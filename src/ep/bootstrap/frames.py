"""What ranks say over TCP once they know each other: frames, each with a proof of who says it.

A frame is a header of 16 bytes, a payload of bounded length and an HMAC-SHA256 over a counter, the
header and the payload. The counter is not sent: a frame that is left out, repeated or moved does
not fit, nor does one of the other direction, whose key differs.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

from ep.bootstrap.proof import prove

HEADER = struct.Struct("!BxxxIQ")
"""Kind, bytes of the payload, number: of a round or a meeting, or an exit code."""
MAC_BYTES = 32
MAX_PAYLOAD = 1 << 26
"""Bytes of a payload, far above what ranks tell each other at set-up."""


class Kind(IntEnum):
    """What a frame is."""

    WAITING = 1
    """Rank 0 still waits for some; the payload is their numbers."""
    GIVEN_UP = 2
    """Rank 0 has waited in vain; the payload is as above."""
    DOORS = 3
    """Where each rank lets in those above it."""
    ROUND = 4
    MEETING = 5
    ABORT = 6


KINDS = frozenset(Kind)


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    number: int
    payload: bytes


class BadFrame(Exception):
    """What came is no frame of the other side's."""


class Sealer:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def seal(self, kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
        """Give the bytes of the next frame."""
        head = HEADER.pack(kind, len(payload), number)
        return head + payload + self._next_mac(head + payload)

    def _next_mac(self, words: bytes) -> bytes:
        self._counter += 1
        return prove(self._key, b"frame", self._counter.to_bytes(8) + words)


class Opener(Sealer):
    """Takes the frames of one direction out of what comes, in whatever pieces it comes."""

    def __init__(self, key: bytes, max_payload: int = MAX_PAYLOAD) -> None:
        super().__init__(key)
        self._max_payload = max_payload
        self._came = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        self._came += data

    def next(self) -> Frame | None:
        """Give the next frame; None while it is not there as a whole.

        Raises
        ------
        BadFrame
            If it is none. Nothing that follows can be believed then.
        """
        if len(self._came) < HEADER.size:
            return None
        kind, length, number = HEADER.unpack_from(self._came)
        # Before anything of it is kept.
        if kind not in KINDS or length > self._max_payload:
            raise BadFrame
        end = HEADER.size + length
        if len(self._came) < end + MAC_BYTES:
            return None
        words, mac = bytes(self._came[:end]), bytes(self._came[end : end + MAC_BYTES])
        if not hmac.compare_digest(mac, self._next_mac(words)):
            raise BadFrame
        del self._came[: end + MAC_BYTES]
        return Frame(Kind(kind), number, words[HEADER.size :])
