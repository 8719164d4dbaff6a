"""RMSNorm of the host backend, in the summation order that the contract fixes for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_CHUNK = 8
_SEGMENT_CHUNKS = 32
_ACCUMULATORS = 4


def rms_norm(
    x: npt.NDArray[np.generic], weight: npt.NDArray[np.generic], eps: float
) -> npt.NDArray[np.generic]:
    """Normalize rows: `x * rstd * weight`, FP32, rounded once.

    Parameters
    ----------
    x : ndarray of bfloat16, `[T, H]`
    weight : ndarray of bfloat16, `[H]`
    eps : float
        Rounded to FP32 before it is added.

    Returns
    -------
    ndarray of bfloat16, `[T, H]`
    """
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32)
        mean = _sum_of_squares(wide) / np.float32(x.shape[1])
        # Through float64 the square root and the division round to FP32 once, and rightly.
        rstd = (1 / np.sqrt((mean + np.float32(eps)).astype(np.float64))).astype(np.float32)
        normed = wide * rstd[:, None] * weight.astype(np.float32)
        return normed.astype(ml_dtypes.bfloat16)


def _sum_of_squares(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    tokens, hidden = x.shape
    segment = _CHUNK * _SEGMENT_CHUNKS
    num_segments = -(-hidden // (segment * _ACCUMULATORS)) * _ACCUMULATORS
    squares = np.zeros((tokens, num_segments * segment), np.float32)
    np.multiply(x, x, out=squares[:, :hidden])
    squares = squares.reshape(tokens, num_segments, _SEGMENT_CHUNKS, _CHUNK)
    lanes = squares[..., 0]
    for element in range(1, _CHUNK):
        lanes = lanes + squares[..., element]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    groups = lanes.reshape(tokens, num_segments // _ACCUMULATORS, _ACCUMULATORS)
    sums = groups[:, 0]
    for group in range(1, groups.shape[1]):
        sums = sums + groups[:, group]
    return np.asarray((sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3]), np.float32)
