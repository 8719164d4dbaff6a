"""Which launcher started this process, by its environment alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ep.bootstrap.slurm import is_step
from ep.errors import BootstrapError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher's variables say of this process.

    Attributes
    ----------
    launcher : str
        "ep" (somebody set EP_RANK), "torchrun", "openmpi", "mpich" (and its kin: Hydra, PMI) or
        "slurm".
    rank, size : int
    """

    launcher: str
    rank: int
    size: int


MAX_DIGITS = 9
"""Of a rank or a size; more no launcher starts, and thousands Python does not read."""

# Order matters. What somebody typed comes first. torchrun's workers may inherit the variables of an
# outer mpirun or srun; its run id tells. Inside sbatch and salloc, mpirun's ranks inherit SLURM_*
# values of the batch step, so Slurm is asked last, and only where it started this very step.
_VARIABLES = (
    ("ep", "EP_RANK", "EP_RANKS", None),
    ("torchrun", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None),
    ("mpich", "PMI_RANK", "PMI_SIZE", None),
    ("torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
)
_HALVES = ("EP_RANKS", "EP_LOCAL_RANK")
"""Without EP_RANK they mean nothing, while EP_RENDEZVOUS may go with another launcher."""


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Find the launcher.

    Parameters
    ----------
    environ : mapping of str to str
        Usually `os.environ`.

    Returns
    -------
    Launch or None
        None for a process that no known launcher started.

    Raises
    ------
    BootstrapError
        If a variable is there and is not the number it should be.
    """
    for name in _HALVES:
        if name in environ and "EP_RANK" not in environ:
            raise _half(name)
    for launcher, rank_name, size_name, needs in _VARIABLES:
        if rank_name not in environ or (needs and needs not in environ):
            continue
        if launcher == "slurm" and not is_step(environ):
            continue
        rank, size = (_number(environ, name, launcher) for name in (rank_name, size_name))
        if not 0 <= rank < size:
            raise BootstrapError(
                f"{rank_name}={rank} and {size_name}={size} do not fit: a rank is 0..size-1; "
                f"unset both unless {launcher} started this process"
            )
        if launcher == "ep" and "EP_LOCAL_RANK" in environ:
            # `World` counts local ranks itself; what is typed must make sense all the same.
            _number(environ, "EP_LOCAL_RANK", launcher)
        return Launch(launcher, rank, size)
    if "EP_RENDEZVOUS" in environ:
        # A world of one would be a silent mistake.
        raise _half("EP_RENDEZVOUS")
    return None


def _half(name: str) -> BootstrapError:
    return BootstrapError(
        f"{name} is set, but nothing says which rank this is; set EP_RANK (0..), EP_RANKS and "
        "EP_RENDEZVOUS=host:port on every rank, or none of them"
    )


def is_started_by_srun(environ: Mapping[str, str], launch: Launch) -> bool:
    """Whether srun itself started this rank, whatever else it offers for MPI. Local."""
    if launch.launcher == "slurm":
        return True
    told = (environ.get("SLURM_PROCID"), environ.get("SLURM_NTASKS"))
    same = told == (str(launch.rank), str(launch.size))
    return launch.launcher == "mpich" and same and is_step(environ)


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        if launcher == "ep":
            raise BootstrapError(
                f"{name}={shown(text)} is no number; set EP_RANK (0..), EP_RANKS and "
                "EP_RENDEZVOUS=host:port on every rank, or none of them"
            )
        raise BootstrapError(
            f"{name}={shown(text)} is not a number, though {launcher} seems to have started this "
            f"process; unset {launcher}'s variables to run alone"
        )
    return int(text)
