"""What the doctor makes of what all ranks have told."""

import dataclasses
import json
from typing import Any

import pytest

from ep.bootstrap import Backend, Place
from ep.bootstrap.device import device_index
from ep.doctor import ranks, reach, selfcheck
from ep.doctor.result import Mark, Options
from ep.errors import BootstrapError, DeviceError
from tests.unit.played import OWN, RACK, Block, device, marks


def survey(own_gpus, *, nodes=None, share_gpus=False, need=1 << 20, options=None, **facts):
    """Ranks with these GPUs, each seeing its own alone; `facts` are lists, one item a rank."""
    nodes = nodes or [0] * len(own_gpus)
    told = []
    for rank, own in enumerate(own_gpus):
        mine: dict[str, Any] = {
            "gpus": [],
            "obstacle": None if own else "no CUDA device is visible",
        }
        if own:
            mine |= {"gpus": [dataclasses.asdict(own)], "ordinal": 0, "memory": [8 << 30, 8 << 30]}
        told.append(mine | {name: values[rank] for name, values in facts.items()})
    places = tuple(
        Place(f"node{node}", f"machine{node}", "", 100 + rank, "")
        for rank, node in enumerate(nodes)
    )
    # As they come from another rank.
    told = json.loads(json.dumps(told))
    return ranks.Survey(options or Options(), places, told, need, share_gpus)


def test_backend_of_all_ranks():
    assert survey([device(0), device(1)]).backend is Backend.GPU
    mixed = survey([device(0), None])
    assert mixed.backend is Backend.HOST
    found = ranks.check_backend(mixed)
    assert found.mark is Mark.WARN
    assert "rank 1: no CUDA device is visible" in found.words
    asked = survey([device(0), None], options=Options(backend="gpu"))
    assert ranks.check_backend(asked).mark is Mark.FAIL
    assert ranks.check_backend(survey([None, None])).words == "host, 2 ranks on 1 node"
    apart = survey([None, None], nodes=[0, 1])
    found = ranks.check_backend(apart)
    assert found.mark is Mark.FAIL
    assert found.words.startswith("host, 2 ranks on 2 nodes: the host backend shares")
    one = [dataclasses.replace(place, machine="machine") for place in apart.places]
    found = ranks.check_backend(dataclasses.replace(apart, places=tuple(one)))
    assert (found.mark, found.words) == (
        Mark.PASS,
        "host, 2 ranks on 2 nodes that are one machine",
    )


def test_versions_and_variables_that_differ():
    versions = [{"ep": "1", "numpy": "2"}, {"ep": "1"}, {"ep": "1", "numpy": "2"}]
    told = survey(
        [None] * 3,
        versions=versions,
        variables=[{"EP_RANK": "0"}, {"EP_CHECK": "1", "EP_RANK": "1"}, {}],
    )
    (found,) = ranks.check_versions(told)
    assert (found.mark, found.words) == (Mark.FAIL, "numpy: ranks 0, 2: 2; rank 1: none")
    (found,) = ranks.check_variables(told)
    assert (found.mark, found.words) == (Mark.WARN, "EP_CHECK: ranks 0, 2: none; rank 1: 1")


def test_ranks_that_share_cpus():
    told = survey([None] * 3, nodes=[0, 0, 1], cpus=[[0], [0], [0]])
    (found,) = ranks.check_cpus(told)
    assert found.words == "ranks 0-1 share 1 CPUs: right, but slow"


@pytest.mark.parametrize(
    ("share_gpus", "mps", "mark"),
    [
        (False, True, Mark.FAIL),
        (True, False, Mark.WARN),
        (True, True, Mark.PASS),
    ],
)
def test_two_ranks_on_one_gpu(share_gpus, mps, mark, monkeypatch):
    monkeypatch.setattr(ranks, "mps_runs", lambda: mps)
    told = survey([device(0), device(1), device(0)], share_gpus=share_gpus)
    found = ranks.check_sharing(told)
    assert found.mark is mark
    assert "several ranks on one GPU: ranks 0, 2" in found.words
    assert ranks.check_sharing(survey([device(0), device(1)])).mark is Mark.PASS


def test_a_gpu_of_another_numa_node():
    gpus = [device(0, numa=0), device(1, numa=1), device(2, numa=-1), device(3, numa=1)]
    told = survey(gpus, numa=[[0], [0], [0], [0, 1]])
    (found,) = ranks.check_numa(told)
    assert (found.mark, found.words) == (Mark.WARN, "rank 1: on NUMA 0, the GPU is on NUMA 1")


OTHER = dataclasses.replace(RACK, clique=8)


@pytest.mark.parametrize(
    ("fabrics", "nodes", "mark", "words"),
    [
        ([RACK, RACK], [0, 1], Mark.PASS, "ranks 0-1: cluster abab"),
        ([RACK, OTHER], [0, 1], Mark.FAIL, "clique 7; rank 1: cluster"),
        ([RACK, OTHER], [0, 0], Mark.FAIL, "several NVLink domains"),
        ([RACK, None], [0, 1], Mark.FAIL, "rank 1: no fabric"),
        ([RACK, dataclasses.replace(RACK, state="not_started")], [0, 1], Mark.FAIL, "no fabric"),
        ([OWN, OWN], [0, 1], Mark.FAIL, "2 nodes, each with a fabric of its own"),
        ([OWN, OWN], [0, 0], Mark.PASS, "one: ranks 0-1: own machine, clique 0"),
        ([None, None], [0, 0], Mark.PASS, "one node, no fabric"),
    ],
)
def test_nvlink_domains(fabrics, nodes, mark, words):
    gpus = [device(number, fabric=fabric) for number, fabric in enumerate(fabrics)]
    found = ranks.check_domain(survey(gpus, nodes=nodes))
    assert found.mark is mark
    assert words in found.words


def test_fabric_memory_over_nodes():
    gpus = [device(0, fabric=RACK), device(1, fabric=RACK)]

    def check(obstacles, nodes=(0, 1), variables=({}, {})):
        told = survey(gpus, nodes=nodes, fabric_obstacle=obstacles, variables=variables)
        return ranks.check_fabric(told)

    assert check(["", ""]).mark is Mark.PASS
    assert check(["x", "x"], [0, 0]).mark is Mark.SKIP
    found = check(["", "NOT_PERMITTED"])
    assert (found.mark, found.words) == (Mark.FAIL, "none on rank 1: NOT_PERMITTED")
    assert check(["", None]).words == "none on rank 1: unknown"
    found = check(["", ""], variables=({}, {"NVSHMEM_DISABLE_MNNVL": "1"}))
    assert (found.mark, "rank 1" in found.words) == (Mark.FAIL, True)


def test_who_reaches_whom():
    gpus = [device(0, fabric=RACK), device(1, fabric=RACK), device(2, fabric=RACK)]
    told = survey(gpus, nodes=[0, 0, 1])
    assert reach.matrix(told) == ["=pf", "p=f", "ff="]
    assert marks(reach.check_reach(told)) == [Mark.PASS]
    gpus[2] = dataclasses.replace(gpus[2], fabric=OTHER)
    told = survey(gpus, nodes=[0, 0, 1])
    assert reach.matrix(told) == ["=p-", "p=-", "--="]
    found = reach.check_reach(told)
    assert [finding.words for finding in found] == [
        "ranks 0-1 cannot reach rank 2",
        "rank 2 cannot reach ranks 0-1",
    ]
    assert marks(found) == [Mark.FAIL, Mark.FAIL]


def test_a_gpu_that_is_hidden_is_no_answer():
    lonely = [dataclasses.replace(device(number), reach=()) for number in (0, 1)]
    told = survey(lonely)
    assert reach.matrix(told) == ["=?", "?="]
    assert marks(reach.check_reach(told)) == [Mark.WARN, Mark.WARN]
    both = [dataclasses.asdict(gpu) for gpu in lonely]
    told = survey(lonely, gpus=[both, both], ordinal=[0, 1])
    assert reach.matrix(told) == ["=-", "-="]
    many = [dataclasses.replace(device(number, num=8), reach=()) for number in range(8)]
    (found,) = reach.check_reach(survey(many))
    assert found.words == "ranks 0-7 do not see the GPU of some others: see the matrix"


def test_machines_with_a_fabric_of_their_own_do_not_reach_each_other():
    gpus = [device(0, fabric=OWN), device(1, fabric=OWN)]
    assert reach.matrix(survey(gpus, nodes=[0, 1])) == ["=-", "-="]


@pytest.mark.parametrize(
    ("need_mib", "size", "free_mib", "same", "want"),
    [
        (100, "", 4096, False, []),
        (1500, "", 4096, False, ["NVSHMEM_SYMMETRIC_SIZE=1564M"]),
        (1500, "2G", 4096, False, []),
        (100, "8G", 4096, False, ["lower NVSHMEM_SYMMETRIC_SIZE"] * 2),
        (100, "3G", 4096, True, ["lower NVSHMEM_SYMMETRIC_SIZE"] * 2),
    ],
)
def test_heap(need_mib, size, free_mib, same, want):
    told = survey(
        [device(0), device(0 if same else 1)],
        need=need_mib << 20,
        variables=[{"NVSHMEM_SYMMETRIC_SIZE": size}] * 2,
        memory=[[free_mib << 20, 1 << 40]] * 2,
        share_gpus=True,
    )
    found = ranks.check_heap(told)
    if not want:
        assert marks(found) == [Mark.PASS]
    assert len(found) == max(1, len(want))
    assert all(words in finding.remedy for words, finding in zip(want, found, strict=False))


def test_one_rank_needs_no_symmetric_heap():
    size = {"NVSHMEM_SYMMETRIC_SIZE": "64G"}
    told = survey([device(0)], need=2 << 30, memory=[[3 << 30, 4 << 30]], variables=[size])
    assert marks(ranks.check_heap(told)) == [Mark.PASS]


def test_a_broken_check_over_ranks_ends_no_other(monkeypatch):
    def broken(_survey):
        raise KeyError("gone")

    monkeypatch.setattr(ranks, "check_sharing", broken)
    results = ranks.judge(survey([device(0), device(1)]))
    names = [result.name for result in results]
    assert {"heap", "reach", "NVLink domain"} <= set(names)
    (found,) = [result.finding for result in results if result.name == "GPU a rank"]
    assert (found.mark, "KeyError: 'gone'" in found.words) == (Mark.FAIL, True)


# Fabric memory between nodes.


class Control:
    """A world in which every other rank says what rank 0 does."""

    rank = 0

    def allgather(self, value, what):
        return [value, "ff"]

    def barrier(self, what):
        pass


@pytest.mark.parametrize(("obstacle", "mark"), [("", Mark.PASS), ("NOT_PERMITTED", Mark.FAIL)])
def test_memory_of_another_node_is_imported(obstacle, mark, monkeypatch):
    imported = []
    control: Any = Control()

    def import_block(exported, ordinal):
        imported.append((exported, ordinal))
        if obstacle:
            raise DeviceError(obstacle)

    monkeypatch.setattr(selfcheck, "FabricBlock", lambda ordinal: Block())
    monkeypatch.setattr(selfcheck, "import_block", import_block)
    told = survey([device(0, fabric=RACK), device(1, fabric=RACK)], nodes=[0, 1])
    (result,) = selfcheck.check_fabric_between(control, told)
    assert imported == [(b"\xff", 0)]
    assert result.finding.mark is mark


def test_the_device_of_a_rank():
    assert [device_index(rank, 4, share_gpus=False) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1, share_gpus=False) == 0
    assert device_index(5, 4, share_gpus=True) == 1
    with pytest.raises(BootstrapError, match="local rank 4 has no GPU: 4 are visible"):
        device_index(4, 4, share_gpus=False)


def test_tokens_of_the_self_check():
    counts = [selfcheck.tokens_of_step(number, 128) for number in range(1, 101)]
    assert counts.count(128) == 2
    assert set(counts) == {128, *selfcheck.SIZES}
    assert max(selfcheck.tokens_of_step(number, 3) for number in range(1, 101)) == 3
