"""What every home of symmetric memory gives: the same bytes on each rank, addressable by all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ep.layout import Field


class SymmetricMemory(Protocol):
    """One buffer of `size_bytes` on every rank, zeroed, seen by all.

    Attributes
    ----------
    size_bytes : int
    addresses : tuple of int
        `[ranks + 1]` base addresses in this process: every rank's buffer, and last this rank's
        buffer through its own mapping. A rank reaches its own buffer through the last one only.
    """

    size_bytes: int
    addresses: tuple[int, ...]

    def array(self, where: int, field: Field) -> Any:
        """View `field` of the buffer behind `addresses[where]`. Local."""
        ...

    def close(self) -> None:
        """Give the memory back. Collective where the home says so."""
        ...
