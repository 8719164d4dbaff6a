"""More of what an exported library does over the played driver: where something goes wrong."""

import contextlib
import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from ep import EpTimeout
from ep.bench.c_loop import LOOP, loop_of
from ep.export.binding import Arming, Hang, Status, StatusError
from ep.record import RECORD_WORDS, Word

STREAM = 0x1230
DISPATCH = (0x10, 0x10, 0x10, 1, STREAM)
COMBINE = (0x10, 0x10, 0x10, 0.0, 0x10, 1, STREAM)


def record_of(bench, exchange):
    """The words that a kernel of `exchange` would write; makes a dispatch."""
    params = [tuple(param) for param in bench.facts["params"]["dispatch"]]
    bench.played.expect(params)
    bench.library.call("ep_dispatch", exchange, 0x10, 0x10, 0x10, 1, None)
    address = bench.played.launched(params)[1]["record"]
    return np.ctypeslib.as_array((ctypes.c_uint32 * RECORD_WORDS).from_address(address))


@contextlib.contextmanager
def expired(bench, awaited=0b1010):
    """An exchange of rank 2 whose combine of step 5 has waited in vain, and its record."""
    with bench.opened(2) as exchange:
        bench.library.arm(exchange)
        record = record_of(bench, exchange)
        record[Word.PHASE], record[Word.RANK], record[Word.STEP] = 2, 2, 5
        record[Word.WAITED_US], record[Word.AWAITED] = 1_500_000, awaited
        record[Word.STATE] = 1
        yield exchange, record


def trouble_at(bench, number, name, exchange, arguments):
    """What a call tells where the driver refuses its call of this number; None: it has fewer."""
    bench.played.set(calls=0, fails_at=number, num_launches=0)
    try:
        bench.library.call(name, exchange, *arguments)
    except StatusError as error:
        return error
    return None


def tells_whatever_the_driver_refuses(bench):
    played, library = bench.played, bench.library
    step = ctypes.byref(ctypes.c_uint64())
    for name, arguments, least in (
        ("ep_arm", (None,), 8),
        ("ep_step", (step,), 3),
        ("ep_dispatch", DISPATCH, 1),
        ("ep_combine", COMBINE, 1),
    ):
        with bench.opened() as exchange:
            library.arm(exchange)
            if name == "ep_combine":
                library.call("ep_dispatch", exchange, *DISPATCH)
            number = 0
            while (error := trouble_at(bench, number, name, exchange, arguments)) is not None:
                assert error.status is Status.DRIVER
                assert "played trouble (700)" in str(error)
                assert played.num_launches == 0
                number += 1
            # The call that went through is the same one, made again.
            assert number == played.calls >= least, name
            played.set(fails_at=-1)


def tells_a_hang_whatever_the_driver_refuses(bench):
    played, library = bench.played, bench.library
    with expired(bench) as (exchange, _):
        held = played.held
        played.set(calls=0)
        library.poll(exchange)
        calls = played.calls
        assert calls >= 6
        for number in range(calls):
            played.set(calls=0, fails_at=number)
            hang = library.poll(exchange)
            assert (hang.phase, hang.rank, hang.step) == (2, 2, 5)
            assert list(hang.awaited) == [0b1010, 0]
            assert (played.held, played.pushed) == (held, 0)
            played.set(calls=0, fails_at=-1, capture_mode=0)


def polls_in_any_thread(bench):
    """The played driver makes streams in a context that has been pushed alone."""
    with expired(bench) as (exchange, _):
        field = bench.layout.fields["announcements"]
        lines = bench.buffer(2)[field.offset_bytes :][: field.size_bytes].view(np.uint32)
        lines.reshape(field.shape)[0, 3, 0] = 4
        seen = []
        thread = threading.Thread(target=lambda: seen.append(bench.library.poll(exchange).seen[3]))
        thread.start()
        thread.join()
        assert seen == [4]
        assert bench.played.pushed == 0


def gives_no_hang_that_arming_has_forgotten(bench):
    """The record is wiped, as by another thread, while the hang is read."""
    played, library = bench.played, bench.library
    with expired(bench) as (exchange, record):
        played.wipe(record.ctypes.data + 4 * Word.STATE)
        hang = Hang(ctypes.sizeof(Hang))
        library.call("ep_poll", exchange, ctypes.byref(hang))
        played.wipe(None)
        assert (hang.phase, hang.rank, list(hang.awaited)) == (0, -1, [0, 0])


def excludes_only_ranks(bench):
    with bench.opened(1) as exchange:
        for rank in (4, 63, 64, 72, 127):
            with bench.fails(Status.ARGUMENT, f"rank {rank} is excluded", "0..3"):
                bench.library.arm(exchange, 0, excluded=1 << rank)
        with bench.fails(Status.ABI, "EP_ARMING_INIT"):
            bench.library.call("ep_arm", exchange, ctypes.byref(Arming(8)))


def refuses_buffers_that_overlap(bench):
    size = bench.layout.total_bytes
    for rank, place in ((1, bench.bases[0]), (3, bench.bases[2] + size - 128), (0, bench.bases[2])):
        peers = list(bench.bases)
        peers[rank] = place
        with bench.fails(Status.ARGUMENT, f"{rank}", "overlap", hex(place), "EP_BUFFER_BYTES"):
            bench.library.open(2, bench.bases[2], peers)
    with bench.fails(Status.ARGUMENT, "ranks 0 and 2 overlap"):
        bench.library.open(2, bench.bases[0], bench.bases)
    with bench.fails(Status.ARGUMENT, "rank 1 is at 0x8000000000000000"):
        bench.library.open(1, 1 << 63, bench.bases)


def counts_no_steps_before_arming(bench):
    with bench.opened() as exchange:
        with bench.fails(Status.ORDER, "not armed"):
            bench.library.step(exchange)
        bench.library.arm(exchange, 7)
        assert bench.library.step(exchange) == 7


def writes_odd_hangs(bench):
    size = ctypes.sizeof(Hang)
    everyone = (ctypes.c_uint64 * 2)((1 << 64) - 1, (1 << 64) - 1)
    seen = (ctypes.c_uint64 * 72)(*range(72))
    last = (1 << 64) - 1
    hang = Hang(size, 1, 71, last, last, everyone, seen)
    words = bench.library.text(hang)
    error = EpTimeout("dispatch", last, 71, tuple(range(72)), tuple(range(72)), last / 1e6)
    want = str(error).replace("Exchange.reset", "ep_arm on every rank")
    assert words == want
    for length in range(1, 40):
        text = ctypes.create_string_buffer(b"\x5a" * 50, 50)
        needed = bench.library.functions.ep_hang_text(
            ctypes.byref(hang), text, ctypes.c_size_t(length)
        )
        assert needed == len(words)
        assert text.value.decode() == words[: length - 1]
        assert text.raw[length:] == b"\x5a" * (50 - length)
    nobody = bench.library.text(Hang(size, 2, -1, 3, 0))
    assert nobody.startswith("rank -1: combine of step 3 waited 0.0 s for no rank; look")
    for wrong in (Hang(0, 1, 0), Hang(size, 3, 0)):
        assert bench.library.text(wrong) == "this is no hang of ep_poll; begin with EP_HANG_INIT"


def loops_in_c(bench):
    arrays = ([(0x10, 0x20, 0x30, 0x40, 2), (0x50, 0x60, 0x70, 0x80, 0)], 0x90, 0xA0)
    chain: Any = SimpleNamespace(addresses=lambda: arrays, bridge=SimpleNamespace(stream=STREAM))
    with bench.opened() as exchange:
        bench.library.arm(exchange)
        run = loop_of(chain, bench.library, exchange, bench.folder / LOOP)
        bench.played.set(num_launches=0)
        run(3)
        assert bench.played.num_launches == 6
        bench.played.set(calls=0, fails_at=1)
        with bench.fails(Status.DRIVER, "played trouble"):
            run(3)


TROUBLE = (
    tells_whatever_the_driver_refuses,
    tells_a_hang_whatever_the_driver_refuses,
    polls_in_any_thread,
    gives_no_hang_that_arming_has_forgotten,
    excludes_only_ranks,
    refuses_buffers_that_overlap,
    counts_no_steps_before_arming,
    writes_odd_hangs,
    loops_in_c,
)
