"""Which GPU each rank has, in which NVLink domain, and whether the ranks can be one job so."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Self

from ep.bootstrap.device import choose_device
from ep.bootstrap.fabric import Fabric, Nvml
from ep.bootstrap.ranks import alike, everywhere
from ep.errors import BootstrapError, EpError, name_ranks
from ep.memory.cuda import Device, driver
from ep.memory.given import known_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ep.bootstrap.ranks import Place
    from ep.bootstrap.world import World

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Seat:
    """The GPU of a rank.

    Attributes
    ----------
    index : int
        Among the devices that the rank's process sees.
    uuid : str
    bus_id : str
        PCI address on its node.
    fabric : Fabric, optional
        None where NVML does not tell.
    """

    index: int
    uuid: str
    bus_id: str
    fabric: Fabric | None

    @classmethod
    def of(cls, device: Device) -> Self:
        """Ask the driver and NVML for the seat of a rank that uses `device`. Local."""
        told: bytes = driver("DeviceGetPCIBusId", 32, driver("DeviceGet", device.ordinal))
        bus_id = told.split(b"\0")[0].decode().lower()
        fabric = None
        try:
            with Nvml() as nvml:
                fabric = nvml.fabric(bus_id)
        except Exception as error:  # noqa: BLE001 - each binding of NVML has errors of its own
            logger.debug("NVML tells nothing of %s: %s", bus_id, error)
        return cls(device.ordinal, device.uuid, bus_id, fabric)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """Undo `dataclasses.asdict` and JSON."""
        return cls(**told | {"fabric": told["fabric"] and Fabric(**told["fabric"])})


def take_seats(
    world: World, ordinal: int | None, *, share_gpus: bool
) -> tuple[Device, tuple[Seat, ...]]:
    """Open this rank's GPU, `ordinal` if it is given, and learn of every rank's. Collective.

    Raises
    ------
    EpError
        On every rank: if one has no GPU, if several share one unasked, or if the GPUs are in
        several NVLink domains.
    """
    device, seat, error = None, None, None
    try:
        if ordinal is None:
            device = choose_device(world.local_rank, share_gpus=share_gpus)
        else:
            device = Device.open(known_device(ordinal))
        seat = Seat.of(device)
    except EpError as problem:
        error = problem
    world.agree(error, "choosing a GPU")
    assert device is not None
    assert seat is not None
    told = world.allgather(dataclasses.asdict(seat), "choosing a GPU")
    seats = tuple(map(Seat.from_json, told))
    wrong = None if share_gpus else _shared(seats)
    if wrong := wrong or _apart(world.places, seats):
        raise everywhere(wrong)
    return device, seats


def ranks_of_gpus(seats: Sequence[Seat]) -> dict[str, list[int]]:
    """Ranks of each GPU, by its UUID."""
    return alike([seat.uuid for seat in seats])


def _shared(seats: Sequence[Seat]) -> BootstrapError | None:
    shared = [ranks for ranks in ranks_of_gpus(seats).values() if len(ranks) > 1]
    if not shared:
        return None
    return BootstrapError(
        f"several ranks have one GPU: {'; '.join(map(name_ranks, shared))}; start one rank a GPU, "
        "check CUDA_VISIBLE_DEVICES, or allow it with EP_SHARE_GPUS=1 (--share-gpus)"
    )


def domains_of(places: Sequence[Place], seats: Sequence[Seat]) -> dict[str, list[int]]:
    """Ranks of each NVLink domain, as far as NVML tells.

    A machine whose fabric ends there, or that has none, is a domain of its own among several. On
    one machine peer access joins what is in no domain.
    """
    names = {place.machine: place.node for place in reversed(places)}
    found: dict[str, list[int]] = {}
    for rank, (place, seat) in enumerate(zip(places, seats, strict=True)):
        fabric = seat.fabric
        if fabric is None or (len(names) == 1 and not fabric.is_joined):
            continue
        if not fabric.is_joined:
            state = " ".join(filter(None, (fabric.state.replace("_", " "), fabric.error)))
            name = f"no fabric beyond {names[place.machine]} ({state})"
        elif fabric.is_own:
            name = f"{fabric.domain}, of {names[place.machine]}"
        else:
            name = fabric.domain
        found.setdefault(name, []).append(rank)
    return found


def _apart(places: Sequence[Place], seats: Sequence[Seat]) -> BootstrapError | None:
    found = domains_of(places, seats)
    if len(found) <= 1:
        return None
    told = "; ".join(
        f"{name_ranks(ranks)} on {', '.join(nodes_of(places[rank] for rank in ranks))}: {name}"
        for name, ranks in found.items()
    )
    return BootstrapError(
        f"the ranks' GPUs are in {len(found)} NVLink domains, between which there are no loads "
        f"and stores: {told}; start all ranks in one by srun --segment or --nodelist, or mpirun's "
        "hosts (nvidia-smi -q, Fabric, tells a host's ClusterUUID and CliqueId)"
    )


def nodes_of(places: Iterable[Place]) -> list[str]:
    """Names of the nodes, each once, in the order of their first ranks."""
    return [node for node, _ in dict.fromkeys((place.node, place.machine) for place in places)]


def placement_lines(places: Sequence[Place], seats: Sequence[Seat]) -> list[str]:
    """Tell people where the ranks are: a line a node, its ranks and their GPUs by local rank."""
    nodes: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault((place.node, place.machine), []).append(rank)
    lines = []
    for (node, _), ranks in nodes.items():
        words = f"{node}: {name_ranks(ranks)}"
        if seats:
            own = [seats[rank] for rank in ranks]
            gpus = (f"{seat.index} {seat.bus_id} {seat.uuid[:8]}" for seat in own)
            domains = dict.fromkeys(_short(seat.fabric) for seat in own)
            # Ranks that share one are not told apart.
            words += f"; GPUs {', '.join(dict.fromkeys(gpus))}; {', '.join(domains)}"
        lines.append(words)
    return lines


def _short(fabric: Fabric | None) -> str:
    if fabric is None or not fabric.is_joined:
        return "no fabric" if fabric else "fabric not told"
    return fabric.domain.replace(fabric.cluster, fabric.cluster[:8])


def placement_json(places: Sequence[Place], seats: Sequence[Seat]) -> dict[str, list[Any]]:
    """Tell programs the same: columns, an item a rank."""
    columns: dict[str, list[Any]] = {
        "node": [place.node for place in places],
        "local_rank": [place.local_rank for place in places],
    }
    if seats:
        fabrics = [seat.fabric for seat in seats]
        columns |= {
            "gpu": [seat.index for seat in seats],
            "uuid": [seat.uuid for seat in seats],
            "bus_id": [seat.bus_id for seat in seats],
            "cluster": [fabric and fabric.cluster for fabric in fabrics],
            "clique": [fabric and fabric.clique for fabric in fabrics],
        }
    return columns
