"""The layer on a GPU, without torch: one CUDA graph from the router to the norm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import ep
from ep.bench.bridge import GpuBridge
from ep.gpu.graph import Graph
from ep.kernels.compile import Launcher
from ep.memory.cuda import upload
from moe.images import KERNELS, get_image
from moe.sizes import Sizes

if TYPE_CHECKING:
    from ep.memory.cuda import Device
    from moe.model import Array, Model, Mxfp8


class GpuLayer:
    """Router, dispatch, experts and combine on one rank, a graph for each number of tokens.

    Parameters
    ----------
    exchange : ep.Exchange
    model : Model
    """

    def __init__(self, exchange: ep.Exchange, model: Model) -> None:
        world, config = exchange.world, exchange.config
        assert world.device is not None
        self._exchange = exchange
        self._bridge = bridge = GpuBridge(world.device)
        kernels = load_kernels(Sizes.of(model, exchange.layout), world.device)
        self._route = kernels["route"]
        self._experts = Experts(exchange, model, bridge, kernels)
        self._router, self._norm_weight = map(bridge.put, (model.router, model.norm_weight))
        most, top_k = config.max_tokens, config.top_k
        self._x = self._empty((most, model.hidden), "bfloat16")
        self._ids = self._empty((most, top_k), "int32")
        self._weights = self._empty((most, top_k), "float32")
        self._partials = self._empty((exchange.layout.rows, model.hidden), "bfloat16")
        self._y = self._empty((most, model.hidden), "bfloat16")
        # All before the first step: on a GPU that ranks share, nothing may be allocated or
        # loaded while another rank's kernels wait for this one's.
        self._graphs = [
            Graph.capture(bridge.stream, partial(self._enqueue, tokens))
            for tokens in range(most + 1)
        ]
        world.barrier()

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """See `moe.model.Layer`."""
        tokens, stream = len(x), self._bridge.stream
        results = [_first(tokens, array) for array in (self._ids, self._weights, self._y)]
        for array in results:
            # What is found there afterwards is this step's.
            self._bridge.poison(array)
        upload(self._x.address, x, stream)
        self._graphs[tokens].launch(stream)
        ids, weights, y = map(self._bridge.get, results)
        # Of a wait that has expired a replay says nothing, but its results are NaN.
        self._exchange.poll()
        return ids, weights, y

    def close(self) -> None:
        """See `moe.model.Layer`."""
        for graph in self._graphs:
            graph.close()
        self._bridge.close()

    def _enqueue(self, tokens: int) -> None:
        """Enqueue a step of `tokens` tokens: what a graph holds."""
        stream = self._bridge.stream
        x, ids, weights, y = (
            _first(tokens, array) for array in (self._x, self._ids, self._weights, self._y)
        )
        if tokens:
            addresses = (x.address, self._router.address, ids.address, weights.address)
            self._route(stream, tokens, *addresses)
        received = self._exchange.dispatch(x, ids, weights, stream)
        self._experts.enqueue(received, self._partials, stream)
        self._exchange.combine(self._partials, ids, self._norm_weight, out=y, stream=stream)

    def _empty(self, shape: tuple[int, ...], dtype: str) -> ep.DeviceArray:
        device = self._exchange.world.device
        assert device is not None
        return ep.DeviceArray.empty(shape, dtype, device.ordinal)


class Experts:
    """The experts of this rank, and the memory that they work in.

    Parameters
    ----------
    exchange : ep.Exchange
    model : Model
    bridge : GpuBridge
        Moves the weights.
    kernels : dict of str to Launcher
    """

    def __init__(
        self, exchange: ep.Exchange, model: Model, bridge: GpuBridge, kernels: dict[str, Launcher]
    ) -> None:
        device, self._kernels = exchange.world.device, kernels
        assert device is not None
        self._sizes = sizes = Sizes.of(model, exchange.layout)
        self._local = local = exchange.config.local_experts(exchange.world.rank)
        here = slice(local.start, local.stop)
        self._gate_up = put_matrices(bridge, model.gate_up[here])
        self._down = put_matrices(bridge, model.down[here])
        # As many CTAs as may do something, whatever the step brings; the grid of a graph is fixed.
        self._ctas = device.num_sms

        def empty(*shape: int, dtype: str = "int32") -> ep.DeviceArray:
            return ep.DeviceArray.empty(shape, dtype, device.ordinal)

        self._slot_of_pair = empty(sizes.pairs)
        self._pair_of_slot = empty(sizes.slots)
        self._expert_of_tile, self._num_tiles = empty(sizes.tiles), empty(1)
        between = (sizes.slots, sizes.intermediate)
        self._between = (
            empty(*between, dtype="float8_e4m3fn"),
            empty(between[0], between[1] // 32, dtype="float8_e8m0fnu"),
        )
        self._made = empty(sizes.slots, sizes.hidden, dtype="float32")

    def enqueue(self, received: ep.Received, partials: ep.DeviceArray, stream: int) -> None:
        """Enqueue what makes `partials` of the rows received. The host learns nothing of them."""
        groups = (self._slot_of_pair, self._pair_of_slot, self._expert_of_tile, self._num_tiles)
        tiles = groups[2:]
        launch, ctas, local = partial(self._launch, stream), self._ctas, self._local
        launch("group", 1, received.ids, *groups, local.start, len(local))
        rows = (received.x, received.scales)
        launch("up", ctas, *rows, *self._gate_up, *groups[1:], *self._between)
        launch("down", ctas, *self._between, *self._down, *tiles, self._made)
        weighted = (self._made, self._slot_of_pair, received.weights)
        launch("sum", self._sizes.rows, *weighted, partials)

    def _launch(self, stream: int, name: str, ctas: int, *args: ep.DeviceArray | int) -> None:
        numbers = (arg if isinstance(arg, int) else arg.address for arg in args)
        self._kernels[name](stream, ctas, *numbers)


def load_kernels(sizes: Sizes, device: Device) -> dict[str, Launcher]:
    """Compile, or find, and load all kernels, so that no capture has to."""
    kernels = {name: Launcher(get_image(name, sizes, device.arch), pdl=True) for name in KERNELS}
    for kernel in kernels.values():
        kernel.load()
    return kernels


def put_matrices(bridge: GpuBridge, matrices: Mxfp8) -> tuple[ep.DeviceArray, ep.DeviceArray]:
    """Copy elements and scales to the device."""
    return bridge.put(matrices.elements), bridge.put(matrices.scales)


def _first(tokens: int, array: ep.DeviceArray) -> ep.DeviceArray:
    """The first rows of an array."""
    shape = (tokens, *array.shape[1:])
    return ep.DeviceArray(array.address, shape, array.dtype, (), array.device, array)
