"""What each task does in tests of Slurm: `python -m tests.slurm.tasks CASE [ARGUMENT...]`."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ep
import ep.bootstrap.world
from ep.bench.cases import Case
from ep.bootstrap import Place, placement
from ep.bootstrap.device import device_index
from ep.bootstrap.fabric import Fabric
from ep.bootstrap.placement import Seat, placement_lines
from tests.multirank.worker import check, config, raises

DEAD = 5


def steps(world, num_steps=3):
    """Checked steps of different size on one buffer."""
    config_ = config(world, "tiny", 4)
    with ep.Exchange(world, config_) as exchange:
        for number in range(num_steps):
            step = Case(config=config_, uneven=number % 2 == 1).step(number, (3, 4, 1)[number % 3])
            check(world, exchange, step)


def play_gpus(clique_of):
    """Let World find the GPUs that Slurm shows this task, in a fabric of these cliques by node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    node = Place.own().node

    def choose(local_rank, *, share_gpus):
        return SimpleNamespace(
            ordinal=device_index(local_rank, len(visible), share_gpus=share_gpus)
        )

    def seat_of(device):
        number = visible[device.ordinal]
        fabric = Fabric("completed", "", "ab" * 16, clique_of(int(node[-1])), "healthy")
        return Seat(device.ordinal, f"{node}-{number}", f"0000:0{number}:00.0", fabric)

    played: tuple[Any, ...] = (Seat, placement, ep.bootstrap.world, Place)
    # As if each node had a kernel of its own.
    own = dataclasses.replace(Place.own(), machine=node)
    for target, name, value in zip(
        played,
        ("of", "choose_device", "gpu_obstacle", "own"),
        (seat_of, choose, lambda **_: None, lambda: own),
        strict=True,
    ):
        setattr(target, name, value)


def gpus(*visible):
    """Each rank has the GPU of its local rank, whether it sees one or all."""
    assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == int(visible[0])
    play_gpus(lambda _node: 7)
    with ep.World.connect("gpu") as world:
        assert (world.num_gpus, world.ranks_on_gpu) == (world.size, 1)
        seat, place = world.seats[world.rank], world.places[world.rank]
        assert seat.uuid == f"{place.node}-{world.local_rank}"
        assert seat.index == (0 if visible[0] == "1" else world.local_rank)
        if world.rank == 0:
            print("\n".join(placement_lines(world.places, world.seats)), flush=True)


def apart():
    """Two NVLink domains of two nodes each."""
    play_gpus(lambda node: node // 2)
    ep.World.connect("gpu")


def absent(*node_names):
    """Tasks of these nodes never come."""
    if Place.own().node in node_names:
        time.sleep(60)
    ep.World.connect("host", timeout_s=4)


def dies(*_arguments):
    """A rank is killed in mid-step; the others say whose process is gone, and where."""
    with ep.World.connect("host", timeout_s=30) as world:
        fields = config(world, "tiny", 4, timeout_s=2, grace_s=0)
        exchange = ep.Exchange(world, fields)
        step = Case(config=fields).step(0, 3)
        check(world, exchange, step)
        if world.rank == DEAD:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = step.inputs(world.rank)
        with raises(ep.EpTimeout, f"rank {DEAD}'s process on node nvl2 is gone") as caught:
            exchange.dispatch(*inputs)
            exchange.combine(
                step.partials(world.rank, step.expected_rows(world.rank).source), inputs.ids
            )
        print(f"told: {caught.error}", flush=True)
        raise caught.error


def beside(folder, own, other):
    """Two jobs at once: neither goes on before it has seen the other."""
    (Path(folder) / own).touch()
    deadline = time.monotonic() + 30
    while not (Path(folder) / other).exists():
        assert time.monotonic() < deadline, f"no {other}"
        time.sleep(0.02)
    with ep.World.connect("host", timeout_s=30) as world:
        steps(world)
        if world.rank == 0:
            print(f"{own}: {world.size} ranks", flush=True)


if __name__ == "__main__":
    {case.__name__: case for case in (gpus, apart, absent, dies, beside)}[sys.argv[1]](
        *sys.argv[2:]
    )
