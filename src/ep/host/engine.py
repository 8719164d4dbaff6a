"""The host backend: the exchange in shared memory, with NumPy.

It keeps the flag protocol of the GPU kernels: rows go to the chosen ranks, then this rank's flag
goes up on every rank (its value tells how many tokens were sent), then this rank waits for all
flags and lowers them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ep.arguments import host_array
from ep.buffers import EpBuffers
from ep.errors import ArgumentError, shown
from ep.host.mxfp8 import quantize
from ep.host.norm import rms_norm
from ep.layout import EMPTY_SOURCE, SOURCE_BITS
from ep.memory.host import HostMemory
from ep.record import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ep.bootstrap import World
    from ep.layout import EpLayout

    Array = npt.NDArray[np.generic]


class HostEngine:
    """Moves the tokens of one exchange. Arguments are checked by the caller.

    Making one is collective: it allocates the buffers, if it is not given them.

    Raises
    ------
    HeapError
        On every rank, if memory is short on one or cannot be shared.
    """

    def __init__(self, world: World, layout: EpLayout, buffers: EpBuffers | None = None) -> None:
        self._layout = layout
        self._config = layout.config
        self._rank = world.rank
        self._present = set(range(world.size))
        self._absent: list[int] = []
        self._step = 0
        self._is_given = buffers is not None
        given = buffers.addresses if buffers is not None else ()
        self._memory = HostMemory.allocate(world, layout.total_bytes, given)
        self._buffers = buffers or EpBuffers(layout, self._memory, world.rank)
        self._buffers.is_taken = True

    @property
    def buffers(self) -> EpBuffers:
        """The receive rows and all else, as views."""
        return self._buffers

    def array(
        self, name: str, array: Any, dtype: np.dtype[Any], shape: Any, *, out: bool = False
    ) -> Array:
        """Check one argument."""
        return host_array(name, array, dtype, shape, out=out)

    def stream(self, stream: Any) -> None:
        """Refuse everything but None."""
        if stream is not None:
            raise ArgumentError(
                f"stream is {shown(stream)}; the host backend has no streams: pass None"
            )

    def resume(self, stream: None) -> None:
        """Nothing changes."""

    def empty(self, shape: tuple[int, int], stream: None) -> Array:  # noqa: ARG002
        """Make a BF16 array for a result."""
        return np.empty(shape, ml_dtypes.bfloat16)

    def values(self, array: Array, stream: None) -> Array:  # noqa: ARG002
        """Copy an argument."""
        return array.copy()

    def poll(self) -> None:
        """Do nothing: an expired wait raises where it waits."""

    @property
    def step(self) -> int:
        """The last step that this rank has begun."""
        return self._step

    def rearm(self, step: int, excluded: frozenset[int]) -> None:
        """Make all as it is between steps, the last of which was `step`; skip `excluded`."""
        self._memory.forget()
        if self._is_given:
            # An empty row's x must be finite, too.
            self._memory.zero()
        for name in ("dispatch_flags", "combine_flags", "counts"):
            self._buffers.own(name)[...] = 0
        self._empty(slice(None))
        self._step = step
        self._absent = sorted(excluded)
        self._present = set(range(self._config.ranks)) - excluded

    def prepare_dispatch(
        self, x: Array, ids: Array, weights: Array, stream: None
    ) -> Callable[[], None]:
        """Give what does `dispatch` with these."""
        return functools.partial(self.dispatch, x, ids, weights, stream)

    def prepare_combine(
        self,
        partials: Array,
        ids: Array,
        norm_weight: Array | None,
        eps: float,
        out: Array,
        stream: None,
    ) -> Callable[[], None]:
        """Give what does `combine` with these."""
        return functools.partial(self.combine, partials, ids, norm_weight, eps, out, stream)

    def dispatch(self, x: Array, ids: Array, weights: Array, stream: None) -> None:  # noqa: ARG002
        """Send tokens, then wait until every rank has sent its own. Collective."""
        tokens = x.shape[0]
        elements, scales = quantize(x)
        chosen = self._chosen(ids)
        source = (self._rank << SOURCE_BITS) | np.arange(tokens, dtype=np.int32)
        first = self._layout.row(self._rank, 0)
        rows = {"x": elements, "scales": scales, "ids": ids, "weights": weights}
        self._step += 1
        for peer in self._present:
            (token_idx,) = chosen[:, peer].nonzero()
            if token_idx.size:
                row = first + token_idx
                for name, values in rows.items():
                    self._buffers.at(peer, name)[row] = values[token_idx]
                self._buffers.at(peer, "header")[row, 0] = source[token_idx]
        self._raise_flags("dispatch_flags", Phase.DISPATCH, tokens + 1)
        flags = self._wait_flags("dispatch_flags", Phase.DISPATCH)
        self._buffers.own("counts")[:] = flags - 1
        self._buffers.own("counts")[self._absent] = 0
        self._empty_absent()

    def combine(
        self,
        partials: Array,
        ids: Array,
        norm_weight: Array | None,
        eps: float,
        out: Array,
        stream: None,  # noqa: ARG002
    ) -> None:
        """Send partials home, empty the rows, then sum what came back. Collective."""
        try:
            self._combine(partials, ids, norm_weight, eps, out)
        except BaseException:
            # Nothing that could be taken for a result.
            out[...] = np.nan
            raise

    def _combine(
        self, partials: Array, ids: Array, norm_weight: Array | None, eps: float, out: Array
    ) -> None:
        chosen = self._chosen(ids)
        header = self._buffers.own("header")
        sent = []
        for source, count in enumerate(self._buffers.own("counts")):
            first = self._layout.row(source, 0)
            (token_idx,) = (header[first : first + count, 0] != EMPTY_SOURCE).nonzero()
            if token_idx.size:
                row = first + token_idx
                self._buffers.at(source, "slots")[0, token_idx, self._rank] = partials[row]
                sent.append(row)
        if sent:
            # Before the flags go up: with them the next step's tokens may come.
            self._empty(np.concatenate(sent))
        self._raise_flags("combine_flags", Phase.COMBINE, 1)
        self._wait_flags("combine_flags", Phase.COMBINE)
        self._empty_absent()
        self._reduce(chosen, norm_weight, eps, out)

    def finish(self) -> None:
        """Do nothing: every call returns with its work done."""

    closes_alone = True

    def close(self) -> None:
        """Give the buffers back. Local: peers keep their mappings."""
        self._buffers.close()
        self._memory.close()

    def _chosen(self, ids: Array) -> npt.NDArray[np.bool_]:
        """Which ranks each token goes to, `[T, ranks]`."""
        # The extra column takes the owner -1 of ids that select nobody.
        chosen = np.zeros((ids.shape[0], self._config.ranks + 1), np.bool_)
        np.put_along_axis(chosen, self._config.owner_of(ids).astype(np.intp), True, axis=1)
        chosen[:, self._absent] = False
        return chosen[:, :-1]

    def _reduce(
        self,
        chosen: npt.NDArray[np.bool_],
        norm_weight: Array | None,
        eps: float,
        out: Array,
    ) -> None:
        slots = self._buffers.own("slots")[0]
        total = np.zeros(out.shape, np.float32)
        with np.errstate(all="ignore"):
            for rank in range(self._config.ranks):
                (token_idx,) = chosen[:, rank].nonzero()
                total[token_idx] += slots[token_idx, rank].astype(np.float32)
            summed = total.astype(ml_dtypes.bfloat16)
        out[...] = summed if norm_weight is None else rms_norm(summed, norm_weight, eps)

    def _empty_absent(self) -> None:
        """Empty what ranks that were only slow have sent, though nobody waits for them any more."""
        for absent in self._absent:
            first = self._layout.row(absent, 0)
            self._empty(slice(first, first + self._layout.stride))

    def _empty(self, rows: slice | npt.NDArray[np.intp]) -> None:
        own = self._buffers.own
        own("header")[rows, 0] = EMPTY_SOURCE
        own("ids")[rows] = self._config.empty_id(self._rank)
        own("weights")[rows] = 0
        # A block of NaNs left scale 255, itself a NaN, and an empty row must be finite. By bytes:
        # E8M0 has no zero, and NumPy would write the number 0 as NaN.
        own("scales").view(np.uint8)[rows] = 0

    def _raise_flags(self, name: str, phase: Phase, value: int) -> None:
        for peer in self._present:
            self._buffers.at(peer, name)[self._rank, 0] = value
            self._memory.ring(peer, phase, self._step)

    def _wait_flags(self, name: str, phase: Phase) -> npt.NDArray[np.int64]:
        timeout_s = self._config.timeout_s + self._config.grace_s * (self._step == 1)
        self._memory.wait(self._present, phase, self._step, timeout_s, phase.name.lower())
        flags = self._buffers.own(name)[:, 0]
        values: npt.NDArray[np.int64] = flags.astype(np.int64)
        flags[:] = 0
        return values
