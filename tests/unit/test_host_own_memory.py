"""An exchange of the host backend on memory that it did not allocate."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ep
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.host import HostEngine
from ep.layout import LINE_BYTES
from ep.memory.given import _first_hole, _mapped_ranges
from ep.testing import run_ranks

CONFIG = ep.EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=5)
WIDE = ep.EpConfig(ranks=4, hidden=96, experts=5, top_k=2, max_tokens=9)
SIZES = [ep.EpBuffers.size_bytes(config, "host") for config in (CONFIG, WIDE)]
GUARD_BYTES = 2 * LINE_BYTES
JUNK = 0xFF
"""Of which every E4M3 number is NaN."""


class Block:
    """Memory of all ranks, in which each has room for both configs between guards."""

    def __init__(self):
        self.each = sum(SIZES) + 3 * GUARD_BYTES
        self.raw = np.full(4 * self.each + LINE_BYTES, JUNK, np.uint8)
        self.first = -(-self.raw.ctypes.data // LINE_BYTES) * LINE_BYTES

    def offset(self, number):
        return GUARD_BYTES + number * (SIZES[0] + GUARD_BYTES)

    def buffers(self, config, rank, number):
        addresses: list[Any] = [
            self.first + peer * self.each + self.offset(number) for peer in range(4)
        ]
        own, addresses[rank] = addresses[rank], None
        return ep.EpBuffers.from_addresses(config, rank, own, addresses, backend="host")

    def guards_are_whole(self):
        outside = np.ones(self.raw.size, np.bool_)
        for rank in range(4):
            for number, size in enumerate(SIZES):
                first = self.first - self.raw.ctypes.data + rank * self.each + self.offset(number)
                outside[first : first + size] = False
        return bool((self.raw[outside] == JUNK).all())


def check(world, exchange, number, tokens):
    step = Case(config=exchange.config, uneven=True).step(number, tokens)
    said = run_checked_step(exchange, step.without(world.excluded))
    assert not any(world.allgather(said and str(said)))


def test_two_exchanges_on_one_block():
    block = Block()

    def rank(world):
        made = [
            ep.Exchange(world, config, buffers=block.buffers(config, world.rank, number))
            for number, config in enumerate((CONFIG, WIDE))
        ]
        for number, tokens in enumerate((5, 0, 3, 1, 4)):
            for exchange in made:
                check(world, exchange, number, tokens)
        made[0].reset()
        check(world, made[0], 7, 2)
        check(world, made[1], 8, 9)
        for exchange in made:
            exchange.close()

    run_ranks(4, rank)
    assert block.guards_are_whole()
    assert not (block.raw == JUNK).all()


def test_arming_writes_all_of_the_own_buffer_and_nothing_else():
    block = Block()

    def rank(world):
        buffers = block.buffers(CONFIG, world.rank, 0)
        exchange = ep.Exchange(world, CONFIG, buffers=buffers, start=False)
        assert exchange.layout.total_bytes == SIZES[0]
        views = {name: buffers.own(name) for name in exchange.layout.fields}
        assert all((view.view(np.uint8) == JUNK).all() for view in views.values())
        world.barrier()
        if world.rank == 1:
            exchange.arm()
        world.barrier()
        for name, view in views.items():
            is_junk = (view.view(np.uint8) == JUNK).all()
            # What empty rows hold, -1, looks like it.
            assert is_junk == (world.rank != 1) or name == "header"
        exchange.start()
        check(world, exchange, 0, 5)
        exchange.close()

    run_ranks(4, rank)
    assert block.guards_are_whole()


def test_nothing_is_allocated_beside_it(monkeypatch):
    block = Block()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: 1 / 0)

    def rank(world):
        ep.Exchange(world, CONFIG, buffers=block.buffers(CONFIG, world.rank, 0)).close()

    run_ranks(4, rank)


def test_buffers_serve_one_exchange_at_a_time():
    block = Block()

    def rank(world):
        buffers = block.buffers(CONFIG, world.rank, 0)
        for number in range(2):
            with ep.Exchange(world, CONFIG, buffers=buffers) as exchange:
                check(world, exchange, number, 3)
                with pytest.raises(ep.CollectiveError, match="an Exchange that was not closed"):
                    ep.Exchange(world, CONFIG, buffers=buffers)
                check(world, exchange, number, 2)
        with pytest.raises(ep.CollectiveError, match=r"fields of .* make them with the same"):
            ep.Exchange(world, WIDE, buffers=buffers)

    run_ranks(4, rank)


def test_buffers_of_an_exchange_that_did_not_start_are_made_anew(monkeypatch):
    block, one = Block(), ep.EpConfig(ranks=1, hidden=64, experts=9, top_k=3, max_tokens=5)
    given = (one, 0, block.first, [0])
    buffers = ep.EpBuffers.from_addresses(*given, backend="host")
    closed, real = [], HostEngine.close

    def close(made):
        closed.append(made)
        real(made)

    monkeypatch.setattr(HostEngine, "close", close)
    with ep.World.connect("host") as world:
        with monkeypatch.context() as patched:
            patched.setattr(ep.Exchange, "start", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ep.Exchange(world, one, buffers=buffers)
        assert len(closed) == 1
        # Another rank might have started, and store into them.
        with pytest.raises(ep.CollectiveError, match="an Exchange that was not closed"):
            ep.Exchange(world, one, buffers=buffers)
        buffers = ep.EpBuffers.from_addresses(*given, backend="host")
        with ep.Exchange(world, one, buffers=buffers) as exchange:
            check(world, exchange, 0, 4)


def test_ranks_go_on_without_others_in_memory_of_the_engine():
    block = Block()

    def rank(world):
        exchange = ep.Exchange(world, CONFIG, buffers=block.buffers(CONFIG, world.rank, 0))
        check(world, exchange, 0, 5)
        if world.rank == 2:
            world._closed = True
            return
        exchange.exclude([2])
        for number, tokens in enumerate((2, 5, 0)):
            check(world, exchange, number, tokens)
        exchange.close()

    run_ranks(4, rank)
    assert block.guards_are_whole()


@given(st.data())
def test_holes_are_found(data):
    limits = data.draw(st.lists(st.integers(0, 40), unique=True, max_size=8).map(sorted))
    ranges = list(zip(limits[::2], limits[1::2], strict=False))
    address, size = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 20))
    mapped = {place for first, end in ranges for place in range(first, end)}
    want = next((at for at in range(address, address + size) if at not in mapped), None)
    assert _first_hole(ranges, address, size) == want


def test_ranges_side_by_side_are_one():
    assert _first_hole([(0, 8), (8, 16)], 4, 12) is None
    assert _first_hole([(0, 8), (8, 16)], 4, 13) == 16


def test_memory_that_this_process_has_not():
    page = mmap.PAGESIZE
    size = -(-SIZES[0] // page) * page
    held = mmap.mmap(-1, 6 * size)
    first = ctypes.addressof(ctypes.c_char.from_buffer(held))
    addresses = [first + rank * size for rank in range(4)]
    libc = ctypes.CDLL(None, use_errno=True)
    made = ep.EpBuffers.from_addresses(CONFIG, 0, first, addresses, backend="host")
    assert made.device is None
    assert made.addresses == (*addresses, first)
    # The last page of rank 2's can be read alone.
    last = addresses[2] + size - page
    assert libc.mprotect(ctypes.c_void_p(last), page, mmap.PROT_READ) == 0
    with pytest.raises(ep.HeapError, match=f"the buffer of rank 2, .* not at {last:#x}; map"):
        ep.EpBuffers.from_addresses(CONFIG, 0, first, addresses, backend="host")
    assert libc.mprotect(ctypes.c_void_p(last), page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    with pytest.raises(ep.HeapError, match=r"the buffer of rank 3, .* not at 0x1000;"):
        ep.EpBuffers.from_addresses(CONFIG, 0, first, [*addresses[:3], 0x1000], backend="host")


def test_a_system_that_tells_nothing_refuses_nothing(monkeypatch):
    def absent(_):
        raise FileNotFoundError

    own = Block()
    monkeypatch.setattr(Path, "read_text", absent)
    assert _first_hole(_mapped_ranges(), own.first, SIZES[0]) is None
    own.buffers(CONFIG, 0, 0)


def test_sizes_are_those_of_a_backend():
    with ep.World.connect("host") as world:
        one = ep.EpConfig(ranks=1, hidden=64, experts=9, top_k=3, max_tokens=5)
        with ep.Exchange(world, one) as exchange:
            assert ep.EpBuffers.size_bytes(one, "host") == exchange.layout.total_bytes
    assert ep.EpBuffers.size_bytes(one) == ep.EpLayout(one).total_bytes
    assert ep.EpBuffers.size_bytes(one, "gpu") > ep.EpBuffers.size_bytes(one, "host")


@pytest.mark.parametrize("backend", ["auto", "cpu", None, 1, []])
def test_backends_that_are_none(backend):
    with pytest.raises(ep.ArgumentError, match=r"allowed are host and gpu, as World\.backend says"):
        ep.EpBuffers.size_bytes(CONFIG, backend)
    with pytest.raises(ep.ArgumentError, match=r"as World\.backend says"):
        ep.EpBuffers.from_addresses(CONFIG, 0, 128, [0, 0, 0, 0], backend=backend)


def test_the_host_has_no_device():
    with pytest.raises(ep.ArgumentError, match="device is 0; leave it out on the host"):
        ep.EpBuffers.from_addresses(CONFIG, 0, 128, [0] * 4, backend="host", device=0)
