"""How many CTAs a launch gets. Plain arithmetic: needs no compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ep.config import EpConfig

SPARE_TOKENS = 8
"""Tokens of every source that there is a CTA for even where this rank has fewer of its own."""


HERALDS = 1
"""CTAs of the fence-free protocol's kernels beside those of a grid below, before them."""


class Grid(NamedTuple):
    """CTAs of a launch of the fence-free protocol that send or wait; the first ones send."""

    senders: int
    ctas: int

    @property
    def waiters(self) -> int:
        """CTAs that wait for peers: receivers of dispatch, reducers of combine."""
        return self.ctas - self.senders


class Limits(NamedTuple):
    """Most CTAs that take a role; None leaves it to the formula.

    Whatever they are, a grid keeps what `dispatch_grid` and `combine_grid` promise.
    """

    senders: int | None = None
    waiters: int | None = None
    """Receivers of dispatch, reducers of combine."""


NO_LIMITS = Limits()


def dispatch_grid(
    config: EpConfig, num_tokens: int, resident: int, limits: Limits = NO_LIMITS
) -> Grid:
    """Grid of dispatch: a CTA for each token, and for each row that may come.

    Parameters
    ----------
    config : EpConfig
    num_tokens : int
        This rank's T; the other ranks' is taken to be about the same.
    resident : int
        CTAs of the kernel that the device holds at once, divided by the ranks that share it; at
        least 2, so that there is room for both roles.
    limits : Limits
        The senders' takes the place of half of `resident`, which they may have without.

    Returns
    -------
    Grid
        No more than `resident`, so that even ranks that share a device wait for nobody who cannot
        start. CTAs loop over what is left. There is at least one sender and, where there are
        peers, one receiver; more receivers than sources are as many for each source.
    """
    sources = config.ranks - 1
    if not sources:
        return Grid(*[max(1, min(num_tokens, resident, _at_most(limits.senders, resident)))] * 2)
    senders = max(1, min(num_tokens, _share(limits.senders, resident)))
    rows = sources * _tokens(config, num_tokens)
    receivers = max(1, min(rows, resident - senders, _at_most(limits.waiters, resident)))
    if receivers > sources:
        receivers -= receivers % sources
    return Grid(senders, senders + receivers)


def combine_grid(
    config: EpConfig, num_tokens: int, resident: int, limits: Limits = NO_LIMITS
) -> Grid:
    """Grid of combine: a CTA for each row that may have come, and for each token.

    Parameters and result as in `dispatch_grid`, but that it is the reducers who may have half of
    `resident`, or what `limits` says in its place; there is one at least where there are tokens.
    """
    positions = (config.ranks - 1) * _tokens(config, num_tokens)
    reducers = min(num_tokens, max(1, _share(limits.waiters, resident)))
    senders = max(1, min(positions, resident - reducers, _at_most(limits.senders, resident)))
    return Grid(senders, senders + reducers)


def _share(limit: int | None, resident: int) -> int:
    """CTAs of the role that chooses first: it leaves one to the other role."""
    return resident // 2 if limit is None else min(limit, resident - 1)


def _at_most(limit: int | None, resident: int) -> int:
    return resident if limit is None else limit


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
