"""Memory of an engine's own, one rank alone: what the driver says no to, and what serves.

`python -m tests.gpu.own_memory`
"""

import itertools
from typing import Any

from cuda.bindings import driver as cu

import ep
from ep.bench.bridge import open_bridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.layout import LINE_BYTES
from ep.memory.cuda import driver
from tests.multirank.worker import raises

CONFIG = ep.EpConfig.load("kimi_k3", ranks=1, max_tokens=8)
SIZE = ep.EpBuffers.size_bytes(CONFIG)
NUMBERS = itertools.count()
ROUNDS = 100


def make(address):
    return ep.EpBuffers.from_addresses(CONFIG, 0, address, [None])


def refused(address, words):
    with raises(ep.HeapError, words):
        make(int(address))


def check(exchange):
    bridge = open_bridge(exchange)
    for tokens in (8, 0, 1, 5):
        step = Case(config=CONFIG, uneven=True).step(next(NUMBERS), tokens)
        wrong = run_checked_step(exchange, step, bridge)
        assert wrong is None, str(wrong)
    bridge.close()


def allow(address, size_bytes, kind):
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = getattr(cu.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{kind}")
    driver("MemSetAccess", address, size_bytes, [access], 1)


def plain_memory():
    short = int(driver("MemAlloc", SIZE - 4096))
    # As a rule it begins where the other ends.
    driver("MemAlloc", SIZE)
    refused(short, "ends before|does not know")
    refused(driver("MemAllocManaged", SIZE, 1), "managed memory, which moves")
    refused(driver("MemHostAlloc", SIZE, 0), "does not know")
    refused(1 << 45, "does not know")


def mapped_memory(world):
    """A buffer that lies in two mappings side by side."""
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(driver("MemGetAllocationGranularity", wanted, least))
    each = -(-SIZE // unit) * unit
    first = int(driver("MemAddressReserve", 3 * each, unit, 0, 0))
    for address in (first, first + each):
        driver("MemMap", address, each, 0, driver("MemCreate", each, wanted, 0), 0)
    refused(first, "may not both load and store")
    allow(first, 2 * each, "READ")
    refused(first, "may not both load and store")
    allow(first, 2 * each, "READWRITE")
    refused(first + 2 * each - LINE_BYTES, "does not know")
    buffers = make(first + each - SIZE // 2 // LINE_BYTES * LINE_BYTES)
    for _ in range(2):
        with ep.Exchange(world, CONFIG, buffers=buffers) as exchange:
            check(exchange)


def several_exchanges(world, pair):
    made = [ep.Exchange(world, CONFIG, buffers=buffers) for buffers in pair]
    for exchange in (*made, *made):
        check(exchange)
    made[0].reset()
    check(made[0])
    with raises(ep.CollectiveError, "an Exchange that was not closed"):
        ep.Exchange(world, CONFIG, buffers=pair[0])
    for exchange in made:
        exchange.close()


def nothing_is_left(world, address):
    def fail(_):
        raise ZeroDivisionError

    real: Any = ep.Exchange.start
    before = driver("MemGetInfo")[0]
    for number in range(ROUNDS):
        ep.Exchange.start = fail if number % 2 else real  # type: ignore[method-assign]
        try:
            ep.Exchange(world, CONFIG, buffers=make(address)).close()
        except ZeroDivisionError:
            assert number % 2
    ep.Exchange.start = real  # type: ignore[method-assign]
    assert driver("MemGetInfo")[0] >= before


def main():
    driver("Init", 0)
    world = ep.World.embedded(0, 1, lambda payload: [payload], backend="gpu", device=0)
    plain_memory()
    mapped_memory(world)
    block = int(driver("MemAlloc", 2 * SIZE + LINE_BYTES))
    pair = [make(block), make(block + SIZE + LINE_BYTES)]
    several_exchanges(world, pair)
    nothing_is_left(world, block)
    world.close()
    print("passed own_memory", flush=True)


if __name__ == "__main__":
    main()
