"""The herald of dispatch: tell every rank which step this one is in, and hear it of them.

That a rank is in a step says that all it did in the step before is done: what it read, what it made
empty. Who has heard it of all ranks may send what comes after this step into the same places. The
rows' own chunks need none of this; it is what lets them be used again.
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
    """

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.ranks = layout.config.ranks
        self.options = options
        self.num_words = -(-self.ranks // WARP)

    @cute.jit
    def warm(self, home: Home, peers: list[Int64]) -> None:
        """Touch the lines that are written and read here."""
        lane = cute.arch.lane_idx()
        ptx.touch(home.control(Control.COMBINED))
        if lane < self.ranks and lane != home.rank and peers[0] != 0:
            for half in range_constexpr(PARITIES):
                ptx.touch(peers[0] + wire.announcement(self.layout, Uint32(half), home.rank))
                ptx.touch(home.base + wire.announcement(self.layout, Uint32(half), lane))

    @cute.jit
    def begin_step(self, home: Home) -> tuple[Int64, Boolean]:
        """Number of this step; from here on warp 0 may announce it. The whole CTA takes part.

        Also whether a kernel before this one gave up: then there is nothing to announce.
        """
        last, stopped = Int64(0), Boolean(False)
        if const_expr(self.options.boundaries == Boundaries.FENCED):
            found = cute.arch.alloc_smem(Int64, 2, 16)
            sFound = cute.make_tensor(found, cute.make_layout(2))
            if cute.arch.warp_idx() == 0:
                # Releases what the kernels before us did; nothing of this one is under way. It
                # takes as long as the load, which is why another warp does that.
                ptx.fence_acq_rel("sys")
            elif cute.arch.warp_idx() == 1 and cute.arch.lane_idx() == 0:
                last, stopped = home.load_step(Control.COMBINED)
                sFound[0] = last
                sFound[1] = Int64(stopped)
            ptx.barrier()
            last = sFound[0]
            stopped = sFound[1] != 0
        else:
            last, stopped = home.load_step(Control.COMBINED)
        return last + 1, stopped

    @cute.jit
    def announce(self, peers: list[Int64], home: Home, step: Int64, num_tokens: Int32) -> None:
        """Tell every other rank that this one is in `step`, and how many tokens it sends."""
        lane, rank = cute.arch.lane_idx(), home.rank
        line = wire.announcement(self.layout, wire.parity(step), rank)
        for word in range_constexpr(self.num_words):
            dst_rank = lane + WARP * word
            # An excluded rank has no address.
            if dst_rank < self.ranks and dst_rank != rank and peers[word] != 0:
                ptx.store_b128(peers[word] + line, wire.note(step, Uint32(0), Uint32(num_tokens)))
        if lane == 0:
            # Nobody in this kernel reads it; combine does.
            ptx.store_v2(home.control(Control.DISPATCHED), wire.words_of(step))

    @cute.jit
    def listen(self, peers: list[Int64], step: Int64, watch: Watch) -> list[Uint32]:
        """Wait for every rank's announcement of this step; keep their tokens for combine.

        Gives the ranks that the lane gave up.
        """
        lost = []
        home, lane = watch.home, cute.arch.lane_idx()
        for word in range_constexpr(self.num_words):
            src_rank, absent = lane + WARP * word, Uint32(0)
            if src_rank < self.ranks and src_rank != home.rank:
                line = wire.announcement(self.layout, wire.parity(step), src_rank)
                num_tokens = Uint32(0)
                if peers[word] != 0:
                    num_tokens, over = self._hear(home.base + line, step, watch)
                    absent = Uint32(over) << Uint32(lane)
                ptx.store_b32(home.field("counts") + Int64(src_rank) * 4, num_tokens)
            lost.append(absent)
        return lost

    @cute.jit
    def _hear(self, line: Int64, step: Int64, watch: Watch) -> tuple[Uint32, Boolean]:
        """Wait for one announcement; gives the rank's tokens, 0 where time ran out."""
        # An acquire is for the kernels after us: what we heard of happened before all they do.
        order = "acquire" if self.options.boundaries == Boundaries.FENCED else "relaxed"
        num_tokens, since_ns = Uint32(0), Uint64(0)
        waiting, over = Boolean(True), Boolean(False)
        while waiting:
            polls = Int32(0)
            while waiting and polls < POLLS_PER_CLOCK:
                said = ptx.load_b128(line, order)
                num_tokens = Uint32(wire.tokens_of(said))
                waiting = not wire.is_of(said, step)
                polls += 1
            if waiting:
                over, since_ns = bounded.is_over(since_ns, watch)
                if over:
                    num_tokens, waiting = Uint32(0), Boolean(False)
        return num_tokens, over
