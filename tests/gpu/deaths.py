"""A rank with a GPU is killed: `python -m tests.gpu.deaths mid|between` under mpirun.

Each rank runs under `tests/multirank/surviving.sh`, or the launcher would end the others.
"""

import os
import signal
import sys
import time
from pathlib import Path

import ep
from ep.bench.bridge import GpuBridge
from ep.memory.cuda import driver
from tests.gpu.common import config_of
from tests.gpu.recovery import Traffic

TIMEOUT_S = 1.0
DEAD = 1


def main(name):
    world = ep.World.connect(backend="gpu")
    config = config_of(world, "kimi_k3", 8, timeout_s=TIMEOUT_S, grace_s=0)
    bridge = GpuBridge(world.device)
    exchange = ep.Exchange(world, config)
    traffic = Traffic(world, exchange, bridge)
    traffic.check(0)
    world.barrier()
    if world.rank == DEAD:
        x, ids, weights = traffic.chain._inputs[0]
        exchange.dispatch(x, ids, weights, bridge.stream)
        if name == "between":
            driver("StreamSynchronize", bridge.stream)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "mid":
        # It is dead while its kernel waits for us.
        time.sleep(0.3)
    took_s, error = traffic.fail(f"rank {DEAD}'s process on node", TIMEOUT_S)
    print(f"rank {world.rank}: told in {took_s:.2f} s: {error}", flush=True)
    exchange.exclude([DEAD])
    for first in (20, 30):
        traffic.check(first, dead=(DEAD,))
    traffic.close()
    exchange.close()
    world.barrier("the end")
    if world.rank == 0:
        print(f"passed death_{name} on {world.size}", flush=True)
        Path(os.environ["EP_TEST_DONE"]).touch()
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
