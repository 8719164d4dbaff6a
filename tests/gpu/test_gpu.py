"""The exchange on GPUs: ranks as threads of this process on one GPU, and as NVSHMEM processes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from ep.memory.cuda import device_count
from ep.testing import run_ranks
from tests.mpi import ROOT, mpirun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device_count(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]
if device_count():
    from tests.gpu.cases import CASES, PROCESS_CASES
else:
    CASES = PROCESS_CASES = {}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_threads_on_one_gpu(case, ranks):
    if ranks < 2 and case.startswith("absent"):
        pytest.skip("nobody can be absent")
    if ranks > 1 and case == "foreign_arrays":
        pytest.skip("frameworks take memory at any time, which waits for other ranks' kernels")
    run_ranks(ranks, CASES[case], backend="gpu")


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mid", "between"])
def test_survivors_go_on(name, tmp_path):
    ranks = min(device_count(), 8)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    env = {"EP_TEST_DONE": str(tmp_path / "done")}
    under = [Path(__file__).parents[1] / "multirank" / "surviving.sh"]
    job = mpirun(ranks, "-m", "tests.gpu.deaths", name, env=env, timeout_s=200, under=under)
    assert f"passed death_{name} on {ranks}" in job.out, job


@pytest.mark.ranks
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_moe_layer(gate):
    ranks = min(device_count(), 8)
    job = mpirun(ranks, "examples/02_moe_layer.py", "--backend", "gpu", "--gate", gate)
    assert job.code == 0, job
    assert job.out.count("came back right") == ranks, job


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*CASES, *PROCESS_CASES])
def test_nvshmem(case):
    ranks = min(device_count(), 8)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    job = mpirun(ranks, "-m", "tests.gpu.worker", case, timeout_s=200)
    assert job.code == 0, job
    assert f"passed {case} on {ranks}" in job.out, job


@pytest.mark.ranks
def test_memory_of_an_engine():
    job = mpirun(1, "-m", "tests.gpu.own_memory")
    assert job.out.count("passed own_memory") == 1, job


@pytest.mark.ranks
@pytest.mark.parametrize("memory", ["vmm", "ipc", "torch"])
def test_memory_of_an_engine_on_every_gpu(memory):
    if memory == "torch" and find_spec("torch") is None:
        pytest.skip("no torch")
    ranks = min(device_count(), 8)
    job = mpirun(ranks, "examples/07_own_memory.py", "--memory", memory)
    assert job.code == 0, job
    assert job.out.count("came back right") == ranks, job


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["03_torch", "04_jax", "05_cupy", "06_numba"])
def test_examples(name, ranks):
    if find_spec(name[3:]) is None:
        pytest.skip(f"no {name[3:]}")
    if ranks > device_count():
        pytest.skip("needs two GPUs")
    job = mpirun(ranks, Path(ROOT, "examples", f"{name}.py"), timeout_s=200)
    assert job.code == 0, job
    ways = {"03_torch": 3, "05_cupy": 2}.get(name, 1)
    assert job.out.count("6 steps came back right") == ways * ranks, job
