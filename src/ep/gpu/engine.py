"""The GPU backend: buffers in symmetric device memory, kernels on the caller's stream."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.arguments import BF16
from ep.buffers import EpBuffers
from ep.config import Protocol
from ep.errors import StateError
from ep.gpu import hot
from ep.gpu.arrays import device_array, stream_handle
from ep.gpu.loading import load_kernels, read_tuning
from ep.kernels.compile import Kind, Launcher
from ep.kernels.grid import HERALDS, Grid, combine_ctas, combine_grid, dispatch_ctas, dispatch_grid
from ep.kernels.options import KernelOptions, Pdl
from ep.memory import cuda
from ep.memory.arm import arm
from ep.memory.local import LocalMemory
from ep.memory.nvshmem import NvshmemMemory
from ep.record import RECORD_WORDS, STAMPS, HangRecord, Phase, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from ep.bootstrap import World
    from ep.kernels.tuning import PerSm
    from ep.layout import EpLayout
    from ep.memory import SymmetricMemory


class GpuEngine:
    """Moves the tokens of one exchange with kernels. Arguments are checked by the caller.

    Making one is collective: it allocates the buffers, if it is not given them, and compiles or
    loads every kernel, so that no later call has to, not even the first one inside a capture.

    Raises
    ------
    HeapError
        On every rank, if memory is short on one or cannot be reached by another.
    """

    def __init__(
        self,
        world: World,
        layout: EpLayout,
        options: KernelOptions | None = None,
        buffers: EpBuffers | None = None,
    ) -> None:
        assert world.device is not None
        self._device = world.device
        self._calls = hot.Calls(int(world.device.context))
        self._config = layout.config
        self._rank = world.rank
        config = layout.config
        self._is_fence_free = config.protocol is Protocol.FENCE_FREE
        # The flag protocol knows no first step.
        bounds_s = (config.timeout_s, config.grace_s)[: 1 + self._is_fence_free]
        self._bounds_ns = [int(bound_s * 1e9) for bound_s in bounds_s]
        if options is None:
            options = KernelOptions(pdl=Pdl.LATE if world.shares_gpus else Pdl.EARLY)
        self._tuning = read_tuning(world, layout.config)
        self._imposed: Mapping[Kind, PerSm] | None = None
        self._sms = self._device.num_sms / world.ranks_on_gpu
        self._shares_context = world.is_one_process and world.shares_gpus
        self._last_stream: int | None = None
        self._stamped: dict[Kind, cuda.DeviceArray] = {}
        self.closes_alone = world.is_one_process or buffers is not None
        with contextlib.ExitStack() as undo:
            self._make(world, layout, options, buffers, undo)
            self._closing = undo.pop_all()
        if not self.closes_alone:
            # What NVSHMEM gave is given back by all ranks or none, so not when this one fails.
            self._closing.callback(self._buffers.close)
        self._buffers.is_taken = True

    def _make(
        self,
        world: World,
        layout: EpLayout,
        options: KernelOptions,
        buffers: EpBuffers | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Load and allocate; `undo` gets what gives it back."""
        self._launch = load_kernels(world, layout, options, undo)
        # Ranks that share a GPU must all fit on it at once, and know nothing of each other.
        self._resident = {
            (kind, norm): self._share_of_gpu(launch, world.ranks_on_gpu)
            for kind, launchers in self._launch.items()
            for norm, launch in launchers.items()
        }
        if buffers is None:
            home = LocalMemory if world.is_one_process else NvshmemMemory
            memory: SymmetricMemory = home.allocate(world, self._device, layout.total_bytes)
            buffers = EpBuffers(layout, memory, world.rank)
        if self.closes_alone:
            undo.callback(buffers.close)
        self._buffers = buffers
        self._record = cuda.PinnedWords(RECORD_WORDS)
        undo.callback(self._record.close)
        # NumPy takes its time to give one word.
        where = self._record.words[Word.STATE :].ctypes.data
        self._state = ctypes.c_uint32.from_address(where)
        self._table = cuda.allocate(8 * len(buffers.addresses))
        undo.callback(cuda.free, self._table)
        self._ended = cuda.driver("EventCreate", _event_flags())
        undo.callback(cuda.driver, "EventDestroy", self._ended)
        if options.stamps:
            self._stamped = self._make_stamps()

    @property
    def buffers(self) -> EpBuffers:
        """The receive rows and all else, as views."""
        return self._buffers

    def array(
        self, name: str, array: Any, dtype: np.dtype[Any], shape: Any, *, out: bool = False
    ) -> cuda.DeviceArray:
        """Check one argument."""
        return device_array(name, array, dtype, shape, device=self._device.ordinal, out=out)

    def stream(self, stream: Any) -> int:
        """Check a stream: the one of the last call, or any once that call's work has ended."""
        handle = stream_handle(stream)
        self.resume(handle)
        return handle

    def resume(self, stream: int) -> None:
        """Check what may have changed since `stream` gave it."""
        self._calls.set_context()
        last = self._last_stream
        if last == stream or last is None or self._calls.is_capturing(stream):
            return
        if not self._has_ended():
            raise StateError(
                f"this Exchange is still at work on stream {last:#x}; it serves one stream "
                f"at a time: synchronize that one before using {stream:#x}, or make one for each"
            )

    def empty(self, shape: tuple[int, int], stream: int) -> cuda.DeviceArray:
        """Make a BF16 array for a result; not while a graph is captured."""
        if self._calls.is_capturing(stream):
            raise StateError("nothing is allocated during graph capture: pass out= to combine")
        if self._shares_context:
            # Allocating can wait for the device, and so for a kernel that waits for this rank.
            raise StateError("ranks of one process that share a GPU pass out= to combine")
        return cuda.DeviceArray.empty(shape, BF16.name, self._device.ordinal)

    def values(self, array: cuda.DeviceArray, stream: int) -> npt.NDArray[Any] | None:
        """Copy an argument to the host; None while a graph is captured."""
        return None if self._calls.is_capturing(stream) else array.numpy(stream)

    def poll(self) -> None:
        """Raise `EpTimeout` if a kernel's wait has expired. Does not wait for the device."""
        if self._state.value:
            record = HangRecord.read(self._record.words)
            if record is not None:
                raise record.error(self._seen(record))

    def _seen(self, record: HangRecord) -> dict[int, int]:
        """Last step that each rank was seen in, as far as its words have come by now."""
        if not self._is_fence_free:
            # Who has not dispatched has combined the step before.
            last = record.step - (record.phase is Phase.DISPATCH)
            return dict.fromkeys(range(self._config.ranks), last)
        with cuda.anywhere(self._device.context):
            # On a stream that waits for no other: nobody knows what the device is at.
            stream = cuda.driver("StreamCreate", cuda.non_blocking())
            words = self._buffers.own("announcements").numpy(int(stream)).astype(np.int64)
            cuda.driver("StreamDestroy", stream)
        steps = (words[..., 0] | words[..., 1] << 32).max(axis=0)
        return {rank: int(step) for rank, step in enumerate(steps)}

    def dispatch(
        self,
        x: cuda.DeviceArray,
        ids: cuda.DeviceArray,
        weights: cuda.DeviceArray,
        stream: int,
    ) -> None:
        """Enqueue dispatch."""
        ctas, args = self._dispatch_args(x, ids, weights)
        self._launch[Kind.DISPATCH][False](stream, ctas, *args)
        self._last_stream = stream

    def prepare_dispatch(
        self,
        x: cuda.DeviceArray,
        ids: cuda.DeviceArray,
        weights: cuda.DeviceArray,
        stream: int,
    ) -> Callable[[], None]:
        """Give what enqueues dispatch with these."""
        ctas, args = self._dispatch_args(x, ids, weights)
        bound = hot.Bound(self._launch[Kind.DISPATCH][False], stream, ctas, *args)

        def launch() -> None:
            bound()
            self._last_stream = stream

        return launch

    def _dispatch_args(
        self, x: cuda.DeviceArray, ids: cuda.DeviceArray, weights: cuda.DeviceArray
    ) -> tuple[int, list[float]]:
        """CTAs and arguments of dispatch."""
        tokens = x.shape[0]
        extra, ctas = self._dispatch_grid(tokens)
        arrays = (x.address, ids.address, weights.address)
        record = (self._record.device_address, *self._bounds_ns)
        return ctas, [self._table, *arrays, *record, self._rank, tokens, *extra]

    def combine(
        self,
        partials: cuda.DeviceArray,
        ids: cuda.DeviceArray,
        norm_weight: cuda.DeviceArray | None,
        eps: float,
        out: cuda.DeviceArray,
        stream: int,
    ) -> None:
        """Enqueue combine."""
        ctas, args = self._combine_args(partials, ids, norm_weight, eps, out)
        self._launch[Kind.COMBINE][norm_weight is not None](stream, ctas, *args)
        hot.Mark(int(self._ended), stream)()

    def prepare_combine(
        self,
        partials: cuda.DeviceArray,
        ids: cuda.DeviceArray,
        norm_weight: cuda.DeviceArray | None,
        eps: float,
        out: cuda.DeviceArray,
        stream: int,
    ) -> Callable[[], None]:
        """Give what enqueues combine with these."""
        ctas, args = self._combine_args(partials, ids, norm_weight, eps, out)
        launcher = self._launch[Kind.COMBINE][norm_weight is not None]
        bound = hot.Bound(launcher, stream, ctas, *args)
        mark = hot.Mark(int(self._ended), stream)

        def launch() -> None:
            bound()
            mark()

        return launch

    def _combine_args(
        self,
        partials: cuda.DeviceArray,
        ids: cuda.DeviceArray,
        norm_weight: cuda.DeviceArray | None,
        eps: float,
        out: cuda.DeviceArray,
    ) -> tuple[int, list[float]]:
        """CTAs and arguments of combine."""
        tokens = ids.shape[0]
        extra, ctas = self._combine_grid(tokens, norm=norm_weight is not None)
        gains = norm_weight.address if norm_weight is not None else 0
        arrays = (partials.address, ids.address, gains, out.address)
        record = (self._record.device_address, *self._bounds_ns)
        return ctas, [self._table, *arrays, *record, eps, self._rank, tokens, *extra]

    def impose(self, choice: Mapping[Kind, PerSm] | None) -> None:
        """Use these limits of the grids from the next call on; None: those of the tuning table.

        For `ep.tune` alone. A grid is an argument of a launch, so that nothing is compiled anew; a
        captured graph keeps the grids it was captured with. Right results do not depend on it.
        """
        self._imposed = choice

    def per_sm(self, kind: Kind, tokens: int) -> PerSm:
        """Limits that a launch with `tokens` tokens has."""
        if self._imposed is not None:
            return self._imposed[kind]
        return self._tuning.find(kind, tokens)

    def grid(self, kind: Kind, tokens: int, *, norm: bool) -> Grid:
        """Grid of a launch of the fence-free protocol; `norm` says nothing to dispatch."""
        limits = self.per_sm(kind, tokens).limits(self._sms)
        if kind is Kind.DISPATCH:
            return dispatch_grid(self._config, tokens, self._resident[kind, False], limits)
        return combine_grid(self._config, tokens, self._resident[kind, norm], limits)

    def clear_stamps(self, stream: int) -> None:
        """Enqueue that all stamps are 0, also while a graph is captured."""
        for stamped in self._stamped.values():
            size_bytes = stamped.shape[0] * STAMPS * 8
            cuda.driver("MemsetD8Async", stamped.address, 0, size_bytes, stream)

    def stamps(self, kind: Kind, stream: int) -> npt.NDArray[np.uint64]:
        """Stamps of kernels built with them, in ns, `[CTAs, STAMPS]`. Waits for `stream`.

        A stamp that no CTA has come to since they were cleared is 0.
        """
        array: npt.NDArray[np.uint64] = self._stamped[kind].numpy(stream).view(np.uint64)
        return array

    def _make_stamps(self) -> dict[Kind, cuda.DeviceArray]:
        shapes = {kind: self._resident[kind, False] for kind in (Kind.DISPATCH, Kind.COMBINE)}
        made = {}
        for kind, ctas in shapes.items():
            more = HERALDS + max(ctas, self._resident[kind, kind is Kind.COMBINE])
            made[kind] = cuda.DeviceArray.empty((more, STAMPS * 2), "uint32", self._device.ordinal)
            cuda.fill(made[kind].address, more * STAMPS * 8, 0, 0)
        return made

    def finish(self) -> None:
        """Wait for all work of this rank's GPU."""
        self._device.use()
        cuda.synchronize()

    def close(self) -> None:
        """Give everything back. Collective with NVSHMEM."""
        self._device.use()
        # Kernels, too: the driver keeps them for the process otherwise, some for each exchange.
        self._closing.close()

    def _dispatch_grid(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Arguments that the protocol's kernel takes more than the other's, and CTAs."""
        if not self._is_fence_free:
            return (), dispatch_ctas(tokens)
        grid = self.grid(Kind.DISPATCH, tokens, norm=False)
        return (grid.senders, self._stamps(Kind.DISPATCH)), HERALDS + grid.ctas

    def _combine_grid(self, tokens: int, *, norm: bool) -> tuple[tuple[int, ...], int]:
        """The same for combine."""
        if not self._is_fence_free:
            return (), combine_ctas(self._config, tokens, self._resident[Kind.COMBINE, norm])
        grid = self.grid(Kind.COMBINE, tokens, norm=norm)
        return (grid.senders, self._stamps(Kind.COMBINE)), HERALDS + grid.ctas

    def _share_of_gpu(self, launch: Launcher, ranks_on_gpu: int) -> int:
        """CTAs of a kernel that may take roles, all resident at once with those of other ranks."""
        resident = launch.resident_ctas(self._device.num_sms) // ranks_on_gpu
        return max(2, resident - (HERALDS if self._is_fence_free else 0))

    def _stamps(self, kind: Kind) -> int:
        """Where a kernel built with stamps puts them; nowhere for others."""
        return self._stamped[kind].address if self._stamped else 0

    @property
    def step(self) -> int:
        """The last step that this rank has begun."""
        # In both protocols the step that dispatch counts is in this place.
        low, high = self._buffers.own("control").numpy(0)[0, :2].tolist()
        return int(low | high << 32 if self._is_fence_free else low)

    def rearm(self, step: int, excluded: frozenset[int]) -> None:
        """Make every row and what announces itself empty, and all counters as after `step`."""
        addresses = np.array(self._buffers.addresses, np.int64)
        addresses[sorted(excluded)] = 0
        cuda.upload(self._table, addresses)
        arm(self._buffers.addresses[-1], self._buffers.layout, self._rank, step)
        self._record.words[:] = 0

    def _has_ended(self) -> bool:
        from cuda.bindings import driver

        (status,) = driver.cuEventQuery(self._ended)
        return bool(status == driver.CUresult.CUDA_SUCCESS)


def _event_flags() -> int:
    from cuda.bindings import driver

    return int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
