"""A model of one MoE layer with random weights, its experts' in MXFP8."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, Self

import ml_dtypes
import numpy as np

from ep.reference import SCALE_BLOCK, mxfp8_quantize

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

BF16 = ml_dtypes.bfloat16


class Gate(StrEnum):
    """How a router makes scores of logits; weights are those of the chosen, of sum 1."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclasses.dataclass(frozen=True)
class Mxfp8:
    """Matrices in MXFP8, blocks along the last axis.

    Attributes
    ----------
    elements : ndarray of float8_e4m3fn, `[..., N, K]`
    scales : ndarray of float8_e8m0fnu, `[..., N, K / 32]`
    """

    elements: Array
    scales: Array

    @classmethod
    def quantize(cls, values: Array) -> Self:
        """Round `[..., K]`, K a multiple of 32, to BF16, then by the rule of ep's dispatch."""
        *outer, depth = values.shape
        elements, scales = mxfp8_quantize(
            values.reshape(np.prod(outer, dtype=int), depth).astype(BF16)
        )
        return cls(elements.reshape(values.shape), scales.reshape(*outer, depth // SCALE_BLOCK))

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values, exactly."""
        scales = self.scales.astype(np.float32).repeat(SCALE_BLOCK, axis=-1)
        values: npt.NDArray[np.float32] = self.elements.astype(np.float32) * scales
        return values

    def __getitem__(self, index: Any) -> Self:
        return type(self)(self.elements[index], self.scales[index])


@dataclasses.dataclass(frozen=True)
class Model:
    """Weights of the layer, all experts'.

    Attributes
    ----------
    top_k : int
    gate : Gate
    router : ndarray of bfloat16, `[E, H]`
    gate_up : Mxfp8 `[E, 2 * I, H]`
        The gate's I rows, then the up projection's.
    down : Mxfp8 `[E, H, I]`
    norm_weight : ndarray of bfloat16, `[H]`
    """

    top_k: int
    gate: Gate
    router: Array
    gate_up: Mxfp8
    down: Mxfp8
    norm_weight: Array

    @classmethod
    def random(
        cls, hidden: int, intermediate: int, experts: int, top_k: int, gate: Gate, seed: int = 0
    ) -> Self:
        """Draw weights for activations of about 1, the same on every rank."""
        rng = np.random.default_rng(seed)

        def matrices(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

        return cls(
            top_k,
            gate,
            matrices(experts, hidden).astype(BF16),
            Mxfp8.quantize(matrices(experts, 2 * intermediate, hidden)),
            Mxfp8.quantize(matrices(experts, hidden, intermediate)),
            (1 + rng.standard_normal(hidden, np.float32) / 8).astype(BF16),
        )

    @property
    def hidden(self) -> int:
        """H, elements of a token."""
        return int(self.router.shape[1])

    @property
    def intermediate(self) -> int:
        """I, elements between an expert's projections."""
        return int(self.down.elements.shape[2])

    @property
    def experts(self) -> int:
        """E."""
        return len(self.router)


class Layer(Protocol):
    """Router, dispatch, experts and combine of one rank, on either backend."""

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """Make a step. Collective.

        Parameters
        ----------
        x : ndarray of bfloat16, `[T, H]`
            T may differ by rank and by step, from 0 to `max_tokens`.

        Returns
        -------
        ids : ndarray of int32, `[T, K]`
            Experts that the router chose.
        weights : ndarray of float32, `[T, K]`
            Theirs, of sum 1.
        y : ndarray of bfloat16, `[T, H]`
            The normed sum of what they made of the token.
        """
        ...

    def close(self) -> None:
        """Release what is the layer's own. Local; no step may be under way."""
        ...


def tokens(number: int, rank: int, count: int, hidden: int) -> Array:
    """Tokens of a rank in step `number`: bfloat16 `[count, H]`, no two alike."""
    rng = np.random.default_rng((number, rank))
    return rng.standard_normal((count, hidden), np.float32).astype(BF16)
