"""Shows: CuPy arrays and streams, experts as a raw kernel, and steps in CUDA graphs.

Run with: mpirun -np 2 python examples/05_cupy.py (or alone; EP_SHARE_GPUS=1 for two on one GPU)
"""

from typing import Any

import cupy

import ep
import toy_layer

# CuPy has no FP8 types, but kernels have: CUDA's headers.
EXPERTS = cupy.RawKernel(
    r"""
#include <cuda_bf16.h>
#include <cuda_fp8.h>

extern "C" __global__ void experts(const __nv_fp8_e4m3* x, const unsigned char* scales,
                                   const int* ids, const float* weights, int hidden, int top_k,
                                   int first, int end, __nv_bfloat16* partials) {
  const size_t row = blockIdx.x;
  float factor = 0;
  for (size_t choice = row * top_k; choice < (row + 1) * top_k; choice++) {
    const int expert = ids[choice];
    if (first <= expert && expert < end) factor += weights[choice] * (1 + expert / 8.f);
  }
  for (int column = threadIdx.x; column < hidden; column += blockDim.x) {
    const size_t at = row * hidden + column;
    partials[at] = __float2bfloat16(ldexpf(float(x[at]), scales[at / 32] - 127) * factor);
  }
}
""",
    "experts",
)


class Layer:
    """Dispatch, experts, combine and norm, on arrays that are used again and again."""

    def __init__(self, exchange: ep.Exchange, stream: cupy.cuda.Stream) -> None:
        config, rows = exchange.config, exchange.layout.rows
        self.exchange, self.stream = exchange, stream
        self.x = cupy.empty((config.max_tokens, config.hidden), toy_layer.BF16)
        self.ids = cupy.empty((config.max_tokens, config.top_k), cupy.int32)
        self.weights = cupy.empty((config.max_tokens, config.top_k), cupy.float32)
        self.partials = cupy.empty((rows, config.hidden), toy_layer.BF16)
        self.norm_weight = cupy.asarray(toy_layer.norm_weight(config))
        self.y = cupy.empty_like(self.x)
        received, local = exchange.received, config.local_experts(exchange.world.rank)
        # The receive rows themselves, no copies. Where NumPy has no letter for a type, its bytes.
        views = (received.x.as_bytes(), received.scales.as_bytes(), received.ids, received.weights)
        sizes = [cupy.int32(n) for n in (config.hidden, config.top_k, local.start, local.stop)]
        self.arguments = (*map(cupy.from_dlpack, views), *sizes, self.partials)
        self.graphs: dict[int, cupy.cuda.Graph] = {}

    def enqueue(self, tokens: int) -> None:
        """Enqueue a step on the stream."""
        x, ids, weights = self.x[:tokens], self.ids[:tokens], self.weights[:tokens]
        self.exchange.dispatch(x, ids, weights, self.stream)
        EXPERTS((self.partials.shape[0],), (128,), self.arguments)
        y, gains = self.y[:tokens], self.norm_weight
        # Without out, combine would have to take memory, which no capture can.
        self.exchange.combine(self.partials, ids, gains, toy_layer.EPS, out=y, stream=self.stream)

    def replay(self, tokens: int) -> None:
        """Enqueue the same as a CUDA graph, made once for each number of tokens."""
        if tokens not in self.graphs:
            self.stream.begin_capture()
            self.enqueue(tokens)
            self.graphs[tokens] = self.stream.end_capture()
        self.graphs[tokens].launch(self.stream)

    def __call__(self, arrays: tuple[Any, ...], *, graph: bool) -> Any:
        """Make a step with these NumPy arrays; give BF16 `[T, H]`."""
        tokens = len(arrays[0])
        for to, array in zip((self.x, self.ids, self.weights), arrays, strict=True):
            to[:tokens].set(array)
        (self.replay if graph else self.enqueue)(tokens)
        return self.y[:tokens].get()


def main() -> None:
    """Run six steps each way."""
    with ep.World.connect(backend="gpu") as world, cupy.cuda.Device(world.device.ordinal):
        config = toy_layer.config_for(world)
        # CuPy enqueues on the stream that is current; ep on the one that it is given.
        with ep.Exchange(world, config) as exchange, cupy.cuda.Stream(non_blocking=True) as stream:
            layer = Layer(exchange, stream)
            # Before the first step: the other ranks would wait for this compiler in a kernel.
            EXPERTS.compile()
            for graph in (False, True):
                for number in range(6):
                    y = layer(toy_layer.inputs(config, number, world.rank), graph=graph)
                    toy_layer.check(y, config, number, world.rank)
                way = "graphs" if graph else "eager"
                print(f"rank {world.rank}: {way}, 6 steps came back right", flush=True)
            # Graphs hold calls of the exchange, and go before it.
            layer.graphs.clear()


if __name__ == "__main__":
    main()
