"""The layer on the host backend, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe.model import BF16, Gate, Model, Mxfp8

if TYPE_CHECKING:
    import ep
    from moe.model import Array


class HostLayer:
    """Router, dispatch, experts and combine on one rank.

    Parameters
    ----------
    exchange : ep.Exchange
    model : Model
    """

    def __init__(self, exchange: ep.Exchange, model: Model) -> None:
        self._exchange = exchange
        self._model = model
        self._local = exchange.config.local_experts(exchange.world.rank)

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """See `moe.model.Layer`."""
        ids, weights = route(self._model, x)
        received = self._exchange.dispatch(x, ids, weights)
        partials = run_experts(self._model, self._local, received)
        return ids, weights, self._exchange.combine(partials, ids, self._model.norm_weight)

    def close(self) -> None:
        """See `moe.model.Layer`."""


def route(model: Model, x: Array) -> tuple[Array, Array]:
    """Choose the `top_k` best experts of each token, the lower id where two are alike."""
    logits = x.astype(np.float32) @ model.router.astype(np.float32).T
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : model.top_k]
    chosen = np.take_along_axis(logits, ids, axis=1)
    if model.gate is Gate.SOFTMAX:
        # Over the chosen alone: renormalised, the others' share cancels.
        scores = np.exp(chosen - chosen[:, :1])
    else:
        scores = 1 / (1 + np.exp(-chosen))
    return ids.astype(np.int32), scores / scores.sum(axis=1, keepdims=True)


def run_experts(model: Model, local: range, received: Any) -> Array:
    """Sum what this rank's experts make of each row, weighted: bfloat16 `[rows, H]`.

    An empty row has no local id, so that no expert sees it.
    """
    rows = Mxfp8(received.x, received.scales).dequantize()
    ids, weights = np.asarray(received.ids), np.asarray(received.weights)
    made = np.zeros((*ids.shape, model.hidden), np.float32)
    for expert in local:
        row, choice = np.nonzero(ids == expert)
        made[row, choice] = weights[row, choice, None] * run_expert(model, expert, rows[row])
    partials = np.zeros_like(rows)
    for made_of_choice in made.swapaxes(0, 1):
        partials += made_of_choice
    return partials.astype(BF16)


def run_expert(model: Model, expert: int, rows: Array) -> Array:
    """What one expert makes of rows `[R, H]`: float32 `[R, H]`."""
    gate, up = np.split(rows @ model.gate_up[expert].dequantize().T, 2, axis=1)
    between = Mxfp8.quantize(gate / (1 + np.exp(-gate)) * up)
    made: Array = between.dequantize() @ model.down[expert].dequantize().T
    return made
