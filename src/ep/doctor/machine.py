"""Checks of the machine around this process: shared memory, limits, the cache, CPUs. Local."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ep.bootstrap.ranks import Place
from ep.config import EpConfig, Protocol
from ep.doctor.result import Check, failed, passed, skipped, warned
from ep.errors import ConfigError
from ep.kernels.cache import cache_dir
from ep.layout import EpLayout

if TYPE_CHECKING:
    from ep.doctor.result import Context, Finding

SPARE_FILES = 64
"""Descriptors that Python, MPI and the launcher need beside those of an exchange."""
_NODES = Path("/sys/devices/system/node")


def uses_host(context: Context) -> bool:
    """Whether the host backend is the one this process can use, as `check_backend` found."""
    return context.options.backend == "host" or bool(context.facts.get("obstacle"))


def ranks_of(context: Context) -> int:
    """Ranks that the launcher tells of."""
    launch = context.facts.get("launch")
    return launch[2] if launch else 1


def buffer_bytes(context: Context, protocol: Protocol | None = None) -> int:
    """Bytes of a rank's buffer for the config that was asked for."""
    options = context.options
    fields = {} if protocol is None else {"protocol": protocol}
    config = EpConfig.load(
        options.config, ranks=ranks_of(context), max_tokens=options.max_tokens, **fields
    )
    return EpLayout(config).total_bytes


def check_node(context: Context) -> Finding:
    """Name of the machine."""
    place = Place.own()
    context.facts["place"] = [place.node, place.machine, place.process]
    return passed(place.node)


def check_shared_memory(context: Context) -> Finding:
    """Whether the host backend's folder can be written, and has room for every rank's buffer."""
    if not uses_host(context):
        return skipped("only the host backend uses it")
    parent = Path(context.environ.get("EP_SHM_DIR") or "/dev/shm")  # noqa: S108 - as the backend does
    remedy = "set EP_SHM_DIR, on every rank, to a folder in memory that this user can write"
    try:
        with tempfile.TemporaryDirectory(prefix="ep-doctor-", dir=parent) as folder:
            os.mkfifo(Path(folder) / "bell", 0o600)
            with (Path(folder) / "memory").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 4096)
    except OSError as error:
        return failed(f"{parent} cannot be used: {error.strerror or error}", remedy)
    space = os.statvfs(parent)
    free, ranks = space.f_bavail * space.f_frsize, ranks_of(context)
    need = ranks * buffer_bytes(context, Protocol.FLAGS)
    told = f"{parent}: {mib(free)} free, {mib(need)} needed by {ranks} rank{'s' * (ranks > 1)}"
    if free < need:
        return failed(
            told, f"free some, lower max_tokens, enlarge {parent}, or set EP_SHM_DIR elsewhere"
        )
    return passed(told)


def check_limits(context: Context) -> Finding:
    """Open files and locked memory."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = f"open files {_limit(files)}, locked memory {_limit(locked, in_mib=True)}"
    need = 2 * ranks_of(context) + 1 + SPARE_FILES
    if files != resource.RLIM_INFINITY and files < need and uses_host(context):
        return failed(f"{told}; an exchange needs up to {need} files", f"ulimit -n {need}, or more")
    return passed(told)


def check_cache(context: Context) -> Finding:
    """Whether compiled kernels can be kept, where nobody else can put any."""
    if uses_host(context):
        return skipped("only the GPU backend keeps compiled kernels")
    try:
        folder = cache_dir()
    except ConfigError as error:
        return warned(f"{error}: each start compiles", "set EP_CACHE_DIR to a folder of this user")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            facts = folder.stat()
    except OSError as error:
        return warned(
            f"{folder} cannot be used ({error.strerror or error}): each start compiles",
            "set EP_CACHE_DIR to a folder that this user can write",
        )
    kept = f"{folder}: {len(list(folder.glob('*.bin')))} kernels"
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return warned(
            f"{kept}; others can write there, and what lies there runs on the GPU",
            f"chmod go-w {folder}, or set EP_CACHE_DIR to a folder of your own",
        )
    return passed(kept)


def check_binding(context: Context) -> Finding:
    """CPUs of this process and their NUMA nodes."""
    cpus = sorted(os.sched_getaffinity(0))
    nodes = numa_nodes()
    own = sorted(node for node, members in nodes.items() if members & set(cpus))
    context.facts["cpus"] = cpus
    context.facts["numa"] = own
    where = f"NUMA {'nodes' if len(own) > 1 else 'node'} {', '.join(map(str, own))}"
    return passed(f"{len(cpus)} of {os.cpu_count()} CPUs, {where if own else 'NUMA unknown'}")


def numa_nodes(root: Path = _NODES) -> dict[int, set[int]]:
    """CPUs of each NUMA node; nothing where the system does not tell."""
    found = {}
    for path in root.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name[4:])] = cpu_list((path / "cpulist").read_text())
    return found


def cpu_list(text: str) -> set[int]:
    """Read "0-3,8" as Linux writes it."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def mib(size_bytes: float) -> str:
    """Bytes for people: "12 MiB", "1.5 GiB"."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.1f} GiB"
    return f"{size_bytes / (1 << 20):.0f} MiB"


def _limit(value: int, *, in_mib: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return mib(value) if in_mib else str(value)


CHECKS = (
    Check("machine", "node", check_node),
    Check("machine", "shared memory", check_shared_memory),
    Check("machine", "limits", check_limits),
    Check("machine", "kernel cache", check_cache),
    Check("machine", "CPUs", check_binding),
)
