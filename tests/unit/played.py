"""GPUs that are played, for tests of the doctor."""

from typing import Any

from ep.bootstrap.fabric import NO_CLUSTER, Fabric
from ep.doctor.probe import Gpu
from ep.doctor.result import Finding

RACK = Fabric("completed", "", "ab" * 16, 7, "healthy")
OWN = Fabric("completed", "", NO_CLUSTER, 0, "healthy")


def device(number=0, *, fabric=None, links=18, numa=0, capability=(9, 0), num=4):
    uuids = [f"{index:02x}" * 16 for index in range(num)]
    reached = tuple(uuid for index, uuid in enumerate(uuids) if index != number)
    bus_id = f"0000:{number:02x}:00.0"
    uuid = uuids[number]
    return Gpu(number, uuid, bus_id, "H200", capability, numa, reached, links, fabric)


def marks(found):
    return [finding.mark for finding in (found if isinstance(found, list) else [found])]


def one(found) -> Any:
    """The only finding."""
    (finding,) = [found] if isinstance(found, Finding) else found
    return finding


class Block:
    exported = b"x"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass
