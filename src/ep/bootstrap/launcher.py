"""Which launcher started this process, by its environment alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ep.errors import BootstrapError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher's variables say of this process.

    Attributes
    ----------
    launcher : str
        "openmpi", "mpich" (and its kin: Hydra, PMI) or "slurm".
    rank, size : int
    """

    launcher: str
    rank: int
    size: int


MAX_DIGITS = 9
"""Of a rank or a size; more no launcher starts, and thousands Python does not read."""

# Order matters: inside sbatch and salloc, mpirun's ranks inherit SLURM_* values of the batch step,
# so Slurm is asked last, and only where it started this very step.
_VARIABLES = (
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None),
    ("mpich", "PMI_RANK", "PMI_SIZE", None),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
)


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
    for launcher, rank_name, size_name, needs in _VARIABLES:
        if rank_name not in environ or (needs and needs not in environ):
            continue
        rank, size = (_number(environ, name, launcher) for name in (rank_name, size_name))
        if not 0 <= rank < size:
            raise BootstrapError(
                f"{rank_name}={rank} and {size_name}={size} do not fit: a rank is 0..size-1; "
                f"unset both unless {launcher} started this process"
            )
        return Launch(launcher, rank, size)
    return None


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise BootstrapError(
            f"{name}={shown(text)} is not a number, though {launcher} seems to have started this "
            f"process; unset {launcher}'s variables to run alone"
        )
    return int(text)
