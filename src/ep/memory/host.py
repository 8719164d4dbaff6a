"""Symmetric memory of the host backend: one shared segment a rank, and a bell to wake it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401 - registers the names of the dtypes that the layout uses
import numpy as np

from ep.errors import HeapError, name_ranks
from ep.files import read_text
from ep.memory.bells import Bells, close_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ep.bootstrap import World
    from ep.layout import Field

_FOLDER = re.compile(r"ep-\d+-\w{8}")
_FILE = re.compile(r"rank\d+\.(memory|bell)|proof")
_PROOF = "proof"
"""File of rank 0 with a number that nobody can guess: who finds it looks into the same folder."""


class Segments:
    """Every rank's buffer in memory that this process sees, and last the own one once more.

    Parameters
    ----------
    segments : list of ndarray of uint8, `[ranks + 1]`
    """

    def __init__(self, segments: list[npt.NDArray[np.uint8]]) -> None:
        self.size_bytes = segments[-1].nbytes
        self.addresses = tuple(segment.ctypes.data for segment in segments)
        self._segments = segments

    def array(self, where: int, field: Field) -> npt.NDArray[np.generic]:
        """See `SymmetricMemory`. Views keep a mapping alive, also after `close`."""
        return np.ndarray(
            field.shape,
            np.dtype(field.dtype),
            buffer=self._segments[where].data,
            offset=field.offset_bytes,
            strides=field.strides_bytes,
        )

    def zero(self) -> None:
        """Zero this rank's buffer. Local."""
        self._segments[-1][:] = 0


def segment_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """View memory that somebody else keeps. Nothing here can know that it is gone."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


class HostMemory(Segments, Bells):
    """Shared segments and bells of all ranks of one machine. Made by `HostMemory.allocate`."""

    def __init__(self, rank: int, segments: list[npt.NDArray[np.uint8]], bells: list[int]) -> None:
        Segments.__init__(self, segments)
        Bells.__init__(self, rank, bells)

    @classmethod
    def allocate(cls, world: World, size_bytes: int, given: Sequence[int] = ()) -> HostMemory:
        """Make, zero and share `size_bytes` on every rank, and bells. Collective.

        The files live in a folder `ep-PID-*` of `EP_SHM_DIR` (default /dev/shm), that of rank 0,
        and lose their names before this returns or raises, so that nothing that happens later
        leaves anything behind. Ranks killed before that leave the folder: the next rank 0 of the
        same user that comes here removes it. Containers of one machine may be nodes of their own,
        if they see that folder.

        Memory that an engine has, `given` by addresses as in `SymmetricMemory`, is taken as it is;
        then the bells alone are made.

        Raises
        ------
        HeapError
            On every rank, if memory is short on one or ranks do not share a machine or folder.
        """
        machines = {place.machine for place in world.places}
        if len(machines) > 1:
            nodes = sorted({place.node for place in world.places})
            apart = HeapError(
                f"the host backend shares memory on one machine, but the ranks are on "
                f"{len(machines)}: {', '.join(nodes)}; start all ranks on one node, or use GPUs"
            )
            apart.on_every_rank = True
            raise apart
        parent = Path(os.environ.get("EP_SHM_DIR") or "/dev/shm").absolute()  # noqa: S108 - memory, not a temporary file
        with contextlib.ExitStack() as stack:
            name, proof, error = "", secrets.token_hex(16), None
            if world.rank == 0:
                try:
                    name = str(stack.enter_context(_new_folder(parent)))
                    _write_proof(Path(name), proof)
                except OSError as problem:
                    error = HeapError(
                        f"cannot make a folder in {parent} ({problem}); {_remedy(problem)}"
                    )
            world.agree(error, "making the shared folder")
            told = world.allgather([name, proof], "naming the shared folder")[0]
            folder = Path(told[0])
            # By each rank: whoever fails may end the job before rank 0 comes to it.
            stack.callback(_remove, folder, world.rank)
            _meet_in(world, folder, told[1])
            return _open_all(cls, world, folder, size_bytes, given)

    def close(self) -> None:
        """Close the bells and drop the segments. Local."""
        Bells.close(self)
        self._segments = []


@contextlib.contextmanager
def _new_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for one exchange's files, which goes when the block ends.

    It is locked meanwhile. The kernel drops the lock when this process ends, whatever way, so that
    a folder that can be locked is one that nobody will remove any more.
    """
    _remove_stale(parent)
    folder, lock = _make_locked(parent)
    try:
        yield folder
    finally:
        # First, for reading the folder takes a descriptor, and there may be no other.
        os.close(lock)
        _remove_all(folder)


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"ep-{os.getpid()}-", dir=parent))
        try:
            lock = _open_folder(folder)
        except FileNotFoundError:
            continue
        except OSError:
            folder.rmdir()
            raise
        taken = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        except OSError:
            # A file system without locks: there nobody takes it for stale, either.
            pass
        # Another rank 0 may have been faster with its lock, and removes the folder.
        if not taken and folder.exists():
            return folder, lock
        os.close(lock)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob("ep-*"):
        if not _FOLDER.fullmatch(folder.name):
            continue
        # Somebody else's, one in use, or gone already.
        with contextlib.suppress(OSError):
            descriptor = _open_folder(folder)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_all(folder)
            finally:
                os.close(descriptor)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_all(folder: Path) -> None:
    # Meanwhile the others remove theirs, or still make some; once the folder is gone, they cannot.
    for _ in range(100):
        try:
            for path in folder.iterdir():
                if _FILE.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            folder.rmdir()
        except OSError as problem:
            if problem.errno == errno.ENOTEMPTY:
                continue
        return


def _write_proof(folder: Path, proof: str) -> None:
    descriptor = os.open(
        folder / _PROOF, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
    )
    with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - by descriptor
        file.write(proof)


def _finds_proof(folder: Path, proof: str) -> bool:
    try:
        return read_text(folder / _PROOF) == proof
    except OSError as problem:
        # No word on what others can see; what needs descriptors next says so.
        return problem.errno in (errno.EMFILE, errno.ENFILE)
    except ValueError:
        return False


def _meet_in(world: World, folder: Path, proof: str) -> None:
    """Find out whether every rank sees the folder of rank 0. Collective.

    A folder may have the same name on all nodes, as /dev/shm does, and be one for each.

    Raises
    ------
    HeapError
        On every rank, naming those that do not see it.
    """
    finds = world.allgather(_finds_proof(folder, proof), "looking into the shared folder")
    blind = [rank for rank, found in enumerate(finds) if not found]
    if not blind:
        return
    nodes = ", ".join(dict.fromkeys(world.places[rank].node for rank in blind))
    apart = HeapError(
        f"{name_ranks(blind)} on {nodes} cannot see what rank 0 on {world.places[0].node} makes in "
        f"{folder.parent}: it is another folder there, or another user's; set EP_SHM_DIR, on every "
        "rank, to one that all of these nodes share, best in memory, or start all on one node"
    )
    apart.on_every_rank = True
    raise apart


def _remedy(problem: OSError, otherwise: str = "set EP_SHM_DIR to another folder") -> str:
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return (
            "raise the limit of open files (ulimit -n): an exchange takes up to two for each "
            "rank, and one more"
        )
    return otherwise


def _open_all(
    kind: type[HostMemory], world: World, folder: Path, size_bytes: int, given: Sequence[int]
) -> HostMemory:
    error = None
    try:
        _create(folder, world.rank, 0 if given else size_bytes)
    except OSError as problem:
        error = HeapError(
            f"cannot allocate {size_bytes} bytes in {folder.parent} ({problem}); "
            + _remedy(problem, "free some, lower max_tokens, or set EP_SHM_DIR to a larger one")
        )
    world.agree(error, "allocating shared memory")
    segments = [segment_at(address, size_bytes) for address in given]
    bells: list[int] = []
    try:
        try:
            for rank in range(world.size):
                if not given:
                    segments.append(_map(folder, rank, size_bytes))
                # Opened both ways, a FIFO never blocks on open and never reports an end.
                bells.append(os.open(_bell(folder, rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            if not given:
                segments.append(_map(folder, world.rank, size_bytes))
        except OSError as problem:
            remedy = _remedy(
                problem,
                "every rank must see the same folder: set EP_SHM_DIR to one that all ranks share",
            )
            error = HeapError(
                f"{world.places[world.rank].node} cannot map the memory of rank "
                f"{min(len(bells), world.size - 1)} in {folder.parent} ({problem}); {remedy}"
            )
        world.agree(error, "mapping the other ranks' memory")
        return kind(world.rank, segments, bells)
    except BaseException:
        close_all(bells)
        raise


def _create(folder: Path, rank: int, size_bytes: int) -> None:
    os.mkfifo(_bell(folder, rank), 0o600)
    if not size_bytes:
        return
    descriptor = os.open(_segment(folder, rank), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserves the pages: a full /dev/shm is an error here, not a SIGBUS in mid-step.
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _map(folder: Path, rank: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    descriptor = os.open(_segment(folder, rank), os.O_RDWR | os.O_CLOEXEC)
    try:
        if sys.version_info >= (3, 13):
            # Otherwise it keeps a descriptor of its own open.
            return np.frombuffer(mmap.mmap(descriptor, size_bytes, trackfd=False), np.uint8)
        return np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
    finally:
        os.close(descriptor)


def _remove(folder: Path, rank: int) -> None:
    # By their names, which takes no descriptor.
    for path in (_segment(folder, rank), _bell(folder, rank)):
        with contextlib.suppress(OSError):
            path.unlink()
    _remove_all(folder)


def _segment(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.memory"


def _bell(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.bell"
