"""What SECURITY.md says of other users of the machine, and of what is loaded."""

import ast
import os
import stat
from pathlib import Path

import pytest

import ep
import ep.memory.host as host
from ep.memory.host import HostMemory
from ep.testing import run_ranks
from tests.strategies import ODD

SRC = Path(__file__).resolve().parents[2] / "src" / "ep"
FILES = {str(path.relative_to(SRC)): ast.parse(path.read_text()) for path in SRC.rglob("*.py")}
# What makes code of data.
MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm"),
    *("multiprocessing", "code", "codeop", "runpy", "imp", "yaml", "xmlrpc"),
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
LOADERS = {"load", "loads", "loadtxt", "fromfile", "memmap", "open_memmap"}


@pytest.mark.parametrize("name", FILES)
def test_nothing_that_is_read_becomes_code(name):
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in MODULES
        elif isinstance(node, ast.Call):
            words = ast.unparse(node.func)
            assert words not in CALLS, f"{name}:{node.lineno}"
            # NumPy's own files may hold pickles.
            module, _, function = words.rpartition(".")
            assert module not in ("np", "numpy") or function not in LOADERS
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert options.get("shell", "False") == "False"
            assert "allow_pickle" not in options


def test_mpi_moves_bytes_and_no_objects():
    """Methods of mpi4py in small letters pickle what they send, and unpickle what comes."""
    called = {
        node.attr
        for node in ast.walk(FILES["bootstrap/mpi.py"])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("comm", "WORLD"))
    }
    assert {"Isend", "Irecv"} <= called
    assert all(name[0].isupper() for name in called)


# Shared memory of the host backend.


@pytest.fixture
def shared(monkeypatch, tmp_path):
    monkeypatch.setenv("EP_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def world():
    with ep.World.connect(backend="host") as world:
        yield world


@pytest.fixture
def open_mask():
    mask = os.umask(0)
    yield
    os.umask(mask)


def test_folder_and_files_are_private_whatever_the_mask(shared, monkeypatch, open_mask):
    real, seen = host._map, []

    def look(folder, rank, size_bytes):
        for path in (folder, *folder.iterdir()):
            status = path.stat()
            seen.append((path.name, stat.S_IMODE(status.st_mode), status.st_uid))
        return real(folder, rank, size_bytes)

    monkeypatch.setattr(host, "_map", look)
    run_ranks(2, lambda world: HostMemory.allocate(world, 4096).close())
    assert {mode for _, mode, _ in seen} == {0o700, 0o600}
    assert {mode for name, mode, _ in seen if not name.startswith("ep-")} == {0o600}
    assert "proof" in {name for name, _, _ in seen}
    assert {owner for _, _, owner in seen} == {os.geteuid()}
    assert not list(shared.iterdir())


def test_the_name_of_a_folder_is_drawn(shared):
    names = []
    for _ in range(4):
        folder, lock = host._make_locked(shared)
        names.append(folder.name.rpartition("-")[2])
        os.close(lock)
    assert len(set(names)) == 4
    assert all(len(name) == 8 for name in names)


def stale(place):
    place.mkdir(0o700)
    for name in ("rank0.memory", "rank0.bell"):
        (place / name).touch(0o600)
    return place


def test_a_link_is_not_followed_to_what_looks_stale(shared, world):
    precious = stale(shared / "precious")
    link = shared / "ep-1-abcdefgh"
    link.symlink_to(precious)
    HostMemory.allocate(world, 4096).close()
    assert link.is_symlink()
    assert len(list(precious.iterdir())) == 2


def test_a_link_in_a_stale_folder_goes_alone(shared, world):
    precious = shared / "precious"
    precious.write_text("kept")
    folder = stale(shared / "ep-1-abcdefgh")
    (folder / "rank1.memory").symlink_to(precious)
    HostMemory.allocate(world, 4096).close()
    assert not folder.exists()
    assert precious.read_text() == "kept"


def test_a_folder_of_another_user_is_left_alone(shared, monkeypatch):
    folder = stale(shared / "ep-1-abcdefgh")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    host._remove_stale(shared)
    assert len(list(folder.iterdir())) == 2
    monkeypatch.undo()
    host._remove_stale(shared)
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_only_has_the_name_of_a_folder_is_left_alone(shared, world, kind):
    path = shared / "ep-1-abcdefgh"
    os.mkfifo(path) if kind == "fifo" else path.touch()
    HostMemory.allocate(world, 4096).close()
    assert path.exists()


def test_a_file_that_was_there_first_is_not_used(shared, world, monkeypatch):
    """Whoever could put a file into the folder would share the memory."""
    real = host._create

    def create(folder, rank, size_bytes):
        (folder / "rank0.memory").touch()
        real(folder, rank, size_bytes)

    monkeypatch.setattr(host, "_create", create)
    with pytest.raises(ep.HeapError, match="File exists"):
        HostMemory.allocate(world, 4096)


@pytest.mark.parametrize("make", ODD, ids=range(len(ODD)))
def test_errors_can_be_printed_whatever_they_hold(make):
    assert len(str(ep.ConfigError("field", make(), "another"))) < 300
