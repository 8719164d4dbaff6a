"""Shows: an engine that has its own memory and its own way to gather, here MPI's.

Run with: mpirun -np 2 python examples/07_own_memory.py --memory host (or vmm, ipc, torch)

host: files that all processes map, without a GPU. vmm: cuMem handles, passed as
file descriptors, as CUDA's own multi-process allocators do it; on a GB300 rack they are fabric
handles, which travel as bytes. ipc: cudaIpc handles of plain allocations. torch: torch's symmetric
memory, one GPU a rank.
"""

import contextlib
import ctypes
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from mpi4py import MPI

import ep
from ep.bench.bridge import open_bridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.memory.cuda import driver  # raises what a call of the driver gives

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


@contextlib.contextmanager
def host(size_bytes: int, _device: int | None) -> Iterator[tuple[int, list[int]]]:
    """Memory of the host, a file each; its own address, and everybody's."""
    mapped = []
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        for path in COMM.allgather(file.name):
            with Path(path).open("r+b") as theirs:
                mapped.append(mmap.mmap(theirs.fileno(), size_bytes))
        COMM.barrier()
    # The files have no names any more: what is mapped ends with the processes.
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in mapped]
    yield addresses[RANK], addresses


def pass_descriptor(mine: int) -> list[int]:
    """Give every rank's descriptor, as this process has it: each rank serves all others in turn."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(Path(folder) / "fd"))
        server.listen(SIZE)
        paths = COMM.allgather(server.getsockname())
        got = []
        for owner, path in enumerate(paths):
            if owner == RANK:
                for _ in range(SIZE - 1):
                    with server.accept()[0] as peer:
                        socket.send_fds(peer, [b"x"], [mine])
                got.append(mine)
            else:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
                    got += socket.recv_fds(client, 1, 1)[1]
        COMM.barrier()
    return got


@contextlib.contextmanager
def vmm(size_bytes: int, device: int) -> Iterator[tuple[int, list[int]]]:
    """Memory of cuMemCreate, mapped on every rank."""
    from cuda.bindings import driver as cu

    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = kind
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(driver("MemGetAllocationGranularity", wanted, least))
    size = -(-size_bytes // unit) * unit
    access = cu.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    mine = driver("MemCreate", size, wanted, 0)
    descriptors = pass_descriptor(int(driver("MemExportToShareableHandle", mine, kind, 0)))
    addresses = []
    for rank, descriptor in enumerate(descriptors):
        handle = mine
        if rank != RANK:
            handle = driver("MemImportFromShareableHandle", descriptor, kind)
        address = driver("MemAddressReserve", size, unit, 0, 0)
        driver("MemMap", address, size, 0, handle, 0)
        driver("MemSetAccess", address, size, [access], 1)
        # The mapping keeps the memory.
        driver("MemRelease", handle)
        os.close(descriptor)
        addresses.append(int(address))
    yield addresses[RANK], addresses
    for address in addresses:
        driver("MemUnmap", address, size)
        driver("MemAddressFree", address, size)


@contextlib.contextmanager
def ipc(size_bytes: int, _device: int) -> Iterator[tuple[int, list[int]]]:
    """Memory of cuMemAlloc, opened on every other rank by its handle."""
    from cuda.bindings import driver as cu

    own = driver("MemAlloc", size_bytes)
    handles = COMM.allgather(bytes(driver("IpcGetMemHandle", own).reserved))
    flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    addresses = []
    for rank, words in enumerate(handles):
        handle = cu.CUipcMemHandle()
        handle.reserved = words
        addresses.append(int(own if rank == RANK else driver("IpcOpenMemHandle", handle, flags)))
    yield int(own), addresses
    for rank, address in enumerate(addresses):
        if rank != RANK:
            driver("IpcCloseMemHandle", address)
    COMM.barrier()
    driver("MemFree", own)


@contextlib.contextmanager
def torch(size_bytes: int, device: int) -> Iterator[tuple[int, list[int]]]:
    """Torch's symmetric memory, by a process group of torch's."""
    import torch
    import torch.distributed as dist  # noqa: TID251 - the engine's, not ep's
    import torch.distributed._symmetric_memory as symmetric  # noqa: TID251 - the same

    with socket.socket() as free:
        free.bind(("", 0))
        port = COMM.bcast(free.getsockname()[1])
    torch.cuda.set_device(device)
    at = {"init_method": f"tcp://{COMM.bcast(socket.gethostname())}:{port}"}
    dist.init_process_group("nccl", rank=RANK, world_size=SIZE, **at)
    memory = symmetric.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    handle = symmetric.rendezvous(memory, dist.group.WORLD)
    yield memory.data_ptr(), list(handle.buffer_ptrs)
    dist.destroy_process_group()


def run(world: ep.World, config: ep.EpConfig, buffers: ep.EpBuffers) -> None:
    """Make steps on the engine's memory, each compared with the oracle."""
    case = Case(config=config, uneven=True)
    with ep.Exchange(world, config, buffers=buffers, start=False) as exchange:
        # When the engine thinks fit: each rank writes its own buffer, then all meet.
        exchange.arm()
        exchange.start()
        bridge = open_bridge(exchange)
        for number, tokens in enumerate((config.max_tokens, 0, 1, 5, 3, 8)):
            wrong = run_checked_step(exchange, case.step(number, tokens), bridge)
            assert wrong is None, str(wrong)
        bridge.close()


@click.command()
@click.option("--memory", type=click.Choice(["host", "vmm", "ipc", "torch"]), default="vmm")
def main(memory: str) -> None:
    """Make an exchange on memory that `ep` did not allocate."""
    backend, device = "host", None
    if memory != "host":
        driver("Init", 0)
        backend, device = "gpu", RANK % int(driver("DeviceGetCount"))
    world = ep.World.embedded(RANK, SIZE, COMM.allgather, backend=backend, device=device)
    config = ep.EpConfig.load("kimi_k3", ranks=SIZE, max_tokens=8)
    size_bytes = ep.EpBuffers.size_bytes(config, backend)
    made = {"host": host, "vmm": vmm, "ipc": ipc, "torch": torch}[memory]
    with made(size_bytes, device) as (own, peers), world:
        on = {"backend": backend, "device": device}
        run(world, config, ep.EpBuffers.from_addresses(config, RANK, own, peers, **on))
    print(f"rank {RANK}: 6 steps on memory of {memory} came back right", flush=True)


if __name__ == "__main__":
    main()
