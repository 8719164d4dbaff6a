"""Which of a word's writes a load may give."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tests.ptx.arena import Arena
from tests.ptx.views import SCOPES, Choice, Message, Thread

FRESH_IN = 4
"""Of the strong loads that could be stale, one in so many is not: polls must end."""
_ACQUIRES = {"acquire", "acq_rel"}
_WHOLE = 0xF


class Reads(Arena):
    """Words as threads may find them.

    Parameters
    ----------
    seed : int
    choice : Choice
    ranks : int
    """

    def __init__(self, seed: int, choice: Choice, ranks: int) -> None:
        super().__init__(ranks)
        self.choice = choice
        self.random = random.Random(seed)
        self.messages: list[Message | None] = [None]

    # What the host and the application's kernels do.

    def read(self, addr: int, num_bytes: int, view: int) -> Any:
        """Bytes as a kernel that knows `view` may find them."""
        words = self.word_range(addr, num_bytes)
        return self._as(Thread((-1, -1), view), words).view(np.uint8)[:num_bytes]

    def poll(self, addr: int, num_bytes: int) -> Any:
        """Bytes as the host finds them that acquires the first word, then reads the others."""
        words = self.word_range(addr, num_bytes)
        host = Thread((-1, -1), 0)
        found = self.base[words].copy()
        slot = int(self.slot[words[0]])
        if slot:
            ((index, found[0]),) = self._choose(host, [slot], True, False)
            sent = self.messages[self.message[slot, index]]
            if sent is not None:
                self._acquire(host, sent, "acquire", SCOPES["sys"])
        found[1:] = self._as(host, words[1:])
        return found.view(np.uint8)[:num_bytes]

    def peek(self, addr: int, num_bytes: int) -> Any:
        """Bytes once everything has settled."""
        at = self.word_range(addr, num_bytes)
        assert not self.slot[at].any()
        return self.base[at].copy().view(np.uint8)[:num_bytes]

    # How the words of a load are chosen.

    def _as(self, thread: Thread, words: Any) -> Any:
        """Words as weak loads of `thread` find them."""
        found = self.base[words]
        slots = self.slot[words]
        last = self.count[slots] - 1
        found = np.where(slots == 0, found, self.value[slots, last])
        if self.choice is Choice.NEWEST:
            return found
        newest = self.event[slots, last]
        known = {
            event: event == 0 or bool(thread.view >> event & 1)
            for event in np.unique(newest).tolist()
        }
        stale = np.array([not known[event] for event in newest.tolist()], bool)
        for nth in np.flatnonzero(stale | self.is_partial[slots]).tolist():
            ((_, found[nth]),) = self._choose(thread, [int(slots[nth])], False, False)
        return found

    def _choose(
        self, thread: Thread, at: list[int], is_strong: bool, whole: bool
    ) -> list[tuple[int, int]]:
        """Index and value of a write of each slot that `thread` may read."""
        floors = [self._floor(thread, slot, is_strong) for slot in at]
        counts = [int(self.count[slot]) for slot in at]
        chosen = self._pick_all(floors, counts, is_strong)
        if whole and len(at) > 1:
            for _ in range(8):
                if self._is_untorn(at, chosen):
                    break
                chosen = [self.random.randrange(*pair) for pair in zip(floors, counts, strict=True)]
            else:
                chosen = [count - 1 for count in counts]
        result = []
        for slot, index in zip(at, chosen, strict=True):
            value = int(self.value[slot, index])
            if self.is_partial[slot]:
                value = self._merge(thread, slot, index)
            if is_strong:
                thread.floors[slot] = int(self.number[slot, index])
            result.append((index, value))
        return result

    def _pick_all(self, floors: list[int], counts: list[int], is_strong: bool) -> list[int]:
        return [
            self._pick(floor, count, is_strong) for floor, count in zip(floors, counts, strict=True)
        ]

    def _is_untorn(self, at: list[int], chosen: list[int]) -> bool:
        """Whether one access may find these writes: all words of a store that was one, or none."""
        seen: dict[int, bool] = {}
        for slot, index in zip(at, chosen, strict=True):
            for place, number in enumerate(self.number[slot, : self.count[slot]].tolist()):
                if number and seen.setdefault(number, place <= index) != (place <= index):
                    return False
        return True

    def _pick(self, floor: int, count: int, is_strong: bool) -> int:
        if floor >= count - 1:
            return count - 1
        if self.choice is Choice.RANDOM:
            return self.random.randrange(floor, count)
        return count - 1 if is_strong and self.random.randrange(FRESH_IN) == 0 else floor

    def _floor(self, thread: Thread, slot: int, is_strong: bool, mask: int = _WHOLE) -> int:
        """Index of the newest write of all bytes of `mask` that the thread knows."""
        count = int(self.count[slot])
        events, masks = self.event[slot].tolist(), self.mask[slot].tolist()
        floor = 0
        for index in range(count - 1, 0, -1):
            event = events[index]
            if masks[index] & mask == mask and (
                event in {0, thread.event} or thread.view >> event & 1
            ):
                floor = index
                break
        if is_strong and slot in thread.floors:
            numbers = self.number[slot, :count].tolist()
            if thread.floors[slot] in numbers:
                floor = max(floor, numbers.index(thread.floors[slot]))
        return floor

    def _merge(self, thread: Thread, slot: int, index: int) -> int:
        """A word of which bytes were stored apart: each byte is as old as it may be at `index`."""
        value = 0
        for byte in range(4):
            cut = max(index, self._floor(thread, slot, False, 1 << byte))
            while not self.mask[slot, cut] >> byte & 1:
                cut -= 1
            value |= int(self.value[slot, cut]) & 0xFF << 8 * byte
        return value

    def _acquire(self, thread: Thread, sent: Message, order: str, level: int) -> None:
        distance = thread.distance(sent.place)
        if distance <= min(level, sent.scope):
            thread.observed |= 1 << sent.event
            if order in _ACQUIRES:
                thread.view |= sent.views[distance]
            else:
                thread.pending[distance] |= sent.views[distance]
