"""What arming writes, in NumPy."""

import numpy as np

from ep.arming import fills


def armed_bytes(layout, rank, step=0):
    """Bytes of a fresh buffer, uint8 `[total_bytes]`."""
    buffer = np.full(layout.total_bytes, 0xA5, np.uint8)
    for fill in fills(layout):
        words = np.ndarray(
            (fill.height, fill.width_words),
            np.uint32,
            buffer.data,
            fill.offset_bytes,
            (fill.pitch_bytes, 4),
        )
        words[:] = fill.value(layout, rank, step)
    return buffer
