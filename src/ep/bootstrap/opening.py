"""Which channel the ranks of this job have."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ep.bootstrap.address import rendezvous_of
from ep.bootstrap.channel import SingleChannel
from ep.bootstrap.launcher import detect, is_started_by_srun
from ep.bootstrap.mpi import open_mpi_channel
from ep.bootstrap.proof import authenticator_of
from ep.bootstrap.slurm import is_step
from ep.bootstrap.tcp import open_tcp_channel
from ep.errors import BootstrapError, shown
from ep.settings import choice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep.bootstrap.channel import Channel
    from ep.bootstrap.launcher import Launch

logger = logging.getLogger(__name__)

MAX_SIZE = 1024
"""Ranks that meet over TCP, each of which holds a connection to each."""
_MPIS = ("openmpi", "mpich")


def open_channel(environ: Mapping[str, str], timeout_s: float) -> Channel:
    """Open the channel between the ranks that the launcher started. Collective.

    MPI or TCP is decided by each rank alone, from what is the same on all of them: the launcher's
    variables, whether mpi4py is installed, and under srun whether MPI's world is that of srun.

    Raises
    ------
    BootstrapError
        If the launcher's variables make no sense, or ranks were started without a way to talk.
    ConfigError
        If EP_BOOTSTRAP is nonsense, or EP_SECRET is none.
    EpTimeout
        If ranks are missing.
    """
    how = choice("EP_BOOTSTRAP", ("auto", "mpi", "tcp"), environ)
    launch = detect(environ)
    if launch is None:
        return SingleChannel()
    _tell_tasks(environ, launch)
    if how == "mpi":
        return open_mpi_channel(launch, timeout_s)
    if how == "auto" and launch.launcher in _MPIS and not is_started_by_srun(environ, launch):
        return open_mpi_channel(launch, timeout_s)
    if launch.size == 1:
        return SingleChannel()
    if how == "auto" and is_started_by_srun(environ, launch) and _offers_mpi(environ):
        try:
            return open_mpi_channel(launch, timeout_s)
        except BootstrapError as error:
            # On every rank: MPI is not there, or each is alone in it.
            logger.warning("rank %d meets the others over TCP, since %s", launch.rank, error)
    return _open_tcp(environ, launch, timeout_s)


def _tell_tasks(environ: Mapping[str, str], launch: Launch) -> None:
    """Say that what makes this a world of one may be left of something around srun."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if launch.size == 1 and launch.launcher != "ep" and is_step(environ) and tasks != "1":
        logger.warning(
            "by the variables of %s this rank is the only one, though srun started %s tasks; unset "
            "those variables before srun, if they are left of a launcher around it",
            launch.launcher,
            shown(tasks),
        )


def _offers_mpi(environ: Mapping[str, str]) -> bool:
    offered = "PMI_RANK" in environ or "PMIX_RANK" in environ
    return offered and find_spec("mpi4py") is not None


def _open_tcp(environ: Mapping[str, str], launch: Launch, timeout_s: float) -> Channel:
    if launch.size > MAX_SIZE:
        raise BootstrapError(
            f"{launch.size} ranks of {launch.launcher} would meet over TCP; allowed are "
            f"{MAX_SIZE}: set the number of ranks right, or use MPI"
        )
    # Both before anybody waits: all ranks fail alike, and at once.
    rendezvous, authenticator = rendezvous_of(environ, launch), authenticator_of(environ)
    return open_tcp_channel(launch, rendezvous, authenticator, timeout_s)
