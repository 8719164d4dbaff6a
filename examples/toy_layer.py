"""What the examples for frameworks share: layers whose result the oracle knows to the last bit.

Expert e multiplies by 1 + e / 8, and weights are sixteenths: all that experts compute is exact in
FP32, whatever a compiler makes of it, until it is rounded to BF16.
"""

import ml_dtypes
import numpy as np

import ep
from ep import reference
from ep.bench.check import Where, check_result
from ep.routing import Routing, route, tokens

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
TOKENS = (5, 0, 8)


def config_for(world: ep.World) -> ep.EpConfig:
    """Give the shape of the examples' layers."""
    # While one rank compiles what the others have already, those wait in a kernel.
    return ep.EpConfig(
        ranks=world.size, hidden=256, experts=8, top_k=2, max_tokens=max(TOKENS), timeout_s=60
    )


def inputs(config: ep.EpConfig, number: int, rank: int) -> tuple[np.ndarray, ...]:
    """X, ids and weights of `rank` in step `number`; how many tokens differs by rank and step."""
    num_tokens = TOKENS[(number + rank) % len(TOKENS)]
    ids, weights = route(
        Routing.MASKED,
        number,
        rank,
        num_tokens=num_tokens,
        top_k=config.top_k,
        ranks=config.ranks,
        experts=config.experts,
    )
    sixteenths = (1 + np.floor(weights * 16)) / 16
    return tokens(number, rank, num_tokens, config.hidden), ids, sixteenths.astype(np.float32)


def norm_weight(config: ep.EpConfig) -> np.ndarray:
    """BF16 `[H]`, the same in every layer."""
    return np.linspace(0.5, 1.5, config.hidden).astype(BF16)


def experts(rows: reference.Rows, local_experts: range) -> np.ndarray:
    """What the experts of a rank make of its rows, weighted; BF16 `[rows, H]`."""
    is_local = (rows.ids >= local_experts.start) & (rows.ids < local_experts.stop)
    factor = (rows.weights * is_local * (1 + rows.ids / 8)).sum(axis=1, keepdims=True)
    scales = rows.scales.astype(np.float32).repeat(32, axis=1)
    return (rows.x.astype(np.float32) * scales * factor.astype(np.float32)).astype(BF16)


def expected(config: ep.EpConfig, number: int, rank: int, layers: int) -> np.ndarray:
    """BF16 `[T, H]` that `rank` must have after `layers` layers, one behind the other."""
    sent = [inputs(config, number, src) for src in range(config.ranks)]
    x, ids, weights = (list(arrays) for arrays in zip(*sent, strict=True))
    geometry = {
        "ranks": config.ranks,
        "experts": config.experts,
        "stride": ep.EpLayout(config).stride,
    }
    for _ in range(layers):
        rows = reference.dispatch(x, ids, weights, **geometry)
        partials = [experts(row, config.local_experts(dst)) for dst, row in enumerate(rows)]
        gains = norm_weight(config)
        x = reference.combine(partials, ids, norm_weight=gains, eps=EPS, **geometry)
    return x[rank]


def check(got: np.ndarray, config: ep.EpConfig, number: int, rank: int, layers: int = 1) -> None:
    """Compare a result, bit for bit, and say what differs."""
    want = expected(config, number, rank, layers)
    complaint = check_result(got, want, Where(rank, number, "combine"))
    if complaint is not None:
        raise AssertionError(str(complaint))
