"""The flag protocol on the device: who has arrived, tell the peers, wait for them, lower the flags.

Each function is called by one whole warp. A flag is word 0 of a line; line s of a rank's flag field
is written by rank s alone: non-zero means raised. Lanes work on ranks lane, lane + 32, lane + 64.
Payload must be ordered before `last_arrival` by a CTA barrier after the last store.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum

from cutlass import (
    Boolean,
    Constexpr,
    Int32,
    Int64,
    Uint32,
    Uint64,
    cute,
    range_constexpr,
)

from ep.device import ptx
from ep.layout import LINE_BYTES
from ep.record import EXPIRED, Phase, Word

WARP = 32
POLLS_PER_CLOCK = 1024
"""Polls between two looks at the clock, which is slow to read; some 0.5 ms."""


class Control(IntEnum):
    """Line of each word of the `control` field. All are 0 before and after a kernel but `STEP`."""

    STEP = 0
    """Word 0: steps begun, ever. Word 1: 1 once a wait has expired, so that one CTA reports it."""
    DISPATCH_ARRIVALS = 1
    COMBINE_ARRIVALS = 2
    COMBINE_DEPARTURES = 3


@dataclasses.dataclass(frozen=True)
class Watch:
    """What `wait_flags` needs to give up and to say so.

    Attributes
    ----------
    phase : Phase
    ranks : int
    control : Int64
        Address of the `control` field.
    rank : Int32
    record : Int64
        Device address of the hang record.
    timeout_ns : Int64
    """

    phase: Phase
    ranks: int
    control: Int64
    rank: Int32
    record: Int64
    timeout_ns: Int64


@cute.jit
def last_arrival(counter: Int64, num_arrivals: Int32) -> Boolean:
    """Count this CTA in; True in the CTA that is the last of `num_arrivals`, and 0 is back.

    The last CTA has acquired, at GPU scope, what every other one did before it arrived, stores on
    peers included: its fence at system scope in `raise_flags` is theirs, too.
    """
    limit = Uint32(num_arrivals - 1)
    before = Uint32(0)
    if cute.arch.lane_idx() == 0:
        before = ptx.atom_inc(counter, limit, "acq_rel", "gpu")
    before = ptx.shfl(before, 0)
    # The shuffle tells the other lanes the number, not what lane 0 acquired with it.
    ptx.sync_warp()
    return before == limit


@cute.jit
def raise_flags(peers: list[Int64], ranks: Constexpr, line: Int64, value: Uint32) -> None:
    """Store `value` at offset `line` of every rank, after all that this warp has seen and done.

    `line` is the offset of this rank's line in the flag field. Fences itself, at system scope.
    """
    lane = cute.arch.lane_idx()
    ptx.fence_acq_rel("sys")
    for word in range_constexpr(len(peers)):
        if lane + WARP * word < ranks:
            ptx.store_b32(peers[word] + line, value, "relaxed", "sys")


@cute.jit
def wait_flags(flags: Int64, watch: Watch) -> tuple[Boolean, list[Uint32]]:
    """Wait until every rank has raised its flag here.

    Acquires at system scope, lane by lane: a warp or CTA barrier must follow before another lane
    or warp reads what was sent.

    Parameters
    ----------
    flags : Int64
        Own address of the flag field.
    watch : Watch

    Returns
    -------
    arrived : Boolean
        False, in every lane, where the time ran out; the hang record then tells who was absent.
    values : list of Uint32
        The lane's flags, in the order of ranks lane, lane + 32, lane + 64.
    """
    lane = cute.arch.lane_idx()
    num_words = -(-watch.ranks // WARP)
    values = [Uint32(0) for _ in range(num_words)]
    polls = Int32(0)
    start_ns = ptx.globaltimer()
    arrived = Boolean(False)
    waiting = Boolean(True)
    while waiting:
        raised = Boolean(True)
        for word in range_constexpr(num_words):
            src_rank = lane + WARP * word
            if src_rank < watch.ranks and values[word] == 0:
                values[word] = ptx.load_b32(flags + Int64(src_rank) * LINE_BYTES, "acquire", "sys")
            raised = raised and (src_rank >= watch.ranks or values[word] != 0)
        arrived = ptx.vote_all(raised)
        waiting = not arrived
        polls += 1
        if waiting and polls % POLLS_PER_CLOCK == 0:
            waited_ns = ptx.globaltimer() - start_ns
            # One lane's clock decides, or some lanes would leave and the votes hang.
            waited_ns = ptx.shfl(waited_ns, 0)
            if waited_ns >= Uint64(watch.timeout_ns):
                _report(watch, values, waited_ns)
                waiting = Boolean(False)
    return arrived, values


@cute.jit
def rearm_flags(flags: Int64, ranks: Constexpr) -> None:
    """Lower all flags of this rank. Every wait on them has ended; their ranks wait for us.

    Weak: nobody acquires a lowered flag. This warp has acquired the flag before, and the fence
    before the next kernel's flags comes between this store and the next one of its rank.
    """
    lane = cute.arch.lane_idx()
    for word in range_constexpr(-(-ranks // WARP)):
        src_rank = lane + WARP * word
        if src_rank < ranks:
            ptx.store_b32(flags + Int64(src_rank) * LINE_BYTES, Uint32(0))


@cute.jit
def _report(watch: Watch, values: list[Uint32], waited_ns: Uint64) -> None:
    """Fill the hang record, unless another CTA of this rank has."""
    lane = cute.arch.lane_idx()
    first = Uint32(1)
    if lane == 0:
        claim = watch.control + LINE_BYTES * Control.STEP + 4
        first = ptx.atom_exch(claim, Uint32(1))
    first = ptx.shfl(first, 0)
    if first == 0:
        for word in range_constexpr(len(values)):
            absent = ptx.ballot(lane + WARP * word < watch.ranks and values[word] == 0)
            if lane == 0:
                _record(watch, Word.AWAITED + word, absent)
        if lane == 0:
            # Counted by this thread, or by a kernel before.
            step = ptx.load_b32(watch.control + LINE_BYTES * Control.STEP)
            _record(watch, Word.PHASE, Uint32(watch.phase))
            _record(watch, Word.STEP, step)
            _record(watch, Word.RANK, Uint32(watch.rank))
            _record(watch, Word.WAITED_US, Uint32(waited_ns // 1000))
            # Releases the weak stores of the other words; the host reads this one first.
            state = watch.record + 4 * Word.STATE
            ptx.store_b32(state, Uint32(EXPIRED), "release", "sys")


def _record(watch: Watch, word: int, value: Uint32) -> None:
    ptx.store_b32(watch.record + 4 * word, value)
