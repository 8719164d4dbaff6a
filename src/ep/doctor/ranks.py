"""Checks over ranks, from what each has told: every rank can make them, rank 0 does. Local."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ep.bench.record import mps_runs
from ep.bootstrap.fabric import is_own_machine
from ep.bootstrap.placement import nodes_of
from ep.bootstrap.ranks import Backend, in_words
from ep.doctor.gpu import IMEX_REMEDY
from ep.doctor.launch import heap_bytes
from ep.doctor.machine import mib
from ep.doctor.probe import Gpu
from ep.doctor.result import Mark, Result, failed, guarded, passed, skipped, warned
from ep.errors import name_ranks
from ep.settings import OF_A_RANK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ep.bootstrap import Place
    from ep.doctor.result import Finding, Options

AREA = "ranks"


@dataclasses.dataclass(frozen=True)
class Survey:
    """What all ranks have told.

    Attributes
    ----------
    options : Options
    places : tuple of Place
    facts : list of dict
        What each rank's own checks have left; of its own GPU also "ordinal" and "memory".
    buffer_bytes : int
        Of a rank's buffer on the GPU backend.
    share_gpus : bool
        Whether ranks may share a GPU.
    """

    options: Options
    places: tuple[Place, ...]
    facts: list[dict[str, Any]]
    buffer_bytes: int
    share_gpus: bool = False

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.places)

    @property
    def num_nodes(self) -> int:
        """Machines that the ranks are on."""
        return len({place.machine for place in self.places})

    @cached_property
    def gpus(self) -> list[Gpu | None]:
        """GPU that each rank would use."""
        told = ((facts.get("ordinal"), facts.get("gpus", [])) for facts in self.facts)
        return [None if own is None else Gpu.from_json(gpus[own]) for own, gpus in told]

    @property
    def backend(self) -> Backend:
        """What an exchange of these ranks would use."""
        if self.options.backend == Backend.HOST or None in self.gpus:
            return Backend.HOST
        return Backend.HOST if any(map(self.obstacle, range(self.size))) else Backend.GPU

    def obstacle(self, rank: int) -> str:
        """Why a rank has no GPU backend; empty if it has."""
        told = self.facts[rank].get("obstacle")
        return told or ("" if self.gpus[rank] else "its GPU could not be looked at")

    def sharers(self) -> list[list[int]]:
        """Ranks of each GPU that several use."""
        owners: dict[str, list[int]] = {}
        for rank, gpu in enumerate(self.gpus):
            if gpu is not None:
                owners.setdefault(gpu.uuid, []).append(rank)
        return [ranks for ranks in owners.values() if len(ranks) > 1]


def judge(survey: Survey) -> list[Result]:
    """Give the results of all checks over ranks; none may end the others."""
    checks: list[tuple[str, Callable[[Survey], Finding | list[Finding]]]] = [
        ("versions", check_versions),
        ("variables", check_variables),
        ("backend", check_backend),
        ("CPUs", check_cpus),
    ]
    if survey.backend is Backend.GPU:
        from ep.doctor.reach import check_reach

        checks += [
            ("GPU a rank", check_sharing),
            ("GPU and CPUs", check_numa),
            ("NVLink domain", check_domain),
            ("fabric memory", check_fabric),
            ("reach", check_reach),
            ("heap", check_heap),
        ]
    results = []
    for name, function in checks:
        results += guarded(AREA, name, partial(function, survey))
    return results


def differences(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell each name whose value is not the same on every rank, and which rank has which."""
    names = sorted(set().union(*said))
    values = {name: [str(theirs.get(name, "none")) for theirs in said] for name in names}
    return [f"{name}: {in_words(told)}" for name, told in values.items() if len(set(told)) > 1]


def check_versions(survey: Survey) -> list[Finding]:
    """Whether all ranks run the same software."""
    found = differences([facts.get("versions", {}) for facts in survey.facts])
    remedy = "give every node the same environment: the same folder, or the same image"
    if not found:
        return [passed("the same on every rank")]
    return [failed(words, remedy) for words in found]


def check_variables(survey: Survey) -> list[Finding]:
    """Whether all ranks have the same settings."""
    found = differences(
        [
            {n: value for n, value in facts.get("variables", {}).items() if n not in OF_A_RANK}
            for facts in survey.facts
        ]
    )
    remedy = "set it alike on every rank: mpirun -genv (MPICH), -x (Open MPI), srun --export=ALL"
    if not found:
        return [passed("EP_* and NVSHMEM_* are the same on every rank")]
    return [warned(words, remedy) for words in found]


def check_backend(survey: Survey) -> Finding:
    """Whether all ranks can use the same backend, and the host backend all ranks' memory."""
    num_names = len(nodes_of(survey.places))
    nodes = f"{num_names} node{'s' * (num_names > 1)}"
    if num_names > survey.num_nodes == 1:
        nodes += " that are one machine"
    told = f"{survey.backend}, {survey.size} rank{'s' * (survey.size > 1)} on {nodes}"
    without = {rank: words for rank in range(survey.size) if (words := survey.obstacle(rank))}
    if survey.options.backend == Backend.GPU and without:
        return failed(f"no GPU backend: {in_words(without)}", "see the checks of those ranks")
    if survey.backend is Backend.HOST and survey.num_nodes > 1:
        return failed(
            f"{told}: the host backend shares memory on one machine",
            "start all ranks on one node, or use GPUs",
        )
    if survey.options.backend == "auto" and 0 < len(without) < survey.size:
        return warned(
            f"{told}, since some ranks have no GPU: {in_words(without)}",
            "see the checks of those ranks, or ask for --backend host",
        )
    return passed(told)


def check_cpus(survey: Survey) -> list[Finding]:
    """Whether the ranks of a node have CPUs enough."""
    machines: dict[str, list[int]] = {}
    for rank, place in enumerate(survey.places):
        machines.setdefault(place.machine, []).append(rank)
    findings = []
    for ranks in machines.values():
        cpus = set().union(*(survey.facts[rank].get("cpus", []) for rank in ranks))
        if 0 < len(cpus) < len(ranks):
            findings.append(
                warned(
                    f"{name_ranks(ranks)} share {len(cpus)} CPUs: right, but slow",
                    "start fewer ranks, or, if the launcher binds them to fewer CPUs than there "
                    "are, let it bind less (--bind-to none)",
                )
            )
    return findings or [passed("every rank can have one of its own")]


def check_sharing(survey: Survey) -> Finding:
    """Two ranks on one GPU."""
    shared = survey.sharers()
    if not shared:
        return passed("one rank a GPU")
    told = f"several ranks on one GPU: {'; '.join(map(name_ranks, shared))}"
    if not survey.share_gpus:
        return failed(
            told,
            "start one rank a GPU; check CUDA_VISIBLE_DEVICES and the launcher's binding "
            "(srun --gpus-per-task=1); or allow it with EP_SHARE_GPUS=1",
        )
    if mps_runs():
        return passed(f"{told}, as allowed, under MPS")
    return warned(f"{told}, as allowed, but without MPS", "start nvidia-cuda-mps-control -d")


def check_numa(survey: Survey) -> list[Finding]:
    """Whether each rank runs near its GPU."""
    far: dict[str, list[int]] = {}
    for rank, gpu in enumerate(survey.gpus):
        nodes = survey.facts[rank].get("numa", [])
        if gpu is not None and gpu.numa >= 0 and nodes and gpu.numa not in nodes:
            told = f"on NUMA {', '.join(map(str, nodes))}, the GPU is on NUMA {gpu.numa}"
            far.setdefault(told, []).append(rank)
    remedy = "bind each rank to the CPUs beside its GPU (nvidia-smi topo -m; srun --gpu-bind)"
    if not far:
        return [passed("no rank is bound away from its GPU")]
    return [warned(f"{name_ranks(ranks)}: {told}", remedy) for told, ranks in far.items()]


def domains(survey: Survey) -> dict[str, list[int]]:
    """Ranks of each NVLink domain; those whose GPU is in none are under ""."""
    found: dict[str, list[int]] = {}
    for rank, gpu in enumerate(survey.gpus):
        fabric = None if gpu is None else gpu.fabric
        found.setdefault(fabric.domain if fabric and fabric.is_joined else "", []).append(rank)
    return found


def check_domain(survey: Survey) -> Finding:
    """Whether all GPUs are in one NVLink domain."""
    found = domains(survey)
    told = "; ".join(f"{name_ranks(ranks)}: {name or 'no fabric'}" for name, ranks in found.items())
    remedy = (
        "start all ranks in one NVLink domain: nodes of one rack and partition, by srun --segment "
        "or --nodelist (nvidia-smi -q, Fabric: ClusterUUID and CliqueId)"
    )
    if len(set(found) - {""}) > 1:
        return failed(f"several NVLink domains: {told}", remedy)
    if "" in found and survey.num_nodes > 1:
        return failed(f"{survey.num_nodes} nodes, but {told}", remedy)
    if "" in found:
        return passed("one node, no fabric: peer access is what counts")
    own = [name for name in found if is_own_machine(name)]
    if own and survey.num_nodes > 1:
        return failed(f"{survey.num_nodes} nodes, each with a fabric of its own", remedy)
    return passed(f"one: {told}")


def check_fabric(survey: Survey) -> Finding:
    """Whether fabric memory can be had by every rank, where the ranks are on several nodes."""
    told = [facts.get("fabric_obstacle") for facts in survey.facts]
    without = {
        rank: "unknown" if words is None else words
        for rank, words in enumerate(told)
        if words != ""
    }
    if survey.num_nodes == 1:
        return skipped("one node: not needed")
    disabled = [
        rank
        for rank, facts in enumerate(survey.facts)
        if facts.get("variables", {}).get("NVSHMEM_DISABLE_MNNVL", "0") not in ("", "0")
    ]
    if disabled:
        return failed(f"NVSHMEM_DISABLE_MNNVL is set on {name_ranks(disabled)}", "unset it")
    if without:
        return failed(f"none on {in_words(without)}", IMEX_REMEDY)
    return passed("every rank can have it")


def check_heap(survey: Survey) -> list[Finding]:
    """The buffer against NVSHMEM's heap, and that against free memory."""
    findings: list[Finding] = []
    need, options = survey.buffer_bytes, survey.options
    what = f"{options.config} with {options.max_tokens} tokens takes {mib(need)} a rank"
    for rank, gpu in enumerate(survey.gpus):
        heap = heap_bytes(survey.facts[rank].get("variables", {}))
        free, _ = survey.facts[rank].get("memory") or (None, None)
        if gpu is None or heap is None:
            continue
        if survey.size == 1:
            # A world of one process takes plain device memory.
            heap = need
        elif need > heap:
            least = -(-need // (1 << 20)) + 64
            findings.append(
                failed(
                    f"{what}, NVSHMEM_SYMMETRIC_SIZE is {mib(heap)}",
                    f"set NVSHMEM_SYMMETRIC_SIZE={least}M or more on every rank",
                )
            )
        sharing = next((len(ranks) for ranks in survey.sharers() if rank in ranks), 1)
        if free is not None and sharing * max(heap, need) > free:
            times = f"{sharing} x " if sharing > 1 else ""
            findings.append(
                failed(
                    f"rank {rank}: {mib(free)} are free on its GPU, {times}"
                    f"{mib(max(heap, need))} are needed",
                    "end what else uses the GPU (nvidia-smi), or lower NVSHMEM_SYMMETRIC_SIZE",
                )
            )
    if any(finding.mark is Mark.FAIL for finding in findings):
        return list(dict.fromkeys(findings))
    known = [facts["memory"][0] for facts in survey.facts if facts.get("memory")]
    least_free = mib(min(known)) if known else "unknown"
    return [passed(f"{what}; least free memory of a GPU: {least_free}")]
