"""Steps that are prepared once and made again, with new contents of the same arrays."""

import dataclasses

import numpy as np
import pytest

import ep
from ep.bench.cases import EPS, Case
from ep.bench.check import Where, check_result, check_rows
from ep.reference import Rows
from ep.testing import run_ranks

CONFIG = ep.EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=5)
FIELDS = [field.name for field in dataclasses.fields(Rows)]


@dataclasses.dataclass
class Prepared:
    """A prepared step of `num_tokens` tokens, and its arrays."""

    exchange: ep.Exchange
    case: Case
    num_tokens: int

    def __post_init__(self):
        step = self.case.step(0, self.num_tokens)
        rows = self.exchange.layout.rows
        self.arrays = [array.copy() for array in step.inputs(self.exchange.world.rank)]
        self.partials = np.zeros((rows, CONFIG.hidden), self.arrays[0].dtype)
        x, ids, weights = self.arrays
        gains = self.case.norm_weight
        self.step = self.exchange.prepare(x, ids, weights, self.partials, gains, EPS)

    def complaint(self, number):
        """Fill the arrays anew and make the step."""
        world, stride = self.exchange.world, self.exchange.layout.stride
        step = self.case.step(number, self.num_tokens)
        for array, values in zip(self.arrays, step.inputs(world.rank), strict=True):
            array[:] = values
        want = step.expected_rows(world.rank)
        self.partials[:] = step.partials(world.rank, want.source)
        received = self.step.dispatch()
        live = Rows(**{name: np.array(getattr(received, name)) for name in FIELDS})
        where = Where(world.rank, number, "dispatch")
        complaint = check_rows(live, want, where, stride)
        got = self.step.combine()
        world.barrier()
        assert got is self.step.out
        return complaint or check_result(got, step.expected_result(world.rank), where)


def test_steps_take_turns_and_take_what_the_arrays_then_hold():
    def rank(world):
        with ep.Exchange(world, CONFIG) as exchange:
            made = [Prepared(exchange, Case(config=CONFIG), tokens) for tokens in (3, 0, 5)]
            for number in range(1, 10):
                complaint = made[number % 3].complaint(number)
                complaints = world.allgather(complaint and str(complaint))
                assert not any(complaints), complaints

    run_ranks(4, rank)


def test_they_answer_plain_calls_of_as_many_tokens_and_nothing_else():
    def rank(world):
        with ep.Exchange(world, CONFIG) as exchange:
            case = Case(config=CONFIG)
            three, two = (Prepared(exchange, case, tokens) for tokens in (3, 2))
            with pytest.raises(ep.StateError, match="combine without a dispatch"):
                three.step.combine()
            exchange.dispatch(*three.arrays)
            with pytest.raises(ep.StateError, match="dispatch follows a dispatch"):
                three.step.dispatch()
            with pytest.raises(ep.StateError, match="of 2 tokens answers a dispatch of 3"):
                two.step.combine()
            three.step.combine()
            world.barrier()
            two.step.dispatch()
            exchange.combine(two.partials, two.arrays[1])
            exchange.reset()
            assert three.complaint(7) is None
        with pytest.raises(ep.StateError, match="is closed"):
            three.step.dispatch()

    run_ranks(4, rank)


def test_arguments_are_checked_when_it_is_prepared():
    def rank(world):
        with ep.Exchange(world, CONFIG) as exchange:
            x, ids, weights = Case(config=CONFIG).step(0, 3).inputs(world.rank)
            partials = np.zeros((exchange.layout.rows, CONFIG.hidden), x.dtype)
            for wrong, name in (
                ((x[:, 1:], ids, weights, partials), "x"),
                ((x, ids[:2], weights, partials), "ids"),
                ((x, ids, weights, partials[1:]), "partials"),
                ((x, ids, weights, partials, x[0, 1:]), "norm_weight"),
                ((x, ids, weights, partials, None, EPS, x[:2]), "out"),
            ):
                with pytest.raises(ep.ArgumentError, match=f"^{name} is "):
                    exchange.prepare(*wrong)
            with pytest.raises(ep.ArgumentError, match="no streams"):
                exchange.prepare(x, ids, weights, partials, stream=1)

    run_ranks(4, rank)


def test_values_are_checked_at_each_call_where_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("EP_CHECK", "1")

    def rank(world):
        with ep.Exchange(world, CONFIG) as exchange:
            made = Prepared(exchange, Case(config=CONFIG), 3)
            assert made.complaint(1) is None
            made.arrays[1][0, 0] = CONFIG.experts
            with pytest.raises(ep.ArgumentError, match="ids"):
                made.step.dispatch()

    run_ranks(4, rank)


def test_a_failure_in_a_prepared_call_stops_the_exchange(monkeypatch):
    class Odd(Exception):
        pass

    def fail(*_):
        raise Odd

    def rank(world):
        with ep.Exchange(world, CONFIG) as exchange:
            case = Case(config=CONFIG)
            with monkeypatch.context() as patch:
                patch.setattr(exchange._engine, "dispatch", fail)
                broken = Prepared(exchange, case, 3)
            made = Prepared(exchange, case, 3)
            with pytest.raises(Odd):
                broken.step.dispatch()
            with pytest.raises(ep.StateError, match="stopped at: dispatch, ended by Odd"):
                made.step.dispatch()
            exchange.reset()
            assert made.complaint(2) is None

    run_ranks(4, rank)
