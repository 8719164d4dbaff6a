"""Words of all ranks, where they are mapped, and the last writes of those that were written."""

from __future__ import annotations

from typing import Any

import numpy as np

DEPTH = 6
"""Writes a word remembers; older ones can no longer be read."""
SEGMENT_SHIFT = 36
_OFFSET = (1 << SEGMENT_SHIFT) - 1
_WHOLE = 0xF


class Fault(Exception):
    """An access that a GPU would refuse, or that this library promises never to make."""


class Arena:
    """Addresses are `segment << 36 | byte`.

    A word that is written gets a *slot* with its writes in coherence order, the value before them
    first; slot 0 stands for words that nobody wrote since all was last settled.

    Attributes
    ----------
    base : ndarray of uint32
        Values of the words as they were last settled.
    slot : ndarray of int32
        Slot of each word, or 0.
    value, event, number, message, mask : ndarray `[slots, DEPTH]`
        Of each write: the word after it, its event, its number in the run, the number of what a
        strong write carries (0 for a weak one), and a bit for each byte that it stored.
    count : ndarray of int8 `[slots]`
    is_partial : ndarray of bool `[slots]`
        Whether some write stored less than the word.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.num_words = 0
        self.count: Any
        self.value: Any
        self.event: Any
        self.number: Any
        self.message: Any
        self.mask: Any
        self.is_partial: Any
        self._word: Any
        self.base = np.zeros(1 << 12, np.uint32)
        self.slot = np.zeros(1 << 12, np.int32)
        self._segments: list[tuple[int, int]] = [(0, 0)]
        self._allowed: list[list[bool]] = [[False] * ranks]
        self._free: dict[int, list[int]] = {}
        self._is_indexed = False
        self.num_slots = 1
        self._make_slots(1 << 10)

    # Mappings.

    def allocate(self, array: Any, rank: int) -> int:
        """Place a copy of `array` on `rank`; gives the address, which only that rank may use."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        size = max(-(-data.size // 16) * 16, 16)
        start = self.num_words
        self.num_words += size // 4
        if self.num_words > len(self.base):
            more = np.zeros(2 * self.num_words - len(self.base), np.uint32)
            self.base = np.concatenate([self.base, more])
            self.slot = np.concatenate([self.slot, more.astype(np.int32)])
        self.base[start : self.num_words].view(np.uint8)[: data.size] = data
        return self._map(start, size, [other == rank for other in range(self.ranks)])

    def alias(self, addr: int, rank: int) -> int:
        """Map memory of `rank` for all the others: the peer mapping."""
        start, size = self._segments[addr >> SEGMENT_SHIFT]
        return self._map(start, size, [other != rank for other in range(self.ranks)])

    def shared(self, num_bytes: int, rank: int) -> int:
        """Memory of a CTA, full of ones."""
        size = max(-(-num_bytes // 16) * 16, 16)
        free = self._free.setdefault(size, [])
        if not free:
            return self.allocate(np.full(size, 0xFF, np.uint8), rank)
        addr = free.pop()
        start, _ = self._segments[addr >> SEGMENT_SHIFT]
        self.slot[start : start + size // 4] = 0
        self.base[start : start + size // 4] = 0xFFFFFFFF
        self._allowed[addr >> SEGMENT_SHIFT] = [other == rank for other in range(self.ranks)]
        self._is_indexed = False
        return addr

    def give_back(self, addr: int) -> None:
        """Take back memory of a CTA that has ended."""
        _, size = self._segments[addr >> SEGMENT_SHIFT]
        self._free.setdefault(size, []).append(addr)

    def words(self, rank: Any, addr: Any, width: int) -> Any:
        """Words of accesses of `width` bytes, `[lanes, words]`; raises where one is not legal."""
        if not self._is_indexed:
            self._start, self._size = np.array(self._segments).T
            self._allow = np.array(self._allowed)
            self._is_indexed = True
        segment = (addr >> np.uint64(SEGMENT_SHIFT)).astype(np.int64)
        offset = (addr & np.uint64(_OFFSET)).astype(np.int64)
        exists = segment < len(self._segments)
        if not exists.all():
            segment = np.where(exists, segment, 0)
        fits = (offset + width <= self._size[segment]) & (offset & (width - 1) == 0)
        legal = fits & self._allow[segment, rank]
        if not legal.all():
            nth = int(np.argmin(legal))
            why = "a mapping it must not use" if fits[nth] else "nothing that is mapped and aligned"
            raise Fault(f"rank {rank[nth]}: {width} bytes at {int(addr[nth]):#x}: {why}")
        first = self._start[segment] + (offset >> 2)
        return first[:, None] + np.arange(max(width // 4, 1))

    def word_range(self, addr: int, num_bytes: int) -> Any:
        """Words of a piece of one segment."""
        start, size = self._segments[addr >> SEGMENT_SHIFT]
        offset = addr & _OFFSET
        assert offset % 4 == 0
        assert offset + num_bytes <= size
        first = start + offset // 4
        return np.arange(first, first + -(-num_bytes // 4))

    # Writes.

    def slots(self, words: Any) -> Any:
        """Slots of words that are about to be written."""
        found = self.slot[words]
        fresh = found == 0
        if fresh.any():
            new = np.unique(words[fresh])
            first = self.num_slots
            self.num_slots += len(new)
            if self.num_slots > len(self.count):
                self._make_slots(2 * self.num_slots)
            made = slice(first, self.num_slots)
            self.slot[new] = np.arange(first, self.num_slots)
            self._word[made] = new
            self.value[made, 0] = self.base[new]
            self.event[made, 0] = self.number[made, 0] = self.message[made, 0] = 0
            self.mask[made, 0] = _WHOLE
            self.count[made] = 1
            self.is_partial[made] = False
            found = self.slot[words]
        return found

    def append(
        self, at: Any, value: Any, event: Any, number: Any, message: Any, mask: int = _WHOLE
    ) -> None:
        """Make a write the newest one of different slots; a full one loses its oldest."""
        count = self.count[at]
        if (count == DEPTH).any():
            full = at[count == DEPTH]
            for slot in full[self.is_partial[full]].tolist():
                for byte in range(4):
                    if not self.mask[slot, 1] >> byte & 1:
                        keep = np.uint32(0xFF << 8 * byte)
                        old, new = self.value[slot, 0] & keep, self.value[slot, 1] & ~keep
                        self.value[slot, 1] = old | new
                self.mask[slot, 1] = _WHOLE
            for array in self._arrays:
                array[full, :-1] = array[full, 1:]
            self.count[full] -= 1
            count = self.count[at]
        self.value[at, count] = value
        self.event[at, count] = event
        self.number[at, count] = number
        self.message[at, count] = message
        self.mask[at, count] = mask
        self.count[at] = count + 1

    def move_last(self, slot: int, index: int) -> None:
        """Put the newest write of a slot at `index` of the coherence order."""
        last = int(self.count[slot]) - 1
        order = [*range(index), last, *range(index, last)]
        for array in self._arrays:
            array[slot, : last + 1] = array[slot, order]

    def settle(self) -> None:
        """Forget all writes but the last one of each byte."""
        used = np.arange(1, self.num_slots)
        last = self.count[used] - 1
        final = self.value[used, last]
        for slot in (np.flatnonzero(self.is_partial[1 : self.num_slots]) + 1).tolist():
            word = 0
            for byte in range(4):
                cut = int(self.count[slot]) - 1
                while not self.mask[slot, cut] >> byte & 1:
                    cut -= 1
                word |= int(self.value[slot, cut]) & 0xFF << 8 * byte
            final[slot - 1] = word
        words = self._word[used]
        current = self.slot[words] == used
        self.base[words[current]] = final[current]
        self.slot[words] = 0
        self.num_slots = 1

    @property
    def _arrays(self) -> tuple[Any, ...]:
        return self.value, self.event, self.number, self.message, self.mask

    def _map(self, start: int, size: int, allowed: list[bool]) -> int:
        self._segments.append((start, size))
        self._allowed.append(allowed)
        self._is_indexed = False
        return (len(self._segments) - 1) << SEGMENT_SHIFT

    def _make_slots(self, size: int) -> None:
        kinds: dict[str, Any] = {
            "value": np.uint32,
            "event": np.int32,
            "number": np.int64,
            "message": np.int32,
            "mask": np.uint8,
        }
        shapes = dict.fromkeys(kinds, (size, DEPTH))
        kinds |= {"count": np.int8, "is_partial": np.bool_, "_word": np.int64}
        for name, kind in kinds.items():
            array = np.zeros(shapes.get(name, (size,)), kind)
            old = self.__dict__.get(name)
            if old is not None:
                array[: len(old)] = old
            setattr(self, name, array)
        self.count[0] = 1
