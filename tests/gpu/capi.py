"""The exported library beside the Python exchange: the same bytes, step by step."""

import contextlib
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import ep
from ep.bench.bridge import GpuBridge
from ep.bench.cases import EPS, Case
from ep.export.binding import Library, StatusError
from ep.export.library import build_library
from ep.export.plan import ExportPlan
from ep.gpu.graph import Graph
from ep.kernels.options import Pdl
from ep.memory import cuda
from tests.gpu.common import agree, config_of
from tests.multirank.worker import raises


@contextlib.contextmanager
def exported(world, config):
    """A library of just the kernels that this world runs."""
    pdl = Pdl.LATE if world.shares_gpus else Pdl.EARLY
    plan = ExportPlan("test", config, (world.device.arch,), (pdl,))
    with tempfile.TemporaryDirectory() as folder:
        path, _ = build_library(plan, plan.images(lambda _done, _total: None), Path(folder))
        yield Library(path)


def whole(exchange):
    """Every byte of this rank's buffer."""
    size = exchange.layout.total_bytes
    return cuda.download(exchange._engine.buffers.addresses[-1], (size,), np.uint8)


class Pair:
    """The same exchange twice: one steps by Python, one by C on buffers that Python gave."""

    def __init__(self, world, config, library, stack):
        self.world, self.config = world, config
        self.bridge = GpuBridge(world.device)
        self.python = stack.enter_context(ep.Exchange(world, config))
        self.other = stack.enter_context(ep.Exchange(world, config))
        addresses = self.other._engine.buffers.addresses
        self.library = library
        self.opened = library.open(
            world.rank, addresses[-1], addresses[:-1], ranks_on_gpu=world.ranks_on_gpu
        )
        library.arm(self.opened)
        world.barrier()

    def arrays(self, step):
        rank = self.world.rank
        rows = step.expected_rows(rank)
        partials = step.partials(rank, rows.source)
        out = np.full((step.counts[rank], self.config.hidden), np.nan, ml_dtypes.bfloat16)
        given = [*step.inputs(rank), partials, step.case.norm_weight]
        return [None if array is None else self.bridge.put(array) for array in given], out

    def calls(self, arrays, out):
        """Dispatch and combine by C."""
        stream, tokens = self.bridge.stream, out.shape[0]
        address = [None if array is None else array.address for array in arrays]
        call, opened = self.library.call, self.opened
        return (
            lambda: call("ep_dispatch", opened, *address[:3], tokens, stream),
            lambda: call(
                *("ep_combine", opened, address[3], address[1], address[4]),
                *(EPS, out.address, tokens, stream),
            ),
        )

    def wait(self):
        cuda.driver("StreamSynchronize", self.bridge.stream)
        self.world.barrier()

    def compare(self, what):
        """Every byte of the two buffers."""
        got, want = whole(self.other), whole(self.python)
        wrong = np.flatnonzero(got != want)
        said = None
        if len(wrong):
            fields = self.python.layout.fields.values()
            starts = np.array([field.offset_bytes for field in fields])
            places = np.unique(np.searchsorted(starts, wrong, "right") - 1)
            names = [list(fields)[place].name for place in places]
            said = f"{what}: {len(wrong)} bytes differ, in {names}"
        agree(self.world, said)

    def step(self, step, *, captured):
        arrays, empty = self.arrays(step)
        outs = [self.bridge.put(empty) for _ in range(2)]
        dispatch, combine = self.calls(arrays, outs[1])
        stream = self.bridge.stream
        graphs = [Graph.capture(stream, call) for call in (dispatch, combine)] if captured else []
        x, ids, weights, partials, gains = arrays
        # Nothing is allocated from here on: that can wait for a kernel that waits for this rank.
        self.world.barrier()
        self.python.dispatch(x, ids, weights, stream)
        graphs[0].launch(stream) if captured else dispatch()
        self.wait()
        self.compare(f"dispatch of step {step.number}")
        self.python.combine(partials, ids, gains, EPS, outs[0], stream)
        graphs[1].launch(stream) if captured else combine()
        self.wait()
        self.compare(f"combine of step {step.number}")
        by_python, by_c = (self.bridge.get(out).view(np.uint16) for out in outs)
        same = np.array_equal(by_python, by_c)
        agree(self.world, None if same else f"results of step {step.number} differ")
        for graph in graphs:
            graph.close()

    def close(self):
        self.wait()
        self.library.call("ep_close", self.opened)
        self.bridge.close()


def same_bytes(world, shape="tiny", num_steps=18, max_tokens=6):
    """Python and C leave the same bytes in the whole buffer, and give the same results."""
    config = config_of(world, shape, max_tokens)
    with exported(world, config) as library, contextlib.ExitStack() as stack:
        pair = Pair(world, config, library, stack)
        for number in range(num_steps):
            case = Case(config=config, uneven=number % 3 == 0, norm=number % 2 == 0, seed=number)
            tokens = (max_tokens, 1, 0, max_tokens // 2)[number % 4]
            pair.step(case.step(number, tokens), captured=number % 5 == 4)
        assert library.step(pair.opened) == num_steps
        # What C leaves is what Python goes on from, and the other way about.
        pair.python, pair.other = pair.other, pair.python
        arrays, empty = pair.arrays(Case(config=config).step(0, 1))
        x, ids, weights, partials, gains = arrays
        out = pair.bridge.put(empty)
        for exchange in (pair.python, pair.other):
            world.barrier()
            exchange.dispatch(x, ids, weights, pair.bridge.stream)
            exchange.combine(partials, ids, gains, EPS, out, pair.bridge.stream)
            pair.wait()
        pair.compare("a step of Python after those of C")
        pair.close()


def hang_in_c(world):
    """A rank that does not come is named by the C library as by Python; then the others go on."""
    config = config_of(world, "tiny", 4)
    with exported(world, config) as library, contextlib.ExitStack() as stack:
        pair = Pair(world, config, library, stack)
        addresses = pair.other._engine.buffers.addresses
        library.call("ep_close", pair.opened)
        fields = {"timeout_us": 200_000, "grace_us": 0, "ranks_on_gpu": world.ranks_on_gpu}
        pair.opened = library.open(world.rank, addresses[-1], addresses[:-1], **fields)
        library.arm(pair.opened)
        world.barrier()
        step = Case(config=config).step(0, 2)
        arrays, empty = pair.arrays(step)
        out = pair.bridge.put(empty)
        dispatch, combine = pair.calls(arrays, out)
        world.barrier()
        absent = world.size - 1
        if world.rank != absent:
            dispatch()
            cuda.driver("StreamSynchronize", pair.bridge.stream)
            hang = library.poll(pair.opened)
            assert (hang.phase, hang.rank, hang.step) == (1, world.rank, 1)
            assert hang.awaited[0] == 1 << absent
            said = library.text(hang)
            assert f"rank {world.rank}: dispatch of step 1 waited 0." in said, said
            assert f"for rank {absent} (their last seen step: 0)" in said, said
            with raises(StatusError, "TIMED_OUT"):
                combine()
        step_of = max(world.allgather(library.step(pair.opened)))
        library.arm(pair.opened, step_of)
        world.barrier()
        for call in pair.calls(arrays, out):
            call()
        pair.wait()
        assert library.poll(pair.opened).phase == 0
        got, want = pair.bridge.get(out), step.expected_result(world.rank)
        assert np.array_equal(got.view(np.uint16), want.view(np.uint16))
        pair.close()
