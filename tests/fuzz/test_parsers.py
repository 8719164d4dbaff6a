"""A few seconds of coverage-guided fuzzing, from texts that are right."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep.config import configs_dir
from ep.tune import table
from tests.unit.test_tuning import ENTRY

ROOT = Path(__file__).resolve().parents[2]
SEEDS = {
    "shape": (configs_dir() / "kimi_k3.toml").read_text(),
    "tuning": table.dumps({"sm_90a": ENTRY}),
    "environment": "unset\x000\x003\x0016\x00unset\x00unset\x00unset",
    "options": "pdl=late,fences=cta,warm=own",
}
RUNS = {"shape": 3000, "tuning": 2000, "environment": 20_000, "options": 20_000}


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has wheels for x86-64 alone (the extra dev)",
)
@pytest.mark.parametrize("target", SEEDS)
def test_nothing_but_an_error_of_ep_comes_out(tmp_path, target):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "right").write_text(SEEDS[target])
    limits = (f"-runs={RUNS[target]}", "-max_total_time=4", "-timeout=10", "-rss_limit_mb=1024")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.parsers", target, *limits, "-seed=1"),
            *("-max_len=4096", f"-artifact_prefix={tmp_path}/", tmp_path / "corpus"),
        ],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done " in done.stderr, done.stderr[-4000:]
