"""Where a rank lets others in: bounded in time, number and bytes, whoever knocks."""

from __future__ import annotations

import dataclasses
import errno
import logging
import selectors
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ep.bootstrap.greeting import Reply, Unwelcome, check_claim, claim_bytes, hello, refusal

if TYPE_CHECKING:
    from ep.bootstrap.greeting import Keys, Party

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""For a whole claim; who drips it has no more."""
MAX_GUESTS = 256
"""Who have not proven anything yet; when more come, the oldest goes. A rank comes again."""
MAX_LOGGED = 20
MAX_NOTES = 3


@dataclasses.dataclass
class Link:
    """A connection to a rank that has proven itself.

    Attributes
    ----------
    socket : socket.socket
    keys : Keys
    host : str
        The other's address, as seen from here.
    port : int
        Where the other listens; 0 for nowhere.
    """

    socket: socket.socket
    keys: Keys
    host: str
    port: int


class Notes:
    """What went wrong while ranks were awaited: logged at first, the last of it told at the end."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self._num_logged = 0

    def add(self, words: str, *, uninvited: bool = False) -> None:
        """Keep `words`; log them, if they are new, where somebody came uninvited."""
        if uninvited and words not in self._told and self._num_logged < MAX_LOGGED:
            self._num_logged += 1
            logger.warning("%s", words)
        self._told.pop(words, None)
        self._told[words] = None
        if len(self._told) > MAX_NOTES:
            del self._told[next(iter(self._told))]

    def last(self) -> tuple[str, ...]:
        """Give what was kept, oldest first."""
        return tuple(self._told)


@dataclasses.dataclass
class _Guest:
    socket: socket.socket
    host: str
    hello: bytes
    until: float
    came: bytearray


class Door:
    """A listening socket, and what becomes of those who come.

    Parameters
    ----------
    listener : socket.socket
    party : Party
    awaited : set of int
        The ranks that may come, each once.
    notes : Notes
    """

    def __init__(
        self, listener: socket.socket, party: Party, awaited: set[int], notes: Notes
    ) -> None:
        self.links: dict[int, Link] = {}
        self._party = party
        self._awaited = awaited
        self._notes = notes
        self._listener = listener
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def absent(self) -> list[int]:
        """Give the ranks that have not come, or have gone again. Local."""
        return sorted(self._awaited - self.links.keys())

    def attend(self, timeout_s: float) -> None:
        """Serve whoever is there, or comes within `timeout_s` seconds. Local."""
        for key, _ in self._selector.select(max(timeout_s, 0)):
            if key.fileobj is self._listener:
                self._admit()
            elif isinstance(key.data, int):
                self._look_after(key.data)
            elif key.data.socket in self._guests:
                self._hear(key.data)
        now = time.monotonic()
        for guest in [one for one in self._guests.values() if one.until < now]:
            self._dismiss(guest, "it took too long to prove itself")

    def close(self) -> None:
        """Close the door, and on all who have proven nothing. The links stay."""
        for guest in self._guests.values():
            guest.socket.close()
        self._guests.clear()
        self._selector.close()
        self._listener.close()

    def _admit(self) -> None:
        try:
            came, address = self._listener.accept()
        except OSError as error:
            # It has gone already, or there are no descriptors: then the oldest makes room.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                words = f"rank {self._party.rank} cannot let in who comes: {error}; raise ulimit -n"
                self._notes.add(words, uninvited=True)
            if self._guests:
                self._dismiss(next(iter(self._guests.values())), "too many came at once")
            time.sleep(0.01)
            return
        came.setblocking(False)
        until = time.monotonic() + PATIENCE_S
        guest = _Guest(came, plain(address[0]), hello(self._party), until, bytearray())
        if len(self._guests) >= MAX_GUESTS:
            self._dismiss(next(iter(self._guests.values())), "too many came at once")
        self._guests[came] = guest
        self._selector.register(came, selectors.EVENT_READ, guest)
        try:
            came.send(guest.hello)
        except OSError:
            self._dismiss(guest, "")

    def _hear(self, guest: _Guest) -> None:
        try:
            wanted = claim_bytes(guest.came) - len(guest.came)
            data = guest.socket.recv(wanted)
            guest.came += data
            if not data:
                raise Unwelcome("it left without proving itself")  # noqa: TRY301
            if claim_bytes(guest.came) > len(guest.came):
                return
            answer, claim = check_claim(self._party, guest.hello, bytes(guest.came))
            if claim.rank not in self._awaited:
                raise Unwelcome(f"rank {claim.rank}, not awaited,", Reply.NOT_AWAITED)  # noqa: TRY301
            if claim.rank in self.links:
                raise Unwelcome(f"rank {claim.rank} a second time", Reply.HERE_ALREADY)  # noqa: TRY301
            guest.socket.send(answer)
        except BlockingIOError:
            return
        except OSError as error:
            self._dismiss(guest, str(error))
        except Unwelcome as error:
            if error.reply is None:
                self._dismiss(guest, str(error))
                return
            with suppress(OSError):
                guest.socket.send(refusal(error.reply))
            self._dismiss(guest, "")
            self._notes.add(f"{error} came from {guest.host}", uninvited=True)
        else:
            del self._guests[guest.socket]
            self.links[claim.rank] = Link(guest.socket, claim.keys, guest.host, claim.port)
            self._selector.modify(guest.socket, selectors.EVENT_READ, claim.rank)

    def _look_after(self, rank: int) -> None:
        """Forget a rank that has gone again; what it may say already is for later."""
        link = self.links[rank]
        self._selector.unregister(link.socket)
        if has_ended(link.socket):
            link.socket.close()
            del self.links[rank]
            self._notes.add(f"rank {rank} came from {link.host}, and went before the others came")

    def _dismiss(self, guest: _Guest, words: str) -> None:
        del self._guests[guest.socket]
        self._selector.unregister(guest.socket)
        guest.socket.close()
        if words:
            self._notes.add(f"a stranger came from {guest.host}: {words}", uninvited=True)


def has_ended(link: socket.socket) -> bool:
    """Whether the other side of one that does not block has gone, and all it said is read."""
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def plain(host: str) -> str:
    """Give an address without the form that IPv6 sockets have for IPv4."""
    return host.removeprefix("::ffff:")


def listen(host: str, port: int, *, is_local: bool) -> socket.socket:
    """Listen at a port, 0 for any, on this machine's loopback alone or on all its addresses.

    Raises
    ------
    OSError
    """
    # Twice as many as ranks, and strangers beside them.
    backlog = 512
    if is_local:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = "127.0.0.1" if host == "localhost" else host
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)
