"""How many CTAs a launch gets. Plain arithmetic: needs no compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep.config import EpConfig

SPARE_TOKENS = 8
"""Tokens of every source that combine has a CTA for even where this rank has fewer of its own."""


def dispatch_ctas(num_tokens: int) -> int:
    """Grid of dispatch: a CTA a token, and one to wait where there is none."""
    return max(num_tokens, 1)


def combine_ctas(config: EpConfig, num_tokens: int, resident: int) -> int:
    """Grid of combine: a CTA for each row that may have come, as far as all are resident at once.

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
    tokens = max(num_tokens, min(config.max_tokens, SPARE_TOKENS))
    return max(1, min(config.ranks * tokens, resident))
