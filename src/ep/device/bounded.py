"""Waits of single threads that end: each poll loop asks here now and then whether to give up.

Polls go in rounds of `POLLS_PER_CLOCK`; only between two of them is anything else looked at.
A thread that gives up keeps whom it waited for, waits for nobody any more, and reports at the end
of the kernel: what is seldom needed stays out of the loops, whose code must be at hand at once.
"""

from __future__ import annotations

import dataclasses

from cutlass import Boolean, Constexpr, Int32, Int64, Uint32, Uint64, cute, range_constexpr

from ep.device import ptx, wire
from ep.device.home import STEP_LINES, STOPPED_WORD, Control, Home
from ep.device.sync import WARP
from ep.record import EXPIRED, Phase, Word

_GATHER_NS = 2_000_000
"""Least time that the reporting thread waits for what other threads miss."""
_GATHER_AT_MOST_NS = 250_000_000


@dataclasses.dataclass(frozen=True)
class Watch:
    """What a wait needs to give up and to say so.

    Attributes
    ----------
    phase : Phase
    home : Home
    record : Int64
        Device address of the hang record.
    timeout_ns : Int64
    grace_ns : Int64
        How much longer it is in step 1, where other ranks may still have much to do.
    """

    phase: Phase
    home: Home
    record: Int64
    timeout_ns: Int64
    grace_ns: Int64

    @property
    def num_words(self) -> int:
        """Words that have a bit for each rank."""
        return -(-self.home.layout.config.ranks // WARP)

    @property
    def step(self) -> Int64:
        """Number of the step, read again: waits are seldom long, and registers are scarce."""
        if self.phase is Phase.DISPATCH:
            return ptx.load_b64(self.home.control(Control.COMBINED)) + 1
        return ptx.load_b64(self.home.control(Control.DISPATCHED))

    @property
    def expired(self) -> Int64:
        """Address of the word that says that a wait has expired."""
        return self.home.control(Control.EXPIRED)


@cute.jit
def is_over(since_ns: Uint64, watch: Watch) -> tuple[Boolean, Uint64]:
    """Whether a thread that has polled in vain `POLLS_PER_CLOCK` times, once more, gives up.

    Parameters
    ----------
    since_ns : Uint64
        What the last call gave; 0 at first. The clock runs from the first look at it.
    watch : Watch

    Returns
    -------
    over : Boolean
    since_ns : Uint64
    """
    now_ns = ptx.globaltimer()
    if since_ns == 0:
        since_ns = now_ns
    over = now_ns - since_ns >= _limit_ns(watch)
    # Others wait for the same ranks; whoever waits after them need not take as long.
    if over:
        ptx.store_b32(watch.expired, Uint32(1), "relaxed", "gpu")
    else:
        over = ptx.load_b32(watch.expired, "relaxed", "gpu") != 0
    return over, since_ns


def nobody(num_words: int) -> list[Uint32]:
    """No rank, as a set."""
    return [Uint32(0) for _ in range(num_words)]


@cute.jit
def _limit_ns(watch: Watch) -> Uint64:
    limit_ns = watch.timeout_ns
    if watch.step == 1:
        limit_ns = limit_ns + watch.grace_ns
    return Uint64(limit_ns)


@cute.jit
def report(awaited: list[Uint32], watch: Watch) -> None:
    """Say whom this thread has waited for; the first thread that does fills the hang record.

    It also stops the kernels after this one. Called by single threads, those that gave up, at the
    end of the kernel. `awaited` has bit r of word w for rank `32 * w + r`.
    """
    place = watch.expired + 4
    for word in range_constexpr(watch.num_words):
        if awaited[word] != 0:
            ptx.atom_or(place + 4 * word, awaited[word])
    stopped = [watch.home.control(line) + 4 * STOPPED_WORD for line in STEP_LINES]
    if ptx.atom_exch(stopped[0], Uint32(1)) == 0:
        ptx.store_b32(stopped[1], Uint32(1), "relaxed", "gpu")
        # Others give up at their next look at the clock; then all is known.
        gather_ns = min(Uint64(watch.timeout_ns) // 32 + _GATHER_NS, Uint64(_GATHER_AT_MOST_NS))
        until_ns = ptx.globaltimer() + gather_ns
        while ptx.globaltimer() < until_ns:
            pass
        for word in range_constexpr(watch.num_words):
            # An atomic reads the newest value.
            _record(watch, Word.AWAITED + word, ptx.atom_or(place + 4 * word, Uint32(0)))
        _record(watch, Word.PHASE, Uint32(watch.phase))
        ptx.store_v2(watch.record + 4 * Word.STEP, wire.words_of(watch.step))
        _record(watch, Word.RANK, Uint32(watch.home.rank))
        # More than an hour does not fit.
        waited_us = min(_limit_ns(watch) // 1000, Uint64(0xFFFFFFFF))
        _record(watch, Word.WAITED_US, Uint32(waited_us))
        ptx.store_b32(watch.record + 4 * Word.STATE, Uint32(EXPIRED), "release", "sys")


@cute.jit
def rank_bits(rank: Int32, num_words: Constexpr) -> list[Uint32]:
    """The set of one rank, in words."""
    bits = []
    for word in range_constexpr(num_words):
        bit = Uint32(0)
        if Uint32(rank) // WARP == word:
            bit = Uint32(1) << (Uint32(rank) % WARP)
        bits.append(bit)
    return bits


def _record(watch: Watch, word: int, value: Uint32) -> None:
    ptx.store_b32(watch.record + 4 * word, value)
