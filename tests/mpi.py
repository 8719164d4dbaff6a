"""Start ranks under a real mpirun, with a hard limit, and tell what they said."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# One node is enough for Open MPI here, and it refuses root and many ranks on few cores unless told.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "PRTE_", "HYDRA_")


@dataclass(frozen=True)
class Job:
    """How a job ended."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self):
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.out}\n{self.err}"


def mpirun(ranks, *command, timeout_s=60, env=None, python=sys.executable, under=()):
    """Run `python *command` on `ranks` ranks; the job is killed, and the test fails, at the limit.

    The mpirun is the one beside `python`, so that it belongs to the MPI that mpi4py loads there.
    Each rank runs under the command `under`, if there is one.
    """
    launcher = shutil.which("mpirun", path=str(Path(python).parent)) or shutil.which("mpirun")
    if launcher is None:
        pytest.fail("no mpirun: pip install '.[mpich]'")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    settings = clean | OPENMPI | {"OMP_NUM_THREADS": "1", "EP_CHECK": "1"} | (env or {})
    return run([launcher, "-np", str(ranks), *under, python, *command], timeout_s, settings)


def run(command, timeout_s, env):
    """Run a command in a process group of its own."""
    start = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout_s} s: {command}\n{out}\n{err}")
    return Job(process.returncode, out, err, time.monotonic() - start)
