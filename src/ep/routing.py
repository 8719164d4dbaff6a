"""Seeded inputs for tests, examples and benchmarks: which experts, with what data, how many tokens.

Every function depends on its arguments alone, so that any rank can make what another one sends.
Token t of a (step, rank) is the same however many tokens follow it, but for `Routing.MASKED`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ep.reference import SCALE_BLOCK, BFloat16Array, local_experts

_Ints: TypeAlias = npt.NDArray[np.int32]
_Words: TypeAlias = npt.NDArray[np.uint32]

ROWS_AT_ONCE = 1024
"""Tokens whose keys, one an expert, are in memory together."""
FULLY_MASKED = 0.125
"""Share of tokens of `Routing.MASKED` without any expert."""


class Routing(StrEnum):
    """How tokens choose their experts."""

    UNIFORM = "uniform"
    """Distinct experts, all equally likely."""
    ZIPF = "zipf"
    """Distinct experts, the k-th most popular 1/k as likely; popularity is the seed's alone."""
    ONE_RANK = "one-rank"
    """All of a token's experts on one rank; distinct where it owns enough, else repeated."""
    ONE_EXPERT = "one-expert"
    """One expert a step, K times for every token of every rank."""
    MASKED = "masked"
    """Uniform with some choices -1, and some tokens -1 throughout."""


class _Stream(IntEnum):
    """First word of the seed, so that no two purposes share random numbers."""

    IDS = 1
    WEIGHTS = 2
    MASK = 3
    POPULARITY = 4
    ELEMENTS = 5
    BLOCKS = 6
    COUNTS = 7
    PARTIALS = 8


def route(
    routing: Routing | str,
    step: int,
    rank: int,
    *,
    num_tokens: int,
    top_k: int,
    ranks: int,
    experts: int,
    seed: int = 0,
    masked_ratio: float = 0.3,
) -> tuple[_Ints, npt.NDArray[np.float32]]:
    """Choose experts and weights for the tokens that `rank` sends in `step`.

    Parameters
    ----------
    routing : Routing or str
    step, rank, seed : int
        At least 0.
    num_tokens, top_k : int
        T and K. Where K exceeds the experts to choose from, they repeat in turn.
    ranks, experts : int
        N and E.
    masked_ratio : float
        Share of -1 among the choices of tokens that are not masked throughout.

    Returns
    -------
    ids : ndarray of int32 `[T, K]`
    weights : ndarray of float32 `[T, K]`
        In (0, 1), also of masked choices. Not normalized: a sum's bits depend on the machine.
    """
    routing = Routing(routing)
    rng = _generator(_Stream.IDS, seed, step, rank)
    if routing is Routing.ONE_EXPERT:
        # Without the rank: every rank must name the same expert.
        expert = _generator(_Stream.IDS, seed, step).integers(experts)
        ids = np.full((num_tokens, top_k), expert, np.int32)
    elif routing is Routing.ONE_RANK:
        ids = _one_rank(rng, num_tokens, top_k, ranks, experts)
    else:
        odds = np.ones(experts)
        if routing is Routing.ZIPF:
            odds += _generator(_Stream.POPULARITY, seed).permutation(experts)
        ids = _distinct(rng, num_tokens, top_k, odds)
    if routing is Routing.MASKED:
        _mask(ids, _generator(_Stream.MASK, seed, step, rank), masked_ratio, step)
    draws = _generator(_Stream.WEIGHTS, seed, step, rank)
    weights = draws.integers(1, 1 << 24, (num_tokens, top_k)) / (1 << 24)
    return ids, weights.astype(np.float32)


def tokens(step: int, rank: int, num_tokens: int, hidden: int, seed: int = 0) -> BFloat16Array:
    """Make the tokens that `rank` sends in `step`: finite, and no two alike.

    Signs and mantissas are random; exponents spread over 20 binades within a 32-block and the
    blocks over 32 more, so that scale bytes differ and small elements round to zero.

    Returns
    -------
    ndarray of bfloat16 `[num_tokens, hidden]`
    """
    num_blocks = -(-hidden // SCALE_BLOCK)
    words = _generator(_Stream.ELEMENTS, seed, step, rank).integers(
        1 << 16, size=(num_tokens, num_blocks * SCALE_BLOCK), dtype=np.uint16
    )
    blocks = _generator(_Stream.BLOCKS, seed, step, rank).integers(
        100, 132, (num_tokens, num_blocks), dtype=np.uint16
    )
    exponent = ((words >> 8 & 127) * 20 >> 7) + np.repeat(blocks, SCALE_BLOCK, axis=1)
    bits = (words & 0x807F) | (exponent << 7)
    return np.ascontiguousarray(bits[:, :hidden]).view(ml_dtypes.bfloat16)


def partials_for(
    source: _Ints, rank: int, hidden: int, *, step: int = 0, seed: int = 0
) -> BFloat16Array:
    """Make what `rank`'s experts give in `step` from nothing but the rows' source words.

    An eighth of the elements is +-2^20 and the rest below 2: large ones often cancel between
    ranks, which leaves a sum that shows the order it was made in.

    Parameters
    ----------
    source : ndarray of int32 `[rows]`
        `(source rank << 16) | token`, or -1.
    rank, hidden, step, seed : int

    Returns
    -------
    ndarray of bfloat16 `[rows, hidden]`
        No two live rows alike, over all ranks. Empty rows are NaN: nobody may read them.
    """
    rows = np.full((len(source), hidden), np.nan, ml_dtypes.bfloat16)
    live = np.flatnonzero(source != -1)
    key, column_key = np.random.SeedSequence([_Stream.PARTIALS, seed, step, rank]).generate_state(2)
    row_words = _scramble(source[live].astype(np.uint32) ^ key)
    column_words = _scramble(np.arange(hidden, dtype=np.uint32) ^ column_key)
    words = _scramble(row_words[:, None] ^ column_words)
    small = 120 + (words >> 8 & 7)
    exponent = np.where(words >> 13 & 7, small, 147)
    mantissa = np.where(words >> 13 & 7, words & 0x7F, 0)
    bits = (words >> 16 & 0x8000) | (exponent << 7) | mantissa
    rows[live] = bits.astype(np.uint16).view(ml_dtypes.bfloat16)
    return rows


def token_counts(step: int, ranks: int, tokens: int, *, uneven: bool, seed: int = 0) -> list[int]:
    """Tokens each rank sends in `step`.

    Parameters
    ----------
    step, ranks, seed : int
    tokens : int
        Most that one rank sends.
    uneven : bool
        Draw each count from 0..tokens, about a quarter of them 0; of two ranks or more one sends
        `tokens` and one none. False: `tokens` everywhere.

    Returns
    -------
    list of int
        T_s of each rank s.
    """
    if not uneven:
        return [tokens] * ranks
    rng = _generator(_Stream.COUNTS, seed, step)
    counts = rng.integers(tokens, size=ranks, endpoint=True)
    counts[rng.random(ranks) < 0.25] = 0
    if ranks > 1:
        full, none = rng.choice(ranks, 2, replace=False)
        counts[full], counts[none] = tokens, 0
    return [int(count) for count in counts]


def _generator(stream: _Stream, seed: int, step: int = 0, rank: int = -1) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([stream, seed, step, rank + 1]))


def _distinct(
    rng: np.random.Generator, num_tokens: int, top_k: int, odds: npt.NDArray[np.float64]
) -> _Ints:
    """Draw without replacement: expert i has weight 1 / odds[i]; odds is `[E]`."""
    ids = np.empty((num_tokens, top_k), np.int32)
    columns = np.arange(top_k) % len(odds)
    for start in range(0, num_tokens, ROWS_AT_ONCE):
        part = ids[start : start + ROWS_AT_ONCE]
        keys = rng.standard_exponential((len(part), len(odds))) * odds
        part[:] = _least(keys, top_k)[:, columns]
    return ids


def _one_rank(
    rng: np.random.Generator, num_tokens: int, top_k: int, ranks: int, experts: int
) -> _Ints:
    ids = np.empty((num_tokens, top_k), np.int32)
    owners = [local_experts(rank, ranks, experts) for rank in range(min(ranks, experts))]
    first = np.array([owned.start for owned in owners])
    size = np.array([len(owned) for owned in owners])
    for start in range(0, num_tokens, ROWS_AT_ONCE):
        part = ids[start : start + ROWS_AT_ONCE]
        draws = rng.random((len(part), 1 + size.max()))
        owner = (draws[:, :1] * len(owners)).astype(np.intp)
        keys = np.where(np.arange(size.max()) < size[owner], draws[:, 1:], np.inf)
        columns = np.arange(top_k) % size[owner]
        part[:] = first[owner] + np.take_along_axis(_least(keys, top_k), columns, axis=1)
    return ids


def _mask(ids: _Ints, rng: np.random.Generator, ratio: float, step: int) -> None:
    num_tokens, top_k = ids.shape
    draws = rng.random((num_tokens, top_k + 1))
    ids[draws[:, :top_k] < ratio] = -1
    ids[draws[:, top_k] < FULLY_MASKED] = -1
    if num_tokens > 1:
        # A lone token stays: a step of one would else never send.
        ids[step % num_tokens] = -1


def _least(keys: npt.NDArray[np.float64], count: int) -> _Ints:
    """Columns of the `count` least keys a row, the least first."""
    if count < keys.shape[1]:
        columns = np.argpartition(keys, count - 1, axis=1)[:, :count]
    else:
        columns = np.broadcast_to(np.arange(keys.shape[1]), keys.shape)
    # What a partition returns first differs between processors; an order by keys does not.
    order = np.argsort(np.take_along_axis(keys, columns, axis=1), axis=1)
    return np.take_along_axis(columns, order, axis=1).astype(np.int32)


def _scramble(words: _Words) -> _Words:
    """Mix the bits of each word, one to one: multiply and xorshift."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))
