"""Libraries of several shapes in one process, over one played driver; run by test_shapes.py."""

import ctypes
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from ep.arming import fills
from ep.export.binding import Status
from tests.capi.cases import STREAM, arms_as_python_does, launches_as_python_does
from tests.capi.played import Bench


def fills_as_python_does(bench):
    """Where the buffer is too large to be there: by what is asked of the driver."""
    played = bench.played
    for rank in (0, bench.config.ranks - 1):
        with bench.opened(rank) as exchange:
            played.set(num_fills=0)
            bench.library.arm(exchange, (3 << 32) + 5)
            noted = (ctypes.c_uint64 * 5 * 16).in_dll(played.library, "played_fills")
            want = [
                [
                    bench.bases[rank] + fill.offset_bytes,
                    fill.width_words,
                    fill.height,
                    fill.pitch_bytes if fill.height > 1 else 0,
                    fill.value(bench.layout, rank, (3 << 32) + 5),
                ]
                for fill in fills(bench.layout)
            ]
            assert [list(row) for row in noted[: played.num_fills]] == want


def excludes_any_rank(bench):
    last = bench.config.ranks - 1
    with bench.opened(0) as exchange:
        params = [tuple(param) for param in bench.facts["params"]["dispatch"]]
        for rank in range(1, bench.config.ranks):
            bench.library.arm(exchange, 0, excluded=1 << rank)
            bench.played.expect(params)
            bench.library.call("ep_dispatch", exchange, None, None, None, 0, None)
            _, values = bench.played.launched(params)
            table = (ctypes.c_uint64 * (last + 2)).from_address(values["table"])
            want = [*bench.bases, bench.bases[0]]
            want[rank] = 0
            assert list(table) == want
        with bench.fails(Status.ARGUMENT, f"rank {last + 1} is excluded", f"0..{last}"):
            bench.library.arm(exchange, 0, excluded=1 << (last + 1))


def work_side_by_side(benches):
    """Each library's exchange does what its own header says, whatever stands open beside it."""
    opened = [bench.library.open(0, bench.bases[0], bench.bases) for bench in benches]
    for bench, exchange in zip(benches, opened, strict=True):
        bench.library.arm(exchange)
    for _ in range(3):
        for bench, exchange in zip(benches, opened, strict=True):
            most = bench.config.max_tokens
            with bench.fails(Status.ARGUMENT, f"0..{most}"):
                bench.library.call("ep_dispatch", exchange, 16, 16, 16, most + 1, STREAM)
            bench.played.set(num_launches=0)
            bench.library.call("ep_dispatch", exchange, 16, 16, 16, most, STREAM)
            bench.library.call("ep_combine", exchange, 16, 16, None, 0.0, 16, most, STREAM)
    for bench, exchange in zip(benches, opened, strict=True):
        bench.library.call("ep_close", exchange)
    assert benches[0].played.held == 0


def fit_no_other(benches):
    for bench in benches:
        for other in benches:
            if other is not bench:
                ids = other.library.functions.ep_config_id()
                with bench.fails(Status.ABI, "compiled for config", ids.decode()):
                    bench.library.open(0, bench.bases[0], bench.bases, config_id=ids)


def main(folders):
    benches = [Bench(Path(folder)) for folder in folders]
    said = {}
    runs: list[Any] = [
        (f"{Path(folder).name} {case.__name__}", case, bench)
        for folder, bench in zip(folders, benches, strict=True)
        for case in (
            fills_as_python_does if bench.is_dry else arms_as_python_does,
            launches_as_python_does,
            excludes_any_rank,
        )
    ]
    runs += [(case.__name__, case, benches) for case in (work_side_by_side, fit_no_other)]
    for name, case, what in runs:
        benches[0].played.set(fails_at=-1, is_dry=isinstance(what, list) or what.is_dry)
        try:
            case(what)
        except Exception:  # noqa: BLE001 - told to the test that asks for it
            said[name] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
