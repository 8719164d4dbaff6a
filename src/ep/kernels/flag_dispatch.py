"""Dispatch: quantize each token once and store it on every rank that owns one of its experts.

One CTA a token. The last CTA to arrive raises this rank's flag on all ranks and waits for theirs;
the others end. So a grid of any size is safe: nobody waits before all of this rank's stores.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ep.device import mxfp8, ptx, rows
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
from ep.layout import LINE_BYTES, SOURCE_BITS, EpLayout
from ep.record import Phase

UNIT = 16
"""Elements a thread quantizes: 32 bytes in, 16 bytes out."""
MAX_PAYLOAD_WARPS = 16


class EpFlagDispatch:
    """The dispatch kernel of one shape; rank and tokens are run-time arguments.

    Parameters
    ----------
    layout : EpLayout
        Everything in it is a compile-time constant.
    options : KernelOptions
    """

    name = "ep_flag_dispatch"
    params = (
        ("table", Int64),
        ("x", Int64),
        ("ids", Int64),
        ("weights", Int64),
        ("record", Int64),
        ("timeout_ns", Int64),
        ("rank", Int32),
        ("num_tokens", Int32),
    )

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        warps = -(-self.config.hidden // (UNIT * WARP))
        self.passes = -(-warps // MAX_PAYLOAD_WARPS)
        self.payload_warps = -(-warps // self.passes)
        # One warp more carries ids, weights and header.
        self.threads = WARP * (self.payload_warps + 1)

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
            Bound of the wait.
        rank, num_tokens : Int32
            This rank and its T, 0..max_tokens.
        num_ctas : Int32
            `max(num_tokens, 1)`.
        stream : CUstream
        """
        self.kernel(table, x, ids, weights, record, timeout_ns, rank, num_tokens).launch(
            grid=[num_ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.options.pdl != Pdl.OFF,
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
    ) -> None:
        """Device side."""
        config, fields = self.config, self.layout.fields
        token, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        peers = rows.load_peers(table, config.ranks, rank)
        own = ptx.load_b64(table + 8 * config.ranks)

        if const_expr(self.options.pdl != Pdl.OFF):
            # Before it only the table is read. The kernels before us still read the rows that our
            # peers' flags let us overwrite, and they produce x, ids and weights.
            ptx.griddepcontrol_wait()
        if const_expr(self.options.pdl == Pdl.EARLY):
            ptx.griddepcontrol_launch_dependents()

        if token < num_tokens:
            expert = rows.load_expert(ids, token, num_tokens, config.top_k)
            if warp < self.payload_warps:
                self._send_payload(x, expert, peers, rank, token)
            else:
                self._send_routing(weights, expert, peers, rank, token)
            if const_expr(self.options.fences == Fences.THREAD):
                ptx.fence_acq_rel("sys")
        ptx.barrier()

        if warp == 0:
            control = own + fields["control"].offset_bytes
            arrivals = control + LINE_BYTES * Control.DISPATCH_ARRIVALS
            if last_arrival(arrivals, num_ctas):
                line = fields["dispatch_flags"].offset_bytes + Int64(rank) * LINE_BYTES
                raise_flags(peers, config.ranks, line, Uint32(num_tokens + 1))
                if lane == 0:
                    ptx.red_add(control + LINE_BYTES * Control.STEP, Uint32(1))
                flags = own + fields["dispatch_flags"].offset_bytes
                watch = Watch(Phase.DISPATCH, config.ranks, control, rank, record, timeout_ns)
                arrived, values = wait_flags(flags, watch)
                if const_expr(self.options.pdl == Pdl.LATE):
                    # Not before the wait: an idle kernel that holds an SM could keep out a peer's
                    # kernel that this one waits for, where ranks share a GPU.
                    ptx.griddepcontrol_launch_dependents()
                if arrived:
                    self._store_counts(own, values)
                    rearm_flags(flags, config.ranks)

    @cute.jit
    def _store_counts(self, own: Int64, flags: list[Uint32]) -> None:
        """Keep the tokens of every source for combine: a flag's value is one more."""
        for word in range_constexpr(len(flags)):
            src_rank = cute.arch.lane_idx() + WARP * word
            if src_rank < self.config.ranks:
                at = own + self.layout.fields["counts"].offset_bytes + Int64(src_rank) * 4
                ptx.store_b32(at, flags[word] - 1)

    @cute.jit
    def _send_payload(
        self, x: Int64, expert: Int32, peers: list[Int64], rank: Int32, token: Int32
    ) -> None:
        """Quantize the token and store elements and scales on its ranks."""
        hidden, fields = self.config.hidden, self.layout.fields
        width = rows.scale_width(self.config)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row = Int64(rank) * rows.stride(self.config) + Int64(token)
        live, offsets, words = [], [], []
        for idx in range_constexpr(self.passes):
            unit = Uint32((idx * self.payload_warps + warp) * WARP + lane)
            at = x + (Int64(token) * hidden + Int64(unit) * UNIT) * 2
            live.append(unit < hidden // UNIT)
            offsets.append(unit)
            words.append([*ptx.load_v4_if(live[idx], at), *ptx.load_v4_if(live[idx], at + 16)])
        masks = rows.owners(expert, self.config)
        elements, scales = [], []
        for idx in range_constexpr(self.passes):
            byte = mxfp8.scale_byte(mxfp8.block_amax(words[idx]))
            elements.append(mxfp8.quantize(words[idx], mxfp8.scale_factor(byte)))
            scales.append(mxfp8.pack_scales(byte, width))
        while not rows.is_empty(masks):
            dst_rank, masks = rows.pop_rank(masks)
            base = rows.peer_base(peers, dst_rank)
            for idx in range_constexpr(self.passes):
                if live[idx]:
                    at = base + fields["x"].offset_bytes + row * hidden
                    ptx.store_v4(at + Int64(offsets[idx]) * UNIT, elements[idx])
                    if lane % (2 * width) == 0:
                        at = base + fields["scales"].offset_bytes + row * (hidden // 32)
                        rows.store_scales(at + Int64(offsets[idx] // 2), scales[idx], width)

    @cute.jit
    def _send_routing(
        self, weights: Int64, expert: Int32, peers: list[Int64], rank: Int32, token: Int32
    ) -> None:
        """Store ids, weights and header on the token's ranks."""
        top_k, fields = self.config.top_k, self.layout.fields
        lane = cute.arch.lane_idx()
        weight = Uint32(0)
        if lane < top_k:
            weight = ptx.load_b32(weights + (Int64(token) * top_k + Int64(lane)) * 4)
        masks = rows.owners(expert, self.config)
        row = Int64(rank) * rows.stride(self.config) + Int64(token)
        source = (Uint32(rank) << SOURCE_BITS) | Uint32(token)
        while not rows.is_empty(masks):
            dst_rank, masks = rows.pop_rank(masks)
            base = rows.peer_base(peers, dst_rank)
            if lane < top_k:
                at = base + row * (4 * top_k) + Int64(lane) * 4
                ptx.store_b32(at + fields["ids"].offset_bytes, Uint32(expert))
                ptx.store_b32(at + fields["weights"].offset_bytes, weight)
            if lane == 0:
                header = (source, Uint32(0), Uint32(0), Uint32(0))
                ptx.store_v4(base + fields["header"].offset_bytes + row * 16, header)
