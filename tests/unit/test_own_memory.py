"""Memory that the engine brings: what is looked at before anything is written, and when it is."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ep
from ep.arguments import misfit
from ep.bench.bridge import open_bridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.errors import DeviceError
from ep.layout import LINE_BYTES
from ep.memory import cuda
from ep.memory.given import GivenMemory, check_addresses
from ep.testing import run_ranks

CONFIG = ep.EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=5)
SIZE = ep.EpLayout(CONFIG).total_bytes
LINES = SIZE // LINE_BYTES
GOOD = [0x7F0000000000 + rank * SIZE for rank in range(4)]
HALVES = [(GOOD[3], SIZE - 128), (GOOD[3] + SIZE - 128, SIZE)]


@given(st.permutations(range(6)), st.integers(0, 5), st.sampled_from([0, None, "own", 3]))
def test_addresses_in_any_order_and_any_own_entry(order, rank, entry):
    own = 0x1000 + order[rank] * SIZE
    peers = [0x1000 + place * SIZE for place in order]
    want = list(peers)
    peers[rank] = entry
    assert check_addresses(rank, own, peers, 6, SIZE) == want


@given(st.integers(0, 3), st.integers(0, 3), st.integers(-LINES + 1, LINES - 1))
def test_buffers_that_overlap(rank, other, distance):
    peers = list(GOOD)
    peers[other] = GOOD[(other + 1) % 4] + distance * LINE_BYTES
    with pytest.raises(ep.ArgumentError, match="overlap"):
        check_addresses(rank, peers[rank], peers, 4, SIZE)


@pytest.mark.parametrize(
    ("own", "peers", "words"),
    [
        (GOOD[0], GOOD[:3], "peers are 3 addresses; allowed are 4"),
        (GOOD[0], 7, "peers are 0 addresses"),
        (0, GOOD, "own is 0x0; allowed is an address"),
        (GOOD[0] + 16, GOOD, "multiple of 128"),
        (-128, GOOD, "own is -0x80"),
        (1 << 63, GOOD, "own is 0x8"),
        ("here", GOOD, "own is 'here'"),
        (GOOD[0], [*GOOD[:3], None], r"peers\[3\] is None"),
        (GOOD[0], [*GOOD[:3], GOOD[3] + 1], r"peers\[3\] is 0x7f"),
        (GOOD[0], [*GOOD[:3], 0], r"peers\[3\] is 0x0"),
    ],
)
def test_addresses_that_are_none(own, peers, words):
    with pytest.raises(ep.ArgumentError, match=words):
        check_addresses(0, own, peers, 4, SIZE)


@pytest.fixture
def driver(monkeypatch):
    """A driver that knows some ranges of addresses as device memory, and counts no context."""
    played = SimpleNamespace(
        known=[(address, SIZE) for address in GOOD],
        context=0,
        is_mapped=False,
        told={"MEMORY_TYPE": 2, "IS_MANAGED": 0, "ACCESS_FLAGS": 3},
    )

    def attribute(name, place):
        for first, size in played.known:
            if first <= place < first + size:
                told = {"RANGE_START_ADDR": first, "RANGE_SIZE": size} | played.told
                if name in told:
                    return told[name]
        raise DeviceError("cuPointerGetAttribute: invalid argument")

    def call(name, *arguments):
        if name == "PointerGetAttribute":
            which, place = arguments
            return attribute(which.name.removeprefix("CU_POINTER_ATTRIBUTE_"), place)
        if name == "MemRetainAllocationHandle" and not played.is_mapped:
            raise DeviceError("cuMemRetainAllocationHandle: invalid argument")
        if name == "CtxGetDevice":
            if played.context is None:
                raise DeviceError("cuCtxGetDevice: invalid device context")
            return played.context
        assert name in {"Init", "MemRetainAllocationHandle", "MemRelease"}, name
        return 1

    monkeypatch.setattr(cuda, "driver", call)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    made = SimpleNamespace(ordinal=0, use=lambda: None)
    monkeypatch.setattr(cuda.Device, "open", lambda ordinal: made)
    pytest.importorskip("cuda.bindings.driver")
    return played


def test_views_are_where_the_layout_says(driver):
    buffers = ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], [GOOD[0], 0, *GOOD[2:]])
    assert buffers.addresses == (*GOOD, GOOD[1])
    layout = ep.EpLayout(CONFIG)
    for rank in range(4):
        for name, field in layout.fields.items():
            view = buffers.at(rank, name)
            assert view.address == GOOD[rank] + field.offset_bytes
            assert tuple(view.shape) == field.shape
    buffers.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"known": [(address, SIZE) for address in GOOD[:3]]}, "rank 3, .* does not know 0x"),
        ({"known": [*((a, SIZE) for a in GOOD[:3]), (GOOD[3], SIZE - 1)]}, "rank 3, .* does not"),
        # One allocation beside the other, as cuMemAlloc gives them.
        ({"known": [*((a, SIZE) for a in GOOD[:3]), *HALVES]}, "rank 3, .* there ends before 0x"),
        ({"told": {"MEMORY_TYPE": 1}}, "rank 0, .* does not know 0x"),
        ({"told": {"MEMORY_TYPE": 2, "ACCESS_FLAGS": 0}}, "rank 0, .* may not both load and store"),
        ({"told": {"MEMORY_TYPE": 2, "ACCESS_FLAGS": 1}}, "rank 0, .* may not both load and store"),
        ({"told": {"MEMORY_TYPE": 2, "IS_MANAGED": 1}}, "rank 0, .* managed memory, which moves"),
    ],
)
def test_memory_that_the_driver_says_no_to(driver, change, words):
    vars(driver).update(change)
    with pytest.raises(ep.HeapError, match=f"the buffer of {words}"):
        ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], GOOD)


@pytest.mark.parametrize(
    "change",
    [
        # What a driver does not tell, and mappings of several handles side by side.
        {"told": {"MEMORY_TYPE": 2}},
        {"known": [*((a, SIZE) for a in GOOD[:3]), *HALVES], "is_mapped": True},
    ],
)
def test_memory_that_the_driver_cannot_judge(driver, change):
    vars(driver).update(change)
    ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], GOOD).close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 4}, r"rank is 4; allowed is 0\.\.3"),
        ({"rank": True}, "rank is True"),
        ({"device": 1}, r"device is 1; allowed is 0\.\.0"),
        ({"device": "cuda:0"}, "device is 'cuda:0'"),
    ],
)
def test_ranks_and_devices_that_are_none(driver, change, words):
    fields = {"rank": 0, "own": GOOD[0], "peers": GOOD} | change
    with pytest.raises(ep.ArgumentError, match=words):
        ep.EpBuffers.from_addresses(CONFIG, **fields)


def test_without_a_context(driver):
    driver.context = None
    with pytest.raises(ep.ArgumentError, match="no CUDA context is current"):
        ep.EpBuffers.from_addresses(CONFIG, 0, GOOD[0], GOOD)


def test_closing_frees_nothing(driver):
    memory = GivenMemory.at(cuda.Device.open(0), 0, GOOD[0], GOOD, 4, SIZE)
    # The played driver has no call that frees.
    memory.close()


def test_buffers_that_do_not_fit(driver):
    layout = ep.EpLayout(CONFIG)
    world: Any = SimpleNamespace(rank=1, device=SimpleNamespace(ordinal=0))
    good = ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], GOOD)
    slow = ep.EpLayout(dataclasses.replace(CONFIG, timeout_s=1))
    wide = ep.EpLayout(dataclasses.replace(CONFIG, max_tokens=50))
    assert misfit(world, layout, good) is None
    assert misfit(world, slow, None) is misfit(world, slow, good) is None
    assert "buffers is a dict" in str(misfit(world, layout, {}))  # type: ignore[arg-type]
    assert "buffers are rank 1's, with fields of" in str(misfit(world, wide, good))
    world.device.ordinal = 1
    assert "mapped on GPU 0, but this rank uses GPU 1" in str(misfit(world, layout, good))
    world.rank, world.device.ordinal = 2, 0
    assert "but this is rank 2" in str(misfit(world, layout, good))
    world.device = None
    assert "mapped on GPU 0, but this rank uses the host" in str(misfit(world, layout, good))


def test_buffers_serve_one_exchange_at_a_time(driver):
    layout = ep.EpLayout(CONFIG)
    world: Any = SimpleNamespace(rank=1, device=SimpleNamespace(ordinal=0))
    buffers = ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], GOOD)
    other = ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], GOOD)
    buffers.is_taken = True
    assert "of an Exchange that was not closed" in str(misfit(world, layout, buffers))
    assert misfit(world, layout, other) is None
    buffers.close()
    assert misfit(world, layout, buffers) is None


def test_misfits_fail_on_every_rank(driver):
    good = ep.EpBuffers.from_addresses(CONFIG, 0, GOOD[0], GOOD)

    def rank(world):
        with pytest.raises(ep.CollectiveError, match=r"failed on 4 of 4.*uses the host"):
            ep.Exchange(world, CONFIG, buffers=good)
        with pytest.raises(ep.CollectiveError, match="buffers given"):
            ep.Exchange(world, CONFIG, buffers=good if world.rank == 2 else None)

    run_ranks(4, rank)


def test_steps_wait_for_start():
    case = Case(config=CONFIG, uneven=True)

    def rank(world):
        exchange = ep.Exchange(world, CONFIG, start=False)
        bridge = open_bridge(exchange)
        x, ids, weights = case.step(0, 3).inputs(world.rank)
        with pytest.raises(ep.StateError, match="has not started; call start"):
            exchange.dispatch(x, ids, weights)
        if world.rank % 2:
            exchange.arm()
            exchange.arm()
        exchange.start()
        for call in (exchange.arm, exchange.start):
            with pytest.raises(ep.StateError, match="has started; reset"):
                call()
        for number, tokens in enumerate((5, 0, 2)):
            said = run_checked_step(exchange, case.step(number, tokens), bridge)
            assert not any(world.allgather(said and str(said)))
        exchange.close()
        for call in (exchange.arm, exchange.start):
            with pytest.raises(ep.StateError, match="is closed"):
                call()

    run_ranks(4, rank)


def test_ranks_that_disagree_on_starting():
    def rank(world):
        with pytest.raises(ep.CollectiveError, match="start"):
            ep.Exchange(world, CONFIG, start=world.rank == 1)

    run_ranks(4, rank)


def test_an_arming_that_failed_is_made_again():
    def rank(world):
        exchange = ep.Exchange(world, CONFIG, start=False)
        engine: Any = exchange._engine
        done, rearm = [], engine.rearm

        def fails_once(*arguments):
            done.append(arguments)
            if len(done) == 2:
                raise KeyboardInterrupt
            rearm(*arguments)

        engine.rearm = fails_once
        exchange.arm()
        with pytest.raises(KeyboardInterrupt):
            exchange.arm()
        exchange.start()
        assert len(done) == 3
        exchange.close()

    run_ranks(4, rank)


@pytest.mark.parametrize("start", [np.True_, np.False_, 0, 1, None])
def test_any_truth_starts(start):
    def rank(world):
        with ep.Exchange(world, CONFIG, start=start if world.rank else bool(start)) as exchange:
            if not start:
                exchange.start()

    run_ranks(4, rank)


def test_a_reset_starts_it_too():
    case = Case(config=CONFIG)

    def rank(world):
        with ep.Exchange(world, CONFIG, start=False) as exchange:
            exchange.reset()
            said = run_checked_step(exchange, case.step(1, 3), open_bridge(exchange))
            assert not any(world.allgather(said and str(said)))

    run_ranks(4, rank)
