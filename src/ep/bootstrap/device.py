"""Which GPU a rank uses, and why it may have none."""

from __future__ import annotations

from importlib.util import find_spec

from ep.errors import BootstrapError
from ep.memory.cuda import Device, device_count

_NEEDED = ("cuda.bindings", "nvshmem")
"""Not the compiler: a cache of compiled kernels does without."""
_NEEDED_BY_ENGINES = _NEEDED[:1]
"""They may bring memory of their own."""


def gpu_obstacle(*, embedded: bool = False) -> str | None:
    """Say why this process cannot use the GPU backend; None if it can. Local."""
    needed = _NEEDED_BY_ENGINES if embedded else _NEEDED
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        return f"{', '.join(missing)} not installed (the extra gpu of ep)"
    return None if device_count() else "no CUDA device is visible"


def choose_device(local_rank: int, *, share_gpus: bool) -> Device:
    """Open the GPU of the `local_rank`-th rank of this node. Local.

    A launcher that binds GPUs shows each rank its own, as device 0; otherwise ranks take the
    visible devices in order.

    Raises
    ------
    BootstrapError
        If there are more ranks than devices and sharing was not asked for.
    """
    return Device.open(device_index(local_rank, device_count(), share_gpus=share_gpus))


def device_index(local_rank: int, visible: int, *, share_gpus: bool) -> int:
    """Which of `visible` devices `choose_device` opens; raises as it does. Local."""
    if visible == 1:
        return 0
    if local_rank >= visible and not share_gpus:
        raise BootstrapError(
            f"local rank {local_rank} has no GPU: {visible} are visible; start at most one rank a "
            "GPU, or allow sharing with EP_SHARE_GPUS=1 (--share-gpus)"
        )
    return local_rank % visible


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
