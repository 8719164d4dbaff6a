"""How chunks of the fence-free protocol are coded: nothing looks like nothing."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest

from ep import reference
from ep.layout import NOTHING

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
    assert 251 not in found
    for byte in found:
        words = (np.uint32(byte * 0x01010101),) * 4
        with np.errstate(over="ignore"):
            sealed = wire.seal_scales(words)
            assert wire.open_scales(sealed) == words
        assert sealed[3] != NOTHING
    # A 32-bit sum is one to one: nothing else gives all ones.
    assert NOTHING == (0xFBFBFBFB + 0x04040404) & 0xFFFFFFFF


def test_no_element_is_all_ones():
    elements, _ = scales_of_every_bf16()
    assert not (elements == 0xFF).any()
    assert not (elements == 0x7F).any()
