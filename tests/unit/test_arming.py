"""What a buffer holds between steps."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep import EpConfig, EpLayout
from ep.arming import fills
from ep.config import Protocol
from tests.armed import armed_bytes
from tests.strategies import configs


def field(layout, buffer, name):
    where = layout.fields[name]
    return buffer[where.offset_bytes :][: where.size_bytes].view(np.uint32)


SMALL = st.builds(
    lambda config, protocol: dataclasses.replace(config, protocol=protocol),
    configs(ranks=9, hidden=256, experts=40, top_k=4, max_tokens=20),
    st.sampled_from(Protocol),
)


@given(SMALL, st.data(), st.integers(0, 2**63 - 1))
def test_every_word_of_every_field(config, data, step):
    layout = EpLayout(config)
    rank = data.draw(st.integers(0, config.ranks - 1))
    buffer = armed_bytes(layout, rank, step)
    is_fence_free = config.protocol is Protocol.FENCE_FREE
    words = {
        "header": 0xFFFFFFFF,
        "ids": config.empty_id(rank),
        "slots": 0xFFFFFFFF if is_fence_free else 0,
        "staging": 0xFFFFFFFF,
    }
    low, high = step & 0xFFFFFFFF, step >> 32
    for name in layout.fields:
        got = field(layout, buffer, name)
        want = np.full_like(got, words.get(name, 0))
        lines = want.reshape(-1, 32)
        if name == "control":
            lines[: 1 + is_fence_free, :2] = low, high
        if name == "announcements":
            lines[:, 4:6] = low, high
        np.testing.assert_array_equal(got, want, err_msg=name)


@given(st.one_of(SMALL, configs()))
def test_nothing_is_written_beyond_the_buffer(config):
    layout = EpLayout(config)
    for fill in fills(layout):
        last = fill.offset_bytes + (fill.height - 1) * fill.pitch_bytes + 4 * fill.width_words
        assert 0 <= fill.offset_bytes < last <= layout.total_bytes
        assert fill.offset_bytes % 4 == 0
        assert fill.pitch_bytes >= 4 * fill.width_words


@pytest.mark.parametrize("rank", range(3))
def test_empty_ids_by_hand(rank):
    layout = EpLayout(EpConfig(ranks=3, hidden=32, experts=8, top_k=2, max_tokens=1))
    ids = field(layout, armed_bytes(layout, rank), "ids")
    assert set(ids.tolist()) == {(3, 0, 0)[rank]}
