"""A World over an all-gather that the engine has, and what the engine's functions may do wrong."""

import threading
from typing import Any

import numpy as np
import pytest

import ep
from ep.bench.bridge import open_bridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.bootstrap import world as world_module

CONFIG = ep.EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=5)


class Gather:
    """An all-gather of bytes between threads, as an engine may have one."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots = [b""] * size
        self.lock, self.later = threading.Lock(), {}

    def without(self, ranks):
        """Give the one that the other ranks have after they have met without `ranks`."""
        with self.lock:
            return self.later.setdefault(tuple(ranks), Gather(len(self.slots) - len(ranks)))

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


def test_the_engine_helps_to_exclude():
    case = Case(config=CONFIG, uneven=True)
    asked = []

    def rank(rank, gather):
        def regroup(ranks):
            asked.append(ranks)
            staying = [one for one in range(4) if one not in ranks]
            return gather.without(ranks).of(staying.index(rank))

        world = ep.World.embedded(rank, 4, gather.of(rank), backend="host", regroup=regroup)
        exchange = ep.Exchange(world, CONFIG)
        exchange.reset()
        for dead in (1, 2):
            if rank == dead:
                return
            exchange.exclude([dead])
            told = world.allgather(rank)
            assert told == [None if one in world.excluded else one for one in range(4)]
            for number, tokens in enumerate((5, 0, 2)):
                step = case.step(number, tokens).without(world.excluded)
                said = run_checked_step(exchange, step)
                assert not any(world.allgather(said and str(said)))
        exchange.close()
        world.close()

    play(4, rank)
    assert sorted(asked) == [[]] * 4 + [[1]] * 3 + [[1, 2]] * 2


def test_ranks_that_exclude_different_ones():
    def rank(rank, gather):
        def regroup(ranks):
            assert ranks == ([3] if rank else [2])
            return gather.without([3]).of(rank)

        world = ep.World.embedded(rank, 4, gather.of(rank), backend="host", regroup=regroup)
        if rank == 3:
            return
        # Rank 0 takes the all-gather for one without rank 2: three ranks in all, as the others do.
        with pytest.raises((ep.CollectiveError, ep.BootstrapError)) as caught:
            world.regroup([3] if rank else [2])
        words = r"rank 0: \[2\].* \[3\]; agree on them first" if rank else "as rank 3's during"
        assert caught.match(words)
        assert not world.excluded

    play(4, rank)


def test_a_regroup_that_does_not_do_its_work():
    wrong: Any = len

    def rank(rank, gather):
        world = ep.World.embedded(rank, 4, gather.of(rank), backend="host", regroup=wrong)
        with pytest.raises(ep.BootstrapError, match="the engine's regroup gave a int; allowed is"):
            world.regroup([3 if rank == 0 else 0])

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


OTHERS = {
    "order": lambda told: [told[0], told[2], told[1], told[3]],
    "nothing": lambda told: [told[0], b"", *told[2:]],
    "another call": lambda told: [told[0], b"\xff\x00", *told[2:]],
    "another's JSON": lambda told: [told[0], b'["start-up", 5]', *told[2:]],
}


@pytest.mark.parametrize("spoil", OTHERS.values(), ids=OTHERS)
def test_words_that_are_not_that_ranks(spoil):
    def rank(rank, gather):
        mine = spoil if rank == 0 else tuple
        if rank == 0:
            with pytest.raises(ep.BootstrapError, match="as rank 1's during start-up"):
                ep.World.embedded(rank, 4, gather.of(rank, mine), backend="host")
        else:
            ep.World.embedded(rank, 4, gather.of(rank, mine), backend="host")

    play(4, rank)


@pytest.mark.parametrize("kind", [memoryview, bytearray, lambda words: np.frombuffer(words, "u1")])
def test_bytes_of_any_kind(kind):
    def rank(rank, gather):
        told = gather.of(rank, lambda told: (kind(words) for words in told))
        world = ep.World.embedded(rank, 4, told, backend="host")
        assert world.allgather(rank) == [0, 1, 2, 3]

    play(4, rank)


def test_what_the_allgather_raises_comes_through():
    class Odd(Exception):
        pass

    def allgather(payload):
        raise Odd

    with pytest.raises(Odd) as caught:
        ep.World.embedded(0, 4, allgather, backend="host")
    said = "rank 0: raised by the engine's allgather, which ep called: start-up"
    assert caught.value.__notes__ == [said]


def test_a_device_never_becomes_the_host(monkeypatch):
    monkeypatch.setattr(world_module, "gpu_obstacle", lambda **_: "no CUDA device is visible")
    with pytest.raises(ep.BootstrapError, match="no CUDA device is visible"):
        ep.World.embedded(0, 1, lambda payload: [payload], device=0)
    assert ep.World.embedded(0, 1, lambda payload: [payload]).backend == "host"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 4}, r"rank is 4; allowed is 0\.\.3"),
        ({"rank": 1.0}, "rank is 1.0"),
        ({"size": 0}, "size is 0"),
        ({"size": 73}, r"allowed is 1\.\.72"),
        ({"allgather": 5}, "allgather is a int"),
        ({"regroup": 5}, "regroup is a int; allowed is a function that takes ranks"),
        ({"backend": "cpu"}, "backend='cpu'"),
        ({"device": 3}, "device=3 is for GPUs; leave it out"),
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
