"""Global and shared memory under the PTX model: who may read which write.

A write belongs to an *event*, the writes of one thread between two of its releases, and a *view*
is the set of events that a thread (or a released message) knows, one bit each. A load may give
any write that is not older, in coherence order, than the newest one known. A store may come, in
coherence order, before writes that its thread does not know. Fences, barriers and kernel
boundaries move views. `docs/protocol.md` says where this allows more or less than PTX.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.arena import DEPTH, Fault
from tests.ptx.reads import Reads
from tests.ptx.views import SCOPES, Access, Choice, Message, Thread, union

_RELEASES = {"release", "acq_rel"}
_WHOLE = 0xF


class Memory(Reads):
    """All memory of all ranks.

    Parameters
    ----------
    seed : int
    choice : Choice
    ranks : int

    Attributes
    ----------
    changes : int
        Stores that gave a word another value: what a machine that only polls does not make.
    """

    def __init__(self, seed: int, choice: Choice, ranks: int) -> None:
        super().__init__(seed, choice, ranks)
        self.changes = 0
        self._num_events = 0
        self._num_writes = 0
        self._sc: dict[tuple[str, int], int] = {}

    def settle(self) -> None:
        """Make every write known to everybody: no kernel runs and the host has waited for all."""
        super().settle()
        self._num_events = 0
        self.messages = [None]
        self._sc.clear()

    # What threads do. `pool` has the threads, `select` says which.

    def load(
        self,
        pool: Any,
        select: Any,
        addr: Any,
        words: int,
        order: str,
        scope: str,
        whole: bool,
        guard: Any,
    ) -> list[Any]:
        """Give `words` arrays; lanes without `guard` touch nothing and get zeros.

        `whole`: all words in one access, else each in its own. An `order` of "nc" is weak, and no
        other thread may have written the words meanwhile.
        """
        access = Access.of("weak" if order == "nc" else order, scope, 4 * words if whole else 4)
        lanes = pool.lanes(select)
        if guard is not None and not guard.all():
            found = np.zeros((words, len(guard)), np.uint32)
            if guard.any():
                one = self._load(pool, lanes[guard], addr[guard], words, order, access)
                found[:, guard] = one
            return list(found)
        return list(self._load(pool, lanes, addr, words, order, access))

    def store(
        self,
        pool: Any,
        select: Any,
        addr: Any,
        values: list[Any],
        width: int,
        order: str,
        scope: str,
        whole: bool,
    ) -> None:
        """Store words, or the low bytes of one word where `width` is below 4.

        `whole`: all words in one access, else each in its own.
        """
        access = Access.of(order, scope, width if whole else 4)
        lanes = pool.lanes(select)
        at = self.slots(self.words(pool.rank[lanes], addr, width))
        data = np.empty(at.shape, np.uint32)
        for word, value in enumerate(values):
            data[:, word] = value
        threads = [pool.threads[lane] for lane in lanes.tolist()]
        if width < 4 or (len(threads) > 1 and len(np.unique(at)) < at.size):
            for nth, thread in enumerate(threads):
                one = slice(nth, nth + 1)
                offset = int(addr[nth]) & 3 if width < 4 else 0
                self._store([thread], at[one], data[one], offset, order, access)
        else:
            self._store(threads, at, data, 0, order, access)

    def atomic(
        self,
        pool: Any,
        select: Any,
        addr: Any,
        how: str,
        value: Any,
        order: str,
        scope: str,
        *,
        reads: bool = True,
    ) -> Any:
        """Read a word and write the next in one step; gives what was read.

        Without `reads` it is a reduction: what it read is acquired by nothing.
        """
        access = Access.of(order, scope, 4)
        lanes = pool.lanes(select)
        at = self.slots(self.words(pool.rank[lanes], addr, 4))
        operands = np.broadcast_to(value, len(lanes)).tolist()
        found = np.zeros(len(lanes), np.uint32)
        for nth, lane in enumerate(lanes.tolist()):
            thread, slot = pool.threads[lane], int(at[nth, 0])
            last, place = self._places_of_atomic(thread, slot, access)
            old, operand = int(self.value[slot, last]), operands[nth]
            new = {
                "inc": 0 if old >= operand else old + 1,
                "add": (old + operand) & 0xFFFFFFFF,
                "exch": operand,
                "or": old | operand,
            }[how]
            read = self.messages[self.message[slot, last]]
            if reads:
                self._acquire(thread, read, order, access)
            sent = self._message(thread, order, access, read, is_atomic=True)
            one = at[nth : nth + 1]
            count = int(self.count[slot])
            numbers = self._write([thread], one, np.array([[new]], np.uint32), [sent], _WHOLE, True)
            thread.floors[slot] = int(numbers[0, 0])
            self._move(slot, place, count)
            found[nth] = old
        return found

    def _places_of_atomic(self, thread: Thread, slot: int, access: Access) -> tuple[int, int]:
        """Index of the write that an atomic reads, and the place of its own.

        No morally strong write comes between the two.
        """
        count = int(self.count[slot])
        if self.choice is Choice.NEWEST:
            return count - 1, count
        place = self._place(thread, slot, access)
        floor = min(self._floor(thread, slot), place - 1)
        for index in range(floor + 1, place):
            if thread.meets(self.messages[self.message[slot, index]], access):
                floor = index
        return self._pick(floor, place, False), place

    def fence(self, pool: Any, select: Any, kind: str, scope: str) -> None:
        """`fence.acq_rel` or `fence.sc`."""
        level = SCOPES[scope]
        for lane in pool.lanes(select).tolist():
            thread = pool.threads[lane]
            for distance in range(level + 1):
                thread.view |= thread.pending[distance]
            view = thread.close()
            if kind == "sc":
                domains = [("cta", thread.place[0]), ("gpu", thread.place[1]), ("sys", 0)]
                for domain in domains[: level + 1]:
                    view |= self._sc.get(domain, 0)
                for domain in domains[: level + 1]:
                    self._sc[domain] = self._sc.get(domain, 0) | view
                thread.view = view
            for distance in range(level + 1):
                thread.released[distance] = view

    def join(self, pool: Any, select: Any, group: int) -> None:
        """A barrier of each `group` of threads: all know what one of them knew or did."""
        lanes = pool.lanes(select).tolist()
        for start in range(0, len(lanes), group):
            threads = [pool.threads[lane] for lane in lanes[start : start + group]]
            view = union(thread.close() for thread in threads)
            for thread in threads:
                thread.view = view

    def _load(
        self, pool: Any, lanes: Any, addr: Any, words: int, order: str, access: Access
    ) -> Any:
        """`[words, lanes]`."""
        at = self.words(pool.rank[lanes], addr, 4 * words)
        slots = self.slot[at]
        found = self.base[at]
        if not slots.any():
            return found.T
        last = self.count[slots] - 1
        found = np.where(slots == 0, found, self.value[slots, last])
        if self.choice is not Choice.NEWEST:
            unsettled = np.flatnonzero((self.event[slots, last] != 0).any(axis=1))
            for nth in unsettled.tolist():
                thread, row = pool.threads[lanes[nth]], slots[nth].tolist()
                if order == "nc" and any(
                    self._floor(thread, slot) < self.count[slot] - 1 for slot in row
                ):
                    raise Fault(f"ld.nc at {int(addr[nth]):#x}: another thread has written there")
                for word, (index, value) in enumerate(self._choose(thread, row, access)):
                    if slots[nth, word]:
                        last[nth, word] = index
                        found[nth, word] = value
        if access.level is not None:
            message = self.message[slots, last]
            for nth, word in zip(*np.nonzero(message), strict=True):
                sent = self.messages[message[nth, word]]
                self._acquire(pool.threads[lanes[nth]], sent, order, access)
        return found.T

    def write(self, addr: int, data: Any) -> int:
        """Store bytes; gives the event that they are."""
        words = np.ascontiguousarray(data).reshape(-1).view(np.uint32)
        at = self.slots(self.word_range(addr, 4 * words.size))
        self._num_writes += 1
        self.changes += 1
        event = self._new_event()
        self.append(at, words, event, self._num_writes, 0)
        return event

    # Stores.

    def _message(
        self,
        thread: Thread,
        order: str,
        access: Access,
        read: Message | None = None,
        *,
        is_atomic: bool = False,
    ) -> int:
        """Number of the message that a strong write of `thread` carries."""
        level = access.level
        assert level is not None
        views, event = list(thread.released), self._new_event()
        if order in _RELEASES:
            views[: level + 1] = [thread.close() | 1 << event] * (level + 1)
        if read is not None and thread.meets(read, access):
            # An atomic passes on what the write it read had released.
            apart = thread.distance(read.place)
            for distance in range(3):
                views[distance] |= read.views[max(distance, apart)]
        known = (views[0], views[1], views[2])
        self.messages.append(Message(thread.place, level, event, known, is_atomic, access.width))
        return len(self.messages) - 1

    def _store(
        self, threads: list[Thread], at: Any, data: Any, offset: int, order: str, access: Access
    ) -> None:
        mask, width = _WHOLE, access.width
        if width < 4:
            mask = ((1 << width) - 1) << offset
            old = self.value[at[:, 0], self.count[at[:, 0]] - 1]
            keep = np.uint32(sum(0xFF << 8 * byte for byte in range(4) if not mask >> byte & 1))
            data = (old & keep | (data[:, 0] << np.uint32(8 * offset)) & ~keep)[:, None]
            self.is_partial[at] = True
        sent = None
        if access.level is not None:
            sent = [self._message(thread, order, access) for thread in threads]
        early = []
        if self.choice is not Choice.NEWEST:
            early = self._early(threads, at, access, mask)
        numbers = self._write(threads, at, data, sent, mask, width != 4 or at.shape[1] == 1)
        for slot, place, count in early:
            self._move(slot, place, count)
        for nth, thread in enumerate(threads):
            if access.level is not None:
                for word, slot in enumerate(at[nth].tolist()):
                    thread.floors[slot] = int(numbers[nth, word])

    def _write(
        self,
        threads: list[Thread],
        at: Any,
        data: Any,
        sent: list[int] | None,
        mask: int,
        whole: bool,
    ) -> Any:
        """Append a store of each thread; gives the numbers, by word where they may tear."""
        events = []
        for nth, thread in enumerate(threads):
            if sent is None:
                thread.event = thread.event or self._new_event()
                events.append(thread.event)
            else:
                message = self.messages[sent[nth]]
                assert message is not None
                thread.view |= 1 << message.event
                events.append(message.event)
        size = len(threads) if whole else at.size
        numbers = self._num_writes + 1 + np.arange(size).reshape(len(threads), -1)
        numbers = np.broadcast_to(numbers, at.shape)
        self._num_writes += size
        self.changes += bool((self.value[at, self.count[at] - 1] != data).any())
        carried = 0 if sent is None else np.array(sent)[:, None]
        self.append(at, data, np.array(events)[:, None], numbers, carried, mask)
        return numbers

    def _early(
        self, threads: list[Thread], at: Any, access: Access, mask: int
    ) -> list[tuple[int, int, int]]:
        """(slot, place, number of writes so far) of stores that come before unknown writes."""
        unsettled = (self.event[at, self.count[at] - 1] != 0).any(axis=1)
        early: list[tuple[int, int, int]] = []
        for nth in np.flatnonzero(unsettled).tolist():
            slots = at[nth].tolist()
            places = [self._place(threads[nth], slot, access, mask) for slot in slots]
            if access.width > 4:
                self._align(threads[nth], slots, places, access)
            for slot, place in zip(slots, places, strict=True):
                count = int(self.count[slot])
                if place < count:
                    early.append((slot, place, count))
        return early

    def _place(self, thread: Thread, slot: int, access: Access, mask: int = _WHOLE) -> int:
        """How many writes of the slot come before one that is about to be appended."""
        count = int(self.count[slot])
        event = int(self.event[slot, count - 1])
        if event in {0, thread.event} or thread.view >> event & 1:
            return count
        place = 1 + max(
            self._floor(thread, slot, 1 << byte)
            for byte in (range(4) if self.is_partial[slot] else (0,))
            if mask >> byte & 1
        )
        if self.choice is Choice.RANDOM:
            place = self.random.randrange(place, count + 1)
        elif self.random.randrange(2):
            place = count
        # Where there is no room the oldest write falls off; one stays before this one.
        place = max(place, 1 + (count == DEPTH))
        # Nothing morally strong comes between an atomic's read and its write.
        while place < count and self._follows(thread, slot, place, access):
            place += 1
        return place

    def _move(self, slot: int, place: int, count: int) -> None:
        """Put the write just appended at `place` of the `count` writes that there were."""
        if place < count:
            self.move_last(slot, place - (count == DEPTH))

    def _follows(self, thread: Thread, slot: int, index: int, access: Access) -> bool:
        sent = self.messages[self.message[slot, index]]
        return sent is not None and sent.is_atomic and thread.meets(sent, access)

    def _align(self, thread: Thread, slots: list[int], places: list[int], access: Access) -> None:
        """Move places on until all words come before, or all after, each morally strong write."""
        moved = True
        while moved:
            moved = False
            before = {
                int(self.number[slot, index])
                for slot, place in zip(slots, places, strict=True)
                for index in range(place)
                if thread.meets(self.messages[self.message[slot, index]], access)
            }
            for word, slot in enumerate(slots):
                for index in range(places[word], int(self.count[slot])):
                    if int(self.number[slot, index]) in before:
                        places[word] = index + 1
                        moved = True

    def _new_event(self) -> int:
        self._num_events += 1
        return self._num_events
