"""A Slurm of four nodes on this machine, as up.sh makes it, and how tests run jobs in it."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.mpi import LAUNCHERS, ROOT, Job, run

HERE = Path(__file__).parent
CANNOT = 77
"""Exit code of up.sh where there can be no Slurm, which is no failure."""
NUM_PORTS = 5


class Lab:
    """Starts jobs; every one has a hard limit, after which nothing of it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        clean = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHERS, "EP_"))}
        self.env = clean | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{clean['PATH']}",
            "OMP_NUM_THREADS": "1",
            # 16 ranks on two cores.
            "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
            # UCX's addresses for all transports are too long for PMI-2: Slurm now and then refuses
            # what MPICH makes of them ("value not properly terminated"), and the job hangs.
            "UCX_TLS": "tcp,self",
            # Ranks that meet without MPI prove themselves by this Slurm's own munge.
            "EP_MUNGE_SOCKET": str(folder / "run" / "munge.socket"),
            # /dev/shm is each node's own.
            "EP_SHM_DIR": str(self.shared),
        }

    def run(self, command, timeout_s=60, env=None) -> Job:
        """Run a command of Slurm's; an `env` of None takes a variable away."""
        given = {k: v for k, v in (self.env | (env or {})).items() if v is not None}
        try:
            job: Job = run(command, timeout_s, given)
        except BaseException:
            self.clear()
            raise
        return job

    def srun(self, *command, timeout_s=60, env=None, nodes=4, ranks=16) -> Job:
        """Run `srun ... python COMMAND`; options of srun come first, up to the one that is none."""
        options = [f"-N{nodes}", f"-n{ranks}", f"--ntasks-per-node={ranks // nodes}"]
        words = list(map(str, command))
        first = next(i for i, word in enumerate(words) if not word.startswith("-") or word == "-m")
        return self.run(
            ["srun", *options, *words[:first], sys.executable, *words[first:]], timeout_s, env
        )

    def sbatch(self, folder, *words, timeout_s=60) -> Job:
        """Run `sbatch WORDS` and wait for the job's end; all that it says is in `out`.

        sbatch's own --wait looks after 2, 10 and 42 s.
        """
        start, out = time.monotonic(), folder / "job.out"
        begun = self.run(["sbatch", "--parsable", "-o", out, *words])
        assert begun.code == 0, begun
        number = begun.out.strip()
        code = None
        while code is None:
            if time.monotonic() - start > timeout_s:
                self.clear()
                pytest.fail(f"still running after {timeout_s} s: {words}\n{out.read_text()}")
            time.sleep(0.2)
            told = self.run(["scontrol", "-o", "show", "job", number]).out
            if not re.search(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", told):
                code = int(re.findall(r"ExitCode=(\d+):", told)[0])
        return Job(code, out.read_text(), begun.err, time.monotonic() - start)

    def clear(self) -> None:
        """End all jobs."""
        for how in (["--signal=KILL", "--full"], []):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["scancel", *how, "--user=root"], env=self.env, timeout=10)


def free_ports() -> int:
    """Give the first of some ports in a row that nobody listens on."""
    for first in random.sample(range(20000, 30000, NUM_PORTS), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + NUM_PORTS):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


@contextlib.contextmanager
def started():
    """Start one, and end it however the tests end; skip, in words, where there can be none."""
    folder = Path(tempfile.mkdtemp(prefix="ep-slurm-"))
    try:
        up = [str(HERE / "up.sh"), str(folder), str(free_ports()), str(os.getpid())]
        done = subprocess.run(up, capture_output=True, text=True, timeout=90, cwd=ROOT)
        if done.returncode == CANNOT:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        lab = Lab(folder)
        lab.shared.mkdir()
        yield lab
        assert not list(lab.shared.iterdir()), "the host backend's memory was left"
    finally:
        subprocess.run([HERE / "down.sh", folder], timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
