"""What pairs cost the host of an engine in C: the same calls by an exported library."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep.bench.cases import EPS
from ep.errors import EpError
from ep.export.binding import Library, Status, StatusError
from ep.export.library import LIBRARY, build_library, find_compiler, run_compiler
from ep.export.plan import ExportPlan
from ep.kernels.options import Pdl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep.bench.chain import Chain

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).resolve().parent / "host_loop.c"
LOOP = "libloop.so"


class LoopStep(ctypes.Structure):
    """As `loop_step` of host_loop.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "ids", "weights", "out")],
        ("tokens", ctypes.c_int32),
    )


@contextlib.contextmanager
def c_loop(chain: Chain) -> Iterator[Callable[[int], int] | None]:
    """Give a function that enqueues pairs of `chain` from C, and says how many ns that took.

    Collective. It works on the exchange's own buffers, armed anew, so that its steps go on. None on
    every rank, which is logged, where one of them cannot build it.
    """
    world = chain.exchange.world
    problem = None
    with tempfile.TemporaryDirectory(prefix="ep-") as scratch:
        try:
            _build(chain, Path(scratch))
        except (EpError, OSError) as error:
            problem = str(error)
        problems = list(filter(None, world.allgather(problem, "building for C")))
        if problems:
            logger.warning("what steps cost the host in C is not measured: %s", problems[0])
            yield None
            return
        library = Library(Path(scratch, LIBRARY))
        with _opened(chain, library) as opened:
            yield loop_of(chain, library, opened, Path(scratch, LOOP))


def _build(chain: Chain, folder: Path) -> None:
    """Make library and loop in `folder`. Local."""
    world = chain.exchange.world
    assert world.device is not None
    pdl = Pdl.LATE if world.shares_gpus else Pdl.EARLY
    plan = ExportPlan("bench", chain.exchange.config, (world.device.arch,), (pdl,))
    find_compiler()
    build_library(plan, plan.images(lambda _done, _total: None), folder)
    shutil.copyfile(SOURCE, folder / SOURCE.name)
    run_compiler(folder, SOURCE.name, "-shared", "-o", LOOP)


@contextlib.contextmanager
def _opened(chain: Chain, library: Library) -> Iterator[ctypes.c_void_p]:
    world = chain.exchange.world
    engine: Any = chain.exchange._engine  # noqa: SLF001 - the buffers are no part of the public surface
    *peers, own = engine.buffers.addresses
    exchange = library.open(world.rank, own, peers, ranks_on_gpu=world.ranks_on_gpu)
    engine.finish()
    world.barrier("arming for C")
    library.arm(exchange, engine.step)
    world.barrier("armed for C")
    yield exchange
    # No rank takes its kernels away while another's are still at work.
    engine.finish()
    world.barrier("ending in C")
    library.call("ep_close", exchange)


def loop_of(
    chain: Chain, library: Library, exchange: ctypes.c_void_p, path: Path
) -> Callable[[int], int]:
    """Give what enqueues pairs of `chain` by the loop at `path`, and says how many ns that took."""
    loop = ctypes.CDLL(str(path)).ep_host_loop
    given, partials, norm_weight = chain.addresses()
    steps = (LoopStep * len(given))(*(LoopStep(*step) for step in given))
    arrays = map(ctypes.c_void_p, (partials, norm_weight))
    stream = ctypes.c_void_p(chain.bridge.stream)
    took_ns = ctypes.c_uint64()
    behind = (*arrays, ctypes.c_float(EPS), stream, ctypes.byref(took_ns))
    calls = (library.functions.ep_dispatch, library.functions.ep_combine)

    def run(pairs: int) -> int:
        status = loop(*calls, exchange, steps, len(steps), pairs, *behind)
        if status:
            words = library.functions.ep_last_error().decode()
            raise StatusError(Status(status), words)
        return took_ns.value

    return run
