"""What an exported library does, over a driver that is played: run by test_capi.py as a process.

The name libcuda.so.1 is the played driver's here, which no other test may meet.
"""

import ctypes
import hashlib
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from ep import EpTimeout
from ep.export.binding import Received, Status
from ep.kernels.compile import Kind
from ep.kernels.grid import HERALDS, combine_grid, dispatch_grid
from ep.layout import HEADER_WORDS
from ep.record import Word
from tests.armed import armed_bytes
from tests.capi.played import Bench
from tests.capi.trouble import TROUBLE, record_of

STREAM = 0x1230


def arms_as_python_does(bench):
    library = bench.library
    for rank in range(bench.config.ranks):
        with bench.opened(rank) as exchange:
            for step in (0, 5, (7 << 32) + 9):
                bench.buffer(rank)[:] = 0x11
                library.arm(exchange, step)
                want = armed_bytes(bench.layout, rank, step)
                np.testing.assert_array_equal(bench.buffer(rank), want)
                assert library.step(exchange) == step
    first, last = bench.bases[0], bench.bases[-1] + bench.layout.total_bytes
    start = first - bench.memory.ctypes.data
    around = [bench.memory[:start], bench.memory[start + last - first :]]
    assert all((part == 0x77).all() for part in around)


def launches_as_python_does(bench):
    played, config, library = bench.played, bench.config, bench.library
    rng = random.Random(0)
    for number in range(300):
        sms, per_sm = rng.choice((1, 20, 132)), rng.choice((1, 2, 4))
        sharing = rng.choice((1, min(3, config.ranks)))
        played.set(sms=sms, per_sm=per_sm)
        most = rng.choice((config.max_tokens, min(config.max_tokens, 20)))
        rank, tokens = rng.randrange(config.ranks), rng.randrange(most + 1)
        norm, eps = rng.choice((0x40, None)), rng.random()
        with bench.opened(rank, timeout_us=123, grace_us=456, ranks_on_gpu=sharing) as exchange:
            library.arm(exchange)
            resident = max(2, sms * per_sm // sharing - HERALDS)
            for kind, plan in ((Kind.DISPATCH, dispatch_grid), (Kind.COMBINE, combine_grid)):
                params = [tuple(param) for param in bench.facts["params"][kind]]
                played.expect(params)
                arrays = {"ids": 0x3000 + number * 4}
                if kind is Kind.DISPATCH:
                    arrays |= {"x": 0x1000, "weights": 0x5004}
                    given: tuple[Any, ...] = (0x1000, arrays["ids"], 0x5004, tokens, STREAM)
                    library.call("ep_dispatch", exchange, *given)
                else:
                    arrays |= {"partials": 0x7000, "norm_weight": norm or 0, "out": 0x9000}
                    given = (0x7000, arrays["ids"], norm, eps, 0x9000, tokens, STREAM)
                    library.call("ep_combine", exchange, *given)
                launch, values = played.launched(params)
                limits = bench.table.find(kind, tokens).limits(sms / sharing)
                grid = plan(config, tokens, resident, limits)
                where = (number, kind, tokens, resident, limits)
                assert tuple(launch.config.grid) == (HERALDS + grid.ctas, 1, 1), where
                assert tuple(launch.config.block)[1:] == (1, 1)
                assert launch.config.stream == STREAM
                assert (launch.config.num_attrs, launch.attribute.id) == (1, 6)
                assert launch.attribute.value[0] == 1
                name = f"{kind}{'-norm' if kind is Kind.COMBINE and norm else ''}"
                image = bench.facts["images"][f"{name}-{'early' if sharing == 1 else 'late'}"]
                assert launch.config.block[0] == image["threads"]
                cubin = ctypes.string_at(launch.function, image["size"])
                assert hashlib.sha256(cubin).hexdigest() == image["sha256"]
                table = np.ctypeslib.as_array(
                    (ctypes.c_uint64 * (config.ranks + 1)).from_address(values.pop("table"))
                )
                assert table.tolist() == [*bench.bases, bench.bases[rank]]
                values.pop("record")
                expected: dict[str, Any] = {
                    **arrays,
                    "timeout_ns": 123_000,
                    "grace_ns": 456_000,
                    "rank": rank,
                    "num_tokens": tokens,
                    "num_senders": grid.senders,
                    "stamps": 0,
                }
                if kind is Kind.COMBINE:
                    expected["eps"] = ctypes.c_float(eps).value
                assert values == expected, where
    played.set(sms=132, per_sm=2)


def excludes(bench):
    # The own entry of the peers is not looked at.
    peers = [bench.bases[0], 0, *bench.bases[2:]]
    with bench.opened(1, peers) as exchange:
        bench.library.arm(exchange, 3, excluded=0b100)
        params = [tuple(param) for param in bench.facts["params"]["dispatch"]]
        bench.played.expect(params)
        bench.library.call("ep_dispatch", exchange, 0x1000, 0x2000, 0x3000, 1, None)
        _, values = bench.played.launched(params)
        table = (ctypes.c_uint64 * (bench.config.ranks + 1)).from_address(values["table"])
        want = [*bench.bases, bench.bases[1]]
        want[2] = 0
        assert list(table) == want
        with bench.fails(Status.ARGUMENT, "rank 1 excludes itself"):
            bench.library.arm(exchange, 3, excluded=0b10)


def refuses_what_does_not_fit_together(bench):
    fails = bench.fails
    cases = (
        (Status.ABI, {"size_bytes": 8}, "8 bytes", "EP_OPTIONS_INIT"),
        (Status.ABI, {"abi_version": 99}, "ABI version 99", "this library has 1"),
        (Status.ABI, {"config_id": b"0" * 32}, "0" * 32, "gpt_oss_20b", '"ranks": 4'),
        (Status.ABI, {"config_id": None}, "(null)"),
        (Status.ARGUMENT, {"rank": 4}, "rank is 4", "0..3"),
        (Status.ARGUMENT, {"rank": -1}, "rank is -1"),
        (Status.ARGUMENT, {"timeout_us": 0}, "timeout_us"),
        (Status.ARGUMENT, {"timeout_us": 1 << 60}, "86400000000"),
        (Status.ARGUMENT, {"grace_us": 1 << 60}, "grace_us"),
        (Status.ARGUMENT, {"ranks_on_gpu": 0}, "ranks_on_gpu is 0"),
        (Status.ARGUMENT, {"reserved": 1}, "reserved"),
        (Status.ARGUMENT, {"own": 0}, "rank 0 is at 0"),
        (Status.ARGUMENT, {"own": bench.bases[0] + 64}, "multiple of 128"),
        (Status.ARGUMENT, {"peers": None}, "peers is NULL"),
    )
    for status, fields, *words in cases:
        given = {"rank": 0, "own": bench.bases[0], "peers": bench.bases} | fields
        peers = given.pop("peers")
        with fails(status, *words):
            bench.library.open(given.pop("rank"), given.pop("own"), peers, **given)
    for rank in range(1, bench.config.ranks):
        peers = list(bench.bases)
        peers[rank] = 0
        with fails(Status.ARGUMENT, f"rank {rank} is at 0"):
            bench.library.open(0, bench.bases[0], peers)
    assert bench.played.held == 0


def refuses_other_gpus(bench):
    played = bench.played
    for major, minor in ((8, 0), (10, 0)):
        played.set(major=major, minor=minor)
        with bench.fails(Status.DEVICE, f"sm_{major}{minor}a", "--arch", '"arches": ["sm_90a"]'):
            bench.library.open(0, bench.bases[0], bench.bases)
    played.set(major=9, minor=0, has_context=0)
    with bench.fails(Status.DEVICE, "no CUDA context is current"):
        bench.library.open(0, bench.bases[0], bench.bases)
    played.set(has_context=1)
    assert played.held == 0


def gives_everything_back_when_the_driver_fails(bench):
    played, library = bench.played, bench.library
    played.set(calls=0)
    library.call("ep_close", library.open(0, bench.bases[0], bench.bases))
    calls = played.calls
    assert calls > 15
    for number in range(calls):
        played.set(calls=0, fails_at=number)
        with bench.fails(Status.DRIVER, "played trouble", "cu"):
            library.open(0, bench.bases[0], bench.bases)
        assert played.held == 0, number
    played.set(fails_at=-1)


def does_not_step_after_arming_has_failed(bench):
    played, library = bench.played, bench.library
    with bench.opened() as exchange:
        library.arm(exchange)
        played.set(calls=0, fails_at=3)
        with bench.fails(Status.DRIVER, "cuMemset"):
            library.arm(exchange)
        played.set(fails_at=-1)
        with bench.fails(Status.ORDER, "not armed"):
            library.call("ep_dispatch", exchange, 0x10, 0x10, 0x10, 1, None)


def keeps_the_order(bench):
    library, fails = bench.library, bench.fails
    good = (0x10, 0x10, 0x10, 1, STREAM)
    combine = (0x10, 0x10, None, 0.0, 0x10, 1, STREAM)
    with bench.opened() as exchange:
        with fails(Status.ORDER, "ep_arm"):
            library.call("ep_dispatch", exchange, *good)
        library.arm(exchange)
        with fails(Status.ORDER, "without a dispatch"):
            library.call("ep_combine", exchange, *combine)
        library.call("ep_dispatch", exchange, *good)
        with fails(Status.ORDER, "follows a dispatch"):
            library.call("ep_dispatch", exchange, *good)
        for wrong in ((*combine[:5], 2, STREAM), (*combine[:5], 1, STREAM + 16)):
            with fails(Status.ARGUMENT, "answers a dispatch of 1"):
                library.call("ep_combine", exchange, *wrong)
        library.call("ep_combine", exchange, *combine)
        library.call("ep_dispatch", exchange, *good)
        library.arm(exchange)
        library.call("ep_dispatch", exchange, *good)


def refuses_bad_arrays(bench):
    library, most = bench.library, bench.config.max_tokens
    good = {"x": 0x10, "ids": 0x14, "weights": 0x18, "tokens": 2}
    brings = {"partials": 0x10, "ids": 0x14, "norm": 0x10, "eps": 0.0, "out": 0x10, "tokens": 2}
    with bench.opened() as exchange:
        library.arm(exchange)
        before = bench.played.num_launches
        for name, value in (
            *(("tokens", value) for value in (-1, most + 1, 2**31 - 1, -(2**31))),
            *(("x", value) for value in (None, 0x18)),
            *((name, value) for name in ("ids", "weights") for value in (None, 0x12)),
        ):
            with bench.fails(Status.ARGUMENT, "num_tokens" if name == "tokens" else name):
                library.call("ep_dispatch", exchange, *(good | {name: value}).values(), None)
        assert bench.played.num_launches == before
        bench.played.set(num_launches=0)
        library.call("ep_dispatch", exchange, *good.values(), None)
        for name, value in (
            *(("partials", value) for value in (None, 0x18)),
            *(("out", value) for value in (None, 0x18)),
            *(("ids", value) for value in (None, 0x12)),
            *(("eps", value) for value in (-1.0, float("nan"), float("inf"))),
            ("norm", 0x18),
        ):
            said = {"norm": "norm_weight"}.get(name, name)
            with bench.fails(Status.ARGUMENT, said):
                library.call("ep_combine", exchange, *(brings | {name: value}).values(), None)
        assert bench.played.num_launches == 1
        library.call("ep_combine", exchange, *brings.values(), None)
        # Without tokens only the partials are there.
        library.call("ep_dispatch", exchange, None, None, None, 0, None)
        library.call("ep_combine", exchange, 0x10, None, None, 0.0, None, 0, None)


def tells_a_hang(bench):
    library, layout = bench.library, bench.layout
    field = layout.fields["announcements"]
    with bench.opened(2) as exchange:
        library.arm(exchange)
        assert library.poll(exchange).phase == 0
        assert library.text(library.poll(exchange)) == "no wait has expired"
        for phase, name in ((1, "dispatch"), (2, "combine")):
            for awaited, seen in (((3,), {3: 8}), ((0, 1, 3), {0: 4, 1: 4, 3: 4})):
                library.arm(exchange)
                record = record_of(bench, exchange)
                assert not record.any()
                step = (1 << 33) + 7
                lines = bench.buffer(2)[field.offset_bytes :][: field.size_bytes].view(np.uint32)
                lines = lines.reshape(field.shape)
                for half in (0, 1):
                    for rank, at in seen.items():
                        lines[half, rank, 0] = at - half
                record[Word.PHASE], record[Word.RANK] = phase, 2
                record[Word.STEP], record[Word.STEP + 1] = step & 0xFFFFFFFF, step >> 32
                waited_us = 10_049_000 + 11_000 * phase
                record[Word.WAITED_US] = waited_us
                record[Word.AWAITED] = sum(1 << rank for rank in awaited)
                record[Word.STATE] = 1
                hang = library.poll(exchange)
                said = (hang.phase, hang.rank, hang.step, hang.waited_us, *hang.awaited)
                bits = sum(1 << rank for rank in awaited)
                assert said == (phase, 2, step, waited_us, bits, 0)
                assert {rank: hang.seen[rank] for rank in seen} == seen
                error = EpTimeout(name, step, 2, awaited, tuple(seen.values()), waited_us / 1e6)
                want = str(error).replace("Exchange.reset", "ep_arm on every rank")
                assert library.text(hang) == want
                for size in (1, 20, len(want), len(want) + 1):
                    assert library.text(hang, size) == want[: size - 1]
                for call in (("ep_poll", None), ("ep_dispatch", 0x10, 0x10, 0x10, 1, None)):
                    with bench.fails(Status.TIMED_OUT, "rank 2"):
                        library.call(call[0], exchange, *call[1:])
                assert bench.played.capture_mode == 0
        library.arm(exchange)
        assert library.poll(exchange).phase == 0


def shows_rows(bench):
    received = Received(ctypes.sizeof(Received))
    with bench.opened(3) as exchange:
        bench.library.call("ep_rows", exchange, ctypes.byref(received))
        fields = bench.layout.fields
        for name in ("x", "scales", "ids", "weights", "source"):
            field = fields["header" if name == "source" else name]
            assert getattr(received, name) == bench.bases[3] + field.offset_bytes
        assert received.source_stride == HEADER_WORDS
        offset, size = ctypes.c_uint64(), ctypes.c_uint64()
        for name, field in fields.items():
            places = (ctypes.byref(offset), ctypes.byref(size))
            bench.library.call("ep_field", name.encode(), *places)
            assert (offset.value, size.value) == (field.offset_bytes, field.size_bytes)
        for unknown in (b"nothing", None):
            with bench.fails(Status.ARGUMENT, "no field", f"it has {', '.join(fields)}"):
                bench.library.call("ep_field", unknown, None, None)
        received.size_bytes = 4
        with bench.fails(Status.ABI, "EP_RECEIVED_INIT"):
            bench.library.call("ep_rows", exchange, ctypes.byref(received))


def survives_null(bench):
    for name in ("ep_open", "ep_arm", "ep_step", "ep_rows", "ep_poll"):
        with bench.fails(Status.ARGUMENT, "NULL"):
            bench.library.call(name, None, None)
    with bench.fails(Status.ARGUMENT, "NULL"):
        bench.library.call("ep_dispatch", None, 0x10, 0x10, 0x10, 1, None)
    bench.library.call("ep_close", None)
    assert bench.library.functions.ep_hang_text(None, None, ctypes.c_size_t(0)) > 0
    for status in Status:
        assert bench.library.functions.ep_status_text(int(status)) != b"no status of ep"
    assert bench.library.functions.ep_status_text(77) == b"no status of ep"


CASES = (
    arms_as_python_does,
    launches_as_python_does,
    excludes,
    refuses_what_does_not_fit_together,
    refuses_other_gpus,
    gives_everything_back_when_the_driver_fails,
    does_not_step_after_arming_has_failed,
    keeps_the_order,
    refuses_bad_arrays,
    tells_a_hang,
    shows_rows,
    survives_null,
    *TROUBLE,
)


def main(folder):
    bench = Bench(Path(folder))
    said = {}
    for case in CASES:
        bench.played.set(fails_at=-1)
        try:
            case(bench)
            said[case.__name__] = ""
        except Exception:  # noqa: BLE001 - told to the test that asks for it
            said[case.__name__] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
