"""Every check at the host edge, each with its exception; after it the exchange still works."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import ep
from ep.testing import run_ranks

BF16 = ml_dtypes.bfloat16
CONFIG = ep.EpConfig(ranks=1, hidden=64, experts=4, top_k=2, max_tokens=3)


def inputs(tokens=2):
    x = np.ones((tokens, 64), BF16)
    ids = np.tile(np.array([0, 3], np.int32), (tokens, 1))
    return {"x": x, "ids": ids, "weights": np.ones((tokens, 2), np.float32)}


@pytest.fixture
def exchange():
    with ep.World.connect(backend="host") as world, ep.Exchange(world, CONFIG) as exchange:
        yield exchange


def partials():
    return np.ones((ep.EpLayout(CONFIG).rows, 64), BF16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [[1.0]]}, "x is a list; the host backend takes a C-contiguous NumPy array"),
        ({"x": np.ones((2, 64), np.float32)}, r"x is float32 \[2, 64\]; allowed is .*bfloat16"),
        ({"x": np.ones((2, 32), BF16)}, r"x is bfloat16 \[2, 32\]; .* shape \[any, 64\]"),
        ({"x": np.ones(64, BF16)}, r"x is bfloat16 \[64\]; .* shape \[any, 64\]"),
        ({"x": np.ones((2, 128), BF16)[:, ::2]}, "not C-contiguous and aligned"),
        ({"x": np.ones((4, 64), BF16)}, r"x has 4 tokens; allowed are 0..3 \(max_tokens\)"),
        ({"ids": np.zeros((2, 2), np.int64)}, r"ids is int64 \[2, 2\]; allowed is .*int32"),
        ({"ids": np.zeros((1, 2), np.int32)}, r"ids is int32 \[1, 2\]; .* shape \[2, 2\]"),
        ({"ids": np.zeros((2, 3), np.int32)}, r"ids is int32 \[2, 3\]; .* shape \[2, 2\]"),
        ({"ids": np.array([[0, 1], [4, 0]], np.int32)}, r"ids\[1, 0\] is 4; .* 0..3, or -1"),
        ({"ids": np.array([[0, -2], [0, 0]], np.int32)}, r"ids\[0, 1\] is -2; .* \(1 of 4 wrong\)"),
        ({"weights": np.ones((2, 2), BF16)}, r"weights is bfloat16 \[2, 2\]; allowed is .*float32"),
        ({"weights": np.ones((3, 2), np.float32)}, r"weights is float32 \[3, 2\]"),
        ({"ids": np.zeros((2, 2), ">i4")}, r"ids is int32 in foreign byte order \[2, 2\]; allowed"),
        (
            {"x": np.ones((2, 64), BF16).view(np.dtype(BF16).newbyteorder(">"))},
            "x is bfloat16 in foreign byte order",
        ),
        ({"x": np.ones((2, 64), BF16).view(np.matrix)}, "x is a matrix; .* numpy.asarray of it"),
        ({"weights": np.ma.array(np.ones((2, 2), np.float32))}, "weights is a MaskedArray"),
        ({"stream": 7}, "stream is 7; the host backend has no streams: pass None"),
    ],
)
def test_dispatch_refuses(exchange, monkeypatch, change, message):
    monkeypatch.setenv("EP_CHECK", "1")
    with pytest.raises(ep.ArgumentError, match=message):
        exchange.dispatch(**(inputs() | change))
    exchange.dispatch(**inputs())
    exchange.combine(partials(), inputs()["ids"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partials": np.ones((3, 64), BF16)}, r"partials is bfloat16 \[3, 64\]; .* \[\d+, 64\]"),
        ({"partials": partials().astype(np.float32)}, "partials is float32"),
        ({"ids": np.zeros((1, 2), np.int32)}, r"ids is int32 \[1, 2\]; .* shape \[2, 2\]"),
        ({"ids": np.zeros((2, 2), np.int32)}, "ids are not those of this step's dispatch"),
        ({"norm_weight": np.ones(32, BF16)}, r"norm_weight is bfloat16 \[32\]; .* shape \[64\]"),
        ({"norm_weight": np.ones(64)}, r"norm_weight is float64 \[64\]"),
        ({"eps": -1e-5}, "eps is -1e-05; allowed is a finite number of FP32, 0 or more"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": "1"}, "eps is '1'"),
        ({"eps": 10**400}, "eps is a number beyond FP64; allowed"),
        ({"eps": 10**5000}, "eps is a number beyond FP64; allowed"),
        ({"eps": Fraction(10**400)}, "eps is a number beyond FP64; allowed"),
        ({"eps": 1e39}, r"eps is 1e\+39; allowed"),
        (
            {"out": np.empty((2, 64), BF16).view(np.matrix)},
            "out is a matrix; .* numpy.asarray of it",
        ),
        ({"partials": np.ma.array(partials())}, "partials is a MaskedArray; .* numpy.asarray"),
        ({"out": np.empty((3, 64), BF16)}, r"out is bfloat16 \[3, 64\]; .* shape \[2, 64\]"),
        ({"out": np.empty((2, 64), np.float32)}, "out is float32"),
        ({"out": np.broadcast_to(np.ones(64, BF16), (2, 64))}, "not C-contiguous"),
        ({"stream": 0}, "stream is 0"),
    ],
)
def test_combine_refuses(exchange, monkeypatch, change, message):
    monkeypatch.setenv("EP_CHECK", "1")
    exchange.dispatch(**inputs())
    with pytest.raises(ep.ArgumentError, match=message):
        exchange.combine(**({"partials": partials(), "ids": inputs()["ids"]} | change))
    result = exchange.combine(partials(), inputs()["ids"])
    assert (result == 1).all()


def test_combine_refuses_a_read_only_out(exchange):
    exchange.dispatch(**inputs())
    out = np.empty((2, 64), BF16)
    out.flags.writeable = False
    with pytest.raises(ep.ArgumentError, match="out is read-only"):
        exchange.combine(partials(), inputs()["ids"], out=out)


def test_combine_writes_into_out(exchange):
    exchange.dispatch(**inputs())
    out = np.zeros((2, 64), BF16)
    assert exchange.combine(partials(), inputs()["ids"], out=out) is out
    assert (out == 1).all()


def test_the_rows_are_known_before_the_first_step(exchange):
    before = exchange.received
    assert (before.source == -1).all()
    assert exchange.dispatch(**inputs()) is before is exchange.received
    assert (before.source >= 0).sum() == 2
    exchange.combine(partials(), inputs()["ids"])
    exchange.close()
    with pytest.raises(ep.StateError, match="this Exchange is closed"):
        _ = exchange.received


def test_order_of_calls(exchange):
    with pytest.raises(ep.StateError, match="combine without a dispatch"):
        exchange.combine(partials(), inputs()["ids"])
    exchange.dispatch(**inputs())
    with pytest.raises(ep.StateError, match="dispatch follows a dispatch"):
        exchange.dispatch(**inputs())
    exchange.combine(partials(), inputs()["ids"])
    exchange.close()
    exchange.close()
    with pytest.raises(ep.StateError, match="this Exchange is closed"):
        exchange.dispatch(**inputs())


def test_ids_that_are_reused_before_combine_do_not_matter_unchecked(exchange):
    given = inputs()
    exchange.dispatch(**given)
    assert (exchange.combine(partials(), given["ids"].copy()) == 1).all()


def test_out_of_range_ids_select_nobody_and_travel(exchange, monkeypatch):
    monkeypatch.delenv("EP_CHECK", raising=False)
    ids = np.array([[2**31 - 1, -(2**31)], [4, 0], [-1, -1]], np.int32)
    given = inputs(3) | {"ids": ids}
    received = exchange.dispatch(**given)
    assert received.source[:3].tolist() == [-1, 1, -1]
    assert received.ids[1].tolist() == [4, 0]
    result = exchange.combine(partials(), ids)
    assert (result[1] == 1).all()
    assert not result[[0, 2]].view(np.uint16).any()


def test_receive_rows_are_read_only(exchange):
    received = exchange.dispatch(**inputs())
    for name in ("x", "scales", "ids", "weights", "source"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(received, name)[0] = 0
    exchange.combine(partials(), inputs()["ids"])


def test_a_view_outlives_the_exchange():
    with ep.World.connect(backend="host") as world:
        exchange = ep.Exchange(world, CONFIG)
        received = exchange.dispatch(**inputs())
        exchange.close()
        assert received.source[:2].tolist() == [0, 1]


def test_world_and_backend_are_checked():
    with pytest.raises(ep.ArgumentError, match="backend='tpu': allowed are auto, host, gpu"):
        ep.World.connect(backend="tpu")
    with ep.World.connect(backend="host") as world:
        config = ep.EpConfig(ranks=2, hidden=64, experts=4, top_k=2, max_tokens=3)
        with pytest.raises(ep.CollectiveError, match="ranks is 2, but the world has 1 rank"):
            ep.Exchange(world, config)
    with pytest.raises(ep.StateError, match="this World is closed"):
        world.barrier()


def test_one_exchange_is_not_shared_by_threads():
    exchanges = {}

    def play(world):
        config = ep.EpConfig(ranks=2, hidden=64, experts=4, top_k=2, max_tokens=3, timeout_s=20)
        exchange = exchanges[world.rank] = ep.Exchange(world, config)
        world.barrier()
        if world.rank == 1:
            # Rank 0 is in its dispatch, waiting for this rank.
            while not exchanges[0]._calls:
                pass
            with pytest.raises(ep.StateError, match="in use by another thread"):
                exchanges[0].dispatch(**inputs())
        exchange.dispatch(**inputs())
        exchange.combine(np.ones((exchange.layout.rows, 64), BF16), inputs()["ids"])
        exchange.close()

    run_ranks(2, play)
