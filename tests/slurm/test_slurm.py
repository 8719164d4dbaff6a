"""Jobs of 16 ranks on 4 nodes, by every route that Slurm offers, on the host backend."""

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions

import pytest

from tests.mpi import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.ranks]

SHAPE = "hidden = 256\nexperts = 10\ntop_k = 3\n"
TASKS = ("-m", "tests.slurm.tasks")
HAS_MPICH = "mpich" in {package.name for package in distributions()}
needs_mpich = pytest.mark.skipif(
    not HAS_MPICH, reason="Slurm's pmi2 was found to work with the MPICH wheel alone"
)
# All that MPI has no part in is tried once, by the route that needs nothing.
NO_MPI = "--mpi=none"
ROUTES = pytest.mark.parametrize("route", [NO_MPI, pytest.param("--mpi=pmi2", marks=needs_mpich)])


@pytest.fixture
def bench(tmp_path):
    """Words of a short run of the benchmark, and where its rows go."""
    shape, rows = tmp_path / "tiny.toml", tmp_path / "rows.jsonl"
    shape.write_text(SHAPE)
    command = ["-m", "ep.bench", "--config", shape, "--tokens", "6", "--steps", "2"]
    return [*command, "--warmup", "0", "--uneven", "--backend", "host", "--json", rows], rows


def check_rows(job, path):
    assert job.code == 0, job
    assert "16 ranks on 4 nodes\nnvl0: ranks 0-3\nnvl1: ranks 4-7\n" in job.out, job
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tokens"], row["ranks"], row["check"]) for row in rows] == [(6, 16, "passed")]
    assert rows[0]["nodes"] == 4
    placed = rows[0]["placement"]
    assert placed["node"] == [f"nvl{rank // 4}" for rank in range(16)]
    assert placed["local_rank"] == [rank % 4 for rank in range(16)]


@ROUTES
def test_srun(lab, route, bench):
    command, rows = bench
    check_rows(lab.srun("-K1", route, *command), rows)


@needs_mpich
def test_mpirun_in_a_batch_job_is_not_misled_by_the_values_of_its_step(lab, bench, tmp_path):
    command, rows = bench
    script = tmp_path / "job.sh"
    words = shlex.join(map(str, command))
    script.write_text(
        "#!/bin/sh\n"
        "echo leaked: $SLURM_PROCID of $SLURM_NTASKS\n"
        f"mpirun -np 16 -ppn 4 {sys.executable} {words}\n"
    )
    # Not the size that mpirun is told, so that a rank that believes Slurm is found out.
    job = lab.sbatch(tmp_path, "-N4", "-n8", script)
    check_rows(job, rows)
    assert "leaked: 0 of 8" in job.out, job


@pytest.mark.parametrize(("asked", "visible"), [("per-task=1", "1"), ("per-node=4", "4")])
def test_each_rank_takes_the_gpu_of_its_own(lab, asked, visible):
    # By name: nodes of the job before may still be closing, and others would be taken.
    options = ("-K1", NO_MPI, f"--gpus-{asked}", "--nodelist=nvl0,nvl1")
    job = lab.srun(*options, *TASKS, "gpus", visible, nodes=2, ranks=8)
    assert job.code == 0, job
    index = {"1": "0000", "4": "0123"}[visible]
    for node in range(2):
        told = ", ".join(f"{index[gpu]} 0000:0{gpu}:00.0 nvl{node}-{gpu}" for gpu in range(4))
        words = (
            f"nvl{node}: ranks {4 * node}-{4 * node + 3}; GPUs {told}; cluster abababab, clique 7"
        )
        assert words in job.out, job


def test_ranks_of_two_domains_are_refused(lab):
    job = lab.srun("-K1", NO_MPI, "--gpus-per-node=4", *TASKS, "apart", ranks=4)
    assert job.code != 0, job
    words = "ranks 0-1 on nvl0, nvl1: cluster abababababababababababababababab, clique 0; ranks 2-3"
    assert words in job.err, job


def test_a_dev_shm_of_each_node_is_told(lab, bench):
    command, _ = bench
    job = lab.srun("-K1", NO_MPI, *command, env={"EP_SHM_DIR": None}, ranks=4)
    assert job.code != 0, job
    words = "ranks 1-3 on nvl1, nvl2, nvl3 cannot see what rank 0 on nvl0 makes in /dev/shm"
    assert job.err.count(words) == 1, job


@ROUTES
def test_a_node_that_never_comes(lab, route):
    job = lab.srun("-K1", route, *TASKS, "absent", "nvl2", ranks=8)
    assert job.code != 0, job
    assert job.seconds < 30, job
    assert "waited 4.0 s" in job.err, job
    # MPI's start-up knows of nobody.
    assert route != NO_MPI or "Slurm has ranks 4-5 on node nvl2" in job.err, job


@pytest.mark.parametrize("kill", ["-K1", "-K0"])
def test_a_task_that_dies(lab, kill):
    job = lab.srun(kill, NO_MPI, *TASKS, "dies", ranks=8)
    assert job.code != 0, job
    assert "nvl2: task 5: Killed" in job.err, job
    # Where Slurm does not end the others, they say why they end themselves.
    assert (kill == "-K1") or "rank 5's process on node nvl2 is gone" in job.out + job.err, job


def test_two_jobs_at_once_on_the_same_nodes(lab, tmp_path):
    def start(own, other):
        return lab.srun("-K1", NO_MPI, *TASKS, "beside", tmp_path, own, other, ranks=8)

    with ThreadPoolExecutor() as pool:
        jobs = pool.map(start, ("first", "second"), ("second", "first"))
    for name, job in zip(("first", "second"), jobs, strict=True):
        assert job.code == 0, job
        assert f"{name}: 8 ranks" in job.out, job


def test_the_script_of_the_rack(lab, bench, tmp_path):
    command, rows = bench
    # The lab's Slurm is older than blocks, and its nodes have four cores.
    lines = (ROOT / "launch" / "gb300_nvl72.sbatch").read_text().splitlines(keepends=True)
    script = tmp_path / "job.sbatch"
    script.write_text("".join(line for line in lines if not line.startswith("#SBATCH --segment")))
    job = lab.sbatch(tmp_path, "--cpus-per-task=1", script, sys.executable, *command)
    check_rows(job, rows)
    assert "nvl3 0 none" in job.out, job
