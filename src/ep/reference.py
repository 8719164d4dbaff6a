"""What dispatch and combine must give, in NumPy: every rank at once, no GPU, nothing else of `ep`.

The oracle of all tests. Arrays are bit-exact unless a NaN's payload is concerned. Quantization is
done on bit patterns, so no flush-to-zero mode of the process can change it; the FP32 arithmetic of
combine is IEEE 754 with subnormals kept, one operation at a time (no fused multiply-add).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

SCALE_BLOCK = 32
"""Elements that share one scale (OCP Microscaling Formats 1.0)."""
CHUNK = 8
"""Elements one lane squares and sums in order: 16 bytes of BF16."""
SEGMENT_CHUNKS = 32
"""Chunks summed by one xor butterfly: the lanes of a warp."""
ACCUMULATORS = 4
"""Partial sums that take the segments in turn."""

BFloat16Array: TypeAlias = npt.NDArray[np.generic]
"""ml_dtypes.bfloat16; the extension types are no types to a checker."""
E4M3Array: TypeAlias = npt.NDArray[np.generic]
"""ml_dtypes.float8_e4m3fn."""
E8M0Array: TypeAlias = npt.NDArray[np.generic]
"""ml_dtypes.float8_e8m0fnu."""
_Ints: TypeAlias = npt.NDArray[np.int32]

_BF16_INF = 0x7F80
_E4M3_MAX = 0x7E
_E8M0_MAX = 254
_E8M0_NAN = 255
_BIT_LENGTH = np.array([mantissa.bit_length() for mantissa in range(128)], np.int32)


def mxfp8_quantize(x: BFloat16Array) -> tuple[E4M3Array, E8M0Array]:
    """Quantize to MXFP8, bit for bit as the CUDA path of flashinfer-python 0.7.4.

    The source of every rule is `mxfp8_quantize(x, is_sf_swizzled_layout=False, backend="cuda")`:

    - Scale byte: amax / 448 rounded up to a power of two, biased by 127. In integers: the exponent
      field of amax minus 8, plus 1 where the mantissa is above 1.75, at least 0. Inf gives 254,
      NaN 255.
    - amax is the greater of two maxima of magnitudes, one over the elements of even index and one
      over those of odd index. A maximum ignores NaN while one number is there; of the two maxima
      the odd one is taken unless the even one compares greater. So 16 odd NaN make the block NaN,
      and 16 even NaN do not.
    - Element: x * 2^(127 - byte) rounded to nearest even; the byte keeps it within 448. BF16
      subnormals count in full.
    - Where the byte is 0, 254 or 255 the factor is 0: finite elements become zeros of their sign.
    - A NaN product (x is NaN, or Inf, since a block with an Inf has factor 0) becomes +448.

    Parameters
    ----------
    x : ndarray of bfloat16 `[T, H]`
        H a multiple of 32.

    Returns
    -------
    elements : ndarray of float8_e4m3fn `[T, H]`
    scales : ndarray of float8_e8m0fnu `[T, H/32]`
        One a 32-block, row-major.
    """
    if x.dtype != ml_dtypes.bfloat16:
        raise ValueError(f"x is {x.dtype}, want bfloat16")
    if x.ndim != 2 or x.shape[1] % SCALE_BLOCK:
        raise ValueError(f"x has shape {x.shape}, want [T, multiple of {SCALE_BLOCK}]")
    num_tokens, hidden = x.shape
    bits = np.ascontiguousarray(x).view(np.uint16).astype(np.int32)
    bits = bits.reshape(num_tokens, hidden // SCALE_BLOCK, SCALE_BLOCK)
    scale = _scale_byte(_block_amax(bits & 0x7FFF))
    elements = _element_code(bits, scale[..., None]).astype(np.uint8)
    return (
        elements.reshape(num_tokens, hidden).view(ml_dtypes.float8_e4m3fn),
        scale.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
    )


def _block_amax(magnitude: _Ints) -> _Ints:
    """Bits of the greatest magnitude `[T, blocks]` of `[T, blocks, 32]`; above Inf where NaN."""
    number = np.where(magnitude > _BF16_INF, 0, magnitude)
    all_odd_nan = (magnitude[..., 1::2] > _BF16_INF).all(axis=-1)
    amax: _Ints = np.where(all_odd_nan, 0x7FFF, number.max(axis=-1))
    return amax


def _scale_byte(amax: _Ints) -> _Ints:
    byte = np.maximum((amax >> 7) - 8 + ((amax & 0x7F) > 0x60), 0)
    byte = np.where(amax == _BF16_INF, _E8M0_MAX, byte)
    return np.where(amax > _BF16_INF, _E8M0_NAN, byte)


def _element_code(bits: _Ints, scale: _Ints) -> _Ints:
    """E4M3 code of each element: sign, then the magnitude rounded at the place its size gives."""
    magnitude = bits & 0x7FFF
    exponent, mantissa = magnitude >> 7, magnitude & 0x7F
    # Every value is significand * 2^(exponent - 134) with 8 significant bits, subnormals too.
    up = np.where(exponent == 0, 8 - _BIT_LENGTH[mantissa], 0)
    significand = np.where(exponent == 0, mantissa << up, mantissa | 0x80)
    scaled = np.where(exponent == 0, 1 - up, exponent) - scale
    # E4M3 keeps 4 bits down to 2^-6, below that the place stays; 9 bits off leave nothing.
    place = np.maximum(scaled, -6)
    drop = np.minimum(4 + place - scaled, 9)
    half = (1 << (drop - 1)) - 1 + ((significand >> drop) & 1)
    code = ((place + 6) << 3) + ((significand + half) >> drop)
    code = np.where((scale == 0) | (scale >= _E8M0_MAX), 0, code) | ((bits >> 8) & 0x80)
    return np.where(magnitude >= _BF16_INF, _E4M3_MAX, code)


def local_experts(rank: int, ranks: int, experts: int) -> range:
    """Global ids of the experts that `rank` owns: contiguous, the first E mod N ranks one more."""
    base, extra = divmod(experts, ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def owner_of(ids: npt.NDArray[np.integer], ranks: int, experts: int) -> _Ints:
    """Rank that owns each id: int32, the shape of `ids`; -1 for ids outside 0..E-1."""
    ends = [local_experts(rank, ranks, experts).stop for rank in range(ranks)]
    owner = np.searchsorted(np.array(ends), ids, side="right")
    return np.where((ids < 0) | (ids >= experts), -1, owner).astype(np.int32)


def empty_id(rank: int, ranks: int, experts: int) -> int:
    """Id that fills the empty rows of `rank`: the least one in 0..E that is not local.

    0 if its range starts above 0, else the end of its range (E where every expert is local).
    """
    local = local_experts(rank, ranks, experts)
    return 0 if local.start > 0 else local.stop


@dataclasses.dataclass(frozen=True)
class Rows:
    """What dispatch leaves on one rank; row = source rank * stride + token.

    A row is live where `source` is not -1. In a real buffer `x` and `scales` of the other rows
    need only be finite (no NaN code, no byte 255); here they are 0.

    Attributes
    ----------
    x : ndarray of float8_e4m3fn `[rows, H]`
    scales : ndarray of float8_e8m0fnu `[rows, H/32]`
    ids : ndarray of int32 `[rows, K]`
        As sent; `empty_id` in empty rows.
    weights : ndarray of float32 `[rows, K]`
        As sent; 0 in empty rows.
    source : ndarray of int32 `[rows]`
        `(source rank << 16) | token`; -1 in empty rows.
    """

    x: E4M3Array
    scales: E8M0Array
    ids: _Ints
    weights: npt.NDArray[np.float32]
    source: _Ints

    @classmethod
    def empty(cls, rows: int, hidden: int, top_k: int, fill_id: int) -> Rows:
        """Rows of which none is live."""
        return cls(
            np.zeros((rows, hidden), np.uint8).view(ml_dtypes.float8_e4m3fn),
            np.zeros((rows, hidden // SCALE_BLOCK), np.uint8).view(ml_dtypes.float8_e8m0fnu),
            np.full((rows, top_k), fill_id, np.int32),
            np.zeros((rows, top_k), np.float32),
            np.full(rows, -1, np.int32),
        )


def dispatch(
    xs: Sequence[BFloat16Array],
    ids: Sequence[_Ints],
    weights: Sequence[npt.NDArray[np.float32]],
    *,
    ranks: int,
    experts: int,
    stride: int,
    receivers: Sequence[int] | None = None,
) -> list[Rows]:
    """Dispatch of all ranks at once.

    Parameters
    ----------
    xs, ids, weights : one array a source rank
        bfloat16 `[T_s, H]`, int32 `[T_s, K]`, float32 `[T_s, K]`.
    ranks, experts : int
        N and E.
    stride : int
        Rows each source has on every rank; at least every T_s.
    receivers : sequence of int, optional
        The destination ranks whose rows are wanted; all of them if not given.

    Returns
    -------
    list of Rows
        One a destination rank, or one a receiver in the order given.
    """
    _check_lengths(ranks, xs=xs, ids=ids, weights=weights)
    hidden, top_k = xs[0].shape[1], ids[0].shape[1]
    destinations = range(ranks) if receivers is None else receivers
    received = [
        Rows.empty(ranks * stride, hidden, top_k, empty_id(rank, ranks, experts))
        for rank in destinations
    ]
    for src in range(ranks):
        num_tokens = _check_tokens(src, ids[src], stride, x=xs[src], weights=weights[src])
        elements, scales = mxfp8_quantize(xs[src])
        owners = owner_of(ids[src], ranks, experts)
        for dst, rows in zip(destinations, received, strict=True):
            tokens = _tokens_for(dst, owners)
            place = src * stride + tokens
            rows.x[place] = elements[tokens]
            rows.scales[place] = scales[tokens]
            rows.ids[place] = ids[src][tokens]
            rows.weights[place] = weights[src][tokens]
            rows.source[place] = (src << 16) | np.arange(num_tokens)[tokens]
    return received


def combine(
    partials: Sequence[BFloat16Array],
    ids: Sequence[_Ints],
    *,
    ranks: int,
    experts: int,
    stride: int,
    norm_weight: BFloat16Array | Sequence[BFloat16Array] | None = None,
    eps: float = 1e-5,
) -> list[BFloat16Array]:
    """Combine of all ranks at once.

    A token's result is the FP32 sum, from +0 and in rank order, of its rows on the ranks that own
    one of its experts, rounded once to BF16; then `rms_norm` of that if there is a weight. All
    other rows are not looked at, whatever they hold.

    Parameters
    ----------
    partials : one bfloat16 `[ranks * stride, H]` a destination rank
        Row by row as `dispatch` laid them out.
    ids : one int32 `[T_s, K]` a source rank
    ranks, experts, stride : int
        The same as in dispatch, ids too.
    norm_weight : bfloat16 `[H]`, or one such a source rank, optional
    eps : float
        Added to the mean square, as FP32; above 0.

    Returns
    -------
    list of ndarray of bfloat16 `[T_s, H]`
        One a source rank; +0 (before the norm) for a token that selects nobody.
    """
    _check_lengths(ranks, partials=partials, ids=ids)
    for rank, partial in enumerate(partials):
        if partial.ndim != 2 or partial.shape[0] != ranks * stride:
            raise ValueError(
                f"partials[{rank}] has shape {partial.shape}, want [{ranks * stride}, H]"
            )
    results = []
    for src, norm in enumerate(_one_a_rank(norm_weight, ranks)):
        num_tokens = _check_tokens(src, ids[src], stride)
        owners = owner_of(ids[src], ranks, experts)
        total = np.zeros((num_tokens, partials[0].shape[1]), np.float32)
        with np.errstate(all="ignore"):
            for dst, partial in enumerate(partials):
                tokens = _tokens_for(dst, owners)
                total[tokens] += partial[src * stride + tokens].astype(np.float32)
            summed = total.astype(ml_dtypes.bfloat16)
        results.append(summed if norm is None else rms_norm(summed, norm, eps))
    return results


def rms_norm(x: BFloat16Array, weight: BFloat16Array, eps: float = 1e-5) -> BFloat16Array:
    """Normalize by the root mean square: (x * rstd) * weight in FP32, rounded once to BF16.

    Parameters
    ----------
    x : ndarray of bfloat16 `[T, H]`
    weight : ndarray of bfloat16 `[H]`
    eps : float

    Returns
    -------
    ndarray of bfloat16 `[T, H]`
    """
    if weight.dtype != ml_dtypes.bfloat16 or weight.shape != x.shape[1:]:
        raise ValueError(f"weight is {weight.dtype} {weight.shape}, want bfloat16 {x.shape[1:]}")
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * rms_rstd(x, eps)[:, None]
        return (scaled * weight.astype(np.float32)).astype(ml_dtypes.bfloat16)


def rms_rstd(x: BFloat16Array, eps: float = 1e-5) -> npt.NDArray[np.float32]:
    """1 / sqrt(mean square + eps) in the fixed FP32 order that every implementation follows.

    - A chunk is 8 consecutive elements: their squares (each rounded, then added) from +0, left to
      right.
    - A segment is 32 consecutive chunks, those past the end +0, summed by a butterfly over the
      chunk's index at distances 16, 8, 4, 2, 1.
    - Segment s is added to accumulator s mod 4, from +0, in rising s; total = (a0+a1) + (a2+a3).
    - mean = total / H, plus eps, then 1 / sqrt of it, each correctly rounded to FP32.

    Parameters
    ----------
    x : ndarray of bfloat16 `[T, H]`
        H a multiple of 8.
    eps : float

    Returns
    -------
    ndarray of float32 `[T]`
    """
    num_tokens, hidden = x.shape
    if hidden == 0 or hidden % CHUNK:
        raise ValueError(f"x has shape {x.shape}, want [T, positive multiple of {CHUNK}]")
    num_chunks = hidden // CHUNK
    num_segments = -(-num_chunks // SEGMENT_CHUNKS)
    with np.errstate(all="ignore"):
        values = x.astype(np.float32).reshape(num_tokens, num_chunks, CHUNK)
        chunks = np.zeros((num_tokens, num_segments * SEGMENT_CHUNKS), np.float32)
        for element in range(CHUNK):
            chunks[:, :num_chunks] += values[..., element] * values[..., element]
        lanes = chunks.reshape(num_tokens, num_segments, SEGMENT_CHUNKS)
        distance = SEGMENT_CHUNKS // 2
        while distance:
            # Addition commutes, so all lanes of a butterfly agree and half of them suffice.
            lanes = lanes[..., :distance] + lanes[..., distance:]
            distance //= 2
        sums = np.zeros((num_tokens, ACCUMULATORS), np.float32)
        for segment in range(num_segments):
            sums[:, segment % ACCUMULATORS] += lanes[:, segment, 0]
        total = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
        shifted = total / np.float32(hidden) + np.float32(eps)
        # Rounding through FP64 is correct rounding here: shown for every FP32 significand.
        return (1.0 / np.sqrt(shifted.astype(np.float64))).astype(np.float32)


def _tokens_for(rank: int, owners: _Ints) -> npt.NDArray[np.intp]:
    """Tokens, rising, that chose an expert of `rank`; `owners` is `[T, K]`."""
    return np.flatnonzero((owners == rank).any(axis=1))


def _one_a_rank(
    weight: BFloat16Array | Sequence[BFloat16Array] | None, ranks: int
) -> Sequence[BFloat16Array | None]:
    if weight is None or isinstance(weight, np.ndarray):
        return [weight] * ranks
    _check_lengths(ranks, norm_weight=weight)
    return weight


def _check_lengths(ranks: int, **per_rank: Sequence[object]) -> None:
    for name, arrays in per_rank.items():
        if len(arrays) != ranks:
            raise ValueError(f"{name} has {len(arrays)} arrays, want one a rank: {ranks}")


def _check_tokens(src: int, ids: _Ints, stride: int, **arrays: npt.NDArray[np.generic]) -> int:
    num_tokens = len(ids)
    if num_tokens > stride:
        raise ValueError(f"rank {src} has {num_tokens} tokens, want at most stride = {stride}")
    for name, array in arrays.items():
        if len(array) != num_tokens:
            raise ValueError(f"{name}[{src}] has {len(array)} tokens, want {num_tokens} as ids")
    return num_tokens
