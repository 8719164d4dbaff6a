"""A GPU that is not the layer's alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import ep
from ep.bench.bridge import GpuBridge
from ep.gpu.graph import Graph
from moe.gpu import Experts, GpuLayer, load_kernels, put_matrices
from moe.model import BF16, Model, Mxfp8
from moe.sizes import Sizes

if TYPE_CHECKING:
    from moe.model import Array

PASSES = 20
"""Of the neighbour at each step: several times as long as the step."""


class CrowdedLayer(GpuLayer):
    """The layer on a GPU whose SMs another stream keeps busy.

    Parameters
    ----------
    exchange : ep.Exchange
    model : Model
    """

    def __init__(self, exchange: ep.Exchange, model: Model) -> None:
        # Before the layer, whose making ends with a barrier: no rank allocates after that.
        self._neighbour = Neighbour(exchange, model)
        super().__init__(exchange, model)

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """See `moe.model.Layer`."""
        self._neighbour.launch()
        return super().__call__(x)

    def close(self) -> None:
        """See `moe.model.Layer`."""
        self._neighbour.close()
        super().close()


class Neighbour:
    """Other work on the same GPU: experts busy with rows of their own, on a stream of their own.

    Parameters
    ----------
    exchange : ep.Exchange
    model : Model
    """

    def __init__(self, exchange: ep.Exchange, model: Model) -> None:
        world, layout = exchange.world, exchange.layout
        assert world.device is not None
        self._bridge = bridge = GpuBridge(world.device)
        sizes = Sizes.of(model, layout)
        rng = np.random.default_rng(world.rank)
        shape = (sizes.rows, sizes.hidden)
        # Every choice of every row is one of this rank's experts, if it has any.
        local = exchange.config.local_experts(world.rank)
        ids = rng.integers(max(len(local), 1), size=(sizes.rows, sizes.top_k), dtype=np.int32)
        ids += local.start
        rows = Mxfp8.quantize(rng.standard_normal(shape, np.float32))
        self._rows = ep.Received(
            *put_matrices(bridge, rows),
            bridge.put(ids),
            bridge.put(np.full(ids.shape, 1 / sizes.top_k, np.float32)),
            None,
        )
        self._partials = bridge.put(np.zeros(shape, BF16))
        kernels = load_kernels(sizes, world.device)
        self._experts = Experts(exchange, model, bridge, kernels)
        self._graph = Graph.capture(bridge.stream, self._enqueue)

    def launch(self) -> None:
        """Keep the SMs busy for a while, beside what other streams do."""
        self._graph.launch(self._bridge.stream)

    def close(self) -> None:
        """Wait for the work, and release it."""
        self._bridge.get(self._partials)
        self._graph.close()
        self._bridge.close()

    def _enqueue(self) -> None:
        for _ in range(PASSES):
            self._experts.enqueue(self._rows, self._partials, self._bridge.stream)
