"""Up to 72 ranks of one process on one GPU, as branches of one graph: queues do not run out."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ep
from ep.bench.bridge import GpuBridge, received_rows
from ep.bench.cases import Case
from ep.bench.check import Where, check_result, check_rows
from ep.bootstrap.channel import ThreadChannel, ThreadGroup
from ep.gpu.graph import Events, Graph
from ep.memory.cuda import driver
from tests.multirank.worker import SHAPES


class Ranks:
    """All ranks of one config, open, driven by one thread."""

    def __init__(self, config):
        self.config = config
        group = ThreadGroup(config.ranks)

        def join(rank):
            world = ep.World(ThreadChannel(group, rank), "gpu", share_gpus=True)
            return ep.Exchange(world, config), GpuBridge(world.device)

        self.pool = ThreadPoolExecutor(config.ranks)
        self.members = list(self.pool.map(join, range(config.ranks)))

    def close(self):
        def leave(member):
            exchange, bridge = member
            exchange.close()
            exchange.world.close()
            bridge.close()

        list(self.pool.map(leave, self.members))

    def capture(self, step):
        """One dispatch, and one combine, of all ranks, a graph each."""
        data = []
        for rank, (_, bridge) in enumerate(self.members):
            rows, result = step.expected_rows(rank), step.expected_result(rank)
            partials = step.partials(rank, rows.source)
            arrays = [*step.inputs(rank), partials, step.case.norm_weight]
            out = bridge.put(np.full_like(result, np.nan))
            data.append((rows, result, [*map(bridge.put, arrays), out]))
        received = {}

        def dispatch(rank, exchange, bridge):
            x, ids, weights, *_ = data[rank][2]
            received[rank] = exchange.dispatch(x, ids, weights, bridge.stream)

        def combine(rank, exchange, bridge):
            _, ids, _, partials, gains, out = data[rank][2]
            exchange.combine(partials, ids, gains, 1e-5, out, bridge.stream)

        return self._fork(dispatch), self._fork(combine), data, received

    def _fork(self, function):
        first = self.members[0][1].stream
        events = Events(len(self.members) + 1)

        def enqueue():
            events.record(0, first)
            for rank, (exchange, bridge) in enumerate(self.members):
                if rank:
                    driver("StreamWaitEvent", bridge.stream, events._events[0], 0)
                function(rank, exchange, bridge)
                if rank:
                    events.record(rank, bridge.stream)
                    driver("StreamWaitEvent", first, events._events[rank], 0)

        return Graph.capture(first, enqueue)


def main(ranks, shape="tiny", steps=6):
    config = ep.EpConfig(ranks=ranks, max_tokens=6, timeout_s=5, **SHAPES[shape])
    members = Ranks(config)
    first = members.members[0][1].stream
    number = 0
    for tokens in (3, 6, 0, 1)[: max(1, steps // 2)]:
        case = Case(config=config, uneven=tokens != 3)
        step = case.step(tokens, tokens)
        dispatch, combine, data, received = members.capture(step)
        for _ in range(3):
            number += 1
            dispatch.launch(first)
            driver("StreamSynchronize", first)
            for rank, (exchange, bridge) in enumerate(members.members):
                exchange.poll()
                where = Where(rank, number, "dispatch")
                stride = exchange.layout.stride
                said = check_rows(
                    received_rows(bridge, received[rank]), data[rank][0], where, stride
                )
                assert said is None, str(said)
            combine.launch(first)
            driver("StreamSynchronize", first)
            for rank, (exchange, bridge) in enumerate(members.members):
                exchange.poll()
                out = bridge.get(data[rank][2][-1])
                said = check_result(out, data[rank][1], Where(rank, number, "combine"))
                assert said is None, str(said)
    members.close()
    print(f"passed {number} steps of {ranks} ranks on one GPU, {shape}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:3])
