"""`python -m ep.bench` as users start it: under mpirun, and alone."""

import json
import os
import sys

import pytest

from tests.mpi import LAUNCHERS, mpirun, run

pytestmark = pytest.mark.ranks

SHAPE = "hidden = 256\nexperts = 10\ntop_k = 3\n"
PLANTED = """
import numpy as np

from ep.bench.cli import main
from ep.host import HostEngine

dispatch = HostEngine.dispatch


def wrong_dispatch(engine, *arguments):
    dispatch(engine, *arguments)
    if engine.buffers.rank == 2:
        engine.buffers.own("x").view(np.uint8)[:, 5] ^= 1


HostEngine.dispatch = wrong_dispatch
main()
"""


@pytest.fixture
def shape(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SHAPE)
    return path


@pytest.mark.parametrize("ranks", [None, 1, 4])
def test_a_run(ranks, shape, tmp_path):
    path = tmp_path / "rows.jsonl"
    command = ["-m", "ep.bench", "--config", shape, "--tokens", "1,6", "--steps", "5"]
    command += ["--uneven", "--backend", "host", "--json", path]
    if ranks is None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        job = run([sys.executable, *command], 60, clean)
    else:
        job = mpirun(ranks, *command)
    assert job.code == 0, job
    table = [line.split() for line in job.out.splitlines() if line.endswith("passed")]
    assert [row[0] for row in table] == ["1", "6"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tokens"], row["ranks"], row["check"]) for row in rows] == [
        (1, ranks or 1, "passed"),
        (6, ranks or 1, "passed"),
    ]
    assert (rows[0]["versions"]["mpi"] is None) == (ranks is None)
    node, local_ranks = os.uname().nodename, list(range(ranks or 1))
    assert rows[0]["placement"] == {
        "node": [node] * len(local_ranks),
        "local_rank": local_ranks,
    }
    told = "ranks 0-3" if ranks == 4 else "rank 0"
    assert job.out.splitlines()[1] == f"{node}: {told}", job


def test_a_wrong_byte_on_one_rank_ends_all_with_1(shape, tmp_path):
    driver = tmp_path / "planted.py"
    driver.write_text(PLANTED)
    job = mpirun(4, driver, "--config", shape, "--tokens", "3", "--backend", "host")
    assert job.code == 1, job
    assert "failed" in job.out, job
    assert "check failed: rank 2, after dispatch of step 1: x[" in job.err, job
    assert job.err.count("check failed") == 1, job
    assert "Traceback" not in job.err, job


def test_a_mistake_is_told_once():
    job = mpirun(4, "-m", "ep.bench", "--tokens", "1,x")
    assert job.code == 2, job
    assert job.err.count("'1,x' is not allowed") == 1, job


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--tokens", "1,x"], "'1,x' is not allowed"),
        (["--config", "nosuch"], "one of deepseek_v2"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_a_mistake_of_one_rank_ends_all_and_is_told_with_its_rank(tmp_path, rank, wrong, words):
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, sys\n"
        f"if os.environ['PMI_RANK'] == '{rank}': sys.argv += {wrong}\n"
        "from ep.bench.cli import main\n"
        "main()\n"
    )
    job = mpirun(3, driver, "--backend", "host")
    assert job.code == 2, job
    assert job.seconds < 30, job
    assert job.err.count(f"Error: options are wrong on rank {rank}: ") == 1, job
    assert job.err.count(words) == 1, job
    assert "Traceback" not in job.err, job


def test_what_every_rank_meets_is_told_once():
    job = mpirun(4, "-m", "ep.bench", "--backend", "gpu", env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.code == 1, job
    assert job.err.count("backend='gpu' cannot be had: ranks 0-3: ") == 1, job


def test_the_host_has_no_breakdown(shape):
    job = mpirun(2, "-m", "ep.bench", "--config", shape, "--backend", "host", "--breakdown")
    assert job.code == 1, job
    assert job.err.count("--breakdown is for GPUs") == 1, job
