"""How ranks find each other over TCP: they meet at rank 0, then each connects to each.

Rank 0 awaits all, tells them where everyone listens, and a key that this meeting alone has. A full
mesh costs N - 1 connections a rank, and makes every death known to all, that of rank 0 too.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ep.bootstrap.dial import Names, connect, receive
from ep.bootstrap.door import Door, Link, Notes, has_ended, listen, plain
from ep.bootstrap.frames import BadFrame, Frame, Kind
from ep.bootstrap.greeting import ANSWER, HELLO, Party, Unwelcome, check_answer, claim
from ep.bootstrap.proof import KEY_BYTES, SharedSecret
from ep.errors import BootstrapError, EpTimeout, name_ranks

if TYPE_CHECKING:
    from ep.bootstrap.address import Rendezvous
    from ep.bootstrap.dial import Address
    from ep.bootstrap.proof import Authenticator

logger = logging.getLogger(__name__)

START_UP = "TCP start-up"
LEAST_KNOCK_S, MOST_KNOCK_S = 3.0, 15.0
"""Bounds of one greeting, from the first try to later ones: a host may be busy, or no rank."""
TELL_EVERY_S = 0.5
LEAVE_S = 1.0
"""That others wait for rank 0's last word longer than it waits: who leaves first is missing."""


class Meeting:
    """One rank's way into the mesh.

    Parameters
    ----------
    rank, size : int
    rendezvous : Rendezvous
    authenticator : Authenticator
    timeout_s : float
        Bound of all of it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        authenticator: Authenticator,
        timeout_s: float,
    ) -> None:
        self._place = rendezvous
        self._party = Party(rank, size, rendezvous.job, authenticator)
        self._timeout_s = timeout_s
        self._start = time.monotonic()
        self._notes = Notes()
        self._names = Names()

    def meet(self) -> dict[int, Link]:
        """Give a connection to every other rank. Collective.

        Raises
        ------
        EpTimeout
            Naming the ranks that did not come, and what came instead.
        BootstrapError
            On rank 0, if it cannot listen.
        OSError
            If there are no sockets to be had.
        """
        links: dict[int, Link] = {}
        try:
            self._await_all(links) if self._party.rank == 0 else self._join(links)
        except BaseException:
            for link in links.values():
                link.socket.close()
            raise
        for link in links.values():
            make_lasting(link.socket)
        return links

    def _left_s(self) -> float:
        return self._start + self._timeout_s - time.monotonic()

    def _timeout(self, missing: list[int], gone: dict[int, str] | None = None) -> EpTimeout:
        waited_s = min(self._timeout_s, time.monotonic() - self._start)
        notes = [f"they meet at {self._place}", *self._notes.last()]
        nodes: dict[str, list[int]] = {}
        for rank in missing if self._place.nodes else ():
            nodes.setdefault(self._place.nodes[rank], []).append(rank)
        notes += [f"Slurm has {name_ranks(ranks)} on node {node}" for node, ranks in nodes.items()]
        return EpTimeout(START_UP, 0, self._party.rank, tuple(missing), (), waited_s, gone, notes)

    # Rank 0.

    def _await_all(self, links: dict[int, Link]) -> None:
        others = set(range(1, self._party.size))
        door = Door(self._listen(), self._party, others, self._notes)
        # Also those that come while this fails.
        door.links = links
        told_at, told = 0.0, list[int]()
        try:
            while (absent := door.absent()) and self._left_s() > 0:
                if absent != told and time.monotonic() > told_at + TELL_EVERY_S:
                    self._tell(links, Kind.WAITING, absent)
                    told_at, told = time.monotonic(), absent
                door.attend(min(self._left_s(), TELL_EVERY_S))
        finally:
            door.close()
        if absent:
            self._tell(links, Kind.GIVEN_UP, absent)
            raise self._timeout(absent)
        key = secrets.token_bytes(KEY_BYTES)
        # One on this very machine is where the others find rank 0.
        doors = [[_unless_loopback(links[rank].host), links[rank].port] for rank in sorted(others)]
        for rank, link in links.items():
            words = {"key": _hide(key, link).hex(), "doors": doors}
            frame = link.keys.sealer.seal(Kind.DOORS, 0, json.dumps(words).encode())
            link.socket.settimeout(max(self._left_s(), 0.1))
            try:
                link.socket.sendall(frame)
            except OSError as error:
                self._notes.add(f"rank {rank} came, and went before it was told of the others")
                raise self._timeout([rank]) from error

    def _listen(self) -> socket.socket:
        """Take the first port that is free, and wait for one where none is."""
        while True:
            problems: list[OSError] = []
            for port in self._place.ports:
                try:
                    return listen(self._place.host, port, is_local=self._place.is_local)
                except OSError as error:
                    problems.append(error)
            if problems[-1].errno != errno.EADDRINUSE or self._left_s() <= 0:
                raise BootstrapError(
                    f"rank 0 cannot listen at {self._place}: {problems[-1]}; choose other ports "
                    "by EP_RENDEZVOUS=host:port, or end what listens there"
                ) from problems[-1]
            time.sleep(min(0.1, max(self._left_s(), 0)))

    def _tell(self, links: dict[int, Link], kind: Kind, absent: list[int]) -> None:
        for link in links.values():
            # It fits where nothing else was said; a rank that has gone again is seen elsewhere.
            with suppress(OSError):
                link.socket.send(link.keys.sealer.seal(kind, 0, json.dumps(absent).encode()))

    # All others.

    def _join(self, links: dict[int, Link]) -> None:
        with listen(self._place.host, 0, is_local=self._place.is_local) as listener:
            self._party = self._party._replace(port=listener.getsockname()[1])
            missing, doors = [0], None
            for knock_s in self._knocks():
                for port in self._place.ports:
                    link = self._knock(0, self._party, self._place.host, port, knock_s)
                    if link is None:
                        continue
                    links[0] = link
                    doors, missing = self._hear_of_all(link, missing)
                    if doors is not None:
                        break
                    del links[0]
                    link.socket.close()
                if doors is not None:
                    break
            if doors is None:
                raise self._timeout(missing)
            self._build(listener, links, doors)

    def _knocks(self) -> Any:
        """Give the bound of each try, with pauses in between, until the time is up."""
        knock_s, pause_s = LEAST_KNOCK_S, 0.01
        while self._left_s() > 0:
            yield knock_s
            time.sleep(max(min(pause_s, self._left_s()), 0))
            knock_s, pause_s = min(knock_s * 1.5, MOST_KNOCK_S), min(pause_s * 1.5, 0.25)

    def _knock(self, rank: int, party: Party, host: str, port: int, knock_s: float) -> Link | None:
        """Connect to `rank` and make sure of it; None, and a note, where that fails."""
        until = time.monotonic() + min(knock_s, max(self._left_s(), 0.1))
        where = f"{host}:{port}"
        try:
            # At one address a stranger may listen, or nobody answer.
            for address, its_end in self._names.dial(host, port, until):
                link = self._greet(rank, party, address, where, its_end)
                if link is not None:
                    return link
        except OSError as error:
            self._notes.add(f"{where}: {error}")
        return None

    def _greet(
        self, rank: int, party: Party, address: Address, where: str, until: float
    ) -> Link | None:
        """As `_knock`, at one address of its host."""
        try:
            came = connect(address, until)
        except OSError as error:
            # Nobody listens yet: that says nothing.
            if not isinstance(error, ConnectionRefusedError):
                self._notes.add(f"{where}: {error}")
            return None
        link = None
        try:
            said = receive(came, HELLO.size, until)
            words, key, bound = claim(party, rank, said)
            came.sendall(words)
            keys = check_answer(party, key, bound, receive(came, ANSWER.size, until))
            name, port, *_ = came.getpeername()
            link = Link(came, keys, plain(name), port)
        except TimeoutError:
            self._notes.add(f"{where}: what listens there did not greet in time")
        except OSError as error:
            # A door that has just closed, of a meeting before this one.
            logger.debug("%s: %s", where, error)
        except Unwelcome as error:
            self._notes.add(f"{where}: {error}")
        finally:
            if link is None:
                came.close()
        return link

    def _hear_of_all(
        self, link: Link, missing: list[int]
    ) -> tuple[dict[str, Any] | None, list[int]]:
        """Wait until rank 0 has met all; None where it is lost before."""
        while self._left_s() + LEAVE_S > 0:
            try:
                frame = self._next_frame(link)
            except TimeoutError:
                break
            except OSError:
                self._notes.add("rank 0 was there, and went before all had come")
                return None, [0]
            except BadFrame:
                self._notes.add("what came for rank 0 was not its own; the connection was cut")
                return None, [0]
            told = json.loads(frame.payload)
            if frame.kind is Kind.DOORS:
                return told, missing
            missing = [*map(int, told)]
            if frame.kind is Kind.GIVEN_UP:
                raise self._timeout(missing)
        # Rank 0 has begun to wait later, and may have more time.
        raise self._timeout(missing)

    def _next_frame(self, link: Link) -> Frame:
        while (frame := link.keys.opener.next()) is None:
            left_s = self._left_s() + LEAVE_S
            # Of a frame that comes byte by byte, too.
            if left_s <= 0:
                raise TimeoutError
            link.socket.settimeout(left_s)
            data = link.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            link.keys.opener.feed(data)
        return frame

    def _build(self, listener: socket.socket, links: dict[int, Link], told: dict[str, Any]) -> None:
        """Connect to the ranks below, and let those above in."""
        me = self._party
        key = _hide(bytes.fromhex(told["key"]), links[0])
        party = me._replace(authenticator=SharedSecret(key, "this meeting's key"))
        above = Door(listener, party, set(range(me.rank + 1, me.size)), self._notes)
        stop = threading.Event()
        # Without rank 0 there is no mesh, and nobody tells those that it has not told.
        first = links[0].socket
        first.setblocking(False)

        def attend() -> None:
            while above.absent() and self._left_s() > 0 and not stop.is_set():
                above.attend(min(self._left_s(), 0.05))

        helper = threading.Thread(target=attend, name="ep-door", daemon=True)
        helper.start()
        try:
            missing = self._reach(party, told["doors"], links)
            while helper.is_alive() and not missing and not has_ended(first):
                helper.join(0.1)
        finally:
            stop.set()
            helper.join()
            links |= above.links
            above.close()
        missing += above.absent()
        if missing:
            raise self._timeout(missing, {0: ""} if has_ended(first) else None)

    def _reach(self, party: Party, doors: list[Any], links: dict[int, Link]) -> list[int]:
        """Connect to the ranks below but 0, and give those that cannot be had."""
        # From the nearest, so that not all begin with the same.
        missing = list(range(party.rank - 1, 0, -1))
        for knock_s in self._knocks() if missing else ():
            for rank in missing:
                host, port = doors[rank - 1]
                link = self._knock(rank, party, host or links[0].host, port, knock_s)
                if link is not None:
                    links[rank] = link
            missing = [rank for rank in missing if rank not in links]
            if not missing or has_ended(links[0].socket):
                break
        return sorted(missing)


def make_lasting(link: socket.socket) -> None:
    """Have small messages go at once, and a machine that is gone be noticed."""
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hide(key: bytes, link: Link) -> bytes:
    """Hide a key, or show it again: who only listens shall not have it."""
    return bytes(one ^ other for one, other in zip(key, link.keys.pad, strict=True))


def _unless_loopback(host: str) -> str:
    return "" if ipaddress.ip_address(host.partition("%")[0]).is_loopback else host
