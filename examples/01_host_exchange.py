"""Shows: one MoE layer's exchange on the host backend, with a toy expert.

Run with: mpirun -np 4 python examples/01_host_exchange.py (or alone, for one rank)
"""

import ml_dtypes
import numpy as np

import ep

BF16 = ml_dtypes.bfloat16


def experts(received: ep.Received, local_experts: range) -> np.ndarray:
    """Weighted sum over this rank's experts of each row; expert e multiplies by 1 + e / 10."""
    # MXFP8 back to float: each block of 32 elements has one power of two.
    scales = received.scales.astype(np.float32).repeat(32, axis=1)
    rows = received.x.astype(np.float32) * scales
    is_local = (received.ids >= local_experts.start) & (received.ids < local_experts.stop)
    factor = (received.weights * is_local * (1 + received.ids / 10)).sum(axis=1, keepdims=True)
    return (rows * factor).astype(BF16)


def main() -> None:
    """Run three steps with a different number of tokens each."""
    with ep.World.connect(backend="host") as world:
        config = ep.EpConfig(ranks=world.size, hidden=128, experts=8, top_k=2, max_tokens=4)
        rng = np.random.default_rng(world.rank)
        with ep.Exchange(world, config) as exchange:
            for tokens in (4, 0, 1):
                x = rng.standard_normal((tokens, config.hidden)).astype(BF16)
                ids = rng.permuted(np.tile(np.arange(8, dtype=np.int32), (tokens, 1)), axis=1)
                ids = np.ascontiguousarray(ids[:, : config.top_k])
                weights = np.full(ids.shape, 0.5, np.float32)
                received = exchange.dispatch(x, ids, weights)
                partials = experts(received, config.local_experts(world.rank))
                y = exchange.combine(partials, ids)
                # Each expert's factor is known, so the result is too, up to the formats' rounding.
                want = x.astype(np.float32) * (1 + ids / 10).mean(axis=1, keepdims=True)
                # E4M3 keeps 3 bits after the point: a sixteenth, and a little near zero.
                np.testing.assert_allclose(y.astype(np.float32), want, rtol=0.07, atol=0.03)
                print(f"rank {world.rank}: {tokens} tokens came back right", flush=True)


if __name__ == "__main__":
    main()
