"""`Exchange`: what users call. It checks, orders and hands over to a backend's engine."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ep.arguments import (
    BF16,
    FP32,
    INT32,
    check_eps,
    check_ids,
    checks_values,
    host_array,
    token_count,
)
from ep.errors import ArgumentError, CollectiveError, EpError, EpTimeout, StateError
from ep.host import HostEngine
from ep.layout import EpLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from ep.bootstrap import World
    from ep.buffers import EpBuffers
    from ep.config import EpConfig


class Engine(Protocol):
    """What a backend does; its arguments have been checked."""

    @property
    def buffers(self) -> EpBuffers:
        """Where the tokens arrive."""
        ...

    def dispatch(self, x: Any, ids: Any, weights: Any) -> None:
        """Send this rank's tokens and wait for the other ranks' tokens."""
        ...

    def combine(self, partials: Any, ids: Any, norm_weight: Any, eps: float, out: Any) -> None:
        """Send partials home, empty the rows, sum what came back into `out`."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclasses.dataclass(frozen=True)
class Received:
    """What a rank received in one step: views of its receive rows, valid until its combine.

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


class Exchange:
    """Dispatch and combine for ever, on one buffer. A context manager.

    Parameters
    ----------
    world : World
    config : EpConfig
        The same on every rank, `config.ranks` being the world's size.

    Raises
    ------
    CollectiveError
        On every rank, if a field of `config` or the version of `ep` differs on one, naming the
        field, its values and ranks; or if `config.ranks` is not the world's size.
    HeapError
        On every rank, if symmetric memory is short on one.

    Notes
    -----
    Making an exchange is collective and ends with a barrier: when it returns, every rank's buffer
    is armed. `dispatch` and `combine` are collective; each `combine` answers the last `dispatch`.
    Several exchanges may live side by side and be used in any order that is the same on all ranks.
    """

    def __init__(self, world: World, config: EpConfig) -> None:
        facts = {
            **{f"EpConfig.{name}": value for name, value in dataclasses.asdict(config).items()},
            "version of ep": version("ep"),
        }
        world.agree_on(facts, "an Exchange's configuration")
        if config.ranks != world.size:
            raise CollectiveError(
                f"EpConfig.ranks is {config.ranks}, but the world has {world.size} "
                f"ranks; pass ranks=world.size"
            )
        self.world = world
        self.config = config
        self.layout = EpLayout(config)
        self._engine: Engine | None = HostEngine(world, self.layout)
        self._received = _receive_views(self._engine.buffers)
        self._busy = threading.Lock()
        self._sent_ids: Any = None
        self._broken: EpError | None = None
        world.barrier("arming the buffers")

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
        stream : None
            The host backend has no streams.

        Returns
        -------
        Received
            Valid until this step's `combine`. All tokens have arrived.

        Raises
        ------
        ArgumentError
            Nothing was sent; the call may be repeated with right arguments.
        StateError
            If the last dispatch has not been combined, the exchange is closed or in use elsewhere.
        EpTimeout
            If ranks did not arrive within `config.timeout_s`.
        """
        with self._turn(stream) as engine:
            if self._sent_ids is not None:
                raise StateError("dispatch follows a dispatch; call combine in between")
            config = self.config
            host_array("x", x, BF16, (None, config.hidden))
            tokens = token_count(config, x)
            host_array("ids", ids, INT32, (tokens, config.top_k))
            host_array("weights", weights, FP32, (tokens, config.top_k))
            if checks_values():
                check_ids(config, ids)
            engine.dispatch(x, ids, weights)
            self._sent_ids = ids.copy()
            return self._received

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
            Row by row the routing-weighted sum over this rank's experts. Empty rows are not read.
        ids : array of int32, `[T_s, K]`
            The same as in this step's dispatch.
        norm_weight : array of bfloat16, `[H]`, optional
            Apply RMSNorm with it to the sum.
        eps : float
            Of the norm.
        out : array of bfloat16, `[T_s, H]`, optional
            Where the result goes; made if not given.
        stream : None
            The host backend has no streams.

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
            If ranks did not arrive within `config.timeout_s`.
        """
        with self._turn(stream) as engine:
            if self._sent_ids is None:
                raise StateError("combine without a dispatch; call dispatch first")
            hidden, tokens = self.config.hidden, self._sent_ids.shape[0]
            host_array("partials", partials, BF16, (self.layout.rows, hidden))
            host_array("ids", ids, INT32, self._sent_ids.shape)
            if checks_values() and not np.array_equal(ids, self._sent_ids):
                raise ArgumentError(
                    "ids are not those of this step's dispatch; pass the same array"
                )
            if norm_weight is not None:
                host_array("norm_weight", norm_weight, BF16, (hidden,))
            eps = check_eps(eps)
            if out is None:
                out = np.empty((tokens, hidden), BF16)
            else:
                host_array("out", out, BF16, (tokens, hidden), out=True)
            engine.combine(partials, ids, norm_weight, eps, out)
            self._sent_ids = None
            return out

    def close(self) -> None:
        """Give the buffer back. Collective the first time; nothing after that.

        Views that `dispatch` returned must not be used any more.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            # Nobody may still be storing into a peer's buffer when it goes.
            self.world.barrier("closing an exchange")
        finally:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        # Otherwise peers may be anywhere, and waiting for them could hang: the world ends the job.

    @contextmanager
    def _turn(self, stream: Any) -> Iterator[Engine]:
        if stream is not None:
            raise ArgumentError(f"stream is {stream!r}; the host backend has no streams: pass None")
        if not self._busy.acquire(blocking=False):
            raise StateError("this Exchange is in use by another thread; make one for each")
        try:
            if self._engine is None:
                raise StateError("this Exchange is closed; make a new one")
            if self._broken is not None:
                raise StateError(
                    f"this Exchange stopped at: {self._broken}; close it and make a new one"
                )
            yield self._engine
        except EpTimeout as error:
            self._broken = error
            raise
        finally:
            self._busy.release()


def _receive_views(buffers: EpBuffers) -> Received:
    own = buffers.own
    return Received(own("x"), own("scales"), own("ids"), own("weights"), own("header")[:, 0])
