"""Dispatch: quantize each token once and store it on every rank that owns one of its experts.

Senders store the row in 16-byte chunks that announce themselves into staging rows of the peers, or
straight into the own receive rows. Receivers wait for the chunks of the peers' rows, copy them into
the receive rows and take them out of staging. Senders come first and never wait. The herald, before
all, tells the peers that this rank is in the step, and hears it of them, and that they have done
with what the step after this one will overwrite.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, const_expr, cute

from ep.device import bounded, ptx, rows
from ep.device.bounded import Watch
from ep.device.home import Control, Home
from ep.device.stamps import Stamps
from ep.kernels.dispatch_receive import RowReceiver
from ep.kernels.dispatch_send import TokenSender
from ep.kernels.herald import Herald
from ep.kernels.options import KernelOptions, Pdl
from ep.layout import EpLayout
from ep.record import Phase, Stamp

THREADS_PER_SM = 1024
"""What the registers of an SM are shared among: most that run at once."""


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
        ("grace_ns", Int64),
        ("rank", Int32),
        ("num_tokens", Int32),
        ("num_senders", Int32),
        ("stamps", Int64),
    )

    def __init__(self, layout: EpLayout, options: KernelOptions) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        self.sender = TokenSender(layout, options)
        self.threads = self.sender.threads
        self.herald = Herald(layout, options, self.threads)
        self.receiver = RowReceiver(layout, options, self.threads)

    @cute.jit
    def __call__(
        self,
        table: Int64,
        x: Int64,
        ids: Int64,
        weights: Int64,
        record: Int64,
        timeout_ns: Int64,
        grace_ns: Int64,
        rank: Int32,
        num_tokens: Int32,
        num_senders: Int32,
        stamps: Int64,
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
        timeout_ns, grace_ns : Int64
            Bound of each wait, and what is added to it in step 1.
        rank, num_tokens : Int32
            This rank and its T, 0..max_tokens.
        num_senders : Int32
            CTAs that send, at least one where there are tokens. Before them comes the herald,
            after them those that receive, at least one where there are peers.
        stamps : Int64
            Device address of uint64 `[num_ctas, STAMPS]`; written by builds with stamps only.
        num_ctas : Int32
        stream : CUstream
        """
        self.kernel(
            *(table, x, ids, weights, record, timeout_ns, grace_ns),
            *(rank, num_tokens, num_senders, stamps),
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
        grace_ns: Int64,
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
        watch = Watch(Phase.DISPATCH, home, record, timeout_ns, grace_ns)
        lost = bounded.nobody(self.sender.num_words)
        if cta == 0:
            peers = rows.load_peers(table, self.config.ranks, rank)
            if const_expr(self.options.has_warm):
                self.herald.warm(home, peers, Control.COMBINED)
            self._begin(clock)
            last, stopped = home.load_step(Control.COMBINED)
            if cute.arch.warp_idx() == 0 and not stopped:
                self.herald.announce(peers, home, last + 1, num_tokens)
                clock.mark(Stamp.SENT)
                lost = self.herald.listen(peers, last + 1, watch)
                clock.mark(Stamp.LAST)
        elif cta <= num_senders:
            everyone = rows.Peers.load(table, self.config.ranks, rank)
            if const_expr(self.options.has_warm):
                self.sender.warm(x, ids, weights, home, everyone, cta - 1, num_tokens)
            self._begin(clock)
            self.sender.send(
                x, ids, weights, home, everyone, cta - 1, num_tokens, num_senders, clock
            )
            clock.mark(Stamp.SENT)
        else:
            num_ctas, _, _ = cute.arch.grid_dim()
            receiver, num_receivers = cta - 1 - num_senders, num_ctas - 1 - num_senders
            peers = rows.load_peers(table, self.config.ranks, rank)
            if const_expr(self.options.has_warm):
                self.receiver.warm(home, receiver)
            self._begin(clock)
            last, stopped = home.load_step(Control.COMBINED)
            if stopped:
                self.receiver.empty_all(receiver, num_receivers, home)
            else:
                lost = self.receiver.receive(receiver, num_receivers, peers, last + 1, watch, clock)
        if not rows.is_empty(lost):
            bounded.report(lost, watch)
        if const_expr(self.options.pdl == Pdl.LATE):
            # Not before the wait: an idle kernel that holds an SM could keep out a peer's
            # kernel that this one waits for, where ranks share a GPU.
            ptx.griddepcontrol_launch_dependents()
        clock.mark(Stamp.DONE)

    def _begin(self, clock: Stamps) -> None:
        """Wait for the kernels before us: they still read the rows, and make x, ids, weights."""
        if const_expr(self.options.pdl != Pdl.OFF):
            ptx.griddepcontrol_wait()
        clock.mark(Stamp.READY)
        if const_expr(self.options.pdl == Pdl.EARLY):
            ptx.griddepcontrol_launch_dependents()
