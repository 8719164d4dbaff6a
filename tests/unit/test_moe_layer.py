"""The MoE layer of the examples: its NumPy side against the dense reference, and its kernels."""

import dataclasses
import importlib.util
import re
from typing import Any

import numpy as np
import pytest

import ep
from ep import reference
from ep.kernels.compile import ARCHES
from moe import images
from moe.dense import Dense
from moe.host import route, run_experts
from moe.model import Gate, Model, tokens
from moe.sizes import Sizes

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, RANKS = 96, 64, 7, 3, 3
CONFIG = ep.EpConfig(ranks=RANKS, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=24)
LAYOUT = ep.EpLayout(CONFIG)
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
)


def model_of(gate):
    return Model.random(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, gate)


def layer(model, xs, spoil=None):
    """Ids, weights and results of every rank, exchanged by the oracle."""
    ids, weights = zip(*(route(model, x) for x in xs), strict=True)
    shape: Any = {"ranks": RANKS, "experts": EXPERTS, "stride": LAYOUT.stride}
    rows = reference.dispatch(xs, ids, weights, **shape)
    partials = [
        run_experts(model, CONFIG.local_experts(rank), received)
        for rank, received in enumerate(rows)
    ]
    if spoil is not None:
        spoil(partials, rows)
    return ids, weights, reference.combine(partials, ids, norm_weight=model.norm_weight, **shape)


@pytest.mark.parametrize("gate", Gate)
def test_experts_give_what_the_dense_reference_gives(gate):
    model = model_of(gate)
    dense = Dense(model)
    for number in range(3):
        xs = [tokens(number, rank, (24, 0, 5)[rank - number], HIDDEN) for rank in range(RANKS)]
        for step in zip(xs, *layer(model, xs), strict=True):
            assert dense.check(*step) < 0.006


def lose_an_expert(partials, rows):
    local = CONFIG.local_experts(1)
    partials[1][(rows[1].ids == local.start).any(axis=1)] = 0


def take_neighbours_row(partials, _rows):
    partials[0][1:3] = partials[0][2:0:-1]


@pytest.mark.parametrize("spoil", [lose_an_expert, take_neighbours_row])
def test_the_dense_reference_sees_wrong_results(spoil):
    model = model_of(Gate.SOFTMAX)
    xs = [tokens(0, rank, 24, HIDDEN) for rank in range(RANKS)]
    ids, weights, results = layer(model, xs, spoil)
    with pytest.raises(AssertionError, match="off, allowed is"):
        Dense(model).check(xs[0], ids[0], weights[0], results[0])


def test_the_dense_reference_sees_wrong_choices():
    model = model_of(Gate.SIGMOID)
    x = tokens(0, 0, 4, HIDDEN)
    ids, weights = route(model, x)
    y, dense = np.zeros_like(x), Dense(model)
    worse = ids.copy()
    worse[2, 0] = np.setdiff1d(np.arange(EXPERTS), ids[2])[0]
    with pytest.raises(AssertionError, match="a better expert was left out"):
        dense.check(x, worse, weights, y)
    twice = ids.copy()
    twice[1, 2] = twice[1, 1]
    with pytest.raises(AssertionError, match="chosen twice"):
        dense.check(x, twice, weights, y)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        dense.check(x, ids, weights * 1.001, y)


@pytest.mark.parametrize("gate", Gate)
def test_weights_are_the_chosen_experts_shares(gate):
    model = model_of(gate)
    x = tokens(0, 0, 24, HIDDEN)
    ids, weights = route(model, x)
    logits = x.astype(np.float64) @ model.router.astype(np.float64).T
    scores = np.exp(logits) if gate is Gate.SOFTMAX else 1 / (1 + np.exp(-logits))
    scores /= scores.sum(axis=1, keepdims=True)
    chosen = np.sort(scores, axis=1)[:, : -TOP_K - 1 : -1]
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(np.take_along_axis(scores, ids, axis=1), chosen)


@needs_compiler
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", images.KERNELS)
def test_kernels_compile(name, arch):
    ptx = images.build(name, Sizes.of(model_of(Gate.SOFTMAX), LAYOUT), arch).ptx
    assert f".target {arch}" in ptx
    assert ".local" not in ptx
    # Gate and up of 32 columns, or 32 columns, and two instructions for a block along K.
    products = {"up": 16, "down": 8}.get(name, 0)
    found = ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    assert found % products == 0 < found if products else not found
    # A wait for the kernel ahead comes before everything, and no sum depends on who is first.
    first = re.search(r"griddepcontrol\.wait|(ld|st|atom|red)\.\S*(global|shared)", ptx)
    assert first
    assert first[0] == "griddepcontrol.wait"
    assert not re.search(r"(atom|red)\.\S*f32", ptx)


@needs_compiler
def test_a_kernel_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_CACHE_DIR", str(tmp_path))
    sizes = Sizes.of(model_of(Gate.SOFTMAX), LAYOUT)
    first = images.get_image("sum", sizes, "sm_90a")
    monkeypatch.setattr(images, "build", None)
    again = images.get_image("sum", sizes, "sm_90a")
    assert (again.entry, again.params, again.cubin) == (first.entry, first.params, first.cubin)
    with pytest.raises(TypeError):
        images.get_image("sum", sizes, "sm_100a")


def test_there_is_a_tile_for_every_pair():
    """Also where the last tile of each expert has one pair; and no more than that takes."""
    some = Sizes.of(model_of(Gate.SOFTMAX), LAYOUT)
    left = []
    for rows in range(1, 70):
        sizes = dataclasses.replace(some, rows=rows, top_k=1)
        counts = np.ones(min(sizes.local_experts, rows), int)
        counts[0] += rows - counts.sum()
        left.append(sizes.tiles - (-(-counts // 16)).sum())
    assert min(left) == 0
