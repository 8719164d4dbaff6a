"""Memory and an all-gather that the engine brings: what is looked at before anything is written."""

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ep
from ep.arguments import misfit
from ep.bench.bridge import open_bridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.bootstrap import world as world_module
from ep.errors import DeviceError
from ep.layout import LINE_BYTES
from ep.memory import cuda
from ep.memory.given import GivenMemory, check_addresses
from ep.testing import run_ranks

CONFIG = ep.EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=5)
SIZE = ep.EpLayout(CONFIG).total_bytes
LINES = SIZE // LINE_BYTES
GOOD = [0x7F0000000000 + rank * SIZE for rank in range(4)]


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
        (0, GOOD, "own is 0x0; allowed is a device address"),
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
    played = SimpleNamespace(known=[(address, SIZE) for address in GOOD], kind=2, context=0)

    def call(name, *arguments):
        if name == "PointerGetAttribute":
            place = arguments[1]
            if any(first <= place < first + size for first, size in played.known):
                return played.kind
            raise DeviceError("cuPointerGetAttribute: invalid argument")
        if name == "CtxGetDevice":
            if played.context is None:
                raise DeviceError("cuCtxGetDevice: invalid device context")
            return played.context
        assert name in {"Init", "DeviceGetCount"}, name
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
        ({"known": [(address, SIZE) for address in GOOD[:3]]}, "buffer of rank 3"),
        ({"known": [*((a, SIZE) for a in GOOD[:3]), (GOOD[3], SIZE - 1)]}, "buffer of rank 3"),
        ({"kind": 1}, "buffer of rank 0"),
    ],
)
def test_memory_that_the_driver_does_not_know(driver, change, words):
    vars(driver).update(change)
    with pytest.raises(ep.HeapError, match=words):
        ep.EpBuffers.from_addresses(CONFIG, 1, GOOD[1], GOOD)


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
    assert "leave them out on the host" in str(misfit(world, layout, good))


def test_misfits_fail_on_every_rank(driver):
    good = ep.EpBuffers.from_addresses(CONFIG, 0, GOOD[0], GOOD)

    def rank(world):
        with pytest.raises(ep.CollectiveError, match=r"failed on 4 of 4.*leave them out"):
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


def test_a_reset_starts_it_too():
    case = Case(config=CONFIG)

    def rank(world):
        with ep.Exchange(world, CONFIG, start=False) as exchange:
            exchange.reset()
            said = run_checked_step(exchange, case.step(1, 3), open_bridge(exchange))
            assert not any(world.allgather(said and str(said)))

    run_ranks(4, rank)


class Gather:
    """An all-gather of bytes between threads, as an engine may have one."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots = [b""] * size

    def of(self, rank, spoil=lambda told: told):
        def allgather(payload):
            self.slots[rank] = payload
            self.barrier.wait()
            told = spoil(list(self.slots))
            self.barrier.wait()
            return told

        return allgather


def play(size, function):
    gather, errors = Gather(size), []

    def run(rank):
        try:
            function(rank, gather)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)
            gather.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error


def test_a_world_over_the_engines_allgather():
    case = Case(config=CONFIG, uneven=True)

    def rank(rank, gather):
        world = ep.World.embedded(rank, 4, gather.of(rank, tuple), backend="host")
        assert (world.rank, world.size, world.local_rank) == (rank, 4, rank)
        with world, ep.Exchange(world, CONFIG) as exchange:
            bridge = open_bridge(exchange)
            for number, tokens in enumerate((5, 1, 0, 3)):
                said = run_checked_step(exchange, case.step(number, tokens), bridge)
                assert not any(world.allgather(said and str(said)))
            exchange.reset()
            said = run_checked_step(exchange, case.step(9, 2), bridge)
            assert not any(world.allgather(said and str(said)))
            with pytest.raises(ep.StateError, match="cannot be excluded from the allgather"):
                exchange.exclude([3 if rank == 0 else 0])

    play(4, rank)


def test_a_rank_that_resets_beside_one_that_gathers():
    def rank(rank, gather):
        world = ep.World.embedded(rank, 4, gather.of(rank), backend="host")
        if rank == 2:
            with pytest.raises(ep.BootstrapError, match="some are at another call"):
                world.regroup()
        else:
            with pytest.raises(ep.CollectiveError, match="at different calls"):
                world.allgather("else")

    play(4, rank)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: told[:3],
        lambda told: None,
        lambda told: "text",
        lambda told: [*told[:3], "text"],
        lambda told: [b"{}"] * 4,
    ],
    ids=["few", "none", "text", "mixed", "others"],
)
def test_an_allgather_that_does_not_do_its_work(spoil):
    def rank(rank, gather):
        with pytest.raises(ep.BootstrapError, match="the engine's allgather gave"):
            ep.World.embedded(rank, 4, gather.of(rank, spoil), backend="host")

    play(4, rank)


def test_what_the_allgather_raises_comes_through():
    class Odd(Exception):
        pass

    def allgather(payload):
        raise Odd

    with pytest.raises(Odd):
        ep.World.embedded(0, 4, allgather, backend="host")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 4}, r"rank is 4; allowed is 0\.\.3"),
        ({"rank": 1.0}, "rank is 1.0"),
        ({"size": 0}, "size is 0"),
        ({"size": 73}, r"allowed is 1\.\.72"),
        ({"allgather": 5}, "allgather is a int"),
        ({"backend": "cpu"}, "backend='cpu'"),
    ],
)
def test_wrong_arguments_of_an_embedded_world(fields, words):
    good = {"rank": 0, "size": 4, "allgather": lambda payload: [payload] * 4, "backend": "host"}
    with pytest.raises(ep.ArgumentError, match=words):
        ep.World.embedded(**(good | fields))


def test_an_engine_with_its_own_memory_needs_no_nvshmem(monkeypatch):
    asked = []

    def obstacle(**options):
        asked.append(options)
        return "no GPU"

    monkeypatch.setattr(world_module, "gpu_obstacle", obstacle)
    ep.World.embedded(0, 1, lambda payload: [payload])
    assert asked == [{"embedded": True}]
    from ep.bootstrap import device

    monkeypatch.setattr(device, "_is_installed", lambda name: name != "nvshmem")
    monkeypatch.setattr(device, "device_count", lambda: 1)
    assert device.gpu_obstacle(embedded=True) is None
    assert "nvshmem not installed" in str(device.gpu_obstacle())


def test_an_error_inside_an_embedded_world_goes_to_the_engine():
    class Odd(Exception):
        pass

    def rank(rank, gather):
        with pytest.raises(Odd), ep.World.embedded(rank, 4, gather.of(rank), backend="host"):
            raise Odd

    play(4, rank)
