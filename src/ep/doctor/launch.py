"""Checks of how this process was started and of the variables it was given. Local."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from ep.bootstrap.launcher import MAX_DIGITS, detect
from ep.doctor.result import Check, failed, passed, warned
from ep.errors import BootstrapError
from ep.settings import SECRETS, VARIABLES, is_set

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep.bootstrap.launcher import Launch
    from ep.doctor.result import Context, Finding

LOCAL_RANKS = (
    *("EP_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK"),
    "SLURM_LOCALID",
)
"""Hints only: `World` counts local ranks itself, since launchers are known to be wrong."""
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_HEAP_BYTES = 1 << 30
"""Of NVSHMEM, where `NVSHMEM_SYMMETRIC_SIZE` says nothing."""


def check_launcher(context: Context) -> Finding:
    """Who started this process, as which rank; Slurm's variables that mean something else."""
    environ = context.environ
    try:
        launch = detect(environ)
    except BootstrapError as error:
        return failed(
            str(error), "unset the variables that are named, or start with mpirun or srun"
        )
    context.facts["launch"] = launch and [launch.launcher, launch.rank, launch.size]
    context.facts["local_rank_hint"] = local_rank_hint(environ)
    if launch is None:
        return _alone(environ)
    told = f"{launch.launcher}, {launch.size} rank{'s' * (launch.size > 1)}"
    leaked = leaked_slurm(environ, launch)
    if leaked:
        told += f"; {', '.join(leaked)} are those of the batch step and count for nothing"
    return passed(told)


def _alone(environ: Mapping[str, str]) -> Finding:
    if "SLURM_JOB_ID" in environ:
        return warned(
            "in a Slurm job, but started by neither srun nor mpirun: one rank",
            "start the ranks with mpirun or srun --mpi=pmi2",
        )
    return passed("none: one rank")


def leaked_slurm(environ: Mapping[str, str], launch: Launch) -> list[str]:
    """Name Slurm's variables that contradict the launcher of this process."""
    if launch.launcher == "slurm":
        return []
    right = {"SLURM_PROCID": launch.rank, "SLURM_NTASKS": launch.size}
    wrong = {name for name, value in right.items() if environ.get(name, str(value)) != str(value)}
    return [f"{name}={environ[name]}" for name in sorted(wrong)]


def local_rank_hint(environ: Mapping[str, str]) -> int:
    """Local rank as the launcher has it, before the ranks could count themselves; else 0."""
    told = (environ.get(name, "") for name in LOCAL_RANKS)
    return next((int(text) for text in told if text.isdecimal() and len(text) <= MAX_DIGITS), 0)


def check_ep_variables(context: Context) -> list[Finding]:
    """Which EP_* are set, and whether anything reads them."""
    given = {
        name: _unless_secret(name, value)
        for name, value in sorted(context.environ.items())
        if name.startswith("EP_")
    }
    known = {name: value for name, value in given.items() if name in VARIABLES}
    findings = [passed(", ".join(f"{name}={value}" for name, value in known.items()) or "none set")]
    for name in sorted(given.keys() - known.keys()):
        close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.7)
        meant = f"write {close[0]}" if close else f"known are {', '.join(VARIABLES)}"
        findings.append(warned(f"nothing reads {name}={given[name]}", f"{meant}, or unset it"))
    others = {n: value for n, value in context.environ.items() if n.startswith("NVSHMEM_")}
    context.facts["variables"] = others | known
    return findings


def _unless_secret(name: str, value: str) -> str:
    """Give a value as it may be shown: also one whose name is misspelt may be a secret."""
    close = difflib.get_close_matches(name, SECRETS, n=1, cutoff=0.7)
    return "(not shown)" if close or "SECRET" in name else value


def check_nvshmem_variables(context: Context) -> Finding | list[Finding]:
    """Which NVSHMEM_* are set, and those that keep it from what `ep` needs."""
    given = {name: value for name, value in context.environ.items() if name.startswith("NVSHMEM_")}
    if not given:
        return passed("none set")
    findings = [passed(", ".join(f"{name}={value}" for name, value in sorted(given.items())))]
    if is_set("NVSHMEM_DISABLE_P2P", given):
        findings.append(
            failed("NVSHMEM_DISABLE_P2P: peers' memory cannot be mapped", "unset it on every rank")
        )
    if heap_bytes(given) is None:
        findings.append(
            failed(
                f"NVSHMEM_SYMMETRIC_SIZE={given['NVSHMEM_SYMMETRIC_SIZE']!r} is no size",
                "write bytes, or a number and K, M, G or T: NVSHMEM_SYMMETRIC_SIZE=2G",
            )
        )
    return findings


def heap_bytes(environ: Mapping[str, str]) -> int | None:
    """Size of NVSHMEM's symmetric heap in bytes, as its variable says; None if that is no size."""
    text = environ.get("NVSHMEM_SYMMETRIC_SIZE", "").strip()
    if not text:
        return DEFAULT_HEAP_BYTES
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)B?", text.upper())
    return int(float(match[1]) * SIZES[match[2]]) if match else None


CHECKS = (
    Check("launch", "launcher", check_launcher),
    Check("launch", "EP_*", check_ep_variables),
    Check("launch", "NVSHMEM_*", check_nvshmem_variables),
)
