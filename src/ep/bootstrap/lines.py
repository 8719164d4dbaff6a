"""The thread that reads and writes all connections of a rank.

It alone touches the sockets, so that nothing which interrupts the user's thread, a signal's handler
say, can leave half a frame behind.
"""

from __future__ import annotations

import collections
import logging
import selectors
import socket
import threading
import weakref
from contextlib import suppress
from os import register_at_fork
from typing import TYPE_CHECKING

from ep.bootstrap.frames import BadFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ep.bootstrap.door import Link
    from ep.bootstrap.frames import Frame, Kind

logger = logging.getLogger(__name__)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Lines:
    """Connections that are read and written at any time.

    Parameters
    ----------
    links : dict of int to Link
        Of each other rank.
    changed : threading.Condition
        Held while `hear` and `lose` are called, and notified after that, and when all is sent.
    hear : callable
        Called with the rank and each frame of it, in order.
    lose : callable
        Called with a rank once its connection has ended, after its last frame.
    """

    def __init__(
        self,
        links: dict[int, Link],
        changed: threading.Condition,
        hear: Callable[[int, Frame], None],
        lose: Callable[[int], None],
    ) -> None:
        self._links = dict(links)
        self._changed = changed
        self._hear, self._lose = hear, lose
        self._queues: dict[int, collections.deque[tuple[Kind, int, bytes]]] = {
            rank: collections.deque() for rank in links
        }
        # Sealed, and not yet taken by the system.
        self._left: dict[int, memoryview] = dict.fromkeys(links, memoryview(b""))
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, READ)
        for rank, link in self._links.items():
            self._selector.register(link.socket, READ, rank)
        _open.add(self)
        threading.Thread(target=self._run, name="ep-lines", daemon=True).start()

    def send(self, ranks: Iterable[int], kind: Kind, number: int, payload: bytes) -> None:
        """Have a frame sent to `ranks`, those that are lost left out. Never blocks. Local."""
        for rank in ranks:
            if rank in self._links:
                self._queues[rank].append((kind, number, payload))
        with suppress(OSError):
            # Full: then it rings already.
            self._ringer.send(b"\0")

    def unsent(self, ranks: Iterable[int]) -> list[int]:
        """Give those of `ranks` to which something is still to be sent. Local."""
        return [rank for rank in ranks if rank in self._links and self._queues[rank]]

    def drop(self) -> None:
        """Close this process's descriptors, as a forked child must: the parent's stay open."""
        for link in self._links.values():
            link.socket.close()
        for end in (self._bell, self._ringer):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        for rank in list(self._links):
            # What came with the last words of the meeting.
            self._try(rank, self._take)
        while True:
            for key, events in self._selector.select():
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._bell.recv(4096)
                    for rank in list(self._links):
                        self._try(rank, self._write)
                elif events & READ:
                    self._try(key.data, self._read)
                if key.data is not None and events & WRITE:
                    self._try(key.data, self._write)

    def _try(self, rank: int, function: Callable[[int], None]) -> None:
        """Do what may end the connection of `rank`."""
        if rank not in self._links:
            return
        try:
            function(rank)
        except BadFrame:
            logger.error("rank %d's connection carries what it did not send; it is cut", rank)  # noqa: TRY400 - no bug here
        except OSError as error:
            logger.debug("rank %d's connection ended: %s", rank, error)
        else:
            return
        self._selector.unregister(self._links[rank].socket)
        with self._changed:
            self._links.pop(rank).socket.close()
            self._queues[rank].clear()
            self._lose(rank)
            self._changed.notify_all()

    def _read(self, rank: int) -> None:
        data = b""
        with suppress(BlockingIOError):
            data = self._links[rank].socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("closed")
        self._links[rank].keys.opener.feed(data)
        self._take(rank)

    def _take(self, rank: int) -> None:
        opener = self._links[rank].keys.opener
        while (frame := opener.next()) is not None:
            with self._changed:
                self._hear(rank, frame)
                self._changed.notify_all()

    def _write(self, rank: int) -> None:
        link, queue = self._links[rank], self._queues[rank]
        if not queue:
            return
        try:
            while queue:
                if not self._left[rank]:
                    self._left[rank] = memoryview(link.keys.sealer.seal(*queue[0]))
                while self._left[rank]:
                    sent = link.socket.send(self._left[rank])
                    self._left[rank] = self._left[rank][sent:]
                # Only now: what is in the queue is unsent.
                queue.popleft()
        except BlockingIOError:
            self._selector.modify(link.socket, READ | WRITE, rank)
            return
        self._selector.modify(link.socket, READ, rank)
        with self._changed:
            self._changed.notify_all()


_open: weakref.WeakSet[Lines] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A child that held them open would hide the death of its parent from the other ranks.
    for lines in list(_open):
        lines.drop()


register_at_fork(after_in_child=_drop_in_child)
