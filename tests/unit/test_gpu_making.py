"""A GPU engine that cannot be made gives back what it has taken; the driver is played."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ep
from ep.errors import DeviceError
from ep.gpu import engine, hot, loading
from ep.kernels.tuning import Tuning
from ep.memory import cuda

LAYOUT = ep.EpLayout(ep.EpConfig(ranks=1, hidden=64, experts=4, top_k=2, max_tokens=4))
KERNELS = 3
OTHERS = 3
"""The record, the table and the event."""


class Ledger:
    """What is taken and not given back; the call of those that take which fails."""

    def __init__(self):
        self.left, self.taken, self.failing = [], 0, 0

    def take(self, what):
        self.taken += 1
        if self.taken == self.failing:
            raise DeviceError(str(what))
        self.left.append(what)
        return 4096

    def holder(self, name, **attributes):
        """Give what takes `name` when it is made, and gives it back by `close`."""

        def make(*_, **__):
            self.take(name)
            return SimpleNamespace(**attributes, close=lambda: self.left.remove(name))

        return make

    def driver(self, name, *_):
        assert name in {"EventCreate", "EventDestroy"}
        return self.take("event") if name == "EventCreate" else self.left.remove("event")


@pytest.fixture
def ledger(monkeypatch):
    ledger = Ledger()
    kernel = {"load": lambda: None, "resident_ctas": lambda num_sms: num_sms}
    monkeypatch.setattr(loading, "Launcher", ledger.holder("kernel", **kernel))
    monkeypatch.setattr(loading, "get_image", lambda *_: "image")
    monkeypatch.setattr(engine, "read_tuning", lambda *_: Tuning())
    monkeypatch.setattr(engine, "_event_flags", lambda: 0)
    monkeypatch.setattr(hot, "Calls", lambda _: None)
    words = {"words": np.zeros(64, np.uint32), "device_address": 4096}
    monkeypatch.setattr(cuda, "PinnedWords", ledger.holder("record", **words))
    monkeypatch.setattr(cuda, "allocate", lambda _: ledger.take("table"))
    monkeypatch.setattr(cuda, "free", lambda _: ledger.left.remove("table"))
    monkeypatch.setattr(cuda, "driver", ledger.driver)
    home = SimpleNamespace(allocate=ledger.holder("memory", addresses=(0, 0), ordinal=0))
    monkeypatch.setattr(engine, "LocalMemory", home)
    monkeypatch.setattr(engine, "NvshmemMemory", home)
    return ledger


def build(home, buffers=None):
    def agree(error, _):
        if error is not None:
            raise error

    world: Any = SimpleNamespace(
        device=SimpleNamespace(context=0, num_sms=8, arch="sm_90a", ordinal=0, use=lambda: None),
        rank=0,
        local_rank=0,
        shares_gpus=False,
        ranks_on_gpu=1,
        is_one_process=home == "local",
        agree=agree,
    )
    return engine.GpuEngine(world, LAYOUT, buffers=buffers)


def given():
    memory: Any = SimpleNamespace(addresses=(0, 0), ordinal=0, close=lambda: None)
    return ep.EpBuffers(LAYOUT, memory, 0)


@pytest.mark.parametrize("failing", range(1, KERNELS + OTHERS + 1))
def test_nothing_is_left_of_an_engine_on_given_memory(ledger, failing):
    ledger.failing, buffers = failing, given()
    with pytest.raises(DeviceError):
        build("given", buffers)
    assert not ledger.left
    assert not buffers.is_taken


@pytest.mark.parametrize("failing", range(1, KERNELS + 1 + OTHERS + 1))
@pytest.mark.parametrize("home", ["local", "nvshmem"])
def test_nothing_is_left_but_what_all_ranks_free_together(ledger, home, failing):
    ledger.failing = failing
    with pytest.raises(DeviceError):
        build(home)
    has_memory = failing > KERNELS + 1
    assert ledger.left == (["memory"] if home == "nvshmem" and has_memory else [])


@pytest.mark.parametrize("home", ["local", "nvshmem", "given"])
def test_closing_gives_back_all(ledger, home):
    made = build(home, given() if home == "given" else None)
    assert len(ledger.left) == KERNELS + (home != "given") + OTHERS
    assert made.buffers.is_taken
    assert made.closes_alone == (home != "nvshmem")
    made.close()
    assert not ledger.left
    assert not made.buffers.is_taken
