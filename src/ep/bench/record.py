"""One JSON object for each measured row: what ran, where, how fast, and whether it was right."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import ep
from ep.bootstrap.placement import nodes_of, placement_json
from ep.files import append_text
from ep.layout import HEADER_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ep.bench.breakdown import Mark
    from ep.bench.cases import Step
    from ep.bench.sweep import Plan
    from ep.bench.timing import Floor, Timing
    from ep.bootstrap import World
    from ep.config import EpConfig


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes that a rank sends to other ranks in a step, averaged over steps.

    Attributes
    ----------
    mean : float
        Over the ranks.
    max : float
        Of the rank that sends most.
    """

    mean: float
    max: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the routing alone says of the bytes sent."""

    dispatch: Bytes
    combine: Bytes
    busiest: float
    """Most that one rank sends in both together."""

    @classmethod
    def of(cls, config: EpConfig, rows: npt.NDArray[np.int64], num_steps: int) -> Traffic:
        """Count from `rows` `[N, N]`, rows from rank to rank over `num_steps` steps.

        A row is x, scales, ids, weights and header in dispatch, and H BF16 elements in combine.
        """
        row_bytes = config.hidden + config.hidden // 32 + 8 * config.top_k + 4 * HEADER_WORDS
        afar = rows * (1 - np.eye(len(rows), dtype=np.int64)) / num_steps
        sent, received = afar.sum(axis=1), afar.sum(axis=0)
        dispatch, combine = sent * row_bytes, received * 2 * config.hidden
        return cls(
            Bytes(float(dispatch.mean()), float(dispatch.max())),
            Bytes(float(combine.mean()), float(combine.max())),
            float((dispatch + combine).max()),
        )


def gather_traffic(world: World, config: EpConfig, steps: Sequence[Step]) -> Traffic:
    """Count what `steps` send. Collective."""
    own = sum(step.rows_to(world.rank) for step in steps)
    rows = world.allgather(np.asarray(own).tolist(), "counting bytes")
    return Traffic.of(config, np.array(rows, np.int64), len(steps))


HOST_COSTS = ("calls", "prepared", "c")
"""Of Python, of Python's prepared steps, and of an exported library's C functions."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a case at one number of tokens.

    Attributes
    ----------
    tokens : int
        Most that a rank sends in a step.
    complaints : tuple of str
        Of the ranks whose check failed, in rank order.
    timing : Timing or None
        None where the check before it failed.
    traffic : Traffic
    floor : Floor or None
        Of the machine; None on the host backend.
    variant : str
        Build of the kernels, as `KernelOptions.parse` reads it.
    marks : tuple of Mark
        Where the time went, on rank 0, of a build with stamps; empty if that was not asked for.
    host_us : dict, optional
        What a pair costs the slowest rank's host in eager mode, by `HOST_COSTS`.
    """

    tokens: int
    complaints: tuple[str, ...]
    timing: Timing | None
    traffic: Traffic
    floor: Floor | None = None
    variant: str = ""
    marks: tuple[Mark, ...] = ()
    host_us: dict[str, float] | None = None

    @property
    def x_floor(self) -> float | None:
        """How many times the floor a pair takes."""
        if self.floor is None or self.timing is None:
            return None
        return self.timing.pair.median / self.floor.pair

    def rates_gbs(self) -> dict[str, float]:
        """GB/s that the busiest rank sends in each call, by its median time; none if not timed."""
        if self.timing is None:
            return {}
        sent = {"dispatch": self.traffic.dispatch.max, "combine": self.traffic.combine.max}
        return {
            name: most / (1e3 * getattr(self.timing, name).median) for name, most in sent.items()
        }

    @property
    def check(self) -> Literal["passed", "failed"]:
        """Whether every rank had what the oracle says, before timing and after."""
        return "failed" if self.complaints else "passed"


def to_json(row: Row, plan: Plan, world: World) -> dict[str, Any]:
    """Give the fields of a row as JSON holds them. Local."""
    case, config = plan.case, plan.case.config
    times: dict[str, Any] = dict.fromkeys(("pair_us", "dispatch_us", "combine_us", "skew_us"))
    if row.timing is not None:
        timed = _rounded(dataclasses.asdict(row.timing))
        times = {f"{name}_us": timed[name] for name in ("pair", "dispatch", "combine")}
        times["skew_us"] = timed["skew_us"]
    return {
        "backend": str(world.backend),
        "ranks": config.ranks,
        "nodes": len(nodes_of(world.places)),
        "placement": placement_json(world.places, world.seats),
        "config": plan.shape,
        "tokens": row.tokens,
        "max_tokens": config.max_tokens,
        "hidden": config.hidden,
        "experts": config.experts,
        "top_k": config.top_k,
        "routing": str(case.routing),
        "uneven": case.uneven,
        "norm": case.norm,
        "steps": plan.steps,
        "warmup": plan.warmup,
        "seed": case.seed,
        "check": row.check,
        **times,
        **gpu_facts(row, plan, world),
        **breakdown(row),
        "host_us": _rounded(row.host_us) if row.host_us else None,
        "sent_bytes": _rounded(dataclasses.asdict(row.traffic)),
        "host_cpus": os.cpu_count(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def gpu_facts(row: Row, plan: Plan, world: World) -> dict[str, Any]:
    """Give what only a run on GPUs has: which, how steps were timed, and the floor. Local."""
    mode = plan.mode(world.backend)
    if row.floor is None or world.device is None:
        return {"mode": mode}
    return {
        "mode": mode,
        "variant": row.variant or "default",
        "protocol": protocol_of(row.variant, plan.case.config),
        "pairs_a_graph": plan.pairs if mode == "graph" else None,
        "gpu": world.device.name,
        "gpus": world.num_gpus,
        "shared_gpus": world.shares_gpus,
        "mps": mps_runs(),
        "floor_us": {
            name: round(getattr(row.floor, name), 3) for name in ("launch", "one_way", "pair")
        },
        "copy_gbs": round(row.floor.copy_gbs, 1),
        "rate_gbs": _rounded(row.rates_gbs()),
        "x_floor": None if row.x_floor is None else round(row.x_floor, 2),
    }


def protocol_of(variant: str, config: EpConfig) -> str:
    """Protocol of a build, as `--compare` names it."""
    named = [part for part in variant.split(",") if part.strip().startswith("protocol=")]
    return named[-1].split("=", 1)[1].strip() if named else str(config.protocol)


def breakdown(row: Row) -> dict[str, Any]:
    """Give the marks of a row, if it has any. Local."""
    if not row.marks:
        return {}
    from ep.bench.breakdown import to_json as marks_to_json

    return {"breakdown_us": marks_to_json(row.marks)}


def mps_runs() -> bool:
    """Whether this process is a client of CUDA MPS, as far as its daemon's pipe tells."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - CUDA's own
    return (Path(folder) / "control").exists()


def append(path: Path, fields: dict[str, Any]) -> None:
    """Append one line to `path`."""
    append_text(path, json.dumps(fields) + "\n")


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; of MPI None where the process runs without."""
    return {
        "ep": ep.__version__,
        "numpy": version("numpy"),
        "ml_dtypes": version("ml_dtypes"),
        "python": platform.python_version(),
        "mpi": _mpi_library(),
        **_gpu_versions(),
    }


def commit() -> str | None:
    """Commit of the checkout that `ep` runs from, "-dirty" if files differ.

    Outside of one what `EP_COMMIT` says, else None.
    """
    told = os.environ.get("EP_COMMIT")
    package = Path(ep.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    # An environment may lie inside of somebody else's checkout.
    if top is None or Path(top) / "src" / "ep" != package:
        return told
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    done = subprocess.run(
        [program, "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _mpi_library() -> str | None:
    # Importing mpi4py here would start MPI in a process that runs without.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return None
    text: str = mpi.Get_library_version().replace("\0", "")
    return " ".join(text.splitlines()[0].split(",")[0].split())


def _gpu_versions() -> dict[str, str | None]:
    from ep.memory.cuda import device_count, driver
    from ep.memory.nvshmem import TESTED

    # The bindings may be there without a driver, and a driver must not be started for nothing.
    if "cuda.bindings.driver" not in sys.modules or not device_count():
        return {}

    number = int(driver("DriverGetVersion"))
    found: dict[str, str | None] = {"cuda_driver": f"{number // 1000}.{number % 1000 // 10}"}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _rounded(value: Any) -> Any:
    """Round every number to 3 digits after the point: ns where the unit is us."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return round(value, 3)
