"""Combine: send each received row's partial back to its source, there sum them in rank order.

Senders store the partials of the peers' rows in 16-byte chunks that announce themselves into the
slots of their sources, and make the rows empty. Reducers wait for the chunks of their tokens, sum
them and take them out of the slots. Senders come first and never wait.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
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
from ep.device.bounded import Control, Watch
from ep.device.sync import WARP
from ep.kernels.options import KernelOptions, Pdl, Warm
from ep.layout import CHUNK_BYTES, EMPTY_SOURCE, LINE_BYTES, EpLayout
from ep.record import Phase

MAX_WARPS = 16
LOADS_IN_FLIGHT = 8
"""Most chunks of slots that a thread polls at once: they live in registers."""
TWO_CTAS_IN_FLIGHT = 2
"""Most of them so that the registers suffice for two CTAs on an SM."""


class EpCombine:
    """The combine kernel of one shape; rank and tokens are run-time arguments.

    Parameters
    ----------
    layout : EpLayout
        Everything in it is a compile-time constant.
    options : KernelOptions
    """

    name = "ep_combine"
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
        ("num_senders", Int32),
    )

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        # A thread has one chunk in each pass; a warp's chunks are one norm segment.
        segments = -(-self.config.hidden // norm.SEGMENT)
        self.passes = -(-segments // MAX_WARPS)
        self.warps = -(-segments // self.passes)
        self.threads = WARP * self.warps
        self.num_chunks = self.config.hidden // norm.CHUNK
        self.num_words = -(-self.config.ranks // WARP)
        # Ranks whose slots a thread polls before it adds the first one.
        most = min(self.config.ranks, self.config.top_k)
        self.batch = min(most, max(LOADS_IN_FLIGHT // self.passes, 1))
        self.num_sources = self.config.ranks - 1
        # Two fit where few chunks are in flight; more would not fit into the registers of two.
        self.ctas_per_sm = 2 if self.batch * self.passes <= TWO_CTAS_IN_FLIGHT else 1

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
        num_senders: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`; local to the rank, completes when its tokens' partials have come.

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
            Bound of each wait.
        eps : Float32
        rank, num_tokens : Int32
            This rank and its T, the same as in dispatch.
        num_senders : Int32
            CTAs that send, at least 1; the others reduce, at least one where there are tokens.
        num_ctas : Int32
        stream : CUstream
        """
        self.kernel(
            *(table, partials, ids, norm_weight, out, record, timeout_ns, eps),
            *(rank, num_tokens, num_senders),
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.options.pdl != Pdl.OFF,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=0,
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
        num_senders: Int32,
    ) -> None:
        """Device side."""
        cta, _, _ = cute.arch.block_idx()
        own = ptx.load_b64(table + 8 * self.config.ranks)
        control = own + self.layout.fields["control"].offset_bytes
        if cta < num_senders:
            peers = rows.load_peers(table, self.config.ranks, rank)
            self._warm_sender(partials, own, peers, control, rank)
            self._begin()
            self._send_rows(partials, own, peers, control, rank, num_senders)
        else:
            gains = self._load_gains(norm_weight)
            self._warm_reducer(own, partials, ids, out, control, rank, num_tokens, num_senders)
            self._begin()
            step = ptx.load_b64(control + LINE_BYTES * Control.DISPATCHED)
            watch = Watch(Phase.COMBINE, self.num_words, control, rank, step, record, timeout_ns)
            self._reduce(own, partials, ids, out, eps, num_tokens, num_senders, gains, watch)
        if const_expr(self.options.pdl == Pdl.LATE):
            # Not before the wait: an idle kernel that holds an SM could keep out a peer's
            # kernel that this one waits for, where ranks share a GPU.
            ptx.griddepcontrol_launch_dependents()

    def _begin(self) -> None:
        """Wait for the kernels before us: they fill the rows and make partials and ids."""
        if const_expr(self.options.pdl != Pdl.OFF):
            ptx.griddepcontrol_wait()
        if const_expr(self.options.pdl == Pdl.EARLY):
            ptx.griddepcontrol_launch_dependents()

    @cute.jit
    def _warm_sender(
        self, partials: Int64, own: Int64, peers: list[Int64], control: Int64, rank: Int32
    ) -> None:
        """Touch what the first row needs; what is read there may still be changing."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if const_expr(self.options.has_warm):
            position = Uint32(cta)
            ptx.touch(control + LINE_BYTES * Control.DISPATCHED)
            ptx.touch(own + self.layout.fields["counts"].offset_bytes)
            if self._exists(position):
                row = self._row(position, rank)
                ptx.touch(own + self.layout.fields["header"].offset_bytes + row * CHUNK_BYTES)
                chunk = min(tid, self.num_chunks - 1)
                at = partials + row * (2 * self.config.hidden)
                ptx.touch(at + Int64(chunk) * CHUNK_BYTES)
                if const_expr(self.options.warm == Warm.PEERS):
                    slot = self._slot(peers, rank, position)
                    if tid == 0:
                        ptx.touch(slot)

    @cute.jit
    def _warm_reducer(
        self,
        own: Int64,
        partials: Int64,
        ids: Int64,
        out: Int64,
        control: Int64,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
    ) -> None:
        """Touch what the first token needs."""
        cta, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(self.options.has_warm):
            token = cta - num_senders
            if token < num_tokens:
                slots = self.layout.fields["slots"]
                row = Int64(rank) * rows.stride(self.config) + Int64(token)
                offset = Int64(min(tid, self.num_chunks - 1)) * CHUNK_BYTES
                ptx.touch(control + LINE_BYTES * Control.DISPATCHED)
                ptx.touch(ids + Int64(token) * (4 * self.config.top_k))
                at = own + slots.offset_bytes + Int64(token) * slots.strides_bytes[0]
                ptx.touch(at + offset)
                ptx.touch(partials + row * (2 * self.config.hidden) + offset)
                ptx.touch(out + Int64(token) * (2 * self.config.hidden) + offset)

    @cute.jit
    def _load_gains(self, norm_weight: Int64) -> list[ptx.Vec4]:
        """The thread's chunks of the norm weight, one a pass."""
        gains = []
        if const_expr(self.options.norm):
            for idx in range_constexpr(self.passes):
                chunk = self._chunk(idx)
                gains.append(
                    ptx.load_v4_if(self._is_live(idx), norm_weight + Int64(chunk) * CHUNK_BYTES)
                )
        return gains

    def _chunk(self, idx: int) -> Int32:
        """The thread's chunk of 8 elements in pass `idx`."""
        tid, _, _ = cute.arch.thread_idx()
        return tid + idx * self.threads

    def _is_live(self, idx: int) -> Boolean | bool:
        """Whether the thread has a chunk in pass `idx`: a constant where all threads have."""
        if self.num_chunks >= (idx + 1) * self.threads:
            return True
        return self._chunk(idx) < self.num_chunks

    @cute.jit
    def _send_rows(
        self,
        partials: Int64,
        own: Int64,
        peers: list[Int64],
        control: Int64,
        rank: Int32,
        num_senders: Int32,
    ) -> None:
        """Send the peers' live rows of this CTA to their sources and make them empty.

        Positions count through all peers' token 0, then 1, and so on, so that the work follows
        the live tokens; lane l looks at the l-th position of the CTA.
        """
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        position = Uint32(cta)
        # Mostly it is live, and then its latency is hidden behind that of the header.
        chunks = self._load_row(partials, position, rank)
        sources = self._load_sources(own, position, rank, num_senders)
        step = ptx.load_b64(control + LINE_BYTES * Control.DISPATCHED)
        end = self._live_positions(own)
        if cta == 0 and tid == 0:
            # Nobody in this kernel reads it; the next dispatch does.
            ptx.store_v2(control + LINE_BYTES * Control.COMBINED, wire.words_of(step))
        more = Boolean(True)
        while more:
            live = ptx.ballot(sources >= 0)
            rest = live
            while rest != 0:
                here = position + Uint32(ptx.lowest_bit(rest)) * Uint32(num_senders)
                rest = rest & (rest - 1)
                if here != Uint32(cta):
                    chunks = self._load_row(partials, here, rank)
                self._send_row(peers, rank, here, chunks)
            # All warps have seen the headers before the first row is made empty.
            ptx.barrier()
            while live != 0:
                here = position + Uint32(ptx.lowest_bit(live)) * Uint32(num_senders)
                live = live & (live - 1)
                rows.rearm_row(own, self._row(here, rank), rank, tid, self.layout)
            position = position + Uint32(num_senders) * WARP
            more = position < end
            if more:
                sources = self._load_sources(own, position, rank, num_senders)

    @cute.jit
    def _send_row(
        self, peers: list[Int64], rank: Int32, position: Uint32, chunks: list[ptx.Vec4]
    ) -> None:
        """Store a partial in its slot at its source."""
        at = self._slot(peers, rank, position)
        for idx in range_constexpr(self.passes):
            if self._is_live(idx):
                ptx.store_b128(at + Int64(self._chunk(idx)) * CHUNK_BYTES, wire.seal(chunks[idx]))

    @cute.jit
    def _slot(self, peers: list[Int64], rank: Int32, position: Uint32) -> Int64:
        """Address of the slot of a position, at its source. All lanes take part."""
        slots = self.layout.fields["slots"]
        src_rank, token = self._source(position, rank)
        slot = Int64(token) * slots.strides_bytes[0] + Int64(rank) * slots.strides_bytes[1]
        return rows.peer_base(peers, src_rank) + slots.offset_bytes + slot

    @cute.jit
    def _source(self, position: Uint32, rank: Int32) -> tuple[Int32, Int32]:
        """Source rank, never the own one, and token of a position."""
        src_rank = Int32(position % max(self.num_sources, 1))
        if src_rank >= rank:
            src_rank = src_rank + 1
        return src_rank, Int32(position // max(self.num_sources, 1))

    def _row(self, position: Uint32, rank: Int32) -> Int64:
        """Row of a position."""
        src_rank, token = self._source(position, rank)
        return Int64(src_rank) * rows.stride(self.config) + Int64(token)

    def _exists(self, position: Uint32) -> Boolean:
        return position < self.num_sources * self.config.max_tokens

    @cute.jit
    def _live_positions(self, own: Int64) -> Uint32:
        """Positions up to the last token of the source that sent most."""
        lane = cute.arch.lane_idx()
        most = Uint32(0)
        for word in range_constexpr(self.num_words):
            if lane + WARP * word < self.config.ranks:
                at = self.layout.fields["counts"].offset_bytes + Int64(lane + WARP * word) * 4
                most = max(most, ptx.load_b32(own + at))
        return ptx.redux_max(most) * self.num_sources

    @cute.jit
    def _load_sources(self, own: Int64, position: Uint32, rank: Int32, num_senders: Int32) -> Int32:
        """Source word of the lane's position: -1 where the row is empty or there is none."""
        here = position + Uint32(cute.arch.lane_idx()) * Uint32(num_senders)
        source = Int32(EMPTY_SOURCE)
        if self._exists(here):
            at = self.layout.fields["header"].offset_bytes + self._row(here, rank) * CHUNK_BYTES
            source = Int32(ptx.load_b32(own + at))
        return source

    @cute.jit
    def _load_row(self, partials: Int64, position: Uint32, rank: Int32) -> list[ptx.Vec4]:
        """The thread's chunks of the partial of a position; zeros where there is none."""
        at = partials + self._row(position, rank) * (2 * self.config.hidden)
        chunks = []
        for idx in range_constexpr(self.passes):
            chunk = self._chunk(idx)
            live = self._is_live(idx) and self._exists(position)
            chunks.append(ptx.load_v4_if(live, at + Int64(chunk) * CHUNK_BYTES))
        return chunks

    @cute.jit
    def _reduce(
        self,
        own: Int64,
        partials: Int64,
        ids: Int64,
        out: Int64,
        eps: Float32,
        num_tokens: Int32,
        num_senders: Int32,
        gains: list[ptx.Vec4],
        watch: Watch,
    ) -> None:
        """Sum, normalize and store the tokens of this CTA; make its own rows empty."""
        config, rank = self.config, watch.rank
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        half = -(-self.passes * self.warps // norm.ACCUMULATORS) * norm.ACCUMULATORS
        segments = cute.arch.alloc_smem(Float32, 2 * half, 16)
        sSegments = cute.make_tensor(segments, cute.make_layout((half, 2)))
        turn = Int32(0)
        token = cta - num_senders
        expert = rows.load_expert(ids, token, num_tokens, config.top_k)
        while token < num_tokens:
            masks = rows.owners(expert, config)
            row = Int64(rank) * rows.stride(config) + Int64(token)
            local = partials + row * (2 * config.hidden)
            sums = self._sum_slots(masks, own, token, local, watch)
            # Two halves in turn: one barrier a token is enough.
            if const_expr(self.options.norm):
                sums = self._normalize(sums, gains, sSegments[None, turn], eps)
            for idx in range_constexpr(self.passes):
                chunk = self._chunk(idx)
                if self._is_live(idx):
                    at = out + Int64(token) * (2 * config.hidden) + Int64(chunk) * CHUNK_BYTES
                    ptx.store_v4(at, sums[idx])
            if rows.has_rank(masks, rank):
                rows.rearm_row(own, row, rank, tid, self.layout)
            token = token + (num_ctas - num_senders)
            turn = 1 - turn
            expert = rows.load_expert(ids, token, num_tokens, config.top_k)

    @cute.jit
    def _sum_slots(
        self, masks: list[Uint32], own: Int64, token: Int32, local: Int64, watch: Watch
    ) -> list[list[Uint32]]:
        """Sum the thread's chunks over the ranks of `masks`, in rank order, and round to BF16."""
        slots = self.layout.fields["slots"]
        slot = own + slots.offset_bytes + Int64(token) * slots.strides_bytes[0]
        sums = [[Float32(0.0)] * norm.CHUNK for _ in range(self.passes)]
        while not rows.is_empty(masks):
            addrs, dst_ranks = [], []
            wanted, awaited = Uint32(0), Uint32(0)
            for nth in range_constexpr(self.batch):
                dst_rank, rest = rows.pop_rank(masks)
                is_own = dst_rank == watch.rank
                at = slot + Int64(dst_rank) * slots.strides_bytes[1]
                if is_own:
                    at = local
                for idx in range_constexpr(self.passes):
                    bit = Uint32(1 << (nth * self.passes + idx))
                    if self._is_live(idx) and not rows.is_empty(masks):
                        wanted = wanted | bit
                        if not is_own:
                            awaited = awaited | bit
                    addrs.append(at + Int64(self._chunk(idx)) * CHUNK_BYTES)
                    dst_ranks.append(dst_rank)
                masks = rest
            parts = self._poll(addrs, dst_ranks, wanted, awaited, watch)
            for nth in range_constexpr(len(parts)):
                idx = nth % self.passes
                sums[idx] = norm.sum_chunks(sums[idx], parts[nth])
                if (awaited >> nth) & 1 != 0:
                    wire.take(addrs[nth])
        return [norm.round_chunk(chunk) for chunk in sums]

    @cute.jit
    def _poll(
        self,
        addrs: list[Int64],
        dst_ranks: list[Int32],
        wanted: Uint32,
        awaited: Uint32,
        watch: Watch,
    ) -> list[ptx.Vec4]:
        """Load the chunks of `wanted`, zeros for the others, until those of `awaited` are here.

        Those that time ran out for stay as they were found: all ones, which are NaN.
        """
        parts = [(Uint32(0),) * 4 for _ in addrs]
        polls, since_ns = Int32(0), Uint64(0)
        pending = wanted
        while pending != 0:
            for nth in range_constexpr(len(addrs)):
                if (pending >> nth) & 1 != 0:
                    parts[nth] = ptx.load_b128(addrs[nth])
            pending = pending & awaited
            for nth in range_constexpr(len(addrs)):
                if wire.has_arrived(parts[nth]):
                    pending = pending & ~Uint32(1 << nth)
            polls += 1
            if pending != 0:
                over, since_ns = bounded.is_over(polls, since_ns, watch)
                if over:
                    self._report(dst_ranks, pending, since_ns, watch)
                    pending = Uint32(0)
        return parts

    @cute.jit
    def _report(
        self, dst_ranks: list[Int32], pending: Uint32, since_ns: Uint64, watch: Watch
    ) -> None:
        """Say which ranks' chunks have not come."""
        bits = [Uint32(0) for _ in range(self.num_words)]
        for nth in range_constexpr(len(dst_ranks)):
            if (pending >> nth) & 1 != 0:
                one = bounded.rank_bits(dst_ranks[nth], self.num_words)
                bits = [some | more for some, more in zip(bits, one, strict=True)]
        bounded.report(bits, since_ns, watch)

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
