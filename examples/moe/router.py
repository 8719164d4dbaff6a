"""The router: logits of all experts, the best of them, and their weights."""

import cuda.bindings.driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ep.device import ptx
from ep.device.sync import WARP
from moe.model import Gate
from moe.sizes import Sizes
from moe.tiles import follow, view

TAKEN = -3.0e38
"""A logit below any other: of an expert that was chosen already."""


class MoeRouter:
    """Route tokens, a CTA each.

    Parameters
    ----------
    sizes : Sizes
    """

    name = "moe_router"
    params = (
        ("x", Int64),
        ("router", Int64),
        ("ids", Int64),
        ("weights", Int64),
    )
    threads = 256

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @cute.jit
    def __call__(
        self,
        x: Int64,
        router: Int64,
        ids: Int64,
        weights: Int64,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`.

        Parameters
        ----------
        x : Int64
            Address of bfloat16 `[T, H]`.
        router : Int64
            Of bfloat16 `[E, H]`.
        ids, weights : Int64
            Of int32 and float32 `[T, K]`, written.
        num_ctas : Int32
            T.
        stream : CUstream
        """
        self.kernel(x, router, ids, weights).launch(
            grid=[num_ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: Int64, router: Int64, ids: Int64, weights: Int64) -> None:
        """Device side."""
        follow()
        token, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        logits = cute.arch.alloc_smem(Float32, self.sizes.experts, 16)
        sLogits = cute.make_tensor(logits, cute.make_layout(self.sizes.experts))
        row_bytes = 2 * self.sizes.hidden
        expert = warp
        while expert < self.sizes.experts:
            logit = self._dot(x + Int64(token) * row_bytes, router + Int64(expert) * row_bytes)
            if lane == 0:
                sLogits[expert] = logit
            expert += self.threads // WARP
        cute.arch.sync_threads()
        if warp == 0:
            self._choose(sLogits, Int64(token) * (4 * self.sizes.top_k), ids, weights)

    @cute.jit
    def _dot(self, a: Int64, b: Int64) -> Float32:
        """Dot product of two rows by one warp, in FP32."""
        total = Float32(0.0)
        chunk = cute.arch.lane_idx()
        while chunk < self.sizes.hidden // 8:
            # 16 bytes of each.
            rA = view(BFloat16, a + Int64(chunk) * 16, 8).load().to(Float32)
            rB = view(BFloat16, b + Int64(chunk) * 16, 8).load().to(Float32)
            for idx in range_constexpr(8):
                total += rA[idx] * rB[idx]
            chunk += WARP
        return cute.arch.warp_reduction_sum(total)

    @cute.jit
    def _choose(self, sLogits: cute.Tensor, at: Int64, ids: Int64, weights: Int64) -> None:
        """Take the best K times, by one warp; choice k ends up in lane k."""
        lane = cute.arch.lane_idx()
        chosen, score = Int32(0), Float32(0.0)
        best = Float32(0.0)
        for choice in range_constexpr(self.sizes.top_k):
            logit, expert = self._best(sLogits)
            if const_expr(choice == 0):
                best = logit
            if lane == choice:
                chosen = expert
                if const_expr(self.sizes.gate == Gate.SOFTMAX):
                    # Over the chosen alone: renormalised, the others' share cancels.
                    score = cute.math.exp(logit - best)
                else:
                    score = 1.0 / (1.0 + cute.math.exp(-logit))
        total = cute.arch.warp_reduction_sum(score)
        if lane < self.sizes.top_k:
            view(Int32, ids + at + Int64(lane) * 4, 1)[0] = chosen
            view(Float32, weights + at + Int64(lane) * 4, 1)[0] = score / total

    @cute.jit
    def _best(self, sLogits: cute.Tensor) -> tuple[Float32, Int32]:
        """Greatest logit and its expert, the lowest of those that have it; it is taken then."""
        logit, expert = Float32(TAKEN), Int32(self.sizes.experts)
        mine = cute.arch.lane_idx()
        while mine < self.sizes.experts:
            if sLogits[mine] > logit:
                logit, expert = sLogits[mine], mine
            mine += WARP
        best = cute.arch.warp_reduction_max(logit)
        if logit != best:
            expert = Int32(self.sizes.experts)
        winner = Int32(~ptx.redux_max(~Uint32(expert)))
        # Each lane looks at logits of its own alone, so nobody waits. None wins if all are NaN.
        if winner == expert and winner < self.sizes.experts:
            sLogits[winner] = Float32(TAKEN)
        return best, winner
