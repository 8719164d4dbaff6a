"""`EpBuffers`: a layout laid over symmetric memory, as typed views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep.layout import EpLayout
    from ep.memory import SymmetricMemory


class EpBuffers:
    """Fields of `layout` as arrays: this rank's and its peers'.

    Attributes
    ----------
    layout : EpLayout
    rank : int
    addresses : tuple of int
        `[ranks + 1]` base addresses; the last is this rank's own mapping.
    """

    def __init__(self, layout: EpLayout, memory: SymmetricMemory, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.addresses = memory.addresses
        self._memory = memory
        self._views: dict[tuple[int, str], Any] = {}

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

    def _view(self, where: int, name: str) -> Any:
        key = (where, name)
        if key not in self._views:
            layout = self.layout
            field = layout.source if name == "source" else layout.fields[name]
            self._views[key] = self._memory.array(where, field)
        return self._views[key]
