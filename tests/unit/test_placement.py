"""Ranks, their GPUs and NVLink domains, over nodes that are played."""

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import ep.bootstrap.world
from ep.bootstrap import placement
from ep.bootstrap.device import device_index
from ep.bootstrap.fabric import Fabric
from ep.bootstrap.placement import Seat, placement_json, placement_lines, take_seats
from ep.bootstrap.ranks import places_of
from ep.errors import BootstrapError
from ep.testing import run_ranks
from tests.unit.played import OWN, RACK

OTHER = dataclasses.replace(RACK, clique=8)
NONE = Fabric("not_supported", "", "", 0)
LATE = Fabric("in_progress", "not ready", RACK.cluster, 0)
IN_RACK = "cluster abababababababababababababababab, clique 7"


@pytest.fixture
def play(monkeypatch):
    """Run a function on ranks of these nodes and machines; a node's GPUs have its fabric."""
    here = threading.local()

    def run(nodes, fabrics, function=None, *, machines=None, visible=4, share_gpus=False):
        def places(said):
            return places_of(
                [
                    dataclasses.replace(
                        place, node=f"nvl{node}", machine=f"m{(machines or nodes)[rank]}"
                    )
                    for rank, (place, node) in enumerate(zip(said, nodes, strict=True))
                ]
            )

        def choose(local_rank, *, share_gpus):
            return SimpleNamespace(index=device_index(local_rank, visible, share_gpus=share_gpus))

        def seat_of(device):
            node, index = nodes[here.rank], device.index
            fabric = fabrics[node] if isinstance(fabrics, list) else fabrics
            return Seat(index, f"{node:x}{index:x}" * 16, f"0000:{index:02x}:00.0", fabric)

        def take(world, ordinal, *, share_gpus):
            here.rank = world.rank
            return take_seats(world, ordinal, share_gpus=share_gpus)

        monkeypatch.setattr(ep.bootstrap.world, "places_of", places)
        monkeypatch.setattr(ep.bootstrap.world, "gpu_obstacle", lambda **_: None)
        monkeypatch.setattr(ep.bootstrap.world, "take_seats", take)
        monkeypatch.setattr(placement, "choose_device", choose)
        monkeypatch.setattr(Seat, "of", seat_of)
        if function is None:
            return run_ranks(len(nodes), lambda world: take(world, None, share_gpus=share_gpus)[1])
        return run_ranks(len(nodes), function, backend="gpu")

    return run


TWO_BY_TWO = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fabrics", "told"),
    [
        ([RACK, OTHER], [f"ranks 0-1 on nvl0: {IN_RACK}; ranks 2-3 on nvl1: ", "clique 8"]),
        ([OWN, OWN], ["ranks 0-1 on nvl0: own machine, clique 0, of nvl0; ranks 2-3 on nvl1: own"]),
        ([NONE, NONE], ["ranks 0-1 on nvl0: no fabric beyond nvl0 (not supported); ranks 2-3"]),
        (
            [RACK, LATE],
            [IN_RACK, "no fabric beyond nvl1 (in progress not ready)"],
        ),
        ([RACK, dataclasses.replace(RACK, error="x")], ["beyond nvl1 (completed x)"]),
    ],
)
def test_ranks_of_several_domains_are_refused_by_name(play, fabrics, told):
    with pytest.raises(BootstrapError, match=r"in 2 NVLink domains.*--segment") as caught:
        play(TWO_BY_TWO, fabrics)
    assert caught.value.on_every_rank
    for words in told:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fabrics", "machines"),
    [
        ([RACK, RACK], None),
        # What NVML does not tell is for NVSHMEM to find out.
        ([None, None], None),
        ([RACK, None], None),
        # On one machine peer access joins GPUs, whatever their containers are called.
        ([NONE, NONE], [0] * 4),
        ([OWN, OWN], [0] * 4),
        ([RACK, LATE], [0] * 4),
    ],
)
def test_ranks_of_one_domain_are_not(play, fabrics, machines):
    seats = play(TWO_BY_TWO, fabrics, machines=machines)
    assert [seat.index for seat in seats[0]] == [0, 1, 0, 1]
    assert {seat.fabric for seat in seats[3][2:]} == {fabrics[1]}


def test_two_domains_of_one_machine_are_two(play):
    with pytest.raises(BootstrapError, match="in 2 NVLink domains"):
        play(TWO_BY_TWO, [RACK, OTHER], machines=[0] * 4)


def test_ranks_on_one_gpu_are_named_before_domains(play):
    with pytest.raises(BootstrapError, match="several ranks have one GPU: ranks 0-1; ranks 2-3"):
        play(TWO_BY_TWO, [RACK, OTHER], visible=1)
    assert len(play(TWO_BY_TWO, RACK, visible=1, share_gpus=True)) == 4
    with pytest.raises(BootstrapError, match="ranks 0, 2: local rank 0 has no GPU: 0 are"):
        play(TWO_BY_TWO, RACK, visible=0)


def test_a_world_knows_every_rank_s_seat(play):
    def look(world):
        return world.seats, world.shares_gpus, world.num_gpus, world.ranks_on_gpu

    for seats, shares, num_gpus, ranks_on_gpu in play(TWO_BY_TWO, RACK, look):
        assert [seat.uuid[:2] for seat in seats] == ["00", "01", "10", "11"]
        assert (shares, num_gpus, ranks_on_gpu) == (False, 4, 1)
    with pytest.raises(BootstrapError, match="NVLink domains"):
        play(TWO_BY_TWO, [RACK, OTHER], look)


def test_placement_in_words_and_for_programs(play):
    places, seats = play([0, 1, 0, 1], [RACK, None], lambda world: (world.places, world.seats))[0]
    assert placement_lines(places, seats) == [
        (
            "nvl0: ranks 0, 2; GPUs 0 0000:00:00.0 00000000, 1 0000:01:00.0 01010101; "
            "cluster abababab, clique 7"
        ),
        "nvl1: ranks 1, 3; GPUs 0 0000:00:00.0 10101010, 1 0000:01:00.0 11111111; fabric not told",
    ]
    columns = placement_json(places, seats)
    assert {name: items[2:] for name, items in columns.items()} == {
        "node": ["nvl0", "nvl1"],
        "local_rank": [1, 1],
        "gpu": [1, 1],
        "uuid": ["01" * 16, "11" * 16],
        "bus_id": ["0000:01:00.0"] * 2,
        "cluster": [RACK.cluster, None],
        "clique": [7, None],
    }
    assert placement_lines(places, ()) == ["nvl0: ranks 0, 2", "nvl1: ranks 1, 3"]
    shared = placement_lines(places, [seats[0]] * 4)
    assert shared[0].count("GPUs 0 0000:00:00.0 00000000; cluster") == 1
    assert list(placement_json(places, ())) == ["node", "local_rank"]


def test_a_seat_needs_no_nvml(monkeypatch):
    def none():
        raise RuntimeError("no libnvidia-ml")

    monkeypatch.setattr(placement, "driver", lambda *_words: b"0000:AB:00.0\0\0")
    monkeypatch.setattr(placement, "Nvml", none)
    device: Any = SimpleNamespace(ordinal=3, uuid="ab")
    assert Seat.of(device) == Seat(3, "ab", "0000:ab:00.0", None)
