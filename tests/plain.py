"""Start ranks as plain processes with EP_RANK and the like, as a launcher without MPI would."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO

import pytest

from tests.mpi import LAUNCHERS, ROOT, Job

NOT_OURS = (*LAUNCHERS, "EP_RANK", "EP_LOCAL_RANK", "EP_RENDEZVOUS", "EP_SECRET", "EP_BOOTSTRAP")


def free_port():
    """A port that was free a moment ago, below those that Linux gives to others."""
    for port in range(20000 + os.getpid() % 5000, 32000):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def settings(rank, size, rendezvous, secret=None, **more):
    """The environment of a rank."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
    own = {"EP_RANK": rank, "EP_RANKS": size, "EP_RENDEZVOUS": rendezvous}
    own |= {"OMP_NUM_THREADS": 1, "EP_CHECK": 1, "PYTHONPATH": path(), "EP_SECRET": secret}
    return clean | {k: str(v) for k, v in (own | more).items() if v is not None}


def path():
    """Where this very tree is found, before what may be installed."""
    return os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))


@dataclass
class Ranks:
    """Ranks that run: `wait` for them; whatever happens, none is left."""

    size: int
    rendezvous: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    # No pipes: nobody reads them while the ranks run, and a full one would stop a rank.
    files: dict[tuple[int, str], IO[str]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def start(self, *command, ranks=None, **env):
        """Start some ranks, all if not said, by `python *command`."""
        for rank in range(self.size) if ranks is None else ranks:
            given = {"secret": self.secret} | env
            self.processes[rank] = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=settings(rank, self.size, self.rendezvous, **given),
                stdin=subprocess.DEVNULL,
                stdout=self._file(rank, "out"),
                stderr=self._file(rank, "err"),
                start_new_session=True,
            )
        return self

    def wait(self, timeout_s=60, *, kill_on_bad_exit=False):
        """Give one `Job` for each rank, and fail the test at the limit.

        With `kill_on_bad_exit` a rank that a signal ends takes the others with it, as with srun -K.
        """
        deadline = time.monotonic() + timeout_s
        with self:
            while any(one.poll() is None for one in self.processes.values()):
                late = time.monotonic() > deadline
                died = any((one.poll() or 0) < 0 for one in self.processes.values())
                if late or (died and kill_on_bad_exit):
                    self.kill()
                if late:
                    pytest.fail(f"still running after {timeout_s} s:\n{self._ended()}")
                time.sleep(0.01)
            return self._ended()

    def kill(self):
        """End what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _ended(self):
        jobs = {}
        for rank, process in self.processes.items():
            code = process.wait(20)
            out, err = (self._read(rank, kind) for kind in ("out", "err"))
            jobs[rank] = Job(code, out, err, time.monotonic() - self.began)
        return Jobs(jobs)

    def _file(self, rank, kind):
        return self.files.setdefault((rank, kind), tempfile.TemporaryFile("w+"))

    def _read(self, rank, kind):
        file = self.files[rank, kind]
        file.seek(0)
        return file.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for process in self.processes.values():
            process.wait(20)
        for file in self.files.values():
            file.close()


class Jobs(dict[int, Job]):
    """What each rank said, and all of them."""

    @property
    def out(self):
        return "".join(job.out for job in self.values())

    @property
    def err(self):
        return "".join(job.err for job in self.values())

    @property
    def codes(self):
        return [job.code for job in self.values()]

    def __str__(self):
        return "\n".join(f"rank {rank}: {job}" for rank, job in self.items())


def play(size, *command, timeout_s=60, kill_on_bad_exit=False, **env):
    """Run one job to its end."""
    ranks = Ranks(size).start(*command, **env)
    return ranks.wait(timeout_s, kill_on_bad_exit=kill_on_bad_exit)
