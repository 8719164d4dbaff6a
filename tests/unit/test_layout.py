"""`EpLayout`: properties that hold for every config."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import ml_dtypes  # noqa: F401 - names the dtypes
import numpy as np
import pytest
from hypothesis import example, given

from ep import EpConfig, EpLayout
from ep.layout import CHUNK_BYTES, LINE_BYTES, PARITIES, SOURCE_BITS
from tests.strategies import configs

RECEIVE = ("x", "scales", "ids", "weights", "header")
LARGEST = EpConfig(ranks=72, hidden=16384, experts=896, top_k=32, max_tokens=65535)
any_config = given(configs())


def extent_bytes(field):
    """Bytes from the first to the last, by the field's own shape and strides."""
    last = sum((n - 1) * s for n, s in zip(field.shape, field.strides_bytes, strict=True))
    return last + np.dtype(field.dtype).itemsize


@any_config
@example(LARGEST)
def test_fields_follow_each_other_on_whole_lines(config):
    layout = EpLayout(config)
    fields = list(layout.fields.values())
    assert fields[0].offset_bytes == 0
    for field in fields:
        assert field.offset_bytes % LINE_BYTES == 0
        assert field.size_bytes % LINE_BYTES == 0
        assert (
            extent_bytes(field)
            <= field.size_bytes
            < extent_bytes(field) + 2 * LINE_BYTES + (field.strides_bytes[0])
        )
        assert field.strides_bytes[-1] == np.dtype(field.dtype).itemsize
        for (length, inner), outer in zip(
            list(zip(field.shape, field.strides_bytes, strict=True))[1:],
            field.strides_bytes,
            strict=False,
        ):
            assert outer >= length * inner
    for before, after in pairwise(fields):
        assert before.offset_bytes + before.size_bytes == after.offset_bytes
    assert layout.total_bytes == fields[-1].offset_bytes + fields[-1].size_bytes
    assert type(layout.total_bytes) is int


@any_config
@example(LARGEST)
def test_no_line_holds_rows_of_two_sources(config):
    layout = EpLayout(config)
    assert config.max_tokens <= layout.stride < config.max_tokens + LINE_BYTES
    for name in RECEIVE:
        field = layout.fields[name]
        assert field.shape[0] == layout.rows
        for source in range(config.ranks):
            start = field.offset_bytes + layout.row(source, 0) * field.strides_bytes[0]
            assert start % LINE_BYTES == 0


@any_config
@example(LARGEST)
def test_no_line_holds_slots_or_flags_of_two_ranks(config):
    layout = EpLayout(config)
    slots = layout.fields["slots"]
    assert slots.strides_bytes[2] % LINE_BYTES == 0
    assert slots.strides_bytes[2] >= 2 * config.hidden
    assert slots.strides_bytes[1] == config.ranks * slots.strides_bytes[2]
    assert slots.strides_bytes[0] == config.max_tokens * slots.strides_bytes[1]
    for name in ("dispatch_flags", "combine_flags"):
        assert layout.fields[name].strides_bytes[0] == LINE_BYTES


@any_config
@example(LARGEST)
def test_no_line_holds_staged_rows_of_two_sources_or_steps(config):
    layout = EpLayout(config)
    staging, lines = layout.fields["staging"], layout.fields["announcements"]
    assert staging.shape[3] * 4 == layout.row_chunks * CHUNK_BYTES
    # Whole lines, so that what a warp stores is whole packets.
    assert staging.strides_bytes[2] - staging.shape[3] * 4 in range(LINE_BYTES)
    assert staging.strides_bytes[2] % LINE_BYTES == 0
    assert staging.strides_bytes[1] % LINE_BYTES == staging.strides_bytes[0] % LINE_BYTES == 0
    assert staging.strides_bytes[1] >= config.max_tokens * staging.strides_bytes[2]
    assert lines.strides_bytes == (config.ranks * LINE_BYTES, LINE_BYTES, 4)
    flags = EpLayout(dataclasses.replace(config, protocol="flags"))
    # The same but for halves of what one is enough for.
    assert list(flags.fields) == list(layout.fields)[:-2]
    assert flags.fields["slots"].shape == (1, *layout.fields["slots"].shape[1:])
    assert layout.fields["slots"].shape[0] == PARITIES


@any_config
def test_a_staged_row_has_room_for_all_of_a_token(config):
    layout = EpLayout(config)
    assert layout.x_chunks * CHUNK_BYTES == config.hidden
    assert layout.scale_chunks * CHUNK_BYTES >= config.hidden // 32
    assert layout.first_choice_chunk == layout.x_chunks + layout.scale_chunks
    assert layout.head_chunk == layout.first_choice_chunk + config.top_k
    assert layout.row_chunks == layout.head_chunk + 1


@any_config
def test_stride_is_the_least_that_works(config):
    layout = EpLayout(config)
    sizes = [layout.fields[name].strides_bytes[0] for name in RECEIVE]
    fewer = [
        stride
        for stride in range(config.max_tokens, layout.stride)
        if all(stride * size % LINE_BYTES == 0 for size in sizes)
    ]
    assert not fewer


@any_config
def test_layout_depends_on_the_config_alone(config):
    assert EpLayout(config).fields == EpLayout(EpConfig(**vars(config))).fields


def test_largest_buffer_needs_64_bits_and_its_source_words_fit_32():
    layout = EpLayout(LARGEST)
    assert layout.rows == 72 * 65536
    assert layout.total_bytes > 2**37
    assert (71 << SOURCE_BITS | 65534) < 2**31


@pytest.mark.parametrize(
    ("name", "stride"), [("kimi_k3", 8), ("deepseek_v3", 8), ("gpt_oss_120b", 64)]
)
def test_stride_of_known_shapes(name, stride):
    assert EpLayout(EpConfig.load(name, ranks=16, max_tokens=8)).stride == stride


def test_the_document_shows_the_table():
    text = (Path(__file__).resolve().parents[2] / "docs" / "layout.md").read_text()
    assert EpLayout(EpConfig.load("kimi_k3", ranks=16, max_tokens=8)).table() in text
