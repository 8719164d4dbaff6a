"""How chunks of the fence-free protocol are coded: nothing looks like nothing."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest

from ep import reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
)

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)


def scales_of_every_bf16():
    """Scale bytes of blocks with one number each, of every pattern."""
    x = np.zeros((1 << 16, 32), np.uint16)
    x[:] = EVERY_BF16[:, None]
    elements, scales = reference.mxfp8_quantize(x.view(ml_dtypes.bfloat16))
    return elements.view(np.uint8), scales.view(np.uint8)


def test_sealed_scales_never_end_in_nothing_and_open_again():
    from ep.device import wire

    _, scales = scales_of_every_bf16()
    found = np.unique(scales).tolist()
    assert 255 in found
    for byte in found:
        word = byte * 0x01010101
        sealed = wire.seal_scales((word,) * 4)
        assert all(0 <= one < 1 << 32 and one >> 24 != 0xFF for one in sealed), byte
        assert wire.open_scales(sealed) == (word,) * 4
    # Bytes do not carry into each other.
    words = (0x00FF00FE, 0xFB03F7FF, 0x01020304, 0xFEFF0000)
    assert wire.open_scales(wire.seal_scales(words)) == words
    assert wire.seal_scales((0x000000FC,) * 4) == (0x04040400,) * 4


def test_no_element_is_all_ones():
    elements, _ = scales_of_every_bf16()
    assert not (elements == 0xFF).any()
    assert not (elements == 0x7F).any()
