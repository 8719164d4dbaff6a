"""Where the ranks of a job meet, by the environment alone."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from ep.bootstrap.launcher import is_started_by_srun
from ep.bootstrap.slurm import candidate_ports, expand_hosts, job_of, nodes_of_ranks
from ep.errors import BootstrapError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep.bootstrap.launcher import Launch

MAX_HOST = 255
MAX_PORTS = 64
"""Ports that a range may have."""
_ADDRESS = re.compile(
    r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([\w.-]+)):(\d{1,5})(?:-(\d{1,5}))?", re.ASCII
)
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 awaits the others.

    Attributes
    ----------
    job : str
        What the ranks prove to be of; no secret.
    host : str
        Of rank 0.
    ports : tuple of int
        Rank 0 takes the first that is free, the others try all.
    source : str
        The variable that says so, for errors.
    nodes : tuple of str
        Of each rank, where that is known before they meet; else nothing.
    """

    job: str
    host: str
    ports: tuple[int, ...]
    source: str
    nodes: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can come."""
        return _LOOPBACK.fullmatch(self.host) is not None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{', '.join(map(str, self.ports))} ({self.source})"


def rendezvous_of(environ: Mapping[str, str], launch: Launch) -> Rendezvous:
    """Find where the ranks of `launch` meet, alike on every rank. Local.

    Raises
    ------
    BootstrapError
        If nothing says so, or what does makes no sense.
    """
    slurm = is_started_by_srun(environ, launch)
    job = job_of(environ) if slurm else ""
    nodes = nodes_of_ranks(environ, launch.rank, launch.size) if slurm else ()
    if "EP_RENDEZVOUS" in environ or launch.launcher == "ep":
        text = environ.get("EP_RENDEZVOUS", "")
        host, ports = parse_address(text)
        return Rendezvous(job or f"ep {text}", host, ports, "EP_RENDEZVOUS", nodes)
    if launch.launcher == "torchrun":
        return _of_torchrun(environ)
    if slurm:
        host = expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))[0]
        return Rendezvous(job, host, _slurm_ports(environ, job), "SLURM_STEP_NODELIST", nodes)
    raise BootstrapError(
        f"EP_BOOTSTRAP=tcp, but nothing says where the {launch.size} ranks of {launch.launcher} "
        "meet; set EP_RENDEZVOUS=host:port on every rank, host being that of rank 0"
    )


def parse_address(text: str) -> tuple[str, tuple[int, ...]]:
    """Give host and ports of `host:port`, `[v6]:port` or `host:first-last`. Local.

    Raises
    ------
    BootstrapError
    """
    match = _ADDRESS.fullmatch(text[: 2 * MAX_HOST])
    if match is not None and len(text) <= MAX_HOST:
        first, last = int(match[3]), int(match[4] or match[3])
        if 0 < first <= last < min(first + MAX_PORTS, 65536):
            return match[1] or match[2], tuple(range(first, last + 1))
    raise BootstrapError(
        f"EP_RENDEZVOUS={shown(text)} is no address of rank 0; allowed are host:port, [IPv6]:port "
        f"and host:first-last, ports 1..65535 and at most {MAX_PORTS} of them; set the same on "
        "every rank"
    )


def _of_torchrun(environ: Mapping[str, str]) -> Rendezvous:
    host, text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    bare = host.removeprefix("[").removesuffix("]")
    match = _ADDRESS.fullmatch(f"[{bare}]:{text}" if ":" in bare else f"{bare}:{text}")
    if match is None or match[4] or not 0 < int(match[3]) < 65536 or len(host) > MAX_HOST:
        raise BootstrapError(
            f"MASTER_ADDR={shown(host)} and MASTER_PORT={shown(text)} are no host and port, though "
            "torchrun seems to have started this process; set both on every rank, or EP_RENDEZVOUS"
        )
    run = environ.get("TORCHELASTIC_RUN_ID")
    # Two runs may have the same id, which is "none" if nobody gives one.
    job = f"torchrun {run} {host}:{text}"
    ports = candidate_ports(job)
    # At its own port torchrun listens itself; elsewhere it may be the only one that is let through.
    return Rendezvous(job, bare, (int(text), *ports) if run is None else ports, "MASTER_ADDR")


def _slurm_ports(environ: Mapping[str, str], job: str) -> tuple[int, ...]:
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    if reserved is None:
        return candidate_ports(job)
    ports: list[int] = []
    for one in reserved[:1000].split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", one, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last < 65536:
            raise BootstrapError(
                f"SLURM_STEP_RESV_PORTS={shown(reserved)} are no ports, such as 12000-12003; set "
                "EP_RENDEZVOUS=host:port instead"
            )
        ports += range(first, last + 1)
    return tuple(ports[:MAX_PORTS])
