"""The whole exchange on ranks that threads play: any config, routing and sequence of steps."""

import functools

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ep
from ep import reference
from ep.bench.cases import Case, Step
from ep.bench.check import run_checked_step
from ep.host.mxfp8 import quantize
from ep.host.norm import rms_norm
from ep.routing import Routing
from ep.testing import run_ranks
from tests.strategies import configs

BF16 = ml_dtypes.bfloat16
few = settings(max_examples=40, deadline=None)


@st.composite
def sequences(draw):
    config = draw(configs(ranks=9, hidden=320, experts=40, max_tokens=9))
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(Routing),
                st.booleans(),
                st.booleans(),
                st.integers(0, config.max_tokens),
            ),
            min_size=3,
            max_size=6,
        )
    )
    return config, steps, draw(st.integers(0, 2**16))


class SharedStep(Step):
    """A step whose data all the ranks of this process make only once."""

    inputs = functools.cache(Step.inputs)


def play(config, steps, seed):
    shared = []
    for number, (routing, uneven, norm, tokens) in enumerate(steps):
        case = Case(config=config, routing=routing, uneven=uneven, norm=norm, seed=seed)
        shared.append(SharedStep(case, number, case.step(number, tokens).counts))

    def rank(world):
        with ep.Exchange(world, config) as exchange:
            for step in shared:
                complaint = run_checked_step(exchange, step, prepared=step.number % 2 == 1)
                complaints = world.allgather(complaint and str(complaint))
                assert not any(complaints), complaints

    run_ranks(config.ranks, rank)


@few
@given(sequences())
def test_any_sequence_of_steps(sequence):
    play(*sequence)


def test_seventy_two_ranks_and_fewer_experts():
    config = ep.EpConfig(ranks=72, hidden=32, experts=50, top_k=4, max_tokens=2, timeout_s=60)
    steps = [(Routing.UNIFORM, True, True, 2), (Routing.MASKED, False, False, 1)]
    play(config, [*steps, (Routing.ZIPF, True, False, 2)], 1)


@few
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64),
    st.integers(0, 2**16),
)
def test_quantization_of_any_bits(rows, blocks, pool, seed):
    picks = np.random.default_rng(seed).choice(np.array(pool, np.uint16), (rows, 32 * blocks))
    x = picks.view(BF16)
    for got, want in zip(quantize(x), reference.mxfp8_quantize(x), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_quantization_of_every_value_beside_every_amax():
    values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for amax in range(0, 0x8000, 37):
        x = np.empty((1 << 16 >> 4, 32), np.uint16)
        x[:, :16] = values.reshape(-1, 16)
        x[:, 16:] = amax
        x = x.view(BF16)
        for got, want in zip(quantize(x), reference.mxfp8_quantize(x), strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@few
@given(
    st.integers(0, 4),
    st.integers(1, 80),
    st.integers(0, 2**16),
    st.floats(0, 1, width=32),
)
def test_norm_of_any_finite_rows(tokens, blocks, seed, eps):
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-20, 20, (tokens, 1)))
    x = (rng.standard_normal((tokens, 32 * blocks)) * scale).astype(BF16)
    weight = rng.standard_normal(32 * blocks).astype(BF16)
    got, want = rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
