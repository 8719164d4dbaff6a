"""Checks of the GPUs that this process sees, their NVLinks and fabric memory. Local."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ep.bootstrap.ranks import Backend
from ep.doctor import probe
from ep.doctor.result import Check, failed, in_words_of, passed, skipped, warned
from ep.errors import DeviceError
from ep.kernels.compile import ARCHES
from ep.memory.cuda import device_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep.doctor.probe import Gpu, Imex
    from ep.doctor.result import Context, Finding

LEAST_CAPABILITY = (9, 0)
IMEX_REMEDY = (
    "ask for the service nvidia-imex on every node of the rack and for the same channel on all: "
    "nvidia-caps-imex-channels in /proc/devices, and its channel0 under /dev visible to this user "
    "and container"
)


def check_driver(context: Context) -> Finding:
    """Whether there is a driver, new enough for the extra `gpu`."""
    needed = context.options.backend == Backend.GPU
    try:
        version, least = probe.driver_version(), probe.needed_version()
    except ImportError:
        words, remedy = "cuda-bindings is not installed", "pip install '.[gpu]' in its folder"
        return failed(words, remedy) if needed else skipped(words)
    except (DeviceError, RuntimeError) as error:
        # cuda.bindings raises RuntimeError where libcuda cannot be loaded.
        words = f"no CUDA driver: {in_words_of(error)}"
        return failed(words, "install NVIDIA's driver") if needed else skipped(words)
    context.facts.setdefault("versions", {})["CUDA driver"] = _version(version)
    if version < least:
        return failed(
            f"the driver serves CUDA {_version(version)}, the extra gpu needs {_version(least)}",
            "update NVIDIA's driver (CUDA 13.0 came with 580), or use --backend host",
        )
    return passed(f"CUDA {_version(version)}")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def check_devices(context: Context) -> Finding | list[Finding]:
    """Which GPUs this process sees, and whether there are kernels for them."""
    context.facts["gpus"] = []
    if not device_count():
        words = f"none is visible{_hidden(context)}"
        if context.options.backend == Backend.GPU:
            return failed(
                words, "check CUDA_VISIBLE_DEVICES, the launcher's binding and nvidia-smi"
            )
        return skipped(words)
    gpus = probe.devices()
    context.facts["gpus"] = [dataclasses.asdict(gpu) for gpu in gpus]
    return judge_devices(gpus)


def _hidden(context: Context) -> str:
    visible = context.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"


def judge_devices(gpus: Sequence[Gpu]) -> list[Finding]:
    """Compare the devices' architectures with those that kernels are made for."""
    findings = []
    for kind in sorted({(gpu.name, gpu.capability, gpu.arch) for gpu in gpus}):
        name, capability, arch = kind
        number = sum((gpu.name, gpu.capability, gpu.arch) == kind for gpu in gpus)
        told = f"{number} x {name}, {arch}"
        if capability < LEAST_CAPABILITY:
            findings.append(
                failed(f"{told}: too old", "use Hopper GPUs or newer, or --backend host")
            )
        elif arch not in ARCHES:
            findings.append(
                warned(
                    f"{told}: kernels are tested on {', '.join(ARCHES)}",
                    "trust the self-check and the tests (pytest -m gpu), not this table",
                )
            )
        else:
            findings.append(passed(told))
    return findings


def check_nvlink(context: Context) -> Finding | list[Finding]:
    """NVLinks and the state of the fabric, as NVML tells them."""
    gpus = [probe.Gpu.from_json(told) for told in context.facts.get("gpus", [])]
    if not gpus:
        return skipped("no GPU")
    try:
        with probe.Nvml() as nvml:
            context.facts.setdefault("versions", {})["NVIDIA driver"] = nvml.driver()
            gpus = [nvml.complete(gpu) for gpu in gpus]
    except Exception as error:  # noqa: BLE001 - each binding of NVML has errors of its own
        return warned(
            f"NVML tells nothing: {in_words_of(error)}",
            "install the extra gpu of ep; in a container ask for the driver capability 'utility'",
        )
    context.facts["gpus"] = [dataclasses.asdict(gpu) for gpu in gpus]
    launch = context.facts.get("launch")
    return judge_nvlink(gpus, alone=len(gpus) == 1 and (launch is None or launch[2] == 1))


def judge_nvlink(gpus: Sequence[Gpu], *, alone: bool = False) -> list[Finding]:
    """Tell links and fabric of each kind of device; a fabric that has not completed is a fail."""
    findings = []
    kinds: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        kinds.setdefault(f"{gpu.links} NVLinks active; {_fabric_words(gpu)}", []).append(gpu)
    for words, alike in kinds.items():
        told = f"GPU {', '.join(str(gpu.ordinal) for gpu in alike)}: {words}"
        fabric = alike[0].fabric
        if fabric is not None and (
            fabric.state == "in_progress" or (fabric.state == "completed" and fabric.error)
        ):
            findings.append(
                failed(told, "look at nvidia-smi -q (Fabric) and at the fabric manager's log")
            )
        elif fabric is not None and fabric.health not in ("", "healthy", "not_supported"):
            findings.append(warned(told, "look at nvidia-smi -q (Fabric, Health)"))
        elif not alike[0].links and not alone:
            findings.append(
                warned(told, "expect PCIe's speed at best; see nvidia-smi nvlink --status")
            )
        else:
            findings.append(passed(told))
    return findings


def _fabric_words(gpu: Gpu) -> str:
    fabric = gpu.fabric
    if fabric is None:
        return "no fabric told"
    if fabric.state != "completed":
        return f"fabric {fabric.state.replace('_', ' ')} {fabric.error}".strip()
    return f"fabric {fabric.error or fabric.health or 'completed'}, {fabric.domain}"


def check_fabric_memory(context: Context) -> Finding:
    """Make, export and import fabric memory: NVML has been seen to tell of fabrics that are not."""
    gpus = [probe.Gpu.from_json(told) for told in context.facts.get("gpus", [])]
    if not gpus:
        return skipped("no GPU")
    gpu = gpus[context.facts.get("local_rank_hint", 0) % len(gpus)]
    obstacle = ""
    try:
        with probe.FabricBlock(gpu.ordinal) as block:
            probe.import_block(block.exported, gpu.ordinal)
    except DeviceError as error:
        obstacle = str(error)
    context.facts["fabric_obstacle"] = obstacle
    return judge_fabric_memory(gpu, obstacle, probe.imex())


def judge_fabric_memory(gpu: Gpu, obstacle: str, channels: Imex) -> Finding:
    """Weigh what the allocation met. Only ranks on several nodes need it."""
    shown = (
        f"IMEX channels: {', '.join(channels.channels) or 'none usable'}"
        f"{'' if channels.driver_knows else ', unknown to the driver'}"
    )
    if not obstacle:
        return passed(f"a fabric handle was made, exported and imported; {shown}")
    told = f"no fabric memory ({obstacle}); {shown}; needed across nodes only"
    fabric = gpu.fabric
    if fabric is None or fabric.state != "completed" or fabric.is_own:
        return skipped(told)
    return warned(f"{told}, where NVML tells of {fabric.domain}", IMEX_REMEDY)


CHECKS = (
    Check("gpu", "driver", check_driver),
    Check("gpu", "devices", check_devices),
    Check("gpu", "NVLink", check_nvlink),
    Check("gpu", "fabric memory", check_fabric_memory),
)
