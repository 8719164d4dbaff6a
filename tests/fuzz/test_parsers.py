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
    # As srun sets them, behind the names of other launchers.
    "environment": "\0".join(
        [*["unset"] * 10, "3", "16", "0", *["unset"] * 3, "nvl[0-3]", "4(x4)", "12000-12003"]
    ),
    "options": "pdl=late,fences=cta,warm=own",
    "hosts": "a[01-03,07]b2,c5",
    "address": "[fe80::1]:29500-29503",
    "frames": "\4\0\0\0\0\0\0\1" + "\0" * 7 + "\1" + "x" * 33,
    "claims": "ep-meet\n\0\1\0\0" + "\0" * 106,
}
RUNS = {"shape": 3000, "tuning": 2000}
"""Of the others 20 000."""


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has wheels for x86-64 alone (the extra dev)",
)
@pytest.mark.parametrize("target", SEEDS)
def test_nothing_but_an_error_of_ep_comes_out(tmp_path, target):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "right").write_text(SEEDS[target])
    limits = (
        f"-runs={RUNS.get(target, 20_000)}",
        "-max_total_time=3",
        "-timeout=10",
        "-rss_limit_mb=1024",
    )
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
