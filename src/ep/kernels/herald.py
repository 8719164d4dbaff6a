"""The herald of both kernels: tell every rank what it must know of this one, and hear it of them.

In dispatch that is which step this rank is in, and with how many tokens: an announcement. In
combine it is that all it did before this kernel is done, what it read and what it made empty: a
clearance, which takes a fence and so has all of combine to be made in. Who has heard the clearance
of a step of all ranks may send what comes two steps later into the same places. The rows' own
chunks need none of this; it is what lets them be used again.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr, cute, range_constexpr

from ep.device import bounded, ptx, wire
from ep.device.bounded import Watch
from ep.device.home import Control, Home
from ep.device.sync import POLLS_PER_CLOCK, WARP
from ep.kernels.options import Boundaries, KernelOptions
from ep.layout import PARITIES, EpLayout


class Herald:
    """What the first CTA does, by one warp: lanes work on ranks lane, lane + 32, lane + 64.

    Parameters
    ----------
    layout : EpLayout
    options : KernelOptions
    threads : int
        Of a CTA.
    """

    def __init__(self, layout: EpLayout, options: KernelOptions, threads: int) -> None:
        self.layout = layout
        self.ranks = layout.config.ranks
        self.options = options
        self.is_fenced = options.boundaries == Boundaries.FENCED
        self.num_words = -(-self.ranks // WARP)
        # Another warp than the first, if there is one.
        self.loader = min(threads // WARP - 1, 1)

    @cute.jit
    def warm(self, home: Home, peers: list[Int64], line: Control) -> None:
        """Touch the lines that are written and read here."""
        lane = cute.arch.lane_idx()
        ptx.touch(home.control(line))
        if lane < self.ranks and lane != home.rank and peers[0] != 0:
            for half in range_constexpr(PARITIES):
                ptx.touch(peers[0] + wire.announcement(self.layout, Uint32(half), home.rank))
                ptx.touch(home.base + wire.announcement(self.layout, Uint32(half), lane))

    @cute.jit
    def announce(self, peers: list[Int64], home: Home, step: Int64, num_tokens: Int32) -> None:
        """Tell every other rank that this one is in `step`, and how many tokens it sends."""
        line = wire.announcement(self.layout, wire.parity(step), home.rank)
        self._tell(peers, home.rank, line, wire.note(step, Uint32(0), Uint32(num_tokens)))
        if cute.arch.lane_idx() == 0:
            # Nobody in this kernel reads it; combine does.
            ptx.store_v2(home.control(Control.DISPATCHED), wire.words_of(step))

    @cute.jit
    def clear(self, peers: list[Int64], home: Home) -> None:
        """Tell every other rank that this one has done with all before this combine.

        Not after a kernel that gave up. The whole CTA takes part.
        """
        found = cute.arch.alloc_smem(Int64, 2, 16)
        sFound = cute.make_tensor(found, cute.make_layout(2))
        warp = cute.arch.warp_idx()
        if warp == self.loader and cute.arch.lane_idx() == 0:
            step, stopped = home.load_step(Control.DISPATCHED)
            sFound[0] = step
            sFound[1] = Int64(stopped)
        if const_expr(self.is_fenced):  # noqa: SIM102 - a constant, and what is not
            if warp == 0:
                # Releases what the kernels before us did; nothing of this one is under way. It
                # takes longer than the load, which is why another warp does that.
                ptx.fence_acq_rel("sys")
        ptx.barrier()
        if warp == 0 and sFound[1] == 0:
            step = sFound[0]
            line = wire.clearance(self.layout, wire.parity(step), home.rank)
            self._tell(peers, home.rank, line, wire.note(step, Uint32(0), Uint32(0)))
            if cute.arch.lane_idx() == 0:
                # Nobody in this kernel reads it; the next dispatch does.
                ptx.store_v2(home.control(Control.COMBINED), wire.words_of(step))

    @cute.jit
    def _tell(self, peers: list[Int64], rank: Int32, line: Int64, note: ptx.Vec4) -> None:
        """Store a note at offset `line` of every other rank's buffer."""
        for word in range_constexpr(self.num_words):
            dst_rank = cute.arch.lane_idx() + WARP * word
            # An excluded rank has no address.
            if dst_rank < self.ranks and dst_rank != rank and peers[word] != 0:
                ptx.store_b128(peers[word] + line, note)

    @cute.jit
    def listen(self, peers: list[Int64], step: Int64, watch: Watch) -> list[Uint32]:
        """Wait for every rank's announcement of this step and its clearance of the one before.

        Keeps their tokens for combine. Gives the ranks that the lane gave up.
        """
        lost = []
        home, lane = watch.home, cute.arch.lane_idx()
        for word in range_constexpr(self.num_words):
            src_rank, absent = lane + WARP * word, Uint32(0)
            if src_rank < self.ranks and src_rank != home.rank:
                num_tokens = Uint32(0)
                if peers[word] != 0:
                    num_tokens, over = self._hear(src_rank, step, watch)
                    absent = Uint32(over) << Uint32(lane)
                ptx.store_b32(home.field("counts") + Int64(src_rank) * 4, num_tokens)
            lost.append(absent)
        return lost

    @cute.jit
    def _hear(self, src_rank: Int32, step: Int64, watch: Watch) -> tuple[Uint32, Boolean]:
        """Wait for one rank's notes; gives its tokens, 0 where time ran out."""
        base = watch.home.base
        said_at = base + wire.announcement(self.layout, wire.parity(step), src_rank)
        cleared_at = base + wire.clearance(self.layout, wire.parity(step - 1), src_rank)
        # An acquire is for the kernels after us: what we heard of happened before all they do.
        order = "acquire" if self.is_fenced else "relaxed"
        num_tokens, since_ns = Uint32(0), Uint64(0)
        waiting, over = Boolean(True), Boolean(False)
        while waiting:
            polls = Int32(0)
            while waiting and polls < POLLS_PER_CLOCK:
                said = ptx.load_b128(said_at)
                cleared = ptx.load_b128(cleared_at, order)
                num_tokens = Uint32(wire.tokens_of(said))
                waiting = not (wire.is_of(said, step) and wire.is_of(cleared, step - 1))
                polls += 1
            if waiting:
                over, since_ns = bounded.is_over(since_ns, watch)
                if over:
                    num_tokens, waiting = Uint32(0), Boolean(False)
        return num_tokens, over
