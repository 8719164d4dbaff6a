from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from ep import reference
from ep.routing import (
    Routing,
    _generator,
    _Stream,
    partials_for,
    route,
    token_counts,
    tokens,
)

Array = npt.NDArray[Any]
K3 = {"top_k": 16, "ranks": 16, "experts": 896}
EVERY = pytest.mark.parametrize("routing", list(Routing))


def ids_of(routing: Routing, step: int = 0, rank: int = 0, **sizes: int) -> Array:
    sizes = {"num_tokens": 64, **K3, **sizes}
    return route(
        routing,
        step,
        rank,
        num_tokens=sizes["num_tokens"],
        top_k=sizes["top_k"],
        ranks=sizes["ranks"],
        experts=sizes["experts"],
        seed=sizes.get("seed", 0),
    )[0]


def most_repeated(ids: Array) -> int:
    """Greatest number of times that a token names one expert."""
    return max(int(np.unique(row, return_counts=True)[1].max()) for row in ids)


def test_names_of_the_command_line() -> None:
    assert [str(routing) for routing in Routing] == [
        "uniform",
        "zipf",
        "one-rank",
        "one-expert",
        "masked",
    ]
    named, _ = route("one-rank", 0, 0, num_tokens=64, **K3)
    np.testing.assert_array_equal(named, ids_of(Routing.ONE_RANK))
    with pytest.raises(ValueError, match="one_rank"):
        route("one_rank", 0, 0, num_tokens=64, **K3)


def test_no_two_purposes_share_random_numbers() -> None:
    drawn = {int(_generator(stream, 3, 1, 2).integers(1 << 62)) for stream in _Stream}
    assert len(drawn) == len(_Stream)


@EVERY
def test_shapes_types_and_ranges(routing: Routing) -> None:
    for num_tokens in (0, 1, 5):
        ids, weights = route(routing, 2, 1, num_tokens=num_tokens, top_k=3, ranks=4, experts=10)
        assert ids.shape == weights.shape == (num_tokens, 3)
        assert ids.dtype == np.int32
        assert weights.dtype == np.float32
        assert ((ids >= -1) & (ids < 10)).all()
        assert ((weights > 0) & (weights < 1)).all()
    assert (ids_of(routing) == -1).any() == (routing is Routing.MASKED)


@EVERY
def test_arguments_alone_decide(routing: Routing) -> None:
    np.testing.assert_array_equal(ids_of(routing, 3, 2), ids_of(routing, 3, 2))
    assert (ids_of(routing, 3, 2) != ids_of(routing, 4, 2)).any()
    assert (ids_of(routing, 3, 2) != ids_of(routing, 3, 2, seed=1)).any()
    if routing is not Routing.ONE_EXPERT:
        assert (ids_of(routing, 3, 2) != ids_of(routing, 3, 1)).any()


@pytest.mark.parametrize("routing", [kind for kind in Routing if kind is not Routing.MASKED])
def test_later_tokens_change_no_earlier_one(routing: Routing) -> None:
    few, many = ids_of(routing, num_tokens=7), ids_of(routing, num_tokens=2100)
    np.testing.assert_array_equal(few, many[:7])


def test_weights_differ_between_tokens_and_ranks() -> None:
    weights = [
        route(Routing.UNIFORM, step, rank, num_tokens=8, **K3)[1]
        for step, rank in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(np.unique(np.stack(weights))) == 3 * 8 * 16
    prefix = route(Routing.UNIFORM, 0, 0, num_tokens=3, **K3)[1]
    np.testing.assert_array_equal(prefix, weights[0][:3])


def test_uniform_is_distinct_and_even() -> None:
    ids = ids_of(Routing.UNIFORM, num_tokens=4096, experts=32, top_k=8)
    assert most_repeated(ids) == 1
    # 1024 a column and expert / 32; seven standard deviations are 78.
    counts = np.bincount(ids.ravel(), minlength=32)
    assert abs(counts - 1024).max() < 200
    assert abs(np.bincount(ids[:, 0], minlength=32) - 128).max() < 80


def test_zipf_is_distinct_and_follows_its_law() -> None:
    ids = ids_of(Routing.ZIPF, num_tokens=20000, experts=64, top_k=4)
    assert most_repeated(ids) == 1
    counts = np.bincount(ids[:, 0], minlength=64)
    harmonic = (1 / np.arange(1, 65)).sum()
    popular = np.sort(counts)[::-1][:4] / 20000
    np.testing.assert_allclose(popular, 1 / (np.arange(1, 5) * harmonic), rtol=0.1)
    other = ids_of(Routing.ZIPF, 5, 3, num_tokens=20000, experts=64, top_k=4)
    assert np.bincount(other[:, 0]).argmax() == counts.argmax()


def test_experts_repeat_in_turn_where_there_are_too_few() -> None:
    for routing in (Routing.UNIFORM, Routing.ZIPF):
        ids = ids_of(routing, experts=3, ranks=2, top_k=8)
        np.testing.assert_array_equal(ids, ids[:, [0, 1, 2, 0, 1, 2, 0, 1]])
        assert {tuple(sorted(row)) for row in ids[:, :3].tolist()} == {(0, 1, 2)}


@pytest.mark.parametrize(("ranks", "experts"), [(16, 896), (5, 23), (3, 8), (8, 5), (1, 4)])
def test_one_rank(ranks: int, experts: int) -> None:
    ids = ids_of(Routing.ONE_RANK, num_tokens=300, ranks=ranks, experts=experts, top_k=4)
    owner = reference.owner_of(ids, ranks, experts)
    assert (owner == owner[:, :1]).all()
    assert set(owner.ravel().tolist()) == set(range(min(ranks, experts)))
    for row, rank in zip(ids, owner[:, 0], strict=True):
        assert len(set(row.tolist())) == min(4, len(reference.local_experts(rank, ranks, experts)))
    assert experts > 99 or set(ids.ravel().tolist()) == set(range(experts))


def test_one_expert_is_the_same_everywhere_and_moves() -> None:
    named = {}
    for step in range(20):
        each = {
            expert
            for rank in range(4)
            for expert in np.unique(ids_of(Routing.ONE_EXPERT, step, rank)).tolist()
        }
        assert len(each) == 1
        named[step] = each.pop()
    assert len(set(named.values())) > 15


def test_masked() -> None:
    ids = ids_of(Routing.MASKED, num_tokens=4000)
    nobody = (ids == -1).all(axis=1)
    assert abs(nobody.mean() - 0.125) < 0.03
    assert abs((ids[~nobody] == -1).mean() - 0.3) < 0.03
    np.testing.assert_array_equal(
        ids[ids != -1], ids_of(Routing.UNIFORM, num_tokens=4000)[ids != -1]
    )
    for step in range(50):
        assert (ids_of(Routing.MASKED, step, num_tokens=2) == -1).all(axis=1).any()
    assert (ids_of(Routing.MASKED, 4, num_tokens=1) != -1).any()
    full, _ = route(Routing.MASKED, 0, 0, num_tokens=9, masked_ratio=1.0, **K3)
    assert (full == -1).all()


def test_tokens_show_where_they_belong() -> None:
    seen = set()
    for seed, step, rank in itertools.product(range(2), range(3), range(4)):
        rows = tokens(step, rank, 8, 64, seed)
        assert rows.shape == (8, 64)
        assert rows.dtype == ml_dtypes.bfloat16
        assert np.isfinite(rows.astype(np.float32)).all()
        seen |= {row.tobytes() for row in rows}
        np.testing.assert_array_equal(tokens(step, rank, 3, 64, seed), rows[:3])
    assert len(seen) == 2 * 3 * 4 * 8
    assert tokens(0, 0, 0, 64).shape == (0, 64)


def test_tokens_exercise_the_quantizer() -> None:
    elements, scales = reference.mxfp8_quantize(tokens(0, 0, 32, 3584))
    assert len(np.unique(scales.view(np.uint8))) > 30
    codes = np.unique(elements.view(np.uint8))
    assert len(codes) == 254


def test_partials_depend_on_source_rank_and_step_alone() -> None:
    source = np.array([3, 65536 + 3, -1, 3 * 65536, 4], np.int32)
    rows = partials_for(source, 2, 64, step=1)
    assert rows.dtype == ml_dtypes.bfloat16
    back = partials_for(source[::-1].copy(), 2, 64, step=1)
    assert rows.tobytes() == back[::-1].tobytes()
    assert np.isnan(rows[2].astype(np.float32)).all()
    live = rows[[0, 1, 3, 4]].astype(np.float32)
    assert np.isfinite(live).all()
    others = [
        partials_for(source, rank, 64, step=s, seed=d)
        for rank, s, d in ((0, 1, 0), (2, 0, 0), (2, 1, 1))
    ]
    distinct = {row.tobytes() for part in (rows, *others) for row in part[[0, 1, 3, 4]]}
    assert len(distinct) == 16
    assert partials_for(source[:0], 2, 64).shape == (0, 64)


def test_partials_show_the_order_of_a_sum() -> None:
    source = np.arange(16, dtype=np.int32)
    parts = [partials_for(source, rank, 256) for rank in range(4)]
    ids = np.tile(np.arange(4, dtype=np.int32), (16, 1))
    none = np.zeros((0, 4), np.int32)
    rows = [np.concatenate([part, np.zeros((48, 256), part.dtype)]) for part in parts]
    ahead, back, swapped, late = (
        reference.combine(
            [rows[rank] for rank in order],
            [ids, none, none, none],
            ranks=4,
            experts=4,
            stride=16,
        )[0].view(np.uint16)
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1, 3, 2))
    )
    assert (ahead != back).any(axis=1).all()
    assert (ahead != late).any(axis=1).all()
    assert (ahead == swapped).all()


def test_token_counts() -> None:
    assert token_counts(3, 4, 7, uneven=False) == [7] * 4
    drawn = [token_counts(step, 16, 128, uneven=True) for step in range(50)]
    for counts in drawn:
        assert len(counts) == 16
        assert min(counts) == 0
        assert max(counts) == 128
        assert all(type(count) is int for count in counts)
    assert len({tuple(counts) for counts in drawn}) == 50
    assert 3 < np.mean([counts.count(0) for counts in drawn]) < 7
    assert token_counts(1, 16, 128, uneven=True) == drawn[1]
    assert token_counts(1, 16, 128, uneven=True, seed=1) != drawn[1]
    assert all(0 <= token_counts(step, 1, 3, uneven=True)[0] <= 3 for step in range(9))
