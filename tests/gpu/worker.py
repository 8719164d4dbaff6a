"""Runs cases on each rank: `python worker.py CASE...` under mpirun. Rank 0 prints how each went."""

import sys
import time

import ep
from tests.gpu.cases import CASES, PROCESS_CASES


def main(names):
    with ep.World.connect(backend="gpu") as world:
        for name in names:
            start = time.monotonic()
            (CASES | PROCESS_CASES)[name](world)
            world.barrier()
            if world.rank == 0:
                seconds = time.monotonic() - start
                print(f"passed {name} on {world.size} in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
