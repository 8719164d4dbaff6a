"""Write what a buffer holds between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep.arming import fills
from ep.memory import cuda

if TYPE_CHECKING:
    from ep.layout import EpLayout


def arm(address: int, layout: EpLayout, rank: int, step: int = 0) -> None:
    """Arm `rank`'s buffer as after `step`, and wait for that. Local.

    No kernel of any rank may use the buffer meanwhile, and none until every rank has armed its own.

    Parameters
    ----------
    address : int
        Of the buffer on the current device, a multiple of 128.
    layout : EpLayout
    rank, step : int
    """
    for fill in fills(layout):
        to, word = address + fill.offset_bytes, fill.value(layout, rank, step)
        if fill.height == 1:
            cuda.driver("MemsetD32Async", to, word, fill.width_words, 0)
        else:
            size = (fill.width_words, fill.height)
            cuda.driver("MemsetD2D32Async", to, fill.pitch_bytes, word, *size, 0)
    cuda.synchronize()
