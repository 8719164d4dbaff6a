"""What the layer must give: each token through its experts, one by one, without ranks or rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moe.model import Gate, Model, Mxfp8

if TYPE_CHECKING:
    from moe.model import Array

LOGIT_TOLERANCE = 1e-4
"""FP32 sums of H products of about 1 in another order; logits are about 1."""
WEIGHT_TOLERANCE = 1e-4
"""Of a weight, relative: what a logit's error makes of it."""
TOLERANCE = 0.01
"""Of a token, its error's norm over its own. The layer rounds to BF16 thrice, partials, sum and
norm, half of 2^-8 at most each time: together some 0.3 %. Where another order of summing moves a
number between the projections over a rounding boundary of E4M3, a little more. Were those not
quantized, a token would be 2 % off or more; without one of its experts, 5 %."""


class Dense:
    """The reference for one model, in float32.

    Parameters
    ----------
    model : Model
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._gate_up = model.gate_up.dequantize()
        self._down = model.down.dequantize()

    def check(self, x: Array, ids: Array, weights: Array, y: Array) -> float:
        """Compare what the layer gave with what it must.

        Parameters
        ----------
        x : ndarray of bfloat16, `[T, H]`
        ids : ndarray of int32, `[T, K]`
        weights : ndarray of float32, `[T, K]`
        y : ndarray of bfloat16, `[T, H]`

        Returns
        -------
        float
            Greatest error of a token of `y`, relative.

        Raises
        ------
        AssertionError
        """
        logits = x.astype(np.float64) @ self._model.router.astype(np.float64).T
        self._check_choice(logits, ids)
        # The layer's own choice: two experts that are alike may be taken for one another.
        want_weights = self._weights(np.take_along_axis(logits, ids, axis=1))
        np.testing.assert_allclose(weights, want_weights, rtol=WEIGHT_TOLERANCE)
        want = self.result(x, ids, want_weights)
        error = np.linalg.norm(y.astype(np.float32) - want, axis=1) / np.linalg.norm(want, axis=1)
        assert (error <= TOLERANCE).all(), f"tokens are {error} off, allowed is {TOLERANCE}"
        return float(error.max(initial=0))

    def result(self, x: Array, ids: Array, weights: Array) -> Array:
        """Each token through its experts: float32 `[T, H]`."""
        rows = Mxfp8.quantize(x).dequantize()
        summed = np.zeros(x.shape, np.float32)
        for token, choice in np.ndindex(*ids.shape):
            made = self._expert(int(ids[token, choice]), rows[token])
            summed[token] += np.float32(weights[token, choice]) * made
        mean_square = np.square(summed).mean(axis=1, keepdims=True)
        gains = self._model.norm_weight.astype(np.float32)
        normed: Array = summed / np.sqrt(mean_square + 1e-5) * gains
        return normed

    def _expert(self, expert: int, row: Array) -> Array:
        """One expert's MLP of one token."""
        size = self._model.intermediate
        gate = self._gate_up[expert, :size] @ row
        up = self._gate_up[expert, size:] @ row
        between = Mxfp8.quantize(gate / (1 + np.exp(-gate)) * up).dequantize()
        made: Array = self._down[expert] @ between
        return made

    def _check_choice(self, logits: Array, ids: Array) -> None:
        """No expert that was left out may beat one that was chosen."""
        chosen = np.zeros(logits.shape, bool)
        np.put_along_axis(chosen, ids, values=True, axis=1)
        assert (chosen.sum(axis=1) == self._model.top_k).all(), "an expert was chosen twice"
        worst = np.where(chosen, logits, np.inf).min(axis=1)
        best = np.where(chosen, -np.inf, logits).max(axis=1)
        assert (worst >= best - LOGIT_TOLERANCE).all(), f"a better expert was left out: {ids}"

    def _weights(self, chosen: Array) -> Array:
        """Weights `[T, K]` of the chosen experts' logits."""
        exponentials = np.exp(chosen)
        scores = exponentials
        if self._model.gate is Gate.SIGMOID:
            scores = exponentials / (1 + exponentials)
        weights: Array = scores / scores.sum(axis=1, keepdims=True)
        return weights
