"""How a rank reaches another: every address of its host, each in its share of a bounded time."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_ADDRESSES = 8
"""That are tried of one host."""


class Address(NamedTuple):
    """One of a host's, as a socket wants it."""

    family: int
    of_socket: tuple[str | int, ...]


_Answer = list[Address] | OSError


class Names:
    """Looks names up in bounded time: the resolver has none, so a thread waits for it.

    It may outlive the wait; who asks for the same name again waits for the same thread, so that
    there is one for each name.
    """

    def __init__(self) -> None:
        self._asked: dict[str, queue.SimpleQueue[_Answer]] = {}

    def look_up(self, host: str, until: float) -> list[Address]:
        """Give the addresses of `host`, without a port. Local.

        Raises
        ------
        OSError
            If there are none; `TimeoutError` if nothing is known then.
        """
        if _is_number(host):
            return _raised(_ask(host))
        if host not in self._asked:
            answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
            self._asked[host] = answers
            threading.Thread(
                target=lambda: answers.put(_ask(host)), name="ep-names", daemon=True
            ).start()
        try:
            answer = self._asked[host].get(timeout=max(until - time.monotonic(), 0))
        except queue.Empty:
            raise TimeoutError("its name was not looked up in time") from None
        # A name may be made, or change, while ranks wait for each other.
        del self._asked[host]
        return _raised(answer)

    def dial(self, host: str, port: int, until: float) -> Iterator[tuple[Address, float]]:
        """Give each address of `host` with `port`, and until when it may be tried. Local.

        Raises
        ------
        OSError
            As `look_up`.
        """
        found = self.look_up(host, until)
        for index, (family, (name, _, *scope)) in enumerate(found):
            share_s = (until - time.monotonic()) / (len(found) - index)
            yield Address(family, (name, port, *scope)), time.monotonic() + share_s


def connect(address: Address, until: float) -> socket.socket:
    """Connect to one address until then. Local.

    Raises
    ------
    OSError
    """
    came = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # Not 0, which would not wait at all.
        came.settimeout(max(until - time.monotonic(), 0.001))
        came.connect(address.of_socket)
    except BaseException:
        came.close()
        raise
    return came


def receive(came: socket.socket, num_bytes: int, until: float) -> bytes:
    """Receive so many bytes, in all of the time until then and no more."""
    data = bytearray()
    while len(data) < num_bytes:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        came.settimeout(left_s)
        more = came.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("closed in the greeting")
        data += more
    return bytes(data)


def _ask(host: str) -> _Answer:
    try:
        told = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    except UnicodeError as error:
        return OSError(str(error))
    found = [Address(family, (str(name), *rest)) for family, _, _, _, (name, *rest) in told]
    return list(dict.fromkeys(found))[:MAX_ADDRESSES]


def _raised(answer: _Answer) -> list[Address]:
    if isinstance(answer, OSError):
        raise answer
    return answer


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
