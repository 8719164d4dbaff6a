"""Which channel the ranks of this job have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep.bootstrap.channel import SingleChannel
from ep.bootstrap.launcher import detect
from ep.bootstrap.mpi import open_mpi_channel
from ep.errors import BootstrapError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep.bootstrap.channel import Channel


def open_channel(environ: Mapping[str, str], timeout_s: float) -> Channel:
    """Open the channel between the ranks that the launcher started. Collective.

    Raises
    ------
    BootstrapError
        If the launcher's variables make no sense, or ranks were started without a way to talk.
    EpTimeout
        If ranks are missing.
    """
    launch = detect(environ)
    if launch is None:
        return SingleChannel()
    if launch.launcher == "slurm":
        if launch.size == 1:
            return SingleChannel()
        raise BootstrapError(
            f"srun started {launch.size} tasks without an MPI: use srun --mpi=pmi2 with the mpich "
            "extra, or mpirun"
        )
    return open_mpi_channel(launch, timeout_s)
