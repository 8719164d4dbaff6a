"""The host backend's shared folder: where it is, and what is left in it."""

import fcntl
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ep
import ep.memory.host as host
from ep.memory.host import HostMemory
from ep.testing import run_ranks

DEAD = """
import os, sys
import ep
import ep.memory.host as host

host._open_all = lambda kind, world, folder, size_bytes, given: (
    host._create(folder, 0, size_bytes), os._exit(9))
host.HostMemory.allocate(ep.World.connect("host"), 4096)
"""


@pytest.fixture
def shared(monkeypatch, tmp_path):
    monkeypatch.setenv("EP_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def world():
    with ep.World.connect(backend="host") as world:
        yield world


def test_folders_of_the_dead_are_removed_and_those_of_the_living_are_not(shared, world):
    assert subprocess.run([sys.executable, "-c", DEAD]).returncode == 9
    (dead,) = shared.iterdir()
    assert sorted(path.name for path in dead.iterdir()) == ["proof", "rank0.bell", "rank0.memory"]
    living = shared / "ep-1-abcdefgh"
    others = [shared / "ep-data", shared / "ep-2-abcdefgh", shared / "else"]
    for folder in (living, *others):
        folder.mkdir()
    (others[1] / "mine").touch()
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    HostMemory.allocate(world, 4096).close()
    assert sorted(shared.iterdir()) == sorted([living, *others])
    os.close(descriptor)
    HostMemory.allocate(world, 4096).close()
    assert sorted(shared.iterdir()) == sorted(others)


@pytest.mark.parametrize("name", ["_create", "_map", "_open_all", "_make_locked"])
def test_a_failure_on_one_rank_leaves_no_file(shared, monkeypatch, name):
    real = getattr(host, name)
    played: list[int] = []

    def fail(*arguments):
        if not played:
            played.append(1)
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(host, name, fail)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, lambda world: HostMemory.allocate(world, 4096), timeout_s=5)
    assert not list(shared.iterdir())


def test_a_folder_goes_though_somebody_still_makes_files(shared, monkeypatch):
    folder = shared / "ep-1-abcdefgh"
    folder.mkdir()
    real, late = Path.rmdir, iter(("rank3.bell", "rank4.memory"))

    def rmdir(path):
        for name in late:
            (path / name).touch()
            break
        real(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    host._remove_all(folder)
    assert not folder.exists()


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_too_few_descriptors_are_told_by_their_limit(shared, world, free):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = os.open(shared, os.O_RDONLY)
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + free, hard))
    try:
        with pytest.raises(ep.HeapError, match=r"Too many open files.*ulimit -n") as caught:
            HostMemory.allocate(world, 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "EP_SHM_DIR" not in str(caught.value)
    assert not list(shared.iterdir())


def test_mappings_keep_no_descriptor_where_python_can_do_without(world):
    before = set(Path("/proc/self/fd").iterdir())
    memory = HostMemory.allocate(world, 4096)
    more = len(set(Path("/proc/self/fd").iterdir()) - before)
    memory.close()
    assert more == (1 if sys.version_info >= (3, 13) else 3)


def test_an_empty_folder_name_is_the_default(monkeypatch, world):
    monkeypatch.setenv("EP_SHM_DIR", "")
    made = []
    real = host._make_locked

    def make(parent):
        made.append(str(parent))
        return real(parent)

    monkeypatch.setattr(host, "_make_locked", make)
    HostMemory.allocate(world, 4096).close()
    assert made == ["/dev/shm"]


def test_a_relative_folder_is_that_of_rank_0(monkeypatch, tmp_path):
    monkeypatch.setenv("EP_SHM_DIR", "here")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)

    def play(world):
        # Threads share one working directory, so look at what rank 0 said.
        said = []
        monkeypatch.setattr(host, "_open_all", lambda *given: said.append(given[2]))
        HostMemory.allocate(world, 4096)
        return said[0]

    for folder in run_ranks(1, play):
        assert folder.is_absolute()
        assert folder.parent == tmp_path / "here"


def test_ranks_that_see_another_folder_of_the_same_name_are_told(shared, monkeypatch):
    real, elsewhere = host._finds_proof, threading.local()

    def finds(folder, proof):
        return real(shared / "elsewhere" / folder.name if elsewhere.__dict__ else folder, proof)

    monkeypatch.setattr(host, "_finds_proof", finds)

    def play(world):
        if world.rank in (1, 3):
            elsewhere.here = True
        with pytest.raises(ep.HeapError) as caught:
            HostMemory.allocate(world, 4096)
        assert caught.value.on_every_rank
        return str(caught.value)

    (words,) = set(run_ranks(4, play))
    node = os.uname().nodename
    assert words.startswith(
        f"ranks 1, 3 on {node} cannot see what rank 0 on {node} makes in {shared}"
    )
    assert "set EP_SHM_DIR" in words
    assert not list(shared.iterdir())


def test_only_the_folder_with_the_right_proof_is_the_same(tmp_path):
    assert not host._finds_proof(tmp_path, "a" * 32)
    host._write_proof(tmp_path, "a" * 32)
    assert host._finds_proof(tmp_path, "a" * 32)
    assert not host._finds_proof(tmp_path, "b" * 32)
    with pytest.raises(FileExistsError):
        host._write_proof(tmp_path, "c" * 32)
    (tmp_path / "proof").unlink()
    os.mkfifo(tmp_path / "proof")
    assert not host._finds_proof(tmp_path, "a" * 32)
