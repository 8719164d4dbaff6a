"""What pairs cost the host of an engine in C: the same calls by an exported library."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep.bench.cases import EPS
from ep.export.binding import Library, Status, StatusError
from ep.export.library import build_library, run_compiler
from ep.export.plan import ExportPlan
from ep.kernels.options import Pdl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep.bench.chain import Chain

SOURCE = Path(__file__).resolve().parent / "host_loop.c"


class LoopStep(ctypes.Structure):
    """As `loop_step` of host_loop.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "ids", "weights", "out")],
        ("tokens", ctypes.c_int32),
    )


@contextlib.contextmanager
def c_loop(chain: Chain) -> Iterator[Callable[[int], int]]:
    """Give a function that enqueues pairs of `chain` from C, and says how many ns that took.

    Collective. It works on the exchange's own buffers, armed anew, so that its steps go on.

    Raises
    ------
    EpError
        If the C compiler fails.
    """
    exchange = chain.exchange
    world = exchange.world
    engine: Any = exchange._engine  # noqa: SLF001 - the buffers are no part of the public surface
    buffers = engine.buffers
    pdl = Pdl.LATE if world.shares_gpus else Pdl.EARLY
    assert world.device is not None
    plan = ExportPlan("bench", exchange.config, (world.device.arch,), (pdl,))
    with tempfile.TemporaryDirectory(prefix="ep-") as scratch:
        folder = Path(scratch)
        build_library(plan, plan.images(lambda _done, _total: None), folder)
        shutil.copyfile(SOURCE, folder / SOURCE.name)
        link = ("-shared", "-L.", "-lep", f"-Wl,-rpath,{folder}")
        run_compiler(folder, SOURCE.name, "-o", "libloop.so", *link)
        library = Library(folder / "libep.so")
        loop = ctypes.CDLL(str(folder / "libloop.so")).ep_host_loop
        opened = library.open(
            world.rank,
            buffers.addresses[-1],
            buffers.addresses[:-1],
            ranks_on_gpu=world.ranks_on_gpu,
        )
        world.barrier("arming for C")
        library.arm(opened, library.step(opened))
        world.barrier("armed for C")
        given, partials, norm_weight = chain.addresses()
        steps = (LoopStep * len(given))(*(LoopStep(*step) for step in given))
        arrays = map(ctypes.c_void_p, (partials, norm_weight))
        stream = ctypes.c_void_p(chain.bridge.stream)
        took_ns = ctypes.c_uint64()
        behind = (*arrays, ctypes.c_float(EPS), stream, ctypes.byref(took_ns))

        def run(pairs: int) -> int:
            status = loop(opened, steps, len(steps), pairs, *behind)
            if status:
                words = library.functions.ep_last_error().decode()
                raise StatusError(Status(status), words)
            return took_ns.value

        yield run
        # No rank takes its kernels away while another's are still at work.
        engine.finish()
        world.barrier("ending in C")
        library.call("ep_close", opened)
