"""Combine: send each received row's partial back to its source, there sum them in rank order.

Senders store the partials of the peers' rows in 16-byte chunks that announce themselves into the
slots of their sources, and make the rows empty. Reducers wait for the chunks of their tokens, sum
them and take them out of the slots. Senders come first and never wait. The herald, before all,
tells the peers that this rank has done with what was dispatched to it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, const_expr, cute

from ep.device import bounded, ptx, rows
from ep.device.bounded import Watch
from ep.device.home import Control, Home
from ep.device.stamps import Stamps
from ep.kernels.combine_reduce import TokenReducer
from ep.kernels.combine_send import MAX_WARPS, Chunks, RowSender
from ep.kernels.herald import Herald
from ep.kernels.options import KernelOptions, Pdl
from ep.layout import EpLayout
from ep.record import Phase, Stamp

TWO_CTAS_IN_FLIGHT = 2
"""Most chunks in flight so that the registers suffice for two CTAs on an SM."""


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
        ("grace_ns", Int64),
        ("eps", Float32),
        ("rank", Int32),
        ("num_tokens", Int32),
        ("num_senders", Int32),
        ("stamps", Int64),
    )

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        chunks = Chunks(self.config.hidden)
        self.threads = chunks.threads
        self.herald = Herald(layout, options, self.threads)
        self.sender = RowSender(layout, options, chunks)
        self.reducer = TokenReducer(layout, options, chunks)
        # Two fit where a CTA is not of the largest and few chunks are in flight; otherwise threads
        # have not the registers.
        in_flight = self.reducer.batch * chunks.passes
        two = chunks.warps < MAX_WARPS and in_flight <= TWO_CTAS_IN_FLIGHT
        self.ctas_per_sm = 2 if two else 1

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
        grace_ns: Int64,
        eps: Float32,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
        stamps: Int64,
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
        timeout_ns, grace_ns : Int64
            Bound of each wait, and what is added to it in step 1.
        eps : Float32
        rank, num_tokens : Int32
            This rank and its T, the same as in dispatch.
        num_senders : Int32
            CTAs that send, at least 1. Before them comes the herald, after them those that reduce,
            at least one where there are tokens.
        stamps : Int64
            Device address of uint64 `[num_ctas, STAMPS]`; written by builds with stamps only.
        num_ctas : Int32
        stream : CUstream
        """
        self.kernel(
            *(table, partials, ids, norm_weight, out, record, timeout_ns, grace_ns, eps),
            *(rank, num_tokens, num_senders, stamps),
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
        grace_ns: Int64,
        eps: Float32,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
        stamps: Int64,
    ) -> None:
        """Device side."""
        cta, _, _ = cute.arch.block_idx()
        clock = Stamps.of_cta(stamps, on=self.options.stamps)
        clock.mark(Stamp.START)
        home = Home.load(self.layout, table, rank)
        if cta == 0:
            peers = rows.load_peers(table, self.config.ranks, rank)
            if const_expr(self.options.has_warm):
                self.herald.warm(home, peers, Control.DISPATCHED)
            self._begin(clock)
            self.herald.clear(peers, home)
            clock.mark(Stamp.SENT)
        elif cta <= num_senders:
            peers = rows.load_peers(table, self.config.ranks, rank)
            if const_expr(self.options.has_warm):
                self.sender.warm(partials, home, peers, cta - 1)
            self._begin(clock)
            self.sender.send(partials, home, peers, cta - 1, num_senders, clock)
        else:
            num_ctas, _, _ = cute.arch.grid_dim()
            first, num_reducers = cta - 1 - num_senders, num_ctas - 1 - num_senders
            peers = rows.load_peers(table, self.config.ranks, rank)
            gains = self.reducer.load_gains(norm_weight)
            if const_expr(self.options.has_warm):
                self.reducer.warm(partials, ids, out, home, first, num_tokens)
            self._begin(clock)
            step, stopped = home.load_step(Control.DISPATCHED)
            watch = Watch(Phase.COMBINE, home, record, timeout_ns, grace_ns)
            lost = self.reducer.reduce(
                *(partials, ids, out, eps, first, num_reducers, num_tokens, gains),
                *(peers, step, stopped, watch, clock),
            )
            if not rows.is_empty(lost):
                bounded.report(lost, watch)
        if const_expr(self.options.pdl == Pdl.LATE):
            # Not before the wait: an idle kernel that holds an SM could keep out a peer's
            # kernel that this one waits for, where ranks share a GPU.
            ptx.griddepcontrol_launch_dependents()
        clock.mark(Stamp.DONE)

    def _begin(self, clock: Stamps) -> None:
        """Wait for the kernels before us: they fill the rows and make partials and ids."""
        if const_expr(self.options.pdl != Pdl.OFF):
            ptx.griddepcontrol_wait()
        clock.mark(Stamp.READY)
        if const_expr(self.options.pdl == Pdl.EARLY):
            ptx.griddepcontrol_launch_dependents()
