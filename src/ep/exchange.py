"""`Exchange`: what users call. It checks, orders and hands over to a backend's engine."""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.arguments import (
    BF16,
    FP32,
    INT32,
    check_eps,
    check_ids,
    checks_values,
    misfit,
    token_count,
)
from ep.bootstrap import Backend, World
from ep.bootstrap.ranks import everywhere
from ep.buffers import layout_of
from ep.config import EpConfig
from ep.errors import (
    ArgumentError,
    CollectiveError,
    StateError,
    name_ranks,
)
from ep.lifecycle import Lifecycle, Sent
from ep.prepared import PreparedStep
from ep.version import __version__

if TYPE_CHECKING:
    from ep.buffers import EpBuffers
    from ep.engine import Engine
    from ep.kernels.options import KernelOptions
    from ep.layout import EpLayout


@dataclasses.dataclass(frozen=True)
class Received:
    """What a rank received in one step: views of its receive rows, valid until its combine.

    On the host they are read-only.

    Row `s * stride + t` holds token t of rank s if that token chose an expert here, else it is
    empty: source -1, every id an expert that is not local, weights 0, `x` and `scales` finite.

    Attributes
    ----------
    x : array of float8_e4m3fn, `[rows, H]`
    scales : array of float8_e8m0fnu, `[rows, H / 32]`
    ids : array of int32, `[rows, K]`
        Global expert ids as sent, all K of them.
    weights : array of float32, `[rows, K]`
        As sent.
    source : array of int32, `[rows]`
        `(s << 16) | t`, or -1.
    """

    x: Any
    scales: Any
    ids: Any
    weights: Any
    source: Any


class Exchange(Lifecycle):
    """Dispatch and combine for ever, on one buffer. A context manager.

    Parameters
    ----------
    world : World
    config : EpConfig
        The same on every rank, `config.ranks` being the world's size.
    kernel_options : KernelOptions, optional
        How the GPU backend's kernels are built; the best known choice if not given.
    buffers : EpBuffers, optional
        Memory of the engine's own, from `EpBuffers.from_addresses`. On all ranks or none.
    start : bool
        If false, the engine calls `arm` and `start` when it is time.

    Attributes
    ----------
    world : World
    config : EpConfig
    layout : EpLayout
        Of the buffer: `layout.rows` receive rows, `layout.row(src_rank, token_idx)`.

    Raises
    ------
    CollectiveError
        On every rank, if a field of `config` or a version differs on one, on GPUs also the
        architecture or the size of the symmetric heap, naming it, its values and ranks; or if
        `config.ranks` is not the world's size.
    HeapError
        On every rank, if symmetric memory is short on one.

    Notes
    -----
    Making an exchange is collective and ends with a barrier, unless `start` is false: when it
    returns, every rank's buffer is armed. `dispatch` and `combine` are collective; each `combine`
    answers the last `dispatch`. Several exchanges may live side by side and be used in any order
    that is the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        config: EpConfig,
        *,
        kernel_options: KernelOptions | None = None,
        buffers: EpBuffers | None = None,
        start: bool = True,
    ) -> None:
        given = (type(world).__name__, type(config).__name__)
        if given != (World.__name__, EpConfig.__name__):
            raise ArgumentError(
                f"Exchange({', '.join(given)}): allowed is Exchange(World, EpConfig)"
            )
        if kernel_options is not None and type(kernel_options).__name__ != "KernelOptions":
            raise ArgumentError(
                f"kernel_options is a {type(kernel_options).__name__}; allowed is KernelOptions"
            )
        if world.excluded:
            raise StateError(
                f"{name_ranks(sorted(world.excluded))} were excluded from this World; a new "
                "Exchange needs all ranks: start a new job"
            )
        facts = {
            **{f"EpConfig.{name}": value for name, value in dataclasses.asdict(config).items()},
            "version of ep": __version__,
            "kernel_options": kernel_options and dataclasses.asdict(kernel_options),
            "buffers given": buffers is not None,
            "start": bool(start),
            **_facts_of_backend(world),
        }
        world.agree_on(facts, "an Exchange's configuration")
        if config.ranks != world.size:
            raise everywhere(
                CollectiveError(
                    f"EpConfig.ranks is {config.ranks}, but the world has {world.size} "
                    f"ranks; pass ranks=world.size"
                )
            )
        layout = layout_of(config, world.backend)
        world.agree(misfit(world, layout, buffers), "looking at the given buffers")
        super().__init__(world, config, layout)
        self._engine = _open_engine(world, layout, kernel_options, buffers)
        try:
            own = self._engine.buffers.own
            names = (field.name for field in dataclasses.fields(Received))
            self._received = Received(*(_for_users(own(name)) for name in names))
            if start:
                self.start()
        except BaseException:
            self._abandon()
            raise

    def dispatch(self, x: Any, ids: Any, weights: Any, stream: Any = None) -> Received:
        """Send each token, quantized, to every rank that owns one of its experts. Collective.

        Parameters
        ----------
        x : array of bfloat16, `[T_s, H]`
            T_s may be 0..max_tokens and differ by rank and by step.
        ids : array of int32, `[T_s, K]`
            Global expert ids. -1 masks a choice. Others outside 0..E-1 raise with `EP_CHECK=1`;
            without it they travel, but select nobody.
        weights : array of float32, `[T_s, K]`
        stream : optional
            On GPUs: an int, a CUstream or anything with `__cuda_stream__`; None is the default
            stream. The host backend has no streams and takes None alone.

        Returns
        -------
        Received
            Valid until this step's `combine`, in the order of `stream`.

        Raises
        ------
        ArgumentError
            Nothing was sent; the call may be repeated with right arguments.
        StateError
            If the last dispatch has not been combined, the exchange is closed or in use elsewhere.
        EpTimeout
            If ranks did not arrive within `config.timeout_s`, in the first step `config.grace_s`
            later. On GPUs it is raised by a later call, `poll` or `check`.

        Notes
        -----
        Whatever else ends the call once sending has begun (an interrupt, say) stops the exchange,
        as `EpTimeout` does: the ranks are out of step.
        """
        with self._turn() as engine:
            self._check_order(None)
            stream = engine.stream(stream)
            x, ids, weights = self._sends(engine, x, ids, weights)
            values = engine.values(ids, stream) if checks_values() else None
            if values is not None:
                check_ids(self.config, values)
            launch = partial(engine.dispatch, x, ids, weights, stream)
            self._commit("dispatch", launch, Sent(x.shape[0], stream, values))
            received: Received = self._received
            return received

    def combine(
        self,
        partials: Any,
        ids: Any,
        norm_weight: Any = None,
        eps: float = 1e-5,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Bring the experts' partials home and sum them; then the rows are empty. Collective.

        Parameters
        ----------
        partials : array of bfloat16, `[rows, H]`
            Row by row the routing-weighted sum over this rank's experts. Empty rows are not used.
        ids : array of int32, `[T_s, K]`
            The same as in this step's dispatch.
        norm_weight : array of bfloat16, `[H]`, optional
            Apply RMSNorm with it to the sum. A constant: on GPUs it may be read before the work
            ahead of this call has ended, so nothing enqueued may still write it.
        eps : float
            Of the norm; pass the model's own.
        out : array of bfloat16, `[T_s, H]`, optional
            Where the result goes; made if not given.
        stream : optional
            As in `dispatch`.

        Returns
        -------
        array of bfloat16, `[T_s, H]`
            FP32 sum of the partials in rank order, rounded once; then the norm, rounded once. 0
            where every id of a token is masked.

        Raises
        ------
        ArgumentError
            Nothing was sent; the call may be repeated with right arguments.
        StateError
            If there is no dispatch to answer, or the exchange is closed or in use elsewhere.
        EpTimeout
            As `dispatch`. No result of the step is one then: what has not come is NaN.
        """
        with self._turn() as engine:
            stream, sent = engine.stream(stream), self._sent
            hidden, tokens = self.config.hidden, sent.tokens if sent else 0
            self._check_order(Sent(tokens, stream))
            assert sent is not None
            if out is None:
                out = engine.empty((tokens, hidden), stream)
            brings = self._brings(engine, tokens, partials, ids, norm_weight, eps, out)
            values = None if sent.values is None else engine.values(brings[1], stream)
            if values is not None and not np.array_equal(values, sent.values):
                raise ArgumentError("ids are not those of this step's dispatch; pass the same")
            launch = partial(engine.combine, *brings, stream)
            self._commit("combine", launch, None)
            return out

    def prepare(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        partials: Any,
        norm_weight: Any = None,
        eps: float = 1e-5,
        out: Any = None,
        stream: Any = None,
    ) -> PreparedStep:
        """Check the arrays of a step once, to make it again and again. Local.

        Parameters are those of `dispatch` and `combine`. The arrays stay where they are, and each
        call takes what they then hold; `out`, if not given, is made here and used each time. With
        `EP_CHECK=1` calls look at values, and are no faster.

        Returns
        -------
        PreparedStep
            Its calls count as this exchange's. It serves until the exchange is closed, after
            `reset` and `exclude`, too.

        Raises
        ------
        ArgumentError
        StateError
            If the exchange is closed, stopped or in use elsewhere.
        """
        with self._turn() as engine:
            at = engine.stream(stream)
            sends = self._sends(engine, x, ids, weights)
            tokens = sends[0].shape[0]
            if out is None:
                out = engine.empty((tokens, self.config.hidden), at)
            brings = self._brings(engine, tokens, partials, ids, norm_weight, eps, out)
            # A stream of another library ends with the object that was given.
            arrays = (x, ids, weights, partials, norm_weight, out, stream, sends, brings)
            if checks_values():
                dispatch = partial(self.dispatch, x, ids, weights, stream)
                combine = partial(self.combine, partials, ids, norm_weight, eps, out, stream)
                return PreparedStep(dispatch, combine, out, arrays)
            sent = Sent(tokens, at)
            send = engine.prepare_dispatch(*sends, at)
            bring = engine.prepare_combine(*brings, at)

            def dispatch_again() -> Received:
                self._again(send, sent, answers=False)
                received: Received = self._received
                return received

            def combine_again() -> Any:
                self._again(bring, sent, answers=True)
                return out

            return PreparedStep(dispatch_again, combine_again, out, arrays)

    def _sends(self, engine: Engine, x: Any, ids: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Check what `dispatch` takes."""
        config = self.config
        x = engine.array("x", x, BF16, (None, config.hidden))
        tokens = token_count(config, x)
        ids = engine.array("ids", ids, INT32, (tokens, config.top_k))
        return x, ids, engine.array("weights", weights, FP32, (tokens, config.top_k))

    def _brings(
        self,
        engine: Engine,
        tokens: int,
        partials: Any,
        ids: Any,
        norm_weight: Any,
        eps: float,
        out: Any,
    ) -> tuple[Any, Any, Any, float, Any]:
        """Check what `combine` takes."""
        hidden = self.config.hidden
        partials = engine.array("partials", partials, BF16, (self.layout.rows, hidden))
        ids = engine.array("ids", ids, INT32, (tokens, self.config.top_k))
        if norm_weight is not None:
            norm_weight = engine.array("norm_weight", norm_weight, BF16, (hidden,))
        target = engine.array("out", out, BF16, (tokens, hidden), out=True)
        return partials, ids, norm_weight, check_eps(eps), target


def _facts_of_backend(world: World) -> dict[str, Any]:
    """What must be alike on all ranks beside the configuration."""
    if world.backend is Backend.HOST:
        return {"byte order": sys.byteorder}
    from ep.memory.nvshmem import TESTED, installed

    assert world.device is not None
    return {
        "GPU architecture": world.device.arch,
        "NVSHMEM_SYMMETRIC_SIZE": os.environ.get("NVSHMEM_SYMMETRIC_SIZE", ""),
        **{f"version of {name}": installed(name) for name in TESTED},
    }


def _for_users(view: Any) -> Any:
    """Make a view that cannot write, where views are NumPy's."""
    if isinstance(view, np.ndarray):
        view = view.view()
        view.flags.writeable = False
    return view


def _open_engine(
    world: World, layout: EpLayout, options: KernelOptions | None, buffers: EpBuffers | None
) -> Engine:
    # Each backend's libraries are loaded only where it is used.
    if world.backend is Backend.GPU:
        from ep.gpu import GpuEngine

        return GpuEngine(world, layout, options, buffers)
    if options is not None:
        raise everywhere(
            ArgumentError("kernel_options are for the GPU backend; leave them out on the host")
        )
    from ep.host import HostEngine

    return HostEngine(world, layout, buffers)
