"""Steps with payloads that the fence-free protocol could take for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.world import OddStep


class AllOnesStep(OddStep):
    """All bits of tokens, weights and partials are ones: how a chunk looks that is not there."""

    def inputs(self, rank: int) -> Any:
        made = super().inputs(rank)
        made.x.view(np.uint16)[:] = 0xFFFF
        weights = np.full(made.weights.shape, 0xFFFFFFFF, np.uint32).view(np.float32)
        return made._replace(weights=weights)

    def partials(self, rank: int, source: Any) -> Any:
        rows = super().partials(rank, source)
        rows.view(np.uint16)[np.asarray(source) >= 0] = 0xFFFF
        return rows
