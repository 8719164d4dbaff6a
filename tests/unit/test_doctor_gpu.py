"""What the doctor makes of GPUs: a driver and an NVML that are played."""

import dataclasses
import enum
import json
import types
from typing import Any

import pytest

from ep.bootstrap.fabric import NO_CLUSTER
from ep.doctor import gpu as checks
from ep.doctor import probe
from ep.doctor.child import CHECKS
from ep.doctor.probe import Gpu, Imex
from ep.doctor.result import Context, Mark, Options
from ep.errors import DeviceError
from ep.kernels.compile import ARCHES
from tests.unit.played import OWN, RACK, Block, device, marks, one

CHANNEL = Imex(driver_knows=True, channels=("channel0",))


# The driver that is played.


class Cuda:
    """Two devices behind `driver`; remembers what is not given back."""

    def __init__(self):
        self.fails: dict[str, str] = {}
        self.held: list[str] = []
        self.answers: dict[str, Any] = {
            "DeviceGetCount": lambda: 2,
            "DeviceGet": lambda ordinal: 10 + ordinal,
            "DeviceGetUuid": lambda handle: types.SimpleNamespace(bytes=bytes([handle]) * 16),
            "DeviceGetAttribute": lambda which, handle: 9 * ("MAJOR" in which.name),
            "DeviceGetPCIBusId": lambda length, handle: b"0000:AB:00.0\0\0",
            "DeviceGetName": lambda length, handle: b"H200\0\0",
            "DeviceCanAccessPeer": lambda handle, peer: int(handle == 10),
            "DevicePrimaryCtxRetain": lambda handle: self.take("context"),
            "DevicePrimaryCtxRelease": lambda handle: self.held.remove("context"),
            "CtxPushCurrent": lambda context: self.take("current"),
            "CtxPopCurrent": lambda: self.held.remove("current"),
            "MemGetInfo": lambda: (5, 6),
            "MemGetAllocationGranularity": lambda wanted, flag: 1 << 21,
            "MemCreate": self.create,
            "MemExportToShareableHandle": lambda *_: types.SimpleNamespace(data=b"h" * 64),
            "MemImportFromShareableHandle": self.import_handle,
            "MemRelease": self.held.remove,
        }

    def __call__(self, name, *arguments):
        if name in self.fails:
            raise DeviceError(f"cu{name}: {self.fails[name]}")
        return self.answers.get(name, lambda *_: None)(*arguments)

    def take(self, what):
        self.held.append(what)
        return what

    def create(self, size_bytes, wanted, flags):
        assert (size_bytes, flags, wanted.location.id) == (1 << 21, 0, 11)
        return self.take("block")

    def import_handle(self, data, kind):
        assert data == b"h" * 64
        return self.take("imported")


@pytest.fixture
def cuda(monkeypatch):
    pytest.importorskip("cuda.bindings.driver")
    made = Cuda()
    monkeypatch.setattr(probe, "driver", made)
    return made


def test_devices_are_read_without_a_context(cuda):
    first, second = probe.devices()
    assert (first.ordinal, first.uuid, first.bus_id) == (0, "0a" * 16, "0000:ab:00.0")
    assert (first.name, first.capability, first.arch) == ("H200", (9, 0), "sm_90a")
    assert first.reach == (second.uuid,)
    assert second.reach == ()
    assert not cuda.held
    assert Gpu.from_json(json.loads(json.dumps(dataclasses.asdict(first)))) == first


def test_numa_node_of_a_bus_id(tmp_path):
    (tmp_path / "0000:ab:00.0").mkdir()
    (tmp_path / "0000:ab:00.0" / "numa_node").write_text("1\n")
    assert probe.numa_node("0000:ab:00.0", tmp_path) == 1
    assert probe.numa_node("0000:ac:00.0", tmp_path) == -1


def test_a_fabric_block_is_given_back(cuda):
    with probe.FabricBlock(1) as block:
        assert block.exported == b"h" * 64
        probe.import_block(block.exported, 1)
        assert sorted(cuda.held) == ["block", "context", "current"]
    assert not cuda.held
    assert probe.memory_bytes(1) == (5, 6)
    assert not cuda.held


@pytest.mark.parametrize(
    "call", ["MemCreate", "MemExportToShareableHandle", "MemGetAllocationGranularity"]
)
def test_a_fabric_block_that_fails_leaves_nothing(cuda, call):
    cuda.fails = {call: "not permitted (CUDA_ERROR_NOT_PERMITTED)"}
    with pytest.raises(DeviceError, match="NOT_PERMITTED"), probe.FabricBlock(1):
        pass
    assert not cuda.held


@pytest.mark.parametrize(
    ("version", "backend", "mark"),
    [(13000, "auto", Mark.PASS), (12080, "auto", Mark.FAIL), (14010, "gpu", Mark.PASS)],
)
def test_driver_version(cuda, version, backend, mark, monkeypatch):
    monkeypatch.setattr(probe, "driver_version", lambda: version)
    monkeypatch.setattr(probe, "needed_version", lambda: 13000)
    assert checks.check_driver(Context({}, Options(backend=backend))).mark is mark


@pytest.mark.parametrize("error", [ImportError("cuda"), RuntimeError("libcuda"), DeviceError("x")])
def test_no_driver_is_no_fail_unless_gpus_were_asked_for(error, monkeypatch):
    def none():
        raise error

    monkeypatch.setattr(probe, "driver_version", none)
    assert checks.check_driver(Context({}, Options())).mark is Mark.SKIP
    assert checks.check_driver(Context({}, Options(backend="gpu"))).mark is Mark.FAIL


def test_hidden_devices_are_named(monkeypatch):
    monkeypatch.setattr(checks, "device_count", lambda: 0)
    context = Context({"CUDA_VISIBLE_DEVICES": ""}, Options(backend="gpu"))
    found = one(checks.check_devices(context))
    assert (found.mark, found.words) == (
        Mark.FAIL,
        "none is visible (CUDA_VISIBLE_DEVICES='')",
    )


@pytest.mark.parametrize(
    ("capability", "mark"),
    [((9, 0), Mark.PASS), ((10, 3), Mark.PASS), ((12, 0), Mark.WARN), ((8, 0), Mark.FAIL)],
)
def test_architectures(capability, mark):
    own = device(capability=capability)
    assert marks(checks.judge_devices([own, own])) == [mark]
    assert (own.arch in ARCHES) == (mark is Mark.PASS)


# NVML that is played.


class State(enum.IntEnum):
    NOT_STARTED = 1
    COMPLETED = 3


class Health(enum.IntEnum):
    HEALTHY = 1


def played_nvml(info):
    class NvmlError(Exception):
        pass

    def link_state(handle, link):
        if link > 3:
            raise NvmlError
        return int(link < 2)

    def fabric(handle):
        if info is None:
            raise NvmlError
        return types.SimpleNamespace(**info)

    opened = []
    return opened, types.SimpleNamespace(
        NvmlError=NvmlError,
        NVLINK_MAX_LINKS=18,
        GpuFabricState=State,
        GpuFabricHealthSummary=Health,
        init_v2=lambda: opened.append(1),
        shutdown=opened.pop,
        system_get_driver_version=lambda: "580.95",
        device_get_handle_by_pci_bus_id_v2=lambda bus_id: bus_id,
        device_get_nvlink_state=link_state,
        device_get_gpu_fabric_info_v=fabric,
        error_string=lambda code: f"error {code}",
    )


INFO = {"state": 3, "status": 0, "cluster_uuid": b"\xab" * 16, "clique_id": 7, "health_summary": 1}


@pytest.mark.parametrize(
    ("info", "want"),
    [
        (INFO, RACK),
        (INFO | {"status": 9}, dataclasses.replace(RACK, error="error 9")),
        (None, None),
    ],
)
def test_nvml(info, want):
    nvml = probe.Nvml.__new__(probe.Nvml)
    opened, nvml._nvml = played_nvml(info)
    with nvml:
        told = nvml.complete(device(links=None))
        assert opened
    assert not opened
    assert told.links == 2
    assert told.fabric == want


def test_names_of_nvml_are_those_of_the_bindings():
    nvml = pytest.importorskip("cuda.bindings.nvml")
    for name in vars(played_nvml(None)[1]):
        assert hasattr(nvml, name), name
    assert nvml.GpuFabricState(3).name == "COMPLETED"
    info = nvml.GpuFabricInfo_v3()
    assert all(hasattr(info, name) for name in INFO)
    assert bytes(info.cluster_uuid).hex() == NO_CLUSTER


def test_nvml_that_tells_nothing(monkeypatch):
    def none():
        raise RuntimeError("no libnvidia-ml")

    monkeypatch.setattr(probe, "Nvml", none)
    context = Context({}, Options(), {"gpus": [dataclasses.asdict(device(links=None))]})
    found = one(checks.check_nvlink(context))
    assert (found.mark, "no libnvidia-ml" in found.words) == (Mark.WARN, True)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"fabric": RACK}, [Mark.PASS]),
        ({"fabric": dataclasses.replace(RACK, state="in_progress")}, [Mark.FAIL]),
        ({"fabric": dataclasses.replace(RACK, error="error 9")}, [Mark.FAIL]),
        ({"fabric": dataclasses.replace(RACK, health="unhealthy")}, [Mark.WARN]),
        ({"links": 0}, [Mark.WARN]),
        ({"fabric": dataclasses.replace(RACK, state="not_supported", error="x")}, [Mark.PASS]),
    ],
)
def test_nvlink(changes, want):
    found = checks.judge_nvlink([device(0, **changes), device(1, **changes)])
    assert marks(found) == want
    assert found[0].words.startswith("GPU 0, 1: ")
    assert marks(checks.judge_nvlink([device(links=0)], alone=True)) == [Mark.PASS]


@pytest.mark.parametrize(
    ("fabric", "obstacle", "channels", "mark"),
    [
        (RACK, "", CHANNEL, Mark.PASS),
        (RACK, "NOT_PERMITTED", Imex(driver_knows=True, channels=()), Mark.WARN),
        (OWN, "NOT_SUPPORTED", Imex(driver_knows=False, channels=()), Mark.SKIP),
        (None, "NOT_SUPPORTED", CHANNEL, Mark.SKIP),
    ],
)
def test_fabric_memory(fabric, obstacle, channels, mark, monkeypatch):
    found = checks.judge_fabric_memory(device(fabric=fabric), obstacle, channels)
    assert found.mark is mark
    assert obstacle in found.words

    def import_block(exported, ordinal):
        if obstacle:
            raise DeviceError(obstacle)

    monkeypatch.setattr(probe, "FabricBlock", lambda ordinal: Block())
    monkeypatch.setattr(probe, "import_block", import_block)
    monkeypatch.setattr(probe, "imex", lambda: channels)
    context = Context({}, Options(), {"gpus": [dataclasses.asdict(device(fabric=fabric))]})
    assert checks.check_fabric_memory(context) == found
    assert context.facts["fabric_obstacle"] == obstacle


def test_imex_channels(tmp_path):
    channels = tmp_path / "nvidia-caps-imex-channels"
    assert probe.imex(tmp_path / "devices", channels) == Imex(driver_knows=False, channels=())
    (tmp_path / "devices").write_text("508 nvidia\n510 nvidia-caps-imex-channels\n")
    channels.mkdir()
    (channels / "channel0").write_text("")
    assert probe.imex(tmp_path / "devices", channels) == CHANNEL


def test_later_checks_read_what_earlier_ones_left():
    order = [check.name for check in CHECKS]
    for first, then in (
        ("launcher", "shared memory"),
        ("backend", "shared memory"),
        ("launcher", "fabric memory"),
        ("devices", "NVLink"),
        ("NVLink", "fabric memory"),
    ):
        assert order.index(first) < order.index(then)
    assert len({(check.area, check.name) for check in CHECKS}) == len(CHECKS)
