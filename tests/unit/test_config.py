"""`EpConfig`: limits, shapes as data, and who owns which expert."""

import dataclasses
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep import ArgumentError, ConfigError, DispatchFormat, EpConfig, Protocol
from tests.strategies import configs

GOOD: dict[str, Any] = {"ranks": 4, "hidden": 64, "experts": 10, "top_k": 2, "max_tokens": 8}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("ranks", 0, "1..72"),
        ("ranks", 73, "1..72"),
        ("ranks", 2.0, "an integer"),
        ("ranks", True, "an integer"),
        ("ranks", "4", "an integer"),
        ("hidden", 0, "32..16384"),
        ("hidden", 16416, "32..16384"),
        ("hidden", 48, "a multiple of 32"),
        ("experts", 0, "1..2147483646"),
        ("experts", 2**31 - 1, "1..2147483646"),
        ("top_k", 0, "1..32"),
        ("top_k", 33, "1..32"),
        ("max_tokens", 0, "1..65535"),
        ("max_tokens", 65536, "1..65535"),
        ("dispatch_format", "fp4", "one of mxfp8"),
        ("protocol", "fences", "one of fence_free, flags"),
        ("timeout_s", 0, "above 0 and at most 86400 seconds"),
        ("timeout_s", -1.0, "above 0 and at most 86400 seconds"),
        ("timeout_s", float("nan"), "above 0 and at most 86400 seconds"),
        ("timeout_s", float("inf"), "above 0 and at most 86400 seconds"),
        ("timeout_s", "10", "a number of seconds"),
    ],
)
def test_each_limit_names_field_value_and_allowed(field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        EpConfig(**(GOOD | {field: value}))
    assert (caught.value.field, caught.value.allowed) == (field, allowed)
    assert str(caught.value) == f"{field}={value!r} is not allowed: {allowed}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("ranks", 1, 72),
        ("hidden", 32, 16384),
        ("experts", 1, 2**31 - 2),
        ("top_k", 1, 32),
        ("max_tokens", 1, 65535),
    ],
)
def test_both_ends_of_each_limit_are_allowed(field, low, high):
    for value in (low, high):
        assert getattr(EpConfig(**(GOOD | {field: value})), field) == value


def test_values_are_made_plain():
    config = EpConfig(**(GOOD | {"ranks": np.int64(3), "timeout_s": 5, "dispatch_format": "mxfp8"}))
    assert type(config.ranks) is int
    assert type(config.timeout_s) is float
    assert config.dispatch_format is DispatchFormat.MXFP8
    assert EpConfig(**(GOOD | {"protocol": "flags"})).protocol is Protocol.FLAGS


def test_config_is_frozen_and_hashable():
    config = EpConfig(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ranks = 5  # type: ignore[misc]
    assert hash(config) == hash(EpConfig(**GOOD))


@pytest.mark.parametrize(
    ("name", "hidden", "experts", "top_k"),
    [
        ("kimi_k3", 3584, 896, 16),
        ("deepseek_v3", 7168, 256, 8),
        ("qwen3_235b", 4096, 128, 8),
        ("gpt_oss_120b", 2880, 128, 4),
    ],
)
def test_shapes_of_the_contract(name, hidden, experts, top_k):
    config = EpConfig.load(name, ranks=16, max_tokens=8)
    assert (config.hidden, config.experts, config.top_k) == (hidden, experts, top_k)
    assert (config.ranks, config.max_tokens, config.timeout_s) == (16, 8, 10.0)


def test_every_shape_loads_and_tells_its_source():
    assert len(EpConfig.available()) >= 10
    folder = Path(__file__).resolve().parents[2] / "configs"
    for name in EpConfig.available():
        EpConfig.load(name, ranks=72, max_tokens=1024)
        table = tomllib.loads((folder / f"{name}.toml").read_text())
        assert len(table["source"]) > 10
        assert table["model"]


def test_load_from_a_file_and_override(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("hidden = 64\nexperts = 7\ntop_k = 3\nmax_tokens = 5\n")
    assert EpConfig.load(path, ranks=2).max_tokens == 5
    assert EpConfig.load(str(path), ranks=2, max_tokens=9, top_k=1).top_k == 1


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("hidden = 64\n", {"ranks": 2}, "it lacks experts, top_k, max_tokens: write that there"),
        ("hidden = 64\nlayers = 3\n", {}, "layers=3 is not allowed: fields are ranks, hidden"),
        ("hidden = ", {}, "config=.* is not allowed: a readable TOML file"),
    ],
)
def test_load_says_what_is_wrong_with_a_file(tmp_path, text, fields, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        EpConfig.load(path, **fields)


def test_load_of_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=re.escape("deepseek_v3") + ".*kimi_k3"):
        EpConfig.load("kimi_k4", ranks=2, max_tokens=1)


@given(configs(experts=1000))
def test_experts_are_split_into_blocks(config):
    blocks = [config.local_experts(rank) for rank in range(config.ranks)]
    assert [expert for block in blocks for expert in block] == list(range(config.experts))
    sizes = [len(block) for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    owners = config.owner_of(np.arange(config.experts))
    assert owners.dtype == np.int32
    assert owners.tolist() == [rank for rank, block in enumerate(blocks) for _ in block]
    for rank, block in enumerate(blocks):
        empty = config.empty_id(rank)
        assert empty not in block
        assert 0 <= empty <= config.experts
        assert (empty == config.experts) == (len(block) == config.experts)


@given(configs(), st.integers(-(2**31), 2**31 - 1))
def test_ids_outside_select_nobody(config, expert):
    owner = config.owner_of(np.array([[expert]], np.int32))
    assert owner.shape == (1, 1)
    assert (owner[0, 0] == -1) == (not 0 <= expert < config.experts)


def test_owner_of_refuses_floats_and_local_experts_refuses_strangers():
    config = EpConfig(**GOOD)
    with pytest.raises(ArgumentError, match="float64, allowed is an integer type"):
        config.owner_of([1.0])
    for rank in (-1, 4):
        with pytest.raises(ArgumentError, match=f"rank {rank} does not exist: ranks are 0..3"):
            config.local_experts(rank)
