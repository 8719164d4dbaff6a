"""Combine: send each received row's partial back to its source, there sum them in rank order.

Every CTA first sends, then arrives; the last one to arrive raises this rank's flag on all ranks.
Only then the CTAs that own tokens wait for all flags and reduce. They stay until all have seen the
flags, so the grid must be co-resident: `grid` bounds it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ep.device import norm, ptx, rows
from ep.device.sync import (
    WARP,
    Control,
    Watch,
    last_arrival,
    raise_flags,
    rearm_flags,
    wait_flags,
)
from ep.kernels.options import Fences, KernelOptions, Pdl
from ep.layout import EMPTY_SOURCE, LINE_BYTES, EpLayout
from ep.record import Phase

MAX_WARPS = 16
LOADS_IN_FLIGHT = 8
"""Most 16-byte loads of slots that a thread waits for at once."""


class EpFlagCombine:
    """The combine kernel of one shape; rank and tokens are run-time arguments.

    Parameters
    ----------
    layout : EpLayout
        Everything in it is a compile-time constant.
    options : KernelOptions
    """

    name = "ep_flag_combine"
    params = (
        ("table", Int64),
        ("partials", Int64),
        ("ids", Int64),
        ("norm_weight", Int64),
        ("out", Int64),
        ("record", Int64),
        ("timeout_ns", Int64),
        ("eps", Float32),
        ("rank", Int32),
        ("num_tokens", Int32),
    )

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        # A thread has one chunk of 16 bytes in each pass; a warp's chunks are one norm segment.
        segments = -(-self.config.hidden // norm.SEGMENT)
        self.passes = -(-segments // MAX_WARPS)
        self.warps = -(-segments // self.passes)
        self.threads = WARP * self.warps
        self.num_chunks = self.config.hidden // norm.CHUNK
        # Ranks whose slots a thread loads before it adds the first one.
        most = min(self.config.ranks, self.config.top_k)
        self.batch = min(most, max(LOADS_IN_FLIGHT // self.passes, 1))
        self.num_positions = self.config.ranks * self.config.max_tokens

    @cute.jit
    def __call__(
        self,
        table: Int64,
        partials: Int64,
        ids: Int64,
        norm_weight: Int64,
        out: Int64,
        record: Int64,
        timeout_ns: Int64,
        eps: Float32,
        rank: Int32,
        num_tokens: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`; local to the rank, completes when every rank has sent its partials.

        Parameters
        ----------
        table : Int64
            Device address of int64 `[ranks + 1]`: the ranks' buffers, the own mapping last.
        partials, out : Int64
            Device addresses of BF16 `[rows, H]` and `[T, H]` (multiples of 16).
        ids : Int64
            Device address of int32 `[T, K]`, the same as in dispatch.
        norm_weight : Int64
            Device address of BF16 `[H]` (a multiple of 16); not read without `norm`.
        record : Int64
            Device address of the hang record.
        timeout_ns : Int64
            Bound of the wait.
        eps : Float32
        rank, num_tokens : Int32
            This rank and its T, the same as in dispatch.
        num_ctas : Int32
            At least 1, at most what is resident at once.
        stream : CUstream
        """
        self.kernel(
            table, partials, ids, norm_weight, out, record, timeout_ns, eps, rank, num_tokens
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.options.pdl != Pdl.OFF,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        table: Int64,
        partials: Int64,
        ids: Int64,
        norm_weight: Int64,
        out: Int64,
        record: Int64,
        timeout_ns: Int64,
        eps: Float32,
        rank: Int32,
        num_tokens: Int32,
    ) -> None:
        """Device side."""
        config, fields = self.config, self.layout.fields
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        peers = rows.load_peers(table, config.ranks, rank)
        own = ptx.load_b64(table + 8 * config.ranks)

        if const_expr(self.options.pdl != Pdl.OFF):
            # Before it only the table is read. The kernels before us produce the partials, and
            # the dispatch that filled the rows must have ended before they are emptied.
            ptx.griddepcontrol_wait()
        if const_expr(self.options.pdl == Pdl.EARLY):
            ptx.griddepcontrol_launch_dependents()

        expert = rows.load_expert(ids, cta, num_tokens, config.top_k)
        gains = self._load_gains(norm_weight)
        self._send_rows(partials, own, peers, rank)
        if const_expr(self.options.fences == Fences.THREAD):
            ptx.fence_acq_rel("sys")
        ptx.barrier()

        control = own + fields["control"].offset_bytes
        flags = own + fields["combine_flags"].offset_bytes
        if warp == 0:
            arrivals = control + LINE_BYTES * Control.COMBINE_ARRIVALS
            if last_arrival(arrivals, num_ctas):
                line = fields["combine_flags"].offset_bytes + Int64(rank) * LINE_BYTES
                raise_flags(peers, config.ranks, line, Uint32(1))

        num_waiting = max(min(num_tokens, num_ctas), 1)
        if cta < num_waiting:
            arrived = Boolean(True)
            if warp == 0:
                watch = Watch(Phase.COMBINE, config.ranks, control, rank, record, timeout_ns)
                arrived, _ = wait_flags(flags, watch)
            # Passes on to all warps what warp 0 has acquired.
            arrived = ptx.barrier_all(arrived)
            if const_expr(self.options.pdl == Pdl.LATE):
                # Not before the wait: an idle kernel that holds an SM could keep out a peer's
                # kernel that this one waits for, where ranks share a GPU.
                ptx.griddepcontrol_launch_dependents()
            if arrived:
                before = Uint32(0)
                if warp == 0 and lane == 0:
                    # Relaxed is enough: every poll of this CTA returned before, as an acquire.
                    # The answer is wanted only at the end, so its latency is hidden.
                    departures = control + LINE_BYTES * Control.COMBINE_DEPARTURES
                    before = ptx.atom_inc(departures, Uint32(num_waiting - 1))
                self._reduce(own, partials, ids, out, eps, rank, num_tokens, expert, gains)
                if warp == 0:  # noqa: SIM102 - `and` would not keep the shuffle to one warp
                    if ptx.shfl(before, 0) == Uint32(num_waiting - 1):
                        rearm_flags(flags, config.ranks)

    @cute.jit
    def _load_gains(self, norm_weight: Int64) -> list[ptx.Vec4]:
        """The thread's chunks of the norm weight, one a pass."""
        gains = []
        if const_expr(self.options.norm):
            for idx in range_constexpr(self.passes):
                chunk = self._chunk(idx)
                live = chunk < self.num_chunks
                gains.append(ptx.load_v4_if(live, norm_weight + Int64(chunk) * 16))
        return gains

    def _chunk(self, idx: int) -> Int32:
        """The thread's chunk of 8 elements in pass `idx`."""
        tid, _, _ = cute.arch.thread_idx()
        return tid + idx * self.threads

    @cute.jit
    def _send_rows(self, partials: Int64, own: Int64, peers: list[Int64], rank: Int32) -> None:
        """Send the live rows of this CTA to their sources and make them empty.

        Positions count through all sources' token 0, then 1, and so on, so that the work follows
        the live tokens; lane l looks at the l-th position of the CTA.
        """
        config, fields = self.config, self.layout.fields
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        slot_bytes = fields["slots"].strides_bytes[2]
        # Mostly it is live, and then its latency is hidden behind that of the header.
        chunks = self._load_row(partials, Uint32(cta))
        position = Uint32(cta)
        sources = self._load_sources(own, position, num_ctas)
        end = self._live_positions(own)
        more = Boolean(True)
        while more:
            live = ptx.ballot(sources >= 0)
            # All warps have seen the headers before the first row is made empty.
            ptx.barrier()
            while live != 0:
                here = position + Uint32(ptx.lowest_bit(live)) * Uint32(num_ctas)
                live = live & (live - 1)
                src_rank, token = here % config.ranks, here // config.ranks
                base = rows.peer_base(peers, src_rank)
                # The own partial is read where it lies.
                if src_rank != Uint32(rank):
                    if here != Uint32(cta):
                        chunks = self._load_row(partials, here)
                    slot = Int64(token) * config.ranks + Int64(rank)
                    at = base + fields["slots"].offset_bytes + slot * slot_bytes
                    for idx in range_constexpr(self.passes):
                        if self._chunk(idx) < self.num_chunks:
                            ptx.store_v4(at + Int64(self._chunk(idx)) * 16, chunks[idx])
                rows.rearm_row(own, self._row(here), rank, tid, self.layout)
            position = position + Uint32(num_ctas) * WARP
            more = position < end
            if more:
                sources = self._load_sources(own, position, num_ctas)

    def _row(self, position: Uint32) -> Int64:
        """Row of a position."""
        src_rank, token = position % self.config.ranks, position // self.config.ranks
        return Int64(src_rank) * rows.stride(self.config) + Int64(token)

    @cute.jit
    def _live_positions(self, own: Int64) -> Uint32:
        """Positions up to the last token of the source that sent most."""
        lane = cute.arch.lane_idx()
        most = Uint32(0)
        for word in range_constexpr(-(-self.config.ranks // WARP)):
            if lane + WARP * word < self.config.ranks:
                at = self.layout.fields["counts"].offset_bytes + Int64(lane + WARP * word) * 4
                most = max(most, ptx.load_b32(own + at))
        return ptx.redux_max(most) * self.config.ranks

    @cute.jit
    def _load_sources(self, own: Int64, position: Uint32, num_ctas: Int32) -> Int32:
        """Source word of the lane's position: -1 where the row is empty or there is none."""
        here = position + Uint32(cute.arch.lane_idx()) * Uint32(num_ctas)
        source = Int32(EMPTY_SOURCE)
        if here < self.num_positions:
            at = self.layout.fields["header"].offset_bytes + self._row(here) * 16
            source = Int32(ptx.load_b32(own + at))
        return source

    @cute.jit
    def _load_row(self, partials: Int64, position: Uint32) -> list[ptx.Vec4]:
        """The thread's chunks of the partial of a position; zeros where there is none."""
        at = partials + self._row(position) * (2 * self.config.hidden)
        chunks = []
        for idx in range_constexpr(self.passes):
            chunk = self._chunk(idx)
            live = position < self.num_positions and chunk < self.num_chunks
            chunks.append(ptx.load_v4_if(live, at + Int64(chunk) * 16))
        return chunks

    @cute.jit
    def _reduce(
        self,
        own: Int64,
        partials: Int64,
        ids: Int64,
        out: Int64,
        eps: Float32,
        rank: Int32,
        num_tokens: Int32,
        expert: Int32,
        gains: list[ptx.Vec4],
    ) -> None:
        """Sum, normalize and store the tokens of this CTA; `expert` is the first one's."""
        config, slots = self.config, self.layout.fields["slots"]
        token, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        half = -(-self.passes * self.warps // norm.ACCUMULATORS) * norm.ACCUMULATORS
        segments = cute.arch.alloc_smem(Float32, 2 * half, 16)
        sSegments = cute.make_tensor(segments, cute.make_layout((half, 2)))
        turn = Int32(0)
        while token < num_tokens:
            masks = rows.owners(expert, config)
            slot = own + slots.offset_bytes + Int64(token) * slots.strides_bytes[1]
            row = Int64(rank) * rows.stride(config) + Int64(token)
            local = partials + row * (2 * config.hidden)
            sums = self._sum_slots(masks, slot, local, rank)
            # Two halves in turn: one barrier a token is enough.
            if const_expr(self.options.norm):
                sums = self._normalize(sums, gains, sSegments[None, turn], eps)
            for idx in range_constexpr(self.passes):
                chunk = self._chunk(idx)
                if chunk < self.num_chunks:
                    at = out + Int64(token) * (2 * config.hidden) + Int64(chunk) * 16
                    ptx.store_v4(at, sums[idx])
            token = token + num_ctas
            turn = 1 - turn
            expert = rows.load_expert(ids, token, num_tokens, config.top_k)

    @cute.jit
    def _sum_slots(
        self, masks: list[Uint32], slot: Int64, local: Int64, rank: Int32
    ) -> list[list[Uint32]]:
        """Sum the thread's chunks over the ranks of `masks`, in rank order, and round to BF16.

        Loads are relaxed at system scope, so that no L1 serves what it held before the flags.
        """
        slot_bytes = self.layout.fields["slots"].strides_bytes[2]
        sums = [[Float32(0.0)] * norm.CHUNK for _ in range(self.passes)]
        while not rows.is_empty(masks):
            # All addresses first, then all loads: so the compiler keeps them in flight at once.
            addrs, wanted, parts = [], [], []
            for _ in range_constexpr(self.batch):
                wanted.append(not rows.is_empty(masks))
                dst_rank, masks = rows.pop_rank(masks)
                at = slot + Int64(dst_rank) * slot_bytes
                if dst_rank == rank:
                    at = local
                addrs.append(at)
            for nth in range_constexpr(self.batch):
                for idx in range_constexpr(self.passes):
                    live = wanted[nth] and self._chunk(idx) < self.num_chunks
                    at = addrs[nth] + Int64(self._chunk(idx)) * 16
                    parts.append(ptx.load_v4_if(live, at, "relaxed", "sys"))
            for nth in range_constexpr(self.batch):
                for idx in range_constexpr(self.passes):
                    sums[idx] = norm.sum_chunks(sums[idx], parts[nth * self.passes + idx])
        return [norm.round_chunk(chunk) for chunk in sums]

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
        for idx in range_constexpr(self.passes):
            total = norm.segment_sum(norm.chunk_squares(sums[idx]))
            if lane == 0:
                sSegments[warp + idx * self.warps] = total
        ptx.barrier()
        segments = [sSegments[idx] for idx in range(self.passes * self.warps)]
        rstd = norm.rms_rstd(norm.total_sum(segments), self.config.hidden, eps)
        return [norm.scale_chunk(sums[idx], rstd, gains[idx]) for idx in range(self.passes)]
