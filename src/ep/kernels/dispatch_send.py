"""The sending half of dispatch: quantize each token once, store it on every rank that wants it."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ep.device import mxfp8, ptx, rows, wire
from ep.device.home import Control, Home
from ep.device.stamps import Stamps
from ep.device.sync import WARP
from ep.kernels.options import KernelOptions, Warm
from ep.layout import CHUNK_BYTES, PARITIES, SOURCE_BITS, EpLayout
from ep.record import Stamp

UNIT = 16
"""Elements a thread quantizes: 32 bytes in, a chunk out."""
MAX_PAYLOAD_WARPS = 16


class TokenSender:
    """What sender CTAs do: payload warps send elements and scales, one warp more all else.

    Parameters
    ----------
    layout : EpLayout
    options : KernelOptions
    """

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        self.passes = -(-layout.scale_chunks // MAX_PAYLOAD_WARPS)
        self.payload_warps = -(-layout.scale_chunks // self.passes)
        self.threads = WARP * (self.payload_warps + 1)
        self.num_words = -(-self.config.ranks // WARP)

    @cute.jit
    def warm(
        self,
        x: Int64,
        ids: Int64,
        weights: Int64,
        home: Home,
        peers: rows.Peers,
        token: Int32,
        num_tokens: Int32,
    ) -> None:
        """Touch what the first token needs; what is read there may still be changing."""
        lane, warp, rank = cute.arch.lane_idx(), cute.arch.warp_idx(), home.rank
        if token < num_tokens:
            ptx.touch(home.control(Control.COMBINED))
            ptx.touch(ids + Int64(token) * (4 * self.config.top_k))
            if warp < self.payload_warps:
                unit = min(self._unit(0), self.config.hidden // UNIT - 1)
                ptx.touch(x + (Int64(token) * self.config.hidden + Int64(unit) * UNIT) * 2)
            else:
                ptx.touch(weights + Int64(token) * (4 * self.config.top_k))
        if const_expr(self.options.warm == Warm.PEERS):
            base = peers.by_lane[0]
            is_peer = lane < self.config.ranks and lane != rank and base != 0
            if warp == self.payload_warps and is_peer:
                for half in range_constexpr(PARITIES):
                    place = min(token, self.config.max_tokens - 1)
                    staged = wire.staged_row(self.layout, Uint32(half), rank, place)
                    ptx.touch(base + staged)

    @cute.jit
    def send(
        self,
        x: Int64,
        ids: Int64,
        weights: Int64,
        home: Home,
        peers: rows.Peers,
        token: Int32,
        num_tokens: Int32,
        num_senders: Int32,
        clock: Stamps,
    ) -> None:
        """Send the tokens of this CTA: `token` and each `num_senders` further on.

        None after a kernel that gave up: what comes now could fall on what a slow peer still needs.
        """
        warp = cute.arch.warp_idx()
        # Every load is under way before the first answer is needed.
        last, stopped = home.load_step(Control.COMBINED)
        expert = rows.load_expert(ids, token, num_tokens, self.config.top_k)
        if warp < self.payload_warps:
            words = self._load_payload(x, token, num_tokens)
            parity = wire.parity(last + 1)
            here = peers.present()
            if stopped:
                num_tokens = Int32(0)
            while token < num_tokens:
                masks = rows.common(rows.owners(expert, self.config), here)
                # The next token is under way while this one leaves.
                following = token + num_senders
                expert = rows.load_expert(ids, following, num_tokens, self.config.top_k)
                after = self._load_payload(x, following, num_tokens)
                self._send_payload(words, masks, home, peers, parity, token, clock)
                token, words = following, after
        else:
            weight = rows.load_expert(weights, token, num_tokens, self.config.top_k)
            step = last + 1
            here = peers.present()
            if stopped:
                num_tokens = Int32(0)
            while token < num_tokens:
                masks = rows.common(rows.owners(expert, self.config), here)
                self._send_routing(expert, weight, masks, home, peers, step, token, num_tokens)
                token = token + num_senders
                expert = rows.load_expert(ids, token, num_tokens, self.config.top_k)
                weight = rows.load_expert(weights, token, num_tokens, self.config.top_k)

    @cute.jit
    def _load_payload(self, x: Int64, token: Int32, num_tokens: Int32) -> list[list[Uint32]]:
        """The lane's 16 elements of each pass, as 8 BF16 pairs; zeros past the end."""
        hidden, words = self.config.hidden, []
        for idx in range_constexpr(self.passes):
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
    def _send_payload(
        self,
        words: list[list[Uint32]],
        masks: list[Uint32],
        home: Home,
        peers: rows.Peers,
        parity: Uint32,
        token: Int32,
        clock: Stamps,
    ) -> None:
        """Quantize the token and store elements and scales on its ranks."""
        hidden, rank = self.config.hidden, home.rank
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        staged = wire.staged_row(self.layout, parity, rank, token)
        row = home.row(rank, token)
        at_own = home.field("x") + row * hidden
        for idx in range_constexpr(self.passes):
            byte = mxfp8.scale_byte(mxfp8.block_amax(words[idx]))
            # Before the elements, whose arithmetic hides the latency of the shuffles.
            scales = mxfp8.gather_scales(byte)
            elements = mxfp8.quantize(words[idx], mxfp8.scale_factor(byte))
            clock.mark(Stamp.QUANTIZED, elements[3])
            live = self._unit(idx) < hidden // UNIT
            offset = Int64(self._unit(idx)) * CHUNK_BYTES
            peers.store_all(masks, rank, live, at_own + offset, staged + offset, elements)
            sealed = wire.seal_scales(scales)
            chunk = warp + idx * self.payload_warps
            if chunk < self.layout.scale_chunks:
                at = staged + (self.layout.x_chunks + Int64(chunk)) * CHUNK_BYTES
                for word in range_constexpr(self.num_words):
                    if (masks[word] >> Uint32(lane)) & 1 != 0:
                        if lane + WARP * word != rank:
                            ptx.store_b128(peers.by_lane[word] + at, sealed)
                        else:
                            mine = home.field("scales") + row * (hidden // 32)
                            rows.store_row_scales(mine, chunk, scales, self.config)

    @cute.jit
    def _send_routing(
        self,
        expert: Int32,
        weight: Int32,
        masks: list[Uint32],
        home: Home,
        peers: rows.Peers,
        step: Int64,
        token: Int32,
        num_tokens: Int32,
    ) -> None:
        """Store ids, weights and a head; to ranks without an expert only a head that says so."""
        lane, rank = cute.arch.lane_idx(), home.rank
        staged = wire.staged_row(self.layout, wire.parity(step), rank, token)
        source = (Uint32(rank) << SOURCE_BITS) | Uint32(token)
        for word in range_constexpr(self.num_words):
            dst_rank = lane + WARP * word
            said = source
            if (masks[word] >> Uint32(lane)) & 1 == 0:
                said = Uint32(wire.NO_TOKEN)
            is_there = peers.by_lane[word] != 0
            if dst_rank < self.config.ranks and dst_rank != rank and is_there:
                at = peers.by_lane[word] + staged + self.layout.head_chunk * CHUNK_BYTES
                ptx.store_b128(at, wire.note(step, said, Uint32(num_tokens)))
        chunk = (Uint32(expert), Uint32(weight), Uint32(0), Uint32(0))
        live = lane < self.config.top_k
        offset = staged + (self.layout.first_choice_chunk + Int64(lane)) * CHUNK_BYTES
        peers.store_others(masks, rank, live, offset, chunk)
        if rows.has_rank(masks, rank):
            row = home.row(rank, token)
            if live:
                rows.store_choice(home.base, row, lane, chunk[0], chunk[1], self.layout)
            if lane == 0:
                rows.store_source(home.base, row, source, self.layout)
