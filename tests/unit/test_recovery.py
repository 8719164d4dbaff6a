"""Exchanges that go on after a failure, with all ranks or without some."""

import threading

import ml_dtypes
import numpy as np
import pytest

import ep
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.bootstrap import Place
from ep.testing import run_ranks

BF16 = ml_dtypes.bfloat16


def shape_of_four(**fields):
    shape = {"ranks": 4, "hidden": 64, "experts": 9, "top_k": 2, "max_tokens": 5, "grace_s": 0}
    return ep.EpConfig(**(shape | fields))


def steps_match(world, exchange, first, dead=(), num_steps=4):
    """Steps of changing size match the oracle bit for bit on every rank."""
    for number in range(num_steps):
        case = Case(config=exchange.config, uneven=number % 2 == 1, norm=number % 3 == 0)
        step = case.step(first + number, (3, 0, 5, 1)[number % 4]).without(dead)
        complaint = run_checked_step(exchange, step)
        said = world.allgather(complaint and str(complaint))
        assert not any(said), said


def inputs(exchange, number=0):
    return Case(config=exchange.config).step(number, 2).inputs(exchange.world.rank)


def partials(exchange):
    return np.ones((exchange.layout.rows, exchange.config.hidden), BF16)


def take_part(exchange, given, phase="dispatch"):
    """Go on, from `phase`, until a wait that expires."""
    if phase == "dispatch":
        exchange.dispatch(*given)
    exchange.combine(partials(exchange), given.ids)
    exchange.dispatch(*given)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_all_ranks_go_on_after_a_late_one(phase):
    def play(world):
        with ep.Exchange(world, shape_of_four(timeout_s=0.3)) as exchange:
            for attempt in range(3):
                steps_match(world, exchange, 10 * attempt)
                late = attempt % 4
                given = inputs(exchange, 5 + attempt)
                if phase == "combine":
                    exchange.dispatch(*given)
                if world.rank != late:
                    with pytest.raises(ep.EpTimeout, match=f"for rank {late} ") as caught:
                        take_part(exchange, given, phase)
                    error = caught.value
                    assert error.step == 4 * (attempt + 1) + attempt + 1
                    assert error.seen == (error.step - (phase == "dispatch"),)
                    with pytest.raises(ep.EpTimeout):
                        exchange.check()
                    with pytest.raises(ep.StateError, match="reset it with all ranks"):
                        exchange.dispatch(*given)
                exchange.reset()
                exchange.poll()
            steps_match(world, exchange, 50)

    run_ranks(4, play)


def test_a_reset_in_the_middle_of_a_step_loses_the_step_alone():
    def play(world):
        with ep.Exchange(world, shape_of_four()) as exchange:
            exchange.dispatch(*inputs(exchange))
            exchange.reset()
            with pytest.raises(ep.StateError, match="combine without a dispatch"):
                exchange.combine(partials(exchange), inputs(exchange).ids)
            steps_match(world, exchange, 3)

    run_ranks(4, play)


def test_results_of_a_step_that_fails_are_nan():
    def play(world):
        exchange = ep.Exchange(world, shape_of_four(timeout_s=0.2))
        given = inputs(exchange)
        out = np.ones((2, exchange.config.hidden), BF16)
        exchange.dispatch(*given)
        if world.rank != 1:
            with pytest.raises(ep.EpTimeout):
                exchange.combine(partials(exchange), given.ids, out=out)
            assert np.isnan(out.astype(np.float32)).all()
        exchange.reset()
        exchange.close()

    run_ranks(4, play)


@pytest.mark.parametrize("dead", [(0,), (2,), (1, 3)])
def test_ranks_go_on_without_the_dead(dead):
    apart, done = threading.Event(), threading.Event()

    def play(world):
        exchange = ep.Exchange(world, shape_of_four(timeout_s=0.3))
        steps_match(world, exchange, 0)
        if world.rank in dead:
            # Not quite dead: it comes back while the others are at work, and sends what it has.
            apart.wait(20)
            for _ in range(2):
                with pytest.raises(ep.EpError):
                    take_part(exchange, inputs(exchange, 1))
            done.wait(20)
            world._closed = True
            return
        with pytest.raises(ep.EpTimeout):
            take_part(exchange, inputs(exchange, 1))
        exchange.exclude(dead)
        assert world.excluded == set(dead)
        apart.set()
        steps_match(world, exchange, 20, dead, num_steps=12)
        exchange.reset()
        steps_match(world, exchange, 40, dead)
        with pytest.raises(ep.StateError, match="excluded from this World"):
            ep.Exchange(world, shape_of_four())
        exchange.close()
        world.barrier()
        done.set()

    run_ranks(4, play)


def test_other_exchanges_follow_by_a_reset():
    done = threading.Event()

    def play(world):
        first = ep.Exchange(world, shape_of_four(timeout_s=0.3))
        second = ep.Exchange(world, shape_of_four(timeout_s=0.3))
        if world.rank == 3:
            done.wait(20)
            world._closed = True
            return
        first.exclude([3])
        with pytest.raises(ep.EpTimeout, match="for rank 3"):
            second.dispatch(*inputs(second))
        second.reset()
        for number in range(3):
            steps_match(world, (first, second)[number % 2], number, (3,))
        world.barrier()
        done.set()
        world._closed = True

    run_ranks(4, play)


def test_ranks_that_reset_different_exchanges_are_told():
    def play(world):
        exchanges = [ep.Exchange(world, shape_of_four()) for _ in range(2)]
        with pytest.raises(ep.CollectiveError, match="resetting exchange 1"):
            exchanges[world.rank == 2].reset()
        for exchange in exchanges:
            exchange.reset()
            steps_match(world, exchange, 0)
            exchange.close()

    run_ranks(4, play)


def test_ranks_that_exclude_different_ones_are_told():
    told = threading.Barrier(4)

    def play(world):
        with ep.Exchange(world, shape_of_four()) as exchange:
            if world.rank != 3:
                with pytest.raises(ep.CollectiveError, match=r"rank 0: \[3\]; ranks 1-2: \[\]"):
                    exchange.exclude([3] if world.rank == 0 else [])
            told.wait(20)
            exchange.reset()
            assert not world.excluded
            steps_match(world, exchange, 0)

    run_ranks(4, play)


def test_a_rank_that_does_not_come_to_a_reset_is_named_and_may_come_later():
    given_up = threading.Barrier(4)

    def play(world):
        exchange = ep.Exchange(world, shape_of_four())
        if world.rank != 1:
            world._timeout_s = 0.3
            with pytest.raises(ep.EpTimeout, match=r"meeting the ranks that remain .* for rank 1"):
                exchange.reset()
            exchange.poll()
        given_up.wait(20)
        world._timeout_s = 20
        exchange.reset()
        steps_match(world, exchange, 0)
        exchange.close()

    run_ranks(4, play)


def test_a_world_goes_on_after_a_collective_that_was_cut_short():
    given_up = threading.Barrier(4)

    def play(world):
        if world.rank != 2:
            world._timeout_s = 0.2
            with pytest.raises(ep.EpTimeout, match="for rank 2"):
                world.barrier()
            with pytest.raises(ep.StateError, match="stopped at"):
                world.barrier()
        given_up.wait(20)
        world._timeout_s = 20
        world.regroup()
        assert world.allgather(world.rank) == [0, 1, 2, 3]

    run_ranks(4, play)


@pytest.mark.parametrize("ranks", [[1], [4], [-1], ["1"], [1.5], [None], [[2]]])
def test_what_is_no_other_rank_is_not_excluded(ranks):
    def play(world):
        if world.rank == 1:
            with ep.Exchange(alone(), shape_of_four(ranks=1)) as exchange:
                if ranks == [1]:
                    exchange.world.rank, exchange.world.size = 1, 4
                with pytest.raises(ep.ArgumentError, match=r"allowed are ranks 0\.\."):
                    exchange.exclude(ranks)
                exchange.world.rank, exchange.world.size = 0, 1
                assert run_checked_step(exchange, Case(config=exchange.config).step(0, 1)) is None

    def alone():
        return ep.World.connect(backend="host")

    run_ranks(2, play)


def test_a_dead_rank_is_told_also_by_who_waits_for_another(monkeypatch):
    """So that every rank excludes the same."""
    monkeypatch.setattr(Place, "has_ended", lambda place: place.local_rank == 2)

    def play(world):
        error = world.explain(ep.EpTimeout("combine", 7, world.rank, (1,), (7,), 1.0))
        assert list(error.gone) == [2]
        assert "for rank 1 (their last seen step: 7); rank 2's process on node" in str(error)

    run_ranks(4, play)
