"""Shows: experts in a kernel of numba-cuda, which has neither FP8 nor BF16 of its own.

Run with: mpirun -np 2 python examples/06_numba.py (or alone; EP_SHARE_GPUS=1 for two on one GPU)
"""

from typing import Any

import numpy as np
from numba import cuda

import ep
import toy_layer


@cuda.jit(device=True)
def from_e4m3(byte: Any, scale: Any) -> Any:
    """FP32 of an E4M3 byte, its block's E8M0 byte applied. Rows hold no NaN."""
    # The same bits are a number of FP32 whose exponent is 120 short, E4M3's subnormals included.
    magnitude = np.uint32((byte & 127) << 20).view(np.float32) * np.float32(2.0**120)
    power = np.uint32(scale << 23).view(np.float32)
    return magnitude * power if byte < 128 else -magnitude * power


@cuda.jit(device=True)
def to_bf16(value: Any) -> Any:
    """Bits of a finite FP32 number in BF16, rounded to nearest even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@cuda.jit
def experts(
    x: Any, scales: Any, ids: Any, weights: Any, first: int, end: int, partials: Any
) -> None:
    """Partials of one row a block; x and scales are bytes, partials are bits."""
    row = cuda.blockIdx.x
    factor = np.float32(0)
    for choice in range(ids.shape[1]):
        expert = ids[row, choice]
        if first <= expert < end:
            factor += weights[row, choice] * (np.float32(1) + np.float32(expert) / np.float32(8))
    for column in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        value = from_e4m3(np.int32(x[row, column]), np.int32(scales[row, column // 32]))
        partials[row, column] = to_bf16(value * factor)


def bf16(array: Any) -> ep.DeviceArray:
    """Describe a numba array of uint16 `[n, H]` as what its bits are."""
    return ep.DeviceArray(
        array.device_ctypes_pointer.value or 0, array.shape, "bfloat16", owner=array
    )


class Layer:
    """Dispatch, experts, combine and norm, on arrays that are used again and again."""

    def __init__(self, exchange: ep.Exchange, stream: Any) -> None:
        config, rows = exchange.config, exchange.layout.rows
        self.exchange, self.stream = exchange, stream
        tokens, hidden, top_k = config.max_tokens, config.hidden, config.top_k
        self.x, self.y = (cuda.device_array((tokens, hidden), np.uint16) for _ in range(2))
        self.ids = cuda.device_array((tokens, top_k), np.int32)
        self.weights = cuda.device_array((tokens, top_k), np.float32)
        self.partials = cuda.device_array((rows, hidden), np.uint16)
        self.norm_weight = cuda.to_device(toy_layer.norm_weight(config).view(np.uint16))
        received, local = exchange.received, config.local_experts(exchange.world.rank)
        # The receive rows themselves, no copies.
        views = (received.x.as_bytes(), received.scales.as_bytes(), received.ids, received.weights)
        arrays = map(cuda.as_cuda_array, views)
        self.arguments = (*arrays, local.start, local.stop, self.partials)
        # Compiles it, before the other ranks wait for this one in a kernel. The rows are empty.
        self.run_experts()
        stream.synchronize()

    def run_experts(self) -> None:
        """Enqueue the experts' kernel."""
        experts[self.partials.shape[0], 128, self.stream](*self.arguments)

    def __call__(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Make a step with these NumPy arrays; give BF16 `[T, H]`."""
        tokens, stream = len(x), self.stream
        here = self.x[:tokens], self.ids[:tokens], self.weights[:tokens]
        if tokens:
            for to, array in zip(here, (x.view(np.uint16), ids, weights), strict=True):
                to.copy_to_device(array, stream=stream)
        self.exchange.dispatch(bf16(here[0]), *here[1:], stream)
        self.run_experts()
        gains, y = bf16(self.norm_weight), self.y[:tokens]
        self.exchange.combine(
            bf16(self.partials), here[1], gains, toy_layer.EPS, out=bf16(y), stream=stream
        )
        stream.synchronize()
        return y.copy_to_host().view(toy_layer.BF16) if tokens else x


def main() -> None:
    """Run six steps."""
    with ep.World.connect(backend="gpu") as world:
        cuda.select_device(world.device.ordinal)
        config = toy_layer.config_for(world)
        with ep.Exchange(world, config) as exchange:
            layer = Layer(exchange, cuda.stream())
            for number in range(6):
                y = layer(*toy_layer.inputs(config, number, world.rank))
                toy_layer.check(y, config, number, world.rank)
            print(f"rank {world.rank}: 6 steps came back right", flush=True)


if __name__ == "__main__":
    main()
