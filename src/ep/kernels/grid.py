"""How many CTAs a launch gets. Plain arithmetic: needs no compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ep.config import EpConfig

SPARE_TOKENS = 8
"""Tokens of every source that there is a CTA for even where this rank has fewer of its own."""


class Grid(NamedTuple):
    """CTAs of a launch of the fence-free protocol; the first ones send."""

    senders: int
    ctas: int


def dispatch_grid(config: EpConfig, num_tokens: int, resident: int) -> Grid:
    """Grid of dispatch: a CTA for each token, and for each row that may come.

    Parameters
    ----------
    config : EpConfig
    num_tokens : int
        This rank's T; the other ranks' is taken to be about the same.
    resident : int
        CTAs of the kernel that the device holds at once, divided by the ranks that share it.

    Returns
    -------
    Grid
        No more than `resident`, so that even ranks that share a device wait for nobody who cannot
        start. CTAs loop over what is left.
    """
    sources = config.ranks - 1
    if not sources:
        return Grid(*[max(1, min(num_tokens, resident))] * 2)
    senders = max(1, min(num_tokens, resident // 2))
    receivers = max(1, min(sources * _tokens(config, num_tokens), resident - senders))
    if receivers > sources:
        receivers -= receivers % sources
    return Grid(senders, senders + receivers)


def combine_grid(config: EpConfig, num_tokens: int, resident: int) -> Grid:
    """Grid of combine: a CTA for each row that may have come, and for each token.

    Parameters and result as in `dispatch_grid`.
    """
    positions = (config.ranks - 1) * _tokens(config, num_tokens)
    reducers = min(num_tokens, max(1, resident // 2))
    senders = max(1, min(positions, resident - reducers))
    return Grid(senders, senders + reducers)


def _tokens(config: EpConfig, num_tokens: int) -> int:
    """Tokens of every source that there is a CTA for."""
    return max(num_tokens, min(config.max_tokens, SPARE_TOKENS))


def dispatch_ctas(num_tokens: int) -> int:
    """Grid of the flag protocol's dispatch: a CTA a token, and one to wait where there is none."""
    return max(num_tokens, 1)


def combine_ctas(config: EpConfig, num_tokens: int, resident: int) -> int:
    """Grid of the flag protocol's combine: a CTA a row that may have come, all resident at once.

    Parameters
    ----------
    config : EpConfig
    num_tokens : int
        This rank's T; the other ranks' is taken to be about the same.
    resident : int
        CTAs of the kernel that the device holds at once, divided by the ranks that share it.

    Returns
    -------
    int
        At least 1. CTAs loop over what is left.
    """
    return max(1, min(config.ranks * _tokens(config, num_tokens), resident))
