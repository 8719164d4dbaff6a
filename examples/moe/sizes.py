"""What the kernels are compiled for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import ep
    from moe.model import Gate, Model

TILE = 16
"""Rows that a warp multiplies at once: M of the tensor cores' BF16 instruction."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Lengths, the same on every rank.

    Attributes
    ----------
    hidden, intermediate, experts, top_k : int
    rows : int
        Receive rows.
    local_experts : int
        Most that a rank owns.
    gate : Gate
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    rows: int
    local_experts: int
    gate: Gate

    @classmethod
    def of(cls, model: Model, layout: ep.EpLayout) -> Self:
        """Sizes of `model` on the ranks of `layout`."""
        return cls(
            model.hidden,
            model.intermediate,
            model.experts,
            model.top_k,
            layout.rows,
            len(layout.config.local_experts(0)),
            model.gate,
        )

    @property
    def pairs(self) -> int:
        """Choices that all rows may have for this rank's experts."""
        return self.rows * self.top_k

    @property
    def tiles(self) -> int:
        """Most tiles that they fill, the last one of each expert perhaps in part."""
        return self.pairs // TILE + self.local_experts

    @property
    def slots(self) -> int:
        """Places for pairs."""
        return self.tiles * TILE
