"""What Slurm's variables say: hosts, tasks on each, ports; total on any text."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from ep.errors import BootstrapError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_HOSTS = 65536
"""That a list may name; a few characters could name billions."""
MAX_LIST = 1 << 16
"""Characters of a list."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps from here on are Slurm's own, a batch script or the shell of salloc, and no srun's."""
FIRST_PORT, NUM_PORTS = 18000, 14000
"""Below the ports that Linux gives to whoever asks for any."""
NUM_CANDIDATES = 8

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_PIECE = re.compile(r"([A-Za-z0-9._-]+)|\[([0-9,-]+)\]|,", re.ASCII)
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether an srun of the user's started this process. Local."""
    text = environ.get("SLURM_STEP_ID")
    if text is None:
        return False
    return not (text.isascii() and text.isdecimal() and len(text) < 20) or (
        int(text) < FIRST_SPECIAL_STEP
    )


def expand_hosts(text: str) -> list[str]:
    """Give the hosts of a list as Slurm writes it: `nvl[0-3]`, `a[01-03,07]b2,c5`. Local.

    Raises
    ------
    BootstrapError
        If it is no such list, or names more than `MAX_HOSTS`.
    """
    if not text or len(text) > MAX_LIST:
        raise _not_hosts(text)
    hosts: list[str] = []
    names, end = [""], 0
    for piece in _PIECE.finditer(text + ","):
        if piece.start() != end:
            break
        end = piece.end()
        if piece[0] == ",":
            hosts += names
            # No name between two commas.
            if names == [""]:
                break
            names = [""]
            continue
        numbers = [piece[1]] if piece[1] else list(_numbers(piece[2], text))
        if len(names) * len(numbers) + len(hosts) > MAX_HOSTS:
            break
        names = [name + number for name in names for number in numbers]
    else:
        if end == len(text) + 1:
            return hosts
    raise _not_hosts(text)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    given = 0
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise _not_hosts(text)
        first, last = int(match[1]), int(match[2] or match[1])
        given += last - first + 1
        if not first <= last or given > MAX_HOSTS:
            raise _not_hosts(text)
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))


def _not_hosts(text: str) -> BootstrapError:
    return BootstrapError(
        f"SLURM_STEP_NODELIST={shown(text)} is no list of at most {MAX_HOSTS} hosts, such as "
        "nvl[0-3],login1; start with srun, or name the first rank's host in EP_RENDEZVOUS"
    )


def nodes_of_ranks(environ: Mapping[str, str], rank: int, size: int) -> tuple[str, ...]:
    """Give the node of each rank; nothing where Slurm's variables do not tell. Local.

    They tell only where ranks fill one node after the other, and this rank must be where that
    says: what is guessed wrong would send people to the wrong node.
    """
    if environ.get("SLURM_DISTRIBUTION", "block").split(",")[0].split(":")[0] != "block":
        return ()
    try:
        hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))
    except BootstrapError:
        return ()
    nodes: list[str] = []
    counts = _tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), size)
    for host, count in zip(hosts, counts, strict=False):
        nodes += [host] * count
    own = environ.get("SLURMD_NODENAME")
    if len(nodes) != size or len(hosts) != len(counts) or (own and nodes[rank] != own):
        return ()
    return tuple(nodes)


def _tasks(text: str, size: int) -> list[int]:
    """Give the tasks of each node: `4(x2),1` is 4, 4, 1; nothing where that is beyond `size`."""
    counts: list[int] = []
    for one in text[:MAX_LIST].split(","):
        match = _TASKS.fullmatch(one)
        if match is None:
            return []
        count, repeat = int(match[1]), int(match[2] or 1)
        if not 0 < count * repeat <= size - sum(counts):
            return []
        counts += [count] * repeat
    return counts


def job_of(environ: Mapping[str, str]) -> str:
    """Name the step, alike on all its ranks and on no other. Local."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "slurm " + ".".join(environ.get(name, "") for name in names)


def candidate_ports(job: str) -> tuple[int, ...]:
    """Give ports to meet at, alike on all ranks of a job, and mostly others for other jobs."""
    words = (hashlib.sha256(f"{job} {one}".encode(errors="replace")) for one in range(64))
    drawn = (FIRST_PORT + int.from_bytes(word.digest()[:8]) % NUM_PORTS for word in words)
    return tuple(dict.fromkeys(drawn))[:NUM_CANDIDATES]
