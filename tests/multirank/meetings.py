"""What each rank does in tests of meetings without MPI: `python meetings.py CASE`."""

import os
import signal
import sys
import time

import ep
from tests.multirank.worker import raises


def without_first():
    """Rank 0, where all have met, is killed; the others hear of it at once, and go on."""
    world = ep.World.connect(backend="host", timeout_s=20)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with raises(ep.EpTimeout, "for rank 0; rank 0's process on node .* is gone"):
        world.barrier()
    assert time.monotonic() - start < 5
    world.regroup([0])
    assert world.allgather(world.rank) == [None, 1, 2, 3]
    world.close()
    with raises(ep.StateError, "has excluded rank 0; no other can be made without them"):
        ep.World.connect(backend="host")
    print("went on", flush=True)


def connect():
    ep.World.connect(backend="host", timeout_s=3)


def tell(number):
    with ep.World.connect(backend="host", timeout_s=20) as world:
        print("heard", world.allgather(int(number)), flush=True)


CASES = {function.__name__: function for function in (without_first, connect, tell)}

if __name__ == "__main__":
    CASES[sys.argv[1]](*sys.argv[2:])
