"""What the machine itself costs: an empty kernel, and a flag that goes to a peer and comes back.

Dispatch and combine cannot be faster than two launches and two crossings; the benchmark measures
both in the same run, with the instructions that the protocol uses.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr, cute

from ep.device import ptx
from ep.device.sync import POLLS_PER_CLOCK, WARP
from ep.kernels.options import KernelOptions, Pdl
from ep.layout import EpLayout


class EpEmpty:
    """A kernel of one warp that does nothing but wait for the one before it."""

    name = "ep_empty"
    params = (("unused", Int64),)
    threads = WARP

    def __init__(self, _layout: EpLayout, options: KernelOptions) -> None:
        self.options = options

    @cute.jit
    def __call__(self, unused: Int64, num_ctas: Int32, stream: cuda.CUstream) -> None:
        """Launch on `stream`."""
        self.kernel(unused).launch(
            grid=[num_ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.options.pdl != Pdl.OFF,
        )

    @cute.kernel
    def kernel(self, unused: Int64) -> None:  # noqa: ARG002 - a kernel has arguments
        """Device side."""
        if const_expr(self.options.pdl != Pdl.OFF):
            ptx.griddepcontrol_wait()
            ptx.griddepcontrol_launch_dependents()


class EpPingPong:
    """Two ranks pass a counter to and fro; each word goes one way, by one relaxed store."""

    name = "ep_ping_pong"
    params = (
        ("own", Int64),
        ("peer", Int64),
        ("timeout_ns", Int64),
        ("rounds", Int32),
        ("first", Int32),
    )
    threads = WARP

    def __init__(self, _layout: EpLayout, options: KernelOptions) -> None:
        self.options = options

    @cute.jit
    def __call__(
        self,
        own: Int64,
        peer: Int64,
        timeout_ns: Int64,
        rounds: Int32,
        first: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`; the two ranks' kernels end together.

        Parameters
        ----------
        own, peer : Int64
            Address of a line of zeros of this rank, and of the peer's. Word 0 counts, word 1 of the
            own line gets the nanoseconds that all rounds took, 0 if the time ran out.
        timeout_ns : Int64
        rounds : Int32
            Times there and back.
        first : Int32
            1 on the rank that begins.
        num_ctas : Int32
            1.
        stream : CUstream
        """
        self.kernel(own, peer, timeout_ns, rounds, first).launch(
            grid=[num_ctas, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, own: Int64, peer: Int64, timeout_ns: Int64, rounds: Int32, first: Int32
    ) -> None:
        """Device side."""
        if cute.arch.lane_idx() == 0:
            start_ns = ptx.globaltimer()
            deadline_ns = start_ns + Uint64(timeout_ns)
            turn = Int32(0)
            alive = Boolean(True)
            while alive and turn < rounds:
                turn += 1
                if first != 0:
                    ptx.store_b32(peer, Uint32(turn), "relaxed", "sys")
                polls = Int32(0)
                seen = ptx.load_b32(own, "relaxed", "sys")
                while alive and seen != Uint32(turn):
                    seen = ptx.load_b32(own, "relaxed", "sys")
                    polls += 1
                    if polls % POLLS_PER_CLOCK == 0:
                        alive = ptx.globaltimer() < deadline_ns
                if first == 0:
                    ptx.store_b32(peer, Uint32(turn), "relaxed", "sys")
            took_ns = Uint32(0)
            if alive:
                took_ns = Uint32(ptx.globaltimer() - start_ns)
            ptx.store_b32(own + 4, took_ns)
