"""Which of a word's writes a load may give."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tests.ptx.arena import Arena
from tests.ptx.views import SCOPES, WEAK, Access, Choice, Message, Thread

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
            access = Access(SCOPES["sys"])
            ((index, found[0]),) = self._choose(host, [slot], access)
            self._acquire(host, self.messages[self.message[slot, index]], "acquire", access)
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
            ((_, found[nth]),) = self._choose(thread, [int(slots[nth])], WEAK)
        return found

    def _choose(self, thread: Thread, at: list[int], access: Access) -> list[tuple[int, int]]:
        """Index and value of a write of each slot that `thread` may read.

        The slots are those of one single-copy access where `access` is wider than a word.
        """
        is_strong = access.level is not None
        chosen = []
        for slot in at:
            floor = self._floor(thread, slot)
            chosen.append(self._pick(floor, int(self.count[slot]), is_strong))
        if len(at) > 1 and access.width > 4:
            self._mend(thread, at, chosen, access)
        result = []
        for slot, index in zip(at, chosen, strict=True):
            value = int(self.value[slot, index])
            if self.is_partial[slot]:
                value = self._merge(thread, slot, index)
            if thread.meets(self.messages[self.message[slot, index]], access):
                thread.floors[slot] = int(self.number[slot, index])
            result.append((index, value))
        return result

    def _mend(self, thread: Thread, at: list[int], chosen: list[int], access: Access) -> None:
        """Move choices on until no word is older than a morally strong write read in another."""
        torn = True
        while torn:
            torn = False
            for slot, index in zip(at, chosen, strict=True):
                if not thread.meets(self.messages[self.message[slot, index]], access):
                    continue
                number = self.number[slot, index]
                for word, other in enumerate(at):
                    same = np.flatnonzero(self.number[other, : self.count[other]] == number)
                    if same.size and chosen[word] < same[0]:
                        chosen[word] = int(same[0])
                        torn = True

    def _pick(self, floor: int, count: int, is_strong: bool) -> int:
        if floor >= count - 1:
            return count - 1
        if self.choice is Choice.RANDOM:
            return self.random.randrange(floor, count)
        return count - 1 if is_strong and self.random.randrange(FRESH_IN) == 0 else floor

    def _floor(self, thread: Thread, slot: int, mask: int = _WHOLE) -> int:
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
        if slot in thread.floors:
            numbers = self.number[slot, :count].tolist()
            if thread.floors[slot] in numbers:
                floor = max(floor, numbers.index(thread.floors[slot]))
        return floor

    def _merge(self, thread: Thread, slot: int, index: int) -> int:
        """A word of which bytes were stored apart: each byte is as old as it may be at `index`."""
        value = 0
        for byte in range(4):
            cut = max(index, self._floor(thread, slot, 1 << byte))
            while not self.mask[slot, cut] >> byte & 1:
                cut -= 1
            value |= int(self.value[slot, cut]) & 0xFF << 8 * byte
        return value

    def _acquire(self, thread: Thread, sent: Message | None, order: str, access: Access) -> None:
        if sent is None or not thread.meets(sent, access):
            return
        distance = thread.distance(sent.place)
        thread.observed |= 1 << sent.event
        if order in _ACQUIRES:
            thread.view |= sent.views[distance]
        else:
            thread.pending[distance] |= sent.views[distance]
