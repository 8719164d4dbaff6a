"""NVML, and the NVLink domains that it tells of. Makes no context. Local."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Self

NO_CLUSTER = bytes(16).hex()
_OWN = "own machine"


@dataclasses.dataclass(frozen=True)
class Fabric:
    """What NVML says of the NVLink fabric that a GPU is part of.

    Attributes
    ----------
    state : str
        "completed" where the GPU has joined; else "not_supported", "not_started", "in_progress".
    error : str
        Of the registration; empty if there was none.
    cluster : str
        UUID in hex; zeros in a machine with a fabric of its own alone.
    clique : int
        GPUs reach each other if cluster and clique are the same.
    health : str
        NVML's summary, as "healthy"; empty where the driver gives none.
    """

    state: str
    error: str
    cluster: str
    clique: int
    health: str = ""

    @property
    def is_joined(self) -> bool:
        """Whether the GPU is in a domain at all."""
        return self.state == "completed" and not self.error

    @property
    def is_own(self) -> bool:
        """Whether the domain ends at the machine, so that two machines' are not one."""
        return self.cluster == NO_CLUSTER

    @property
    def domain(self) -> str:
        """Name of the NVLink domain."""
        cluster = _OWN if self.is_own else f"cluster {self.cluster}"
        return f"{cluster}, clique {self.clique}"


def is_own_machine(domain: str) -> bool:
    """Whether a domain of that name ends at the machine."""
    return domain.startswith(_OWN)


class Nvml:
    """NVML, while it is open. A context manager; raises on entry where there is none."""

    def __init__(self) -> None:
        from cuda.bindings import nvml

        self._nvml: Any = nvml

    def __enter__(self) -> Self:
        self._nvml.init_v2()
        return self

    def __exit__(self, *_error: object) -> None:
        self._nvml.shutdown()

    def driver(self) -> str:
        """Version of the driver, as people name it: "580.95.05"."""
        return str(self._nvml.system_get_driver_version())

    def links(self, bus_id: str) -> int:
        """Active NVLinks of the GPU at a PCI address."""
        handle, active = self._handle(bus_id), 0
        for link in range(int(self._nvml.NVLINK_MAX_LINKS)):
            # Links that a GPU has not are errors.
            with contextlib.suppress(self._nvml.NvmlError):
                active += int(self._nvml.device_get_nvlink_state(handle, link))
        return active

    def fabric(self, bus_id: str) -> Fabric | None:
        """Fabric of the GPU at a PCI address; None where the driver does not tell."""
        nvml = self._nvml
        try:
            info = nvml.device_get_gpu_fabric_info_v(self._handle(bus_id))
        except nvml.NvmlError:
            return None
        status = int(info.status)
        return Fabric(
            nvml.GpuFabricState(int(info.state)).name.lower(),
            nvml.error_string(status) if status else "",
            bytes(info.cluster_uuid).hex(),
            int(info.clique_id),
            nvml.GpuFabricHealthSummary(int(info.health_summary)).name.lower(),
        )

    def _handle(self, bus_id: str) -> Any:
        return self._nvml.device_get_handle_by_pci_bus_id_v2(bus_id)
