"""What each rank does in tests of memory that it shares by itself: `python own_memory.py FOLDER`.

The all-gather is MPI's, called as an engine's own; two exchanges lie in one file of each rank.
"""

import ctypes
import mmap
import os
import sys
import traceback
from pathlib import Path

from mpi4py import MPI

import ep
from ep.bench.cases import Case
from tests.multirank.worker import check, config, raises

COMM = MPI.COMM_WORLD
TOKENS = (6, 0, 3, 1, 5)


def share(folder, size_bytes):
    """Give the address of every rank's file in this process, by mappings of its own."""
    descriptor = os.open(folder / f"engine{COMM.rank}", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(descriptor, 0, size_bytes)
    os.pwrite(descriptor, b"\xff" * size_bytes, 0)
    os.close(descriptor)
    COMM.barrier()
    mapped = []
    for rank in range(COMM.size):
        with (folder / f"engine{rank}").open("r+b") as file:
            mapped.append(mmap.mmap(file.fileno(), size_bytes))
    COMM.barrier()
    (folder / f"engine{COMM.rank}").unlink()
    return mapped, [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in mapped]


def regroup(ranks):
    """Make the communicator of the others, which they alone come to."""
    group = COMM.group.Excl(ranks)
    return COMM.Create_group(group).allgather


def use(world, exchange, first):
    for number, tokens in enumerate(TOKENS, first):
        step = Case(config=exchange.config, uneven=True).step(number, tokens)
        check(world, exchange, step.without(world.excluded))


def main(folder):
    world = ep.World.embedded(COMM.rank, COMM.size, COMM.allgather, backend="host", regroup=regroup)
    shapes = [config(world, "tiny", 6), config(world, "gpt_oss_120b", 6)]
    sizes = [ep.EpBuffers.size_bytes(shape, "host") for shape in shapes]
    mapped, bases = share(folder, sum(sizes))
    made = []
    for shape, offset in zip(shapes, (0, sizes[0]), strict=True):
        addresses = [base + offset for base in bases]
        buffers = ep.EpBuffers.from_addresses(
            shape, world.rank, addresses[world.rank], addresses, backend="host"
        )
        made.append(ep.Exchange(world, shape, buffers=buffers, start=False))
    for exchange in made:
        exchange.arm()
        exchange.start()
    for exchange in made:
        use(world, exchange, 0)
    made[0].reset()
    for exchange in reversed(made):
        use(world, exchange, 10)
    if world.rank != 2:
        for exchange in made:
            exchange.exclude([2]) if exchange is made[0] else exchange.reset()
            use(world, exchange, 20)
        with raises(ep.StateError, "excluded from this World"):
            ep.Exchange(world, shapes[0])
        for exchange in made:
            exchange.close()
        world.close()
    del made, mapped
    COMM.barrier()
    print(f"passed on rank {COMM.rank}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:  # noqa: BLE001 - the others would wait for this rank
        traceback.print_exc()
        COMM.Abort(1)
