"""The reducing half of combine: wait for each token's partials, sum, normalize and store."""

from __future__ import annotations

from cutlass import (
    Boolean,
    Float32,
    Int32,
    Int64,
    Uint32,
    Uint64,
    const_expr,
    cute,
    range_constexpr,
)

from ep.device import bounded, norm, ptx, rows, wire
from ep.device.bounded import Watch
from ep.device.home import Control, Home
from ep.device.stamps import Stamps
from ep.device.sync import POLLS_PER_CLOCK, WARP
from ep.kernels.combine_send import Chunks
from ep.kernels.options import KernelOptions
from ep.layout import CHUNK_BYTES, NOTHING, PARITIES, EpLayout
from ep.record import Stamp

LOADS_IN_FLIGHT = 8
"""Most chunks of slots that a thread polls at once: they live in registers."""
LOADS_OF_MANY_RANKS = 6
"""The same for more than 32 ranks, whose sets take more than a word."""


class TokenReducer:
    """What reducer CTAs do: a CTA a token.

    Parameters
    ----------
    layout : EpLayout
    options : KernelOptions
    chunks : Chunks
    """

    def __init__(self, layout: EpLayout, options: KernelOptions, chunks: Chunks) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        self.chunks = chunks
        # Ranks whose slots a thread polls before it adds the first one.
        most = min(self.config.ranks, self.config.top_k)
        in_flight = LOADS_IN_FLIGHT if self.config.ranks <= WARP else LOADS_OF_MANY_RANKS
        self.batch = min(most, max(in_flight // chunks.passes, 1))

    @cute.jit
    def load_gains(self, norm_weight: Int64) -> list[ptx.Vec4]:
        """The thread's chunks of the norm weight, one a pass."""
        gains = []
        if const_expr(self.options.norm):
            for idx in range_constexpr(self.chunks.passes):
                chunk = self.chunks.idx(idx)
                gains.append(
                    ptx.load_v4_if(
                        self.chunks.is_live(idx), norm_weight + Int64(chunk) * CHUNK_BYTES
                    )
                )
        return gains

    @cute.jit
    def warm(
        self,
        partials: Int64,
        ids: Int64,
        out: Int64,
        home: Home,
        first: Int32,
        num_tokens: Int32,
    ) -> None:
        """Touch what the first token needs."""
        tid, _, _ = cute.arch.thread_idx()
        if first < num_tokens:
            row = home.row(home.rank, first)
            offset = Int64(min(tid, self.chunks.total - 1)) * CHUNK_BYTES
            ptx.touch(home.control(Control.DISPATCHED))
            ptx.touch(ids + Int64(first) * (4 * self.config.top_k))
            for half in range_constexpr(PARITIES):
                ptx.touch(
                    home.base + wire.slot(self.layout, Uint32(half), first, Int32(0)) + offset
                )
            ptx.touch(partials + row * (2 * self.config.hidden) + offset)
            ptx.touch(out + Int64(first) * (2 * self.config.hidden) + offset)

    @cute.jit
    def reduce(
        self,
        partials: Int64,
        ids: Int64,
        out: Int64,
        eps: Float32,
        first: Int32,
        num_reducers: Int32,
        num_tokens: Int32,
        gains: list[ptx.Vec4],
        peers: list[Int64],
        step: Int64,
        stopped: Boolean,
        watch: Watch,
        clock: Stamps,
    ) -> list[Uint32]:
        """Sum, normalize and store the tokens of this CTA; make its own rows empty.

        After a kernel that gave up every result is NaN. Gives the ranks that the thread gave up.
        """
        config, home = self.config, watch.home
        tid, _, _ = cute.arch.thread_idx()
        half = -(-self.chunks.passes * self.chunks.warps // norm.ACCUMULATORS) * norm.ACCUMULATORS
        segments = cute.arch.alloc_smem(Float32, 2 * half, 16)
        sSegments = cute.make_tensor(segments, cute.make_layout((half, 2)))
        turn = Int32(0)
        token = first
        here = rows.present(peers)
        lost = bounded.nobody(watch.num_words)
        if stopped:
            here = [Uint32(0) for _ in here]
        expert = rows.load_expert(ids, token, num_tokens, config.top_k)
        while token < num_tokens:
            masks = rows.common(rows.owners(expert, config), here)
            # Of the next token, so that the wait for this one hides it.
            expert = rows.load_expert(ids, token + num_reducers, num_tokens, config.top_k)
            row = home.row(home.rank, token)
            local = partials + row * (2 * config.hidden)
            slot = home.base + wire.slot(self.layout, wire.parity(step), token, Int32(0))
            sums, lost = self._sum_slots(masks, slot, local, lost, watch)
            if stopped:
                sums = [[Uint32(NOTHING)] * len(chunk) for chunk in sums]
            if token == first:
                clock.mark(Stamp.FIRST, sums[0][0])
            clock.mark(Stamp.LAST, sums[0][0])
            # Two halves in turn: one barrier a token is enough.
            if const_expr(self.options.norm):
                sums = self._normalize(sums, gains, sSegments[None, turn], eps)
            for idx in range_constexpr(self.chunks.passes):
                chunk = self.chunks.idx(idx)
                if self.chunks.is_live(idx):
                    at = out + Int64(token) * (2 * config.hidden) + Int64(chunk) * CHUNK_BYTES
                    ptx.store_v4(at, sums[idx])
            if rows.has_rank(masks, home.rank):
                rows.rearm_row(home.base, row, home.rank, tid, self.layout)
            token = token + num_reducers
            turn = 1 - turn
        return lost

    @cute.jit
    def _sum_slots(
        self,
        masks: list[Uint32],
        slot: Int64,
        local: Int64,
        lost: list[Uint32],
        watch: Watch,
    ) -> tuple[list[list[Uint32]], list[Uint32]]:
        """Sum the thread's chunks over the ranks of `masks`, in rank order, and round to BF16.

        `slot` is the address of the token's first slot.
        """
        per_rank = self.layout.fields["slots"].strides_bytes[2]
        sums = [[Float32(0.0)] * norm.CHUNK for _ in range(self.chunks.passes)]
        while not rows.is_empty(masks):
            addrs, dst_ranks = [], []
            wanted, awaited = Uint32(0), Uint32(0)
            for nth in range_constexpr(self.batch):
                dst_rank, rest = rows.pop_rank(masks)
                is_own = dst_rank == watch.home.rank
                at = slot + Int64(dst_rank) * per_rank
                if is_own:
                    at = local
                for idx in range_constexpr(self.chunks.passes):
                    bit = Uint32(1 << (nth * self.chunks.passes + idx))
                    if self.chunks.is_live(idx) and not rows.is_empty(masks):
                        wanted = wanted | bit
                        if not is_own:
                            awaited = awaited | bit
                    addrs.append(at + Int64(self.chunks.idx(idx)) * CHUNK_BYTES)
                    dst_ranks.append(dst_rank)
                masks = rest
            parts, missing = self._poll(addrs, wanted, awaited, watch)
            lost = self._with_missing(lost, missing, dst_ranks)
            for nth in range_constexpr(len(parts)):
                idx = nth % self.chunks.passes
                sums[idx] = norm.sum_chunks(sums[idx], parts[nth])
                if (awaited >> nth) & 1 != 0:
                    wire.take(addrs[nth])
        return [norm.round_chunk(chunk) for chunk in sums], lost

    @cute.jit
    def _poll(
        self,
        addrs: list[Int64],
        wanted: Uint32,
        awaited: Uint32,
        watch: Watch,
    ) -> tuple[list[ptx.Vec4], Uint32]:
        """Load the chunks of `wanted`, zeros for the others, until those of `awaited` are here.

        Those that time ran out for are given as a set. They stay as they were found: all ones,
        which are NaN.
        """
        parts = [(Uint32(0),) * 4 for _ in addrs]
        since_ns, missing = Uint64(0), Uint32(0)
        pending = wanted
        while pending != 0:
            polls = Int32(0)
            while pending != 0 and polls < POLLS_PER_CLOCK:
                parts, pending = self._look(parts, addrs, pending, awaited)
                polls += 1
            if pending != 0:
                over, since_ns = bounded.is_over(since_ns, watch)
                if over:
                    missing, pending = pending, Uint32(0)
        return parts, missing

    @cute.jit
    def _look(
        self, parts: list[ptx.Vec4], addrs: list[Int64], wanted: Uint32, awaited: Uint32
    ) -> tuple[list[ptx.Vec4], Uint32]:
        """Load the chunks of `wanted`; gives all parts, and those of `awaited` still to come."""
        for nth in range_constexpr(len(addrs)):
            if (wanted >> nth) & 1 != 0:
                parts[nth] = ptx.load_b128(addrs[nth])
        pending = wanted & awaited
        for nth in range_constexpr(len(addrs)):
            if wire.has_arrived(parts[nth]):
                pending = pending & ~Uint32(1 << nth)
        return parts, pending

    @cute.jit
    def _with_missing(
        self, lost: list[Uint32], missing: Uint32, dst_ranks: list[Int32]
    ) -> list[Uint32]:
        """Add the ranks whose chunks are missing to those that are lost."""
        if missing != 0:
            for nth in range_constexpr(len(dst_ranks)):
                if (missing >> nth) & 1 != 0:
                    one = bounded.rank_bits(dst_ranks[nth], len(lost))
                    lost = [some | more for some, more in zip(lost, one, strict=True)]
        return lost

    @cute.jit
    def _normalize(
        self,
        sums: list[list[Uint32]],
        gains: list[ptx.Vec4],
        sSegments: cute.Tensor,
        eps: Float32,
    ) -> list[list[Uint32]]:
        """RMSNorm of the CTA's token."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for idx in range_constexpr(self.chunks.passes):
            total = norm.segment_sum(norm.chunk_squares(sums[idx]))
            if lane == 0:
                sSegments[warp + idx * self.chunks.warps] = total
        ptx.barrier()
        segments = [sSegments[idx] for idx in range(self.chunks.passes * self.chunks.warps)]
        rstd = norm.rms_rstd(norm.total_sum(segments), self.config.hidden, eps)
        return [norm.scale_chunk(sums[idx], rstd, gains[idx]) for idx in range(self.chunks.passes)]
