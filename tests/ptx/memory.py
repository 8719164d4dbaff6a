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

from tests.ptx.arena import DEPTH
from tests.ptx.reads import Reads
from tests.ptx.views import SCOPES, Choice, Message, Thread, union

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

        `whole`: all words in one single-copy access.
        """
        lanes = pool.lanes(select)
        if guard is not None and not guard.all():
            found = np.zeros((words, len(guard)), np.uint32)
            if guard.any():
                one = self._load(pool, lanes[guard], addr[guard], words, order, scope, whole)
                found[:, guard] = one
            return list(found)
        return list(self._load(pool, lanes, addr, words, order, scope, whole))

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
        """Store words, or the low bytes of one word where `width` is below 4."""
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
                self._store([thread], at[one], data[one], width, offset, order, scope, whole)
        else:
            self._store(threads, at, data, 4, 0, order, scope, whole)

    def atomic(
        self, pool: Any, select: Any, addr: Any, how: str, value: Any, order: str, scope: str
    ) -> Any:
        """Read the newest word and write the next in one step; gives what was read."""
        lanes = pool.lanes(select)
        at = self.slots(self.words(pool.rank[lanes], addr, 4))
        operands = np.broadcast_to(value, len(lanes)).tolist()
        found = np.zeros(len(lanes), np.uint32)
        for nth, lane in enumerate(lanes.tolist()):
            thread, slot = pool.threads[lane], int(at[nth, 0])
            last = self._newest_for_atomic(thread, slot, SCOPES[scope])
            old, operand = int(self.value[slot, last]), operands[nth]
            new = {
                "inc": 0 if old >= operand else old + 1,
                "add": (old + operand) & 0xFFFFFFFF,
                "exch": operand,
            }[how]
            read = self.messages[self.message[slot, last]]
            level = SCOPES[scope]
            if read is not None:
                self._acquire(thread, read, order, level)
            sent = self._message(thread, order, level, read, is_atomic=True)
            self._write(
                [thread], at[nth : nth + 1], np.array([[new]], np.uint32), [sent], _WHOLE, True
            )
            found[nth] = old
        return found

    def _newest_for_atomic(self, thread: Thread, slot: int, level: int) -> int:
        """Index of the write that an atomic reads: the newest, but for writers out of its scope."""
        count = int(self.count[slot])
        sent = self.messages[self.message[slot, count - 1]]
        if self.choice is Choice.NEWEST or (
            sent is not None and thread.distance(sent.place) <= min(level, sent.scope)
        ):
            return count - 1
        return self._pick(self._floor(thread, slot, True), count, False)

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
        self, pool: Any, lanes: Any, addr: Any, words: int, order: str, scope: str, whole: bool
    ) -> Any:
        """`[words, lanes]`."""
        at = self.words(pool.rank[lanes], addr, 4 * words)
        slots = self.slot[at]
        found = self.base[at]
        if not slots.any():
            return found.T
        last = self.count[slots] - 1
        found = np.where(slots == 0, found, self.value[slots, last])
        is_strong = order != "weak"
        if self.choice is not Choice.NEWEST:
            unsettled = np.flatnonzero((self.event[slots, last] != 0).any(axis=1))
            for nth in unsettled.tolist():
                thread = pool.threads[lanes[nth]]
                chosen = self._choose(thread, slots[nth].tolist(), is_strong, whole and words > 1)
                for word, (index, value) in enumerate(chosen):
                    if slots[nth, word]:
                        last[nth, word] = index
                        found[nth, word] = value
        if is_strong:
            message = self.message[slots, last]
            for nth, word in zip(*np.nonzero(message), strict=True):
                sent = self.messages[message[nth, word]]
                assert sent is not None
                self._acquire(pool.threads[lanes[nth]], sent, order, SCOPES[scope])
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
        level: int,
        read: Message | None = None,
        *,
        is_atomic: bool = False,
    ) -> int:
        """Number of the message that a strong write of `thread` carries."""
        views, event = list(thread.released), self._new_event()
        if order in _RELEASES:
            views[: level + 1] = [thread.close() | 1 << event] * (level + 1)
        if read is not None:
            # An atomic passes on what the write it read had released.
            apart = thread.distance(read.place)
            if apart <= min(level, read.scope):
                for distance in range(3):
                    views[distance] |= read.views[max(distance, apart)]
        sent = Message(thread.place, level, event, (views[0], views[1], views[2]), is_atomic)
        self.messages.append(sent)
        return len(self.messages) - 1

    def _store(
        self,
        threads: list[Thread],
        at: Any,
        data: Any,
        width: int,
        offset: int,
        order: str,
        scope: str,
        whole: bool,
    ) -> None:
        mask, is_strong = _WHOLE, order != "weak"
        if width < 4:
            mask = ((1 << width) - 1) << offset
            old = self.value[at[:, 0], self.count[at[:, 0]] - 1]
            keep = np.uint32(sum(0xFF << 8 * byte for byte in range(4) if not mask >> byte & 1))
            data = (old & keep | (data[:, 0] << np.uint32(8 * offset)) & ~keep)[:, None]
            self.is_partial[at] = True
        sent = None
        if is_strong:
            sent = [self._message(thread, order, SCOPES[scope]) for thread in threads]
        early = []
        if self.choice is not Choice.NEWEST and not (whole and at.shape[1] > 1):
            early = self._early(threads, at, is_strong, mask)
        numbers = self._write(threads, at, data, sent, mask, whole)
        for slot, index in early:
            self.move_last(slot, index)
        for nth, thread in enumerate(threads):
            if is_strong:
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
        self, threads: list[Thread], at: Any, is_strong: bool, mask: int
    ) -> list[tuple[int, int]]:
        """(slot, index) of stores that come before writes which their threads do not know."""
        newest = self.event[at, self.count[at] - 1]
        early = []
        for nth, word in zip(*np.nonzero(newest), strict=True):
            thread, slot, event = threads[nth], int(at[nth, word]), int(newest[nth, word])
            if event == thread.event or thread.view >> event & 1:
                continue
            count = int(self.count[slot])
            index = 1 + max(
                self._floor(thread, slot, is_strong, 1 << byte)
                for byte in (range(4) if self.is_partial[slot] else (0,))
                if mask >> byte & 1
            )
            if self.choice is Choice.RANDOM:
                index = self.random.randrange(index, count + 1)
            elif self.random.randrange(2):
                index = count
            # Nothing comes between an atomic's read and its write.
            while index < count and self._is_atomic(slot, index):
                index += 1
            if index < count:
                # The oldest write falls off where there is no room.
                early.append((slot, max(index - (count == DEPTH), 1)))
        return early

    def _is_atomic(self, slot: int, index: int) -> bool:
        sent = self.messages[self.message[slot, index]]
        return sent is not None and sent.is_atomic

    def _new_event(self) -> int:
        self._num_events += 1
        return self._num_events
