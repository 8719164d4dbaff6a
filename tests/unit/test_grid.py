"""Grids: what they promise holds whatever the limits are; without limits they are the formula's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep import EpConfig
from ep.kernels.grid import (
    NO_LIMITS,
    SPARE_TOKENS,
    Grid,
    Limits,
    combine_ctas,
    combine_grid,
    dispatch_ctas,
    dispatch_grid,
)
from tests.strategies import configs

limit = st.none() | st.integers(-5, 2000)
limits = st.builds(Limits, limit, limit)
residents = st.integers(2, 1200)


@st.composite
def launches(draw):
    config = draw(configs(max_tokens=2000))
    return config, draw(st.integers(0, config.max_tokens)), draw(residents)


def shape(ranks, max_tokens):
    return EpConfig(ranks=ranks, hidden=64, experts=8, top_k=2, max_tokens=max_tokens)


@given(launches(), limits)
def test_dispatch_keeps_what_it_promises(launch, limits):
    config, num_tokens, resident = launch
    grid = dispatch_grid(config, num_tokens, resident, limits)
    sources = config.ranks - 1
    assert 1 <= grid.senders <= max(1, num_tokens)
    assert grid.senders + grid.waiters == grid.ctas <= resident
    if not sources:
        assert grid.waiters == 0
        return
    assert 1 <= grid.waiters <= sources * max(num_tokens, SPARE_TOKENS)
    assert grid.waiters <= sources or grid.waiters % sources == 0


@given(launches(), limits)
def test_combine_keeps_what_it_promises(launch, limits):
    config, num_tokens, resident = launch
    grid = combine_grid(config, num_tokens, resident, limits)
    assert grid.senders >= 1
    assert grid.senders + grid.waiters == grid.ctas <= resident
    assert min(num_tokens, 1) <= grid.waiters <= num_tokens
    assert grid.senders <= max(1, (config.ranks - 1) * max(num_tokens, SPARE_TOKENS))


@given(launches(), limits)
def test_no_role_has_more_than_its_limit(launch, limits):
    config, num_tokens, resident = launch
    for plan in (dispatch_grid, combine_grid):
        grid = plan(config, num_tokens, resident, limits)
        for ctas, most in zip((grid.senders, grid.waiters), limits, strict=True):
            assert most is None or ctas <= max(1, most)


def formula(config, num_tokens, resident):
    """Both grids, in words of their own."""
    sources = config.ranks - 1
    tokens = max(num_tokens, min(config.max_tokens, 8))
    senders = max(1, min(num_tokens, resident // 2))
    receivers = max(1, min(sources * tokens, resident - senders))
    if receivers > sources:
        receivers = receivers // max(sources, 1) * sources
    dispatch = Grid(senders, senders + receivers)
    if not sources:
        dispatch = Grid(*[max(1, min(num_tokens, resident))] * 2)
    reducers = min(num_tokens, resident // 2)
    senders = max(1, min(sources * tokens, resident - reducers))
    return dispatch, Grid(senders, senders + reducers)


@given(launches())
def test_without_limits_it_is_the_formula(launch):
    config, num_tokens, resident = launch
    for limits in ((), (NO_LIMITS,)):
        grids = (
            dispatch_grid(config, num_tokens, resident, *limits),
            combine_grid(config, num_tokens, resident, *limits),
        )
        assert grids == formula(config, num_tokens, resident)


@pytest.mark.parametrize(
    ("ranks", "num_tokens", "limits", "dispatch", "combine"),
    [
        (2, 64, Limits(), (64, 64), (64, 64)),
        (2, 400, Limits(), (132, 132), (132, 132)),
        # The other role takes what a limit leaves free, ...
        (2, 400, Limits(senders=33), (33, 231), (33, 132)),
        (2, 400, Limits(waiters=33), (132, 33), (231, 33)),
        # ... and a limit may give a role more than half.
        (2, 400, Limits(senders=200), (200, 64), (132, 132)),
        (2, 400, Limits(waiters=200), (132, 132), (64, 200)),
        (2, 400, Limits(1000, 1000), (263, 1), (1, 263)),
        (4, 400, Limits(waiters=32), (132, 30), (232, 32)),
        (4, 400, Limits(1, 2), (1, 2), (1, 2)),
        (1, 400, Limits(senders=50), (50, 0), (1, 132)),
    ],
)
def test_limits(ranks, num_tokens, limits, dispatch, combine):
    config = shape(ranks, 512)
    for plan, want in ((dispatch_grid, dispatch), (combine_grid, combine)):
        grid = plan(config, num_tokens, 264, limits)
        assert (grid.senders, grid.waiters) == want, plan.__name__


def test_the_flag_protocol_has_no_limits():
    assert [dispatch_ctas(count) for count in (0, 1, 7)] == [1, 1, 7]
    config = shape(4, 64)
    assert [combine_ctas(config, count, 132) for count in (0, 16, 64)] == [32, 64, 132]
