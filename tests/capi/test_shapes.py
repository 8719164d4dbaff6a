"""Exported libraries of odd and extreme shapes do as Python does, all in one process."""

import dataclasses
import json
import os
import shutil
import sys
from typing import Any

import pytest

from ep import EpLayout
from tests.capi.made import CONFIG, DRIVER, HERE, make, make_driver, run

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
SHAPES: dict[str, dict[str, Any]] = {
    "alone": {"ranks": 1, "experts": 1, "top_k": 1},
    "least": {"ranks": 2, "hidden": 32, "top_k": 1, "max_tokens": 1},
    "halves": {"ranks": 65, "max_tokens": 3, "hidden": 32},
    "rack": {"ranks": 72, "experts": 9, "max_tokens": 9, "top_k": 32},
    "long": {"ranks": 3, "max_tokens": 65535, "hidden": 32},
    "largest": {
        "ranks": 72,
        "hidden": 16384,
        "experts": 720,
        "top_k": 32,
        "max_tokens": 65535,
    },
}


def test_shapes(tmp_path):
    for name, shape in SHAPES.items():
        config = dataclasses.replace(CONFIG, **shape)
        make(tmp_path / name, config)
        if name == "largest":
            assert EpLayout(config).total_bytes > 1 << 39
        if name == next(iter(SHAPES)):
            make_driver(tmp_path / name)
        else:
            os.link(tmp_path / next(iter(SHAPES)) / DRIVER, tmp_path / name / DRIVER)
    folders = [tmp_path / name for name in SHAPES]
    said = json.loads(run(sys.executable, "-m", "tests.capi.shapes", *folders, cwd=HERE.parents[1]))
    assert not said, "\n".join(f"{name}: {trace}" for name, trace in said.items())
