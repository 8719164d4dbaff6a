"""Shows: dispatch and combine as custom ops of torch, in torch.compile and in CUDA graphs.

Run with: mpirun -np 2 python examples/03_torch.py (or alone; EP_SHARE_GPUS=1 for two on one GPU)
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import ep
import toy_layer

EXCHANGES: list[ep.Exchange] = []
"""Ops take tensors and numbers: they name an exchange by its place here."""
ROWS = ("row_x", "row_scales", "row_ids", "row_weights")

# Both ops are declared to write the receive rows, which are arguments of theirs. So the compiler
# keeps what reads rows between the op that fills them and the one that empties them, and neither
# drops, merges nor swaps calls. Rows cannot be results: a result is memory that the compiler owns,
# and gives to others once it was read, while these belong to the exchange.


@torch.library.custom_op("ep_example::dispatch", mutates_args=("rows",))
def dispatch(x: Tensor, ids: Tensor, weights: Tensor, rows: list[Tensor], which: int) -> None:
    """Fill the rows."""
    exchange = EXCHANGES[which]
    check_in_place(exchange, rows)
    # Asked for in every call: within a capture it is the capture's stream.
    exchange.dispatch(x, ids, weights, torch.cuda.current_stream())


@torch.library.custom_op("ep_example::combine", mutates_args=("rows",))
def combine(
    partials: Tensor, ids: Tensor, norm_weight: Tensor, rows: list[Tensor], which: int
) -> Tensor:
    """Give the layer's result `[T, H]`, and empty the rows."""
    exchange = EXCHANGES[which]
    check_in_place(exchange, rows)
    # Torch's own memory: in a capture it comes from the graph's pool.
    y = partials.new_empty(ids.shape[0], partials.shape[1])
    stream = torch.cuda.current_stream()
    exchange.combine(partials, ids, norm_weight, toy_layer.EPS, out=y, stream=stream)
    return y


@dispatch.register_fake
def _(*_: object) -> None:
    pass


@combine.register_fake
def _(partials: Tensor, ids: Tensor, *_: object) -> Tensor:
    return partials.new_empty(ids.shape[0], partials.shape[1])


def check_in_place(exchange: ep.Exchange, rows: list[Tensor]) -> None:
    """Refuse copies of the rows, as `aot_eager` and `Module.to(dtype)` make them."""
    if rows[0].data_ptr() != exchange.received.x.address:
        raise RuntimeError("a copy of the receive rows: use inductor, and keep the module's types")


class MoeLayers(nn.Module):
    """Two layers of dispatch, experts, combine and norm, which take turns with one exchange."""

    def __init__(self, exchange: ep.Exchange) -> None:
        super().__init__()
        self.which = len(EXCHANGES)
        EXCHANGES.append(exchange)
        self.local = exchange.config.local_experts(exchange.world.rank)
        self.register_buffer("norm_weight", to_torch(toy_layer.norm_weight(exchange.config)))
        received = exchange.received
        # No copies, and each only once: a compiler cannot know that two tensors are one memory. Of
        # the scales their bytes: inductor (torch 2.11) fails where an op writes float8_e8m0fnu.
        rows = (received.x, received.scales.as_bytes(), received.ids, received.weights)
        for name, array in zip(ROWS, rows, strict=True):
            self.register_buffer(name, torch.from_dlpack(array), persistent=False)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Give `[T, H]`."""
        rows = [self.get_buffer(name) for name in ROWS]
        for _ in range(2):
            dispatch(x, ids, weights, rows, self.which)
            x = combine(self.experts(*rows), ids, self.norm_weight, rows, self.which)
        return x

    def experts(self, x: Tensor, scales: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Give the partials `[rows, H]`; yours will be a grouped GEMM that takes MXFP8."""
        is_local = (ids >= self.local.start) & (ids < self.local.stop)
        factor = (weights * is_local * (1 + ids / 8)).sum(1, keepdim=True)
        powers = scales.view(torch.float8_e8m0fnu).float().unsqueeze(2)
        return ((x.float().unflatten(1, (-1, 32)) * powers).flatten(1) * factor).bfloat16()


class Graphs:
    """A CUDA graph of a model for each number of tokens."""

    def __init__(self, model: Callable[..., Tensor]) -> None:
        self.model = model
        self.made: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(self, *arrays: Tensor) -> Tensor:
        """Replay the graph for as many tokens."""
        tokens = arrays[0].shape[0]
        if tokens not in self.made:
            graph, inputs = torch.cuda.CUDAGraph(), [array.clone() for array in arrays]
            # Other threads of this process may call CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = self.model(*inputs)
            self.made[tokens] = graph, inputs, y
        graph, inputs, y = self.made[tokens]
        for to, array in zip(inputs, arrays, strict=True):
            to.copy_(array)
        graph.replay()
        return y


def to_torch(array: np.ndarray) -> Tensor:
    """Copy to the current GPU; torch takes no bfloat16 from NumPy."""
    if array.dtype == toy_layer.BF16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def main() -> None:
    """Run six steps each way."""
    with ep.World.connect(backend="gpu") as world:
        torch.cuda.set_device(world.device.ordinal)
        config = toy_layer.config_for(world)
        with ep.Exchange(world, config) as exchange, torch.cuda.stream(torch.cuda.Stream()):
            model = MoeLayers(exchange)
            compiled = torch.compile(model, fullgraph=True)
            ways = {"eager": model, "compiled": compiled, "graphs": Graphs(compiled)}
            for name, run in ways.items():
                for number in range(6):
                    y = run(*map(to_torch, toy_layer.inputs(config, number, world.rank)))
                    got = y.view(torch.int16).cpu().numpy().view(toy_layer.BF16)
                    toy_layer.check(got, config, number, world.rank, layers=2)
                print(f"rank {world.rank}: {name}, 6 steps came back right", flush=True)


if __name__ == "__main__":
    main()
