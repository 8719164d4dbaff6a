"""Arguments of every kind, on the host: refused before anything is sent, or right to the bit."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ep
from ep.arguments import BF16, FP32, INT32
from ep.bench.cases import Case, Inputs, Step
from ep.bench.check import Complaint, Where, check_result, run_checked_step
from ep.testing import run_ranks
from tests.strategies import anything

CONFIG = ep.EpConfig(ranks=1, hidden=64, experts=4, top_k=2, max_tokens=3)
CASE = Case(config=CONFIG)
ROWS = ep.EpLayout(CONFIG).rows
TOKENS = 2
STEP = CASE.step(0, TOKENS)
NUMBERS = itertools.count(1)

DTYPES = [np.dtype(kind) for kind in "?bBhHiIqQefdgFDOMmSU"]
DTYPES += [np.dtype(kind) for kind in (">i4", ">f4", "S3", "i4,f4", "(2,)i4")]
DTYPES += [
    np.dtype(kind) for kind in (BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, BF16.newbyteorder())
]


class Subclass(np.ndarray[Any, Any]):
    """May redefine anything."""


def misaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = array.view(np.uint8).ravel()
    return raw[1:].view(array.dtype).reshape(array.shape)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


CHANGES: dict[str, Callable[[Any], Any]] = {
    "misaligned": misaligned,
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "reversed": lambda array: array[::-1],
    "Fortran": np.asfortranarray,
    "transposed": lambda array: array.T,
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape),
    "one more axis": lambda array: array[None],
    "flat": np.ravel,
    "longer": lambda array: np.concatenate([array, array]),
    "wider": lambda array: np.concatenate([array, array], axis=-1),
    "none": lambda array: array[:0],
    "subclass": lambda array: array.view(Subclass),
    "matrix": lambda array: array.view(np.matrix) if array.ndim == 2 else array.view(Subclass),
    "masked": np.ma.array,
    "record": lambda array: array.view(np.recarray),
    "memory": memoryview,
    "list": lambda array: array.tolist(),
    "copy": np.copy,
    "read-only": read_only,
}


def changed(array):
    """Give `array` as other types and in other memory."""
    yield from (np.zeros(array.shape, dtype) for dtype in DTYPES)
    yield from (apply(name, array) for name in CHANGES)


def apply(name, array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        try:
            return CHANGES[name](array)
        except (ValueError, TypeError):
            return None


def is_right(array, dtype, shape, *, out=False):
    """What the contract asks, said another way than `ep.arguments` says it."""
    if type(array) is not np.ndarray or (array.dtype, array.shape) != (dtype, shape):
        return False
    is_dense = array.__array_interface__["strides"] is None
    is_aligned = array.ctypes.data % dtype.alignment == 0
    return is_dense and is_aligned and (array.flags.writeable or not out)


@pytest.fixture(scope="module")
def exchange():
    with (
        pytest.MonkeyPatch.context() as patch,
        ep.World.connect(backend="host") as world,
        ep.Exchange(world, CONFIG) as exchange,
    ):
        patch.delenv("EP_CHECK", raising=False)
        yield exchange


def check_still_right(exchange):
    assert run_checked_step(exchange, CASE.step(next(NUMBERS), 3)) is None


def goes_through(call, *arguments, **options):
    """Whether a call is not refused; no other exception than the one for arguments may come."""
    try:
        call(*arguments, **options)
    except ep.ArgumentError as error:
        assert len(str(error)) < 1000  # noqa: PT017 - and it can be printed
        return False
    return True


KINDS = {"x": (BF16, (TOKENS, 64)), "ids": (INT32, (TOKENS, 2)), "weights": (FP32, (TOKENS, 2))}


def check_dispatch(exchange, name, value):
    right = STEP.inputs(0)._asdict()
    must = is_right(value, *KINDS[name]) if name in right else value is None
    assert goes_through(exchange.dispatch, **(right | {name: value})) == must
    if must:
        ids = value if name == "ids" else right["ids"]
        exchange.combine(np.zeros((ROWS, 64), BF16), ids)
    check_still_right(exchange)


@pytest.mark.parametrize("name", KINDS)
def test_dispatch_of_other_arrays(exchange, name):
    for value in changed(getattr(STEP.inputs(0), name)):
        check_dispatch(exchange, name, value)


@given(st.sampled_from([*KINDS, "stream"]), anything())
def test_dispatch_of_anything(exchange, name, value):
    check_dispatch(exchange, name, value)


def answer():
    return {
        "partials": np.ones((ROWS, 64), BF16),
        "ids": STEP.inputs(0).ids,
        "norm_weight": np.ones(64, BF16),
        "out": np.ones((TOKENS, 64), BF16),
    }


def check_combine(exchange, name, value):
    right = answer()
    if name in right:
        array = right[name]
        must = is_right(value, array.dtype, array.shape, out=name == "out")
        must |= value is None and name in ("norm_weight", "out")
    elif name == "eps":
        must = isinstance(value, (int, float, Fraction, np.floating, np.integer))
        must = must and 0 <= value <= float(np.finfo(np.float32).max)
    else:
        must = value is None
    exchange.dispatch(*STEP.inputs(0))
    assert goes_through(exchange.combine, **(right | {name: value})) == must
    if not must:
        result = exchange.combine(**right)
        assert result is right["out"]
        assert not np.isnan(result).any()
    check_still_right(exchange)


@pytest.mark.parametrize("name", answer())
def test_combine_of_other_arrays(exchange, name):
    for value in changed(answer()[name]):
        check_combine(exchange, name, value)


@given(st.sampled_from([*answer(), "eps", "stream"]), anything())
def test_combine_of_anything(exchange, name, value):
    check_combine(exchange, name, value)


def test_a_result_may_lie_where_partials_or_tokens_lie(exchange):
    sent, want = STEP.inputs(0), None
    for where in ("own", "partials", "tokens"):
        exchange.dispatch(*sent)
        partials = STEP.partials(0, STEP.expected_rows(0).source)
        out = {"own": None, "partials": partials[:TOKENS], "tokens": sent.x}[where]
        result = exchange.combine(partials, sent.ids, CASE.norm_weight, out=out)
        want = result.copy() if want is None else want
        assert (result.view(np.uint16) == want.view(np.uint16)).all()


# Odd numbers, on two ranks.

RANKS = 2
PAIR = dataclasses.replace(CONFIG, ranks=RANKS, timeout_s=20)
# A seed has nothing to shrink.
SEEDS = settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
ODD_IDS = np.array([-1, 0, 1, 2, 3, 4, 5, 2**31 - 1, -2, -(2**31)], np.int32)
ODD_BITS = {
    16: [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0001, 0x8000, 0x7F7F, 0xFF7F, 0x0080, 0x3F80],
    32: [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 1, 1 << 31, 0x7F7FFFFF],
}


@dataclasses.dataclass(frozen=True)
class OddStep(Step):
    """A step of given numbers: what is sent, and `[rank, source, token, H]` partials."""

    sent: tuple[Inputs, ...] = dataclasses.field(kw_only=True)
    table: Any = dataclasses.field(kw_only=True)

    def inputs(self, rank):
        return self.sent[rank]

    def partials(self, rank, source):
        return np.where(
            (source == -1)[:, None],
            np.array(np.nan, BF16),
            self.table[rank, source >> 16 & 1, source & 1],
        )


def odd_step(seed, number, case):
    rng = np.random.default_rng([seed, number])

    def bits(width, shape):
        share = rng.choice([0.0, 0.1, 1.0])
        random = rng.integers(1 << width, size=shape, dtype=np.uint64)
        odd = rng.choice(ODD_BITS[width], shape)
        return np.where(rng.random(shape) < share, odd, random).astype(f"u{width // 8}")

    sent = []
    for _ in range(RANKS):
        count = int(rng.integers(3))
        x, weights = bits(16, (count, 64)).view(BF16), bits(32, (count, 2)).view(np.float32)
        sent.append(Inputs(x, rng.choice(ODD_IDS, (count, 2)), weights))
    table = bits(16, (RANKS, RANKS, 2, 64)).view(BF16)
    counts = tuple(len(inputs.x) for inputs in sent)
    return OddStep(case, number, counts, sent=tuple(sent), table=table)


def play_odd(world, seed, case) -> list[Complaint | None]:
    complaints = []
    with ep.Exchange(world, PAIR) as exchange:
        for number in range(4):
            step = odd_step(seed, number, case)
            # Refused on every rank, each in its own way, before the step.
            wrong: Any = {("ids", "weights")[world.rank]: None}
            with pytest.raises(ep.ArgumentError):
                exchange.dispatch(**(step.inputs(world.rank)._asdict() | wrong))
            complaints.append(run_checked_step(exchange, step))
            world.barrier()
    return complaints


@given(st.integers(0, 2**32), st.booleans())
@SEEDS
def test_every_number_arrives_to_the_bit(seed, norm):
    case = Case(config=PAIR, norm=norm)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EP_CHECK", raising=False)
        said = run_ranks(RANKS, lambda world: play_odd(world, seed, case))
    assert said == [[None] * 4] * RANKS


@given(st.integers(0, 2**32), st.sampled_from([4, 5, 2**31 - 1, -2, -(2**31)]))
@SEEDS
def test_checked_ids_are_refused_on_each_rank_and_the_step_goes_on(seed, wrong):
    def play(world):
        with ep.Exchange(world, PAIR) as exchange:
            step = Case(config=PAIR, seed=seed).step(1, 3)
            x, ids, weights = step.inputs(world.rank)
            other = ids.copy()
            other[world.rank, 1] = wrong
            words = rf"ids\[{world.rank}, 1\] is {wrong}; allowed are 0..3, or -1"
            with pytest.raises(ep.ArgumentError, match=words):
                exchange.dispatch(x, other, weights)
            exchange.dispatch(x, ids, weights)
            partials = step.partials(world.rank, step.expected_rows(world.rank).source)
            with pytest.raises(ep.ArgumentError, match="not those of this step's dispatch"):
                exchange.combine(partials, other)
            got = exchange.combine(partials, ids, step.case.norm_weight)
            return check_result(
                got, step.expected_result(world.rank), Where(world.rank, 1, "combine")
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_CHECK", "1")
        assert run_ranks(RANKS, play) == [None] * RANKS
