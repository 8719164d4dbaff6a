"""Dispatch: quantize each token once and store it on every rank that owns one of its experts.

Senders store the row in 16-byte chunks that announce themselves into staging rows of the peers, or
straight into the own receive rows. Receivers wait for the chunks of the peers' rows, copy them into
the receive rows and take them out of staging. Senders come first and never wait.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr, cute, range_constexpr

from ep.device import bounded, mxfp8, ptx, rows, wire
from ep.device.bounded import Control, Watch
from ep.device.sync import WARP
from ep.kernels.options import KernelOptions, Pdl, Warm
from ep.layout import CHUNK_BYTES, LINE_BYTES, NOTHING, PARITIES, SOURCE_BITS, EpLayout
from ep.record import Phase

UNIT = 16
"""Elements a thread quantizes: 32 bytes in, a chunk out."""
MAX_PAYLOAD_WARPS = 16
THREADS_PER_SM = 1024


class EpDispatch:
    """The dispatch kernel of one shape; rank and tokens are run-time arguments.

    Parameters
    ----------
    layout : EpLayout
        Everything in it is a compile-time constant.
    options : KernelOptions
    """

    name = "ep_dispatch"
    params = (
        ("table", Int64),
        ("x", Int64),
        ("ids", Int64),
        ("weights", Int64),
        ("record", Int64),
        ("timeout_ns", Int64),
        ("rank", Int32),
        ("num_tokens", Int32),
        ("num_senders", Int32),
    )

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        self.send_passes = -(-layout.scale_chunks // MAX_PAYLOAD_WARPS)
        self.payload_warps = -(-layout.scale_chunks // self.send_passes)
        # One warp more carries ids, weights and announcements.
        self.threads = WARP * (self.payload_warps + 1)
        self.receive_passes = -(-layout.row_chunks // self.threads)
        self.first_choice = layout.x_chunks + layout.scale_chunks
        self.head = self.first_choice + self.config.top_k
        self.num_words = -(-self.config.ranks // WARP)

    @cute.jit
    def __call__(
        self,
        table: Int64,
        x: Int64,
        ids: Int64,
        weights: Int64,
        record: Int64,
        timeout_ns: Int64,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`; local to the rank, completes when every rank has dispatched.

        Parameters
        ----------
        table : Int64
            Device address of int64 `[ranks + 1]`: the ranks' buffers, the own mapping last.
        x, ids, weights : Int64
            Device addresses of BF16 `[T, H]` (a multiple of 16), int32 and FP32 `[T, K]`.
        record : Int64
            Device address of the hang record.
        timeout_ns : Int64
            Bound of each wait.
        rank, num_tokens : Int32
            This rank and its T, 0..max_tokens.
        num_senders : Int32
            CTAs that send, at least 1; the others receive, at least one where there are peers.
        num_ctas : Int32
        stream : CUstream
        """
        self.kernel(
            table, x, ids, weights, record, timeout_ns, rank, num_tokens, num_senders
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.options.pdl != Pdl.OFF,
            # Without a bound the assembler would rather spill than use more than 40 registers.
            min_blocks_per_mp=max(1, THREADS_PER_SM // self.threads),
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(
        self,
        table: Int64,
        x: Int64,
        ids: Int64,
        weights: Int64,
        record: Int64,
        timeout_ns: Int64,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
    ) -> None:
        """Device side."""
        cta, _, _ = cute.arch.block_idx()
        own = ptx.load_b64(table + 8 * self.config.ranks)
        control = own + self.layout.fields["control"].offset_bytes
        if cta < num_senders:
            peers = rows.Peers.load(table, self.config.ranks, rank)
            self._warm_sender(x, ids, weights, peers, control, rank, num_tokens)
            self._begin()
            self._send(x, ids, weights, own, peers, control, rank, num_tokens, num_senders)
        else:
            self._warm_receiver(own, control, cta - num_senders, rank)
            self._begin()
            step = ptx.load_b64(control + LINE_BYTES * Control.COMBINED) + 1
            watch = Watch(Phase.DISPATCH, self.num_words, control, rank, step, record, timeout_ns)
            self._receive(own, cta - num_senders, num_senders, watch)
        if const_expr(self.options.pdl == Pdl.LATE):
            # Not before the wait: an idle kernel that holds an SM could keep out a peer's
            # kernel that this one waits for, where ranks share a GPU.
            ptx.griddepcontrol_launch_dependents()

    def _begin(self) -> None:
        """Wait for the kernels before us: they still read the rows, and make x, ids, weights."""
        if const_expr(self.options.pdl != Pdl.OFF):
            ptx.griddepcontrol_wait()
        if const_expr(self.options.pdl == Pdl.EARLY):
            ptx.griddepcontrol_launch_dependents()

    @cute.jit
    def _warm_sender(
        self,
        x: Int64,
        ids: Int64,
        weights: Int64,
        peers: rows.Peers,
        control: Int64,
        rank: Int32,
        num_tokens: Int32,
    ) -> None:
        """Touch what the first token needs; what is read there may still be changing."""
        token, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        if const_expr(self.options.has_warm):  # noqa: SIM102 - the first is a constant
            if token < num_tokens:
                ptx.touch(control + LINE_BYTES * Control.COMBINED)
                ptx.touch(ids + Int64(token) * (4 * self.config.top_k))
                if warp < self.payload_warps:
                    unit = min(self._unit(0), self.config.hidden // UNIT - 1)
                    ptx.touch(x + (Int64(token) * self.config.hidden + Int64(unit) * UNIT) * 2)
                else:
                    ptx.touch(weights + Int64(token) * (4 * self.config.top_k))
        if const_expr(self.options.has_warm and self.options.warm == Warm.PEERS):  # noqa: SIM102
            if warp == self.payload_warps and lane < self.config.ranks and lane != rank:
                for half in range_constexpr(PARITIES):
                    place = min(token, self.config.max_tokens - 1)
                    staged = wire.staged_row(self.layout, Uint32(half), rank, place)
                    ptx.touch(peers.by_lane[0] + staged)
                    line = wire.announcement(self.layout, Uint32(half), rank)
                    ptx.touch(peers.by_lane[0] + line)

    @cute.jit
    def _warm_receiver(self, own: Int64, control: Int64, receiver: Int32, rank: Int32) -> None:
        """Touch what the first row needs."""
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(self.options.has_warm):
            ptx.touch(control + LINE_BYTES * Control.COMBINED)
            src_rank, token = self._first_row(receiver, rank)
            row = Int64(src_rank) * rows.stride(self.config) + Int64(token)
            ptx.touch(own + self.layout.fields["x"].offset_bytes + row * self.config.hidden)
            ptx.touch(own + wire.announcement(self.layout, Uint32(0), src_rank))
            for half in range_constexpr(PARITIES):
                staged = wire.staged_row(self.layout, Uint32(half), src_rank, token)
                chunk = min(tid, self.head)
                ptx.touch(own + staged + Int64(chunk) * CHUNK_BYTES)

    @cute.jit
    def _first_row(self, receiver: Int32, rank: Int32) -> tuple[Int32, Int32]:
        """Source and token that a receiver begins with."""
        per_round = max(self.config.ranks - 1, 1)
        src_rank = Int32(Uint32(receiver) % per_round)
        if src_rank >= rank:
            src_rank = src_rank + 1
        token = Int32(Uint32(receiver) // per_round)
        return src_rank, min(token, self.config.max_tokens - 1)

    @cute.jit
    def _send(
        self,
        x: Int64,
        ids: Int64,
        weights: Int64,
        own: Int64,
        peers: rows.Peers,
        control: Int64,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
    ) -> None:
        """Send the tokens of this CTA; the first CTA also says how many there are."""
        token, _, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        # Every load is under way before the first answer is needed.
        step = ptx.load_b64(control + LINE_BYTES * Control.COMBINED)
        expert = rows.load_expert(ids, token, num_tokens, self.config.top_k)
        if warp < self.payload_warps:
            words = self._load_payload(x, token, num_tokens)
            parity = wire.parity(step + 1)
            while token < num_tokens:
                masks = rows.owners(expert, self.config)
                self._send_payload(words, masks, own, peers, parity, rank, token)
                token = token + num_senders
                expert = rows.load_expert(ids, token, num_tokens, self.config.top_k)
                words = self._load_payload(x, token, num_tokens)
        else:
            weight = rows.load_expert(weights, token, num_tokens, self.config.top_k)
            step = step + 1
            if token == 0:
                self._announce(own, peers, control, step, rank, num_tokens)
            while token < num_tokens:
                masks = rows.owners(expert, self.config)
                self._send_routing(expert, weight, masks, own, peers, step, rank, token)
                token = token + num_senders
                expert = rows.load_expert(ids, token, num_tokens, self.config.top_k)
                weight = rows.load_expert(weights, token, num_tokens, self.config.top_k)

    @cute.jit
    def _load_payload(self, x: Int64, token: Int32, num_tokens: Int32) -> list[list[Uint32]]:
        """The lane's 16 elements of each pass, as 8 BF16 pairs; zeros past the end."""
        hidden, words = self.config.hidden, []
        for idx in range_constexpr(self.send_passes):
            unit = self._unit(idx)
            at = x + (Int64(token) * hidden + Int64(unit) * UNIT) * 2
            live = unit < hidden // UNIT and token < num_tokens
            words.append([*ptx.load_v4_if(live, at), *ptx.load_v4_if(live, at + 16)])
        return words

    def _unit(self, idx: int) -> Int32:
        """The lane's 16 elements in pass `idx`, as a number; also their chunk's."""
        tid, _, _ = cute.arch.thread_idx()
        return tid + idx * self.payload_warps * WARP

    @cute.jit
    def _announce(
        self,
        own: Int64,
        peers: rows.Peers,
        control: Int64,
        step: Int64,
        rank: Int32,
        num_tokens: Int32,
    ) -> None:
        """Tell every rank that this one is in `step`, and how many tokens it sends."""
        lane = cute.arch.lane_idx()
        line = wire.announcement(self.layout, wire.parity(step), rank)
        for word in range_constexpr(self.num_words):
            dst_rank = lane + WARP * word
            if dst_rank < self.config.ranks and dst_rank != rank:
                said = wire.note(step, Uint32(num_tokens))
                ptx.store_b128(peers.by_lane[word] + line, said)
        if lane == 0:
            counts = self.layout.fields["counts"].offset_bytes + Int64(rank) * 4
            ptx.store_b32(own + counts, Uint32(num_tokens))
            # Nobody in this kernel reads it; combine does.
            ptx.store_v2(control + LINE_BYTES * Control.DISPATCHED, wire.words_of(step))

    @cute.jit
    def _send_payload(
        self,
        words: list[list[Uint32]],
        masks: list[Uint32],
        own: Int64,
        peers: rows.Peers,
        parity: Uint32,
        rank: Int32,
        token: Int32,
    ) -> None:
        """Quantize the token and store elements and scales on its ranks."""
        hidden, fields = self.config.hidden, self.layout.fields
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        staged = wire.staged_row(self.layout, parity, rank, token)
        row = Int64(rank) * rows.stride(self.config) + Int64(token)
        at_own = own + fields["x"].offset_bytes + row * hidden
        for idx in range_constexpr(self.send_passes):
            byte = mxfp8.scale_byte(mxfp8.block_amax(words[idx]))
            elements = mxfp8.quantize(words[idx], mxfp8.scale_factor(byte))
            live = self._unit(idx) < hidden // UNIT
            offset = Int64(self._unit(idx)) * CHUNK_BYTES
            peers.store_all(masks, rank, live, at_own + offset, staged + offset, elements)
            scales = mxfp8.gather_scales(byte)
            sealed = wire.seal_scales(scales)
            chunk = warp + idx * self.payload_warps
            if chunk < self.layout.scale_chunks:
                at = staged + (self.layout.x_chunks + Int64(chunk)) * CHUNK_BYTES
                for word in range_constexpr(self.num_words):
                    if (masks[word] >> Uint32(lane)) & 1 != 0:
                        if lane + WARP * word != rank:
                            ptx.store_b128(peers.by_lane[word] + at, sealed)
                        else:
                            mine = own + fields["scales"].offset_bytes + row * (hidden // 32)
                            wire.store_row_scales(mine, chunk, scales, self.config)

    @cute.jit
    def _send_routing(
        self,
        expert: Int32,
        weight: Int32,
        masks: list[Uint32],
        own: Int64,
        peers: rows.Peers,
        step: Int64,
        rank: Int32,
        token: Int32,
    ) -> None:
        """Store ids, weights and a head; to ranks without an expert only a head that says so."""
        lane = cute.arch.lane_idx()
        staged = wire.staged_row(self.layout, wire.parity(step), rank, token)
        source = (Uint32(rank) << SOURCE_BITS) | Uint32(token)
        for word in range_constexpr(self.num_words):
            dst_rank = lane + WARP * word
            said = source
            if (masks[word] >> Uint32(lane)) & 1 == 0:
                said = Uint32(wire.NO_TOKEN)
            if dst_rank < self.config.ranks and dst_rank != rank:
                at = peers.by_lane[word] + staged + self.head * CHUNK_BYTES
                ptx.store_b128(at, wire.note(step, said))
        chunk = (Uint32(expert), Uint32(weight), Uint32(0), Uint32(0))
        live = lane < self.config.top_k
        offset = staged + (self.first_choice + Int64(lane)) * CHUNK_BYTES
        peers.store_others(masks, rank, live, offset, chunk)
        if rows.has_rank(masks, rank):
            row = Int64(rank) * rows.stride(self.config) + Int64(token)
            if live:
                self._store_choice(own, row, lane, chunk)
            if lane == 0:
                self._store_source(own, row, source)

    @cute.jit
    def _store_choice(self, own: Int64, row: Int64, nth: Int32, chunk: ptx.Vec4) -> None:
        """Store choice `nth` of a row of this rank."""
        fields = self.layout.fields
        at = own + row * (4 * self.config.top_k) + Int64(nth) * 4
        ptx.store_b32(at + fields["ids"].offset_bytes, chunk[0])
        ptx.store_b32(at + fields["weights"].offset_bytes, chunk[1])

    def _store_source(self, own: Int64, row: Int64, source: Uint32) -> None:
        """Make a row of this rank live."""
        at = own + self.layout.fields["header"].offset_bytes + row * CHUNK_BYTES
        ptx.store_v4(at, (source, Uint32(0), Uint32(0), Uint32(0)))

    @cute.jit
    def _receive(self, own: Int64, receiver: Int32, num_senders: Int32, watch: Watch) -> None:
        """Receive the rows of this CTA: of some sources all, or of one source some."""
        num_ctas, _, _ = cute.arch.grid_dim()
        num_sources = self.config.ranks - 1
        num_receivers = num_ctas - num_senders
        # As many CTAs for each source as there are; where they are few, each has several sources.
        groups = min(num_receivers, num_sources)
        per_round = max(num_sources, 1)
        nth = Int32(Uint32(receiver) % per_round)
        first = Int32(Uint32(receiver) // per_round)
        apart = max(Int32(Uint32(num_receivers) // per_round), 1)
        parity = wire.parity(watch.step)
        while nth < num_sources:
            src_rank = nth
            if src_rank >= watch.rank:
                src_rank = src_rank + 1
            token = first
            more = token < apart
            while more:
                num_tokens = self._receive_row(own, src_rank, token, parity, watch)
                token = token + apart
                more = token < num_tokens
            nth = nth + groups

    @cute.jit
    def _receive_row(
        self, own: Int64, src_rank: Int32, token: Int32, parity: Uint32, watch: Watch
    ) -> Int32:
        """Receive a row, if there is one; gives the source's tokens, 0 where time ran out.

        Each thread waits for its own chunks, and for the announcement in any case: that it came
        lets this rank send the step after the next one (see `docs/protocol.md`).
        """
        tid, _, _ = cute.arch.thread_idx()
        staged = own + wire.staged_row(
            self.layout, parity, src_rank, min(token, self.config.max_tokens - 1)
        )
        line = own + wire.announcement(self.layout, parity, src_rank)
        mine = [tid + idx * self.threads for idx in range(self.receive_passes)]
        # Past the last chunk a thread looks at the head.
        addrs = [staged + Int64(min(chunk, self.head)) * CHUNK_BYTES for chunk in mine]
        chunks = [(Uint32(NOTHING),) * 4 for _ in mine]
        num_tokens, is_row, source = Int32(0), Boolean(False), Uint32(0)
        polls, since_ns = Int32(0), Uint64(0)
        waiting = Boolean(True)
        while waiting:
            here = Boolean(True)
            for idx in range_constexpr(self.receive_passes):
                chunks[idx] = ptx.load_b128(addrs[idx])
                here = here and wire.has_arrived(chunks[idx])
            head = ptx.load_b128(staged + self.head * CHUNK_BYTES)
            said = ptx.load_b128(line)
            num_tokens, source = Int32(wire.noted(said)), wire.noted(head)
            is_row = token < num_tokens and source != wire.NO_TOKEN
            known = wire.is_of(head, watch.step) and (here or not is_row)
            waiting = not wire.is_of(said, watch.step) or (token < num_tokens and not known)
            polls += 1
            if waiting:
                over, since_ns = bounded.is_over(polls, since_ns, watch)
                if over:
                    bounded.report(bounded.rank_bits(src_rank, self.num_words), since_ns, watch)
                    num_tokens, is_row, waiting = Int32(0), Boolean(False), Boolean(False)
        if token == 0 and tid == 0:
            counts = self.layout.fields["counts"].offset_bytes + Int64(src_rank) * 4
            ptx.store_b32(own + counts, Uint32(num_tokens))
        if is_row:
            row = Int64(src_rank) * rows.stride(self.config) + Int64(token)
            for idx in range_constexpr(self.receive_passes):
                if mine[idx] < self.head:
                    self._store_chunk(own, row, mine[idx], chunks[idx])
                    wire.take(addrs[idx])
                elif mine[idx] == self.head:
                    self._store_source(own, row, source)
        return num_tokens

    @cute.jit
    def _store_chunk(self, own: Int64, row: Int64, chunk_idx: Int32, chunk: ptx.Vec4) -> None:
        """Store a chunk of a row where the experts read it."""
        hidden, fields = self.config.hidden, self.layout.fields
        if chunk_idx < self.layout.x_chunks:
            at = own + fields["x"].offset_bytes + row * hidden
            ptx.store_v4(at + Int64(chunk_idx) * CHUNK_BYTES, chunk)
        elif chunk_idx < self.first_choice:
            at = own + fields["scales"].offset_bytes + row * (hidden // 32)
            nth = chunk_idx - self.layout.x_chunks
            wire.store_row_scales(at, nth, wire.open_scales(chunk), self.config)
        else:
            self._store_choice(own, row, chunk_idx - self.first_choice, chunk)
