"""What can be held of the examples without their frameworks and without a GPU."""

import ast
import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import ep
from ep import reference
from ep.reference import Rows
from ep.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.rglob("[0-9]*") if path.is_file())
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
PAGES = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def head_of(path):
    """The words at the head of a program, without the marks of a comment."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    comment = re.match(r"/\*.*?\*/|(//[^\n]*\n)+", text, re.DOTALL)
    assert comment is not None
    return re.sub(r"\s*\n\s*(\*|//) ?|^/[*/] ", "\n", comment[0]).strip()


def test_there_are_some():
    assert {path.suffix for path in PROGRAMS} == {".py", ".c", ".cc", ".cpp"}
    assert len(PROGRAMS) >= 8


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=name_of)
def test_it_is_python(path):
    compile(path.read_text(), path, "exec")
    assert head_of(path)


@pytest.mark.parametrize("path", [p for p in PROGRAMS if p.suffix != ".cc"], ids=name_of)
def test_it_says_what_it_shows_and_how_it_is_run(path):
    head = head_of(path)
    assert re.match(r"Shows: \w+.*\.\n", head, re.DOTALL)
    (command,) = re.findall(r"^Run with: (.+)$", head, re.MULTILINE)
    assert path.suffix != ".py" or f"python {name_of(path)}" in command


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_a_page_leads_to_it(path):
    assert any(name_of(path) in page for page in PAGES)


def test_the_page_leads_nowhere_else():
    for target in re.findall(r"\]\((\.\./[^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).resolve().is_file(), target


@pytest.fixture
def toy_layer():
    spec = importlib.util.spec_from_file_location("toy_layer", EXAMPLES / "toy_layer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_examples_expect_is_what_an_exchange_gives(toy_layer):
    def rank(world):
        config = dataclasses.replace(toy_layer.config_for(world), timeout_s=5)
        local, gains = config.local_experts(world.rank), toy_layer.norm_weight(config)
        with ep.Exchange(world, config) as exchange:
            for number in range(4):
                y, ids, weights = toy_layer.inputs(config, number, world.rank)
                for _ in range(2):
                    received = exchange.dispatch(y, ids, weights)
                    rows = Rows(**{name: getattr(received, name) for name in vars(received)})
                    partials = toy_layer.experts(rows, local)
                    y = exchange.combine(partials, ids, gains, toy_layer.EPS)
                toy_layer.check(y, config, number, world.rank, layers=2)
                if len(y):
                    y[-1, -1] += 1
                    with pytest.raises(AssertionError, match=r"1 of \d+ elements differ"):
                        toy_layer.check(y, config, number, world.rank, layers=2)
            return [len(toy_layer.inputs(config, number, world.rank)[0]) for number in range(4)]

    assert run_ranks(3, rank) == [[5, 0, 8, 5], [0, 8, 5, 0], [8, 5, 0, 8]]


def test_experts_compute_exactly(toy_layer):
    """As their page says: what FP64 makes of it is a number of FP32, whatever the order."""
    config = ep.EpConfig(ranks=1, hidden=256, experts=8, top_k=2, max_tokens=8)
    stride = ep.EpLayout(config).stride
    for number in range(6):
        x, ids, weights = toy_layer.inputs(config, number, 0)
        (rows,) = reference.dispatch([x], [ids], [weights], ranks=1, experts=8, stride=stride)
        factor = (rows.weights.astype(np.float64) * (rows.ids >= 0) * (1 + rows.ids / 8)).sum(
            axis=1, keepdims=True
        )
        scales = rows.scales.astype(np.float64).repeat(32, axis=1)
        exact = rows.x.astype(np.float64) * scales * factor
        assert (exact == exact.astype(np.float32)).all()
        want = exact.astype(np.float32).astype(toy_layer.BF16)
        empty = rows.source == -1
        got = toy_layer.experts(rows, range(8))
        assert (got[~empty].view(np.uint16) == want[~empty].view(np.uint16)).all()
