"""What CUDA, NVML and the system tell of GPUs. Everything that touches them is here. Local.

No call makes a context, but for `FabricBlock` and `memory_bytes`, on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ep.bootstrap import fabric
from ep.bootstrap.fabric import Fabric
from ep.memory.cuda import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

_PCI = Path("/sys/bus/pci/devices")
_PROC_DEVICES = Path("/proc/devices")
_CHANNELS = Path("/dev/nvidia-caps-imex-channels")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device that this process sees.

    Attributes
    ----------
    ordinal : int
    uuid, bus_id, name : str
    capability : tuple of int
    numa : int
        NUMA node of its PCI slot; -1 if unknown.
    reach : tuple of str
        UUIDs of the other visible devices whose memory it can load and store.
    links : int, optional
        Active NVLinks; None where NVML does not tell.
    fabric : Fabric, optional
        None where NVML does not tell.
    """

    ordinal: int
    uuid: str
    bus_id: str
    name: str
    capability: tuple[int, int]
    numa: int
    reach: tuple[str, ...] = ()
    links: int | None = None
    fabric: Fabric | None = None

    @property
    def arch(self) -> str:
        """As `Device.arch`."""
        return f"sm_{self.capability[0]}{self.capability[1]}a"

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Gpu:
        """Undo `dataclasses.asdict` and JSON."""
        joined = told["fabric"] and Fabric(**told["fabric"])
        major, minor = told["capability"]
        return cls(
            **told | {"capability": (major, minor), "reach": tuple(told["reach"]), "fabric": joined}
        )


def driver_version() -> int:
    """Newest CUDA that the driver supports, as 13000; raises where there is no driver."""
    return int(driver("DriverGetVersion"))


def needed_version() -> int:
    """Oldest CUDA that the installed bindings, and so all of the extra `gpu`, work with."""
    from cuda.bindings import driver as cuda

    # Within a major version older drivers serve newer libraries.
    return int(cuda.CUDA_VERSION) // 1000 * 1000


def devices() -> list[Gpu]:
    """Give the devices that this process sees, without what NVML tells."""
    from cuda.bindings import driver as cuda

    driver("Init", 0)
    handles = [driver("DeviceGet", ordinal) for ordinal in range(int(driver("DeviceGetCount")))]
    uuids = [bytes(driver("DeviceGetUuid", handle).bytes).hex() for handle in handles]
    attribute = cuda.CUdevice_attribute
    found = []
    for ordinal, handle in enumerate(handles):
        major, minor = (
            int(driver("DeviceGetAttribute", which, handle))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        bus_id = _text(driver("DeviceGetPCIBusId", 32, handle)).lower()
        reach = tuple(
            uuid
            for peer, uuid in zip(handles, uuids, strict=True)
            if peer is not handle and int(driver("DeviceCanAccessPeer", handle, peer))
        )
        name = _text(driver("DeviceGetName", 256, handle))
        found.append(
            Gpu(ordinal, uuids[ordinal], bus_id, name, (major, minor), numa_node(bus_id), reach)
        )
    return found


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode()


def numa_node(bus_id: str, root: Path = _PCI) -> int:
    """NUMA node of a PCI device; -1 if the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return int((root / bus_id / "numa_node").read_text())
    return -1


class Nvml(fabric.Nvml):
    """NVML, for what the doctor tells of devices."""

    def complete(self, gpu: Gpu) -> Gpu:
        """Add what NVML tells of a device."""
        return dataclasses.replace(
            gpu, links=self.links(gpu.bus_id), fabric=self.fabric(gpu.bus_id)
        )


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[Any]:
    """Use the primary context of a device, and give it back."""
    driver("Init", 0)
    device = driver("DeviceGet", ordinal)
    driver("CtxPushCurrent", driver("DevicePrimaryCtxRetain", device))
    try:
        yield device
    finally:
        driver("CtxPopCurrent")
        driver("DevicePrimaryCtxRelease", device)


def memory_bytes(ordinal: int) -> tuple[int, int]:
    """Free and total memory of a device, as a process that has begun to use it sees them."""
    with _context(ordinal):
        free, total = driver("MemGetInfo")
        return int(free), int(total)


@dataclasses.dataclass(frozen=True)
class Imex:
    """What the system shows of IMEX channels, which fabric memory needs across nodes."""

    driver_knows: bool
    channels: tuple[str, ...]


def imex(proc_devices: Path = _PROC_DEVICES, channels: Path = _CHANNELS) -> Imex:
    """Look for the driver's entry and for the channels that this process can open."""
    knows = False
    with contextlib.suppress(OSError):
        knows = channels.name in proc_devices.read_text()
    usable = []
    with contextlib.suppress(OSError):
        for path in sorted(channels.iterdir()):
            with contextlib.suppress(OSError), path.open("rb"):
                usable.append(path.name)
    return Imex(knows, tuple(usable))


class FabricBlock:
    """A small allocation behind a fabric handle, which other nodes can import. A context manager.

    Raises
    ------
    DeviceError
        On entry, in the driver's words: NOT_SUPPORTED without a fabric, NOT_PERMITTED without an
        IMEX channel.

    Attributes
    ----------
    exported : bytes
        The handle that travels.
    """

    def __init__(self, ordinal: int) -> None:
        self.exported = b""
        self._ordinal = ordinal
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        from cuda.bindings import driver as cuda

        with contextlib.ExitStack() as stack:
            device = stack.enter_context(_context(self._ordinal))
            location = cuda.CUmemLocation()
            location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = int(device)
            wanted = cuda.CUmemAllocationProp()
            wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            wanted.requestedHandleTypes = _fabric_type()
            wanted.location = location
            least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            size_bytes = int(driver("MemGetAllocationGranularity", wanted, least))
            handle = driver("MemCreate", size_bytes, wanted, 0)
            stack.callback(driver, "MemRelease", handle)
            exported = driver("MemExportToShareableHandle", handle, _fabric_type(), 0)
            self.exported = bytes(exported.data)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()


def import_block(exported: bytes, ordinal: int) -> None:
    """Import a fabric handle, of this process or another's, and let go of it again.

    Raises
    ------
    DeviceError
        NOT_PERMITTED where exporter and importer are not on the same IMEX channel.
    """
    with _context(ordinal):
        driver("MemRelease", driver("MemImportFromShareableHandle", exported, _fabric_type()))


def _fabric_type() -> Any:
    from cuda.bindings import driver as cuda

    return cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
