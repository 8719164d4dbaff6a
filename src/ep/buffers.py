"""`EpBuffers`: a layout laid over symmetric memory, as typed views."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ep.bootstrap.ranks import Backend
from ep.config import Protocol
from ep.errors import ArgumentError, shown
from ep.layout import EpLayout
from ep.memory.cuda import Device
from ep.memory.given import GivenHostMemory, GivenMemory, current_device, known_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep.config import EpConfig
    from ep.memory import SymmetricMemory


def layout_of(config: EpConfig, backend: str) -> EpLayout:
    """Give the layout that a backend uses for `config`; raises `ArgumentError` for none."""
    given: object = backend
    if given not in list(Backend):
        raise ArgumentError(
            f"backend={shown(backend)}: allowed are {' and '.join(Backend)}, as World.backend says"
        )
    if backend == Backend.HOST:
        # Flags in shared memory: nothing is staged.
        config = dataclasses.replace(config, protocol=Protocol.FLAGS)
    return EpLayout(config)


class EpBuffers:
    """Fields of `layout` as arrays: this rank's and its peers'.

    An exchange makes its own, or takes those of an engine: see `from_addresses`.

    Attributes
    ----------
    layout : EpLayout
    rank : int
    addresses : tuple of int
        `[ranks + 1]` base addresses; the last is this rank's own mapping.
    device : int or None
        Ordinal of the GPU that they are mapped on; None for memory of the host.
    is_taken : bool
        Whether an exchange works on them; until it is closed in order, no other may.
    """

    is_taken = False

    def __init__(self, layout: EpLayout, memory: SymmetricMemory, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.addresses = memory.addresses
        self.device = getattr(memory, "ordinal", None)
        self._memory = memory
        self._views: dict[tuple[int, str], Any] = {}

    @classmethod
    def from_addresses(
        cls,
        config: EpConfig,
        rank: int,
        own: int,
        peers: Sequence[Any],
        *,
        backend: str = Backend.GPU,
        device: Any = None,
    ) -> EpBuffers:
        """Lay the fields over memory that the engine has made and mapped. Local.

        The memory is the engine's: it is never freed here, and must last until every rank has
        closed its exchange. An exchange writes all of it when it is armed. They serve one exchange
        at a time.

        Parameters
        ----------
        config : EpConfig
        rank : int
            This rank.
        own : int
            Address of this rank's buffer, by its own mapping: `size_bytes(config, backend)` from
            a multiple of 128 on.
        peers : sequence of int
            `[ranks]` addresses at which this rank's GPU, or on the host this process, loads from
            and stores into every rank's buffer. The own entry is not looked at.
        backend : {"gpu", "host"}
            Of the World that the exchange is made in.
        device : int, optional
            Ordinal of this rank's GPU; that of the current context if not given.

        Returns
        -------
        EpBuffers

        Raises
        ------
        ArgumentError
            If addresses are missing, not aligned, or overlap.
        HeapError
            If the driver says that the GPU cannot use some of it, or on the host the system that
            this process cannot.
        """
        layout = layout_of(config, backend)
        if type(rank) is not int or not 0 <= rank < config.ranks:
            raise ArgumentError(f"rank is {shown(rank)}; allowed is 0..{config.ranks - 1}")
        given = (rank, own, peers, config.ranks, layout.total_bytes)
        if backend == Backend.HOST:
            if device is not None:
                raise ArgumentError(f"device is {shown(device)}; leave it out on the host")
            return cls(layout, GivenHostMemory.at(*given), rank)
        ordinal = current_device() if device is None else known_device(device)
        return cls(layout, GivenMemory.at(Device.open(ordinal), *given), rank)

    @staticmethod
    def size_bytes(config: EpConfig, backend: str = Backend.GPU) -> int:
        """Bytes of each rank's buffer on `backend`, "gpu" or "host". Local.

        The backends lay a buffer out in two ways: a size is that of one of them.
        """
        return layout_of(config, backend).total_bytes

    def own(self, name: str) -> Any:
        """View field `name` of this rank's buffer, or "source", through its own mapping."""
        return self._view(self.layout.config.ranks, name)

    def at(self, rank: int, name: str) -> Any:
        """View field `name` of `rank`'s buffer; for this rank itself the same as `own`."""
        return self._view(self.layout.config.ranks if rank == self.rank else rank, name)

    def close(self) -> None:
        """Drop the views and give the memory back. Collective where the memory says so."""
        self._views.clear()
        self._memory.close()
        self.is_taken = False

    def _view(self, where: int, name: str) -> Any:
        key = (where, name)
        if key not in self._views:
            layout = self.layout
            field = layout.source if name == "source" else layout.fields[name]
            self._views[key] = self._memory.array(where, field)
        return self._views[key]
