"""MXFP8 quantization of the host backend: float arithmetic, as a kernel would do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ep.config import SCALE_BLOCK

if TYPE_CHECKING:
    import numpy.typing as npt

_E4M3_MAX = np.float32(448)
_MAGNITUDE = np.uint16(0x7FFF)
_INF = np.uint16(0x7F80)


def quantize(
    x: npt.NDArray[np.generic],
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Quantize rows to MXFP8, for every BF16 input as the contract's rule gives it.

    Parameters
    ----------
    x : ndarray of bfloat16, `[T, H]`
        C-contiguous.

    Returns
    -------
    elements : ndarray of float8_e4m3fn, `[T, H]`
    scales : ndarray of float8_e8m0fnu, `[T, H / 32]`
    """
    tokens, hidden = x.shape
    blocks = (tokens, hidden // SCALE_BLOCK, SCALE_BLOCK)
    magnitude = (x.view(np.uint16) & _MAGNITUDE).reshape(blocks)
    is_nan = magnitude > _INF
    amax = np.where(is_nan, np.uint16(0), magnitude).max(axis=-1)
    scale = amax.astype(np.int32)
    # A BF16 amax is 2^(e-127) * (1 + m/128); 448 is 1.75 * 2^8.
    scale = np.clip((scale >> 7) - 8 + ((scale & 0x7F) > 0x60), 0, 254)
    scale = np.where(amax == _INF, 254, scale)
    # NaN wins where all elements of odd index are NaN, and only there: see the contract.
    scale = np.where(is_nan[..., 1::2].all(axis=-1), 255, scale)
    factor = np.ldexp(np.float32(1), np.where((scale == 0) | (scale >= 254), -200, 127 - scale))
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = x.astype(np.float32).reshape(blocks) * factor[..., None].astype(np.float32)
        # fmin before fmax: a NaN, and Inf * 0, ends at +448.
        scaled = np.fmax(np.fmin(scaled, _E4M3_MAX), -_E4M3_MAX)
    elements = scaled.astype(ml_dtypes.float8_e4m3fn).reshape(tokens, hidden)
    return elements, scale.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
