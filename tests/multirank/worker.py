"""What each rank of a multi-rank test does: `python worker.py CASE`."""

import dataclasses
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ep
from ep.bench.cases import Case, Step
from ep.bench.check import run_checked_step
from ep.routing import Routing

BF16 = ml_dtypes.bfloat16
# Shapes that differ in everything: wide rows, rows narrower than a line, few experts, odd counts.
SHAPES: dict[str, Any] = {
    "kimi_k3": {"hidden": 3584, "experts": 896, "top_k": 16},
    "gpt_oss_120b": {"hidden": 2880, "experts": 128, "top_k": 4},
    "tiny": {"hidden": 32, "experts": 7, "top_k": 3},
}


class raises:  # noqa: N801 - as in pytest, which a worker's environment may not have
    """Expect an exception whose words match."""

    def __init__(self, kind, match=""):
        self.kind, self.match, self.error = kind, match, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.error = error
        if error is None:
            raise AssertionError(f"did not raise {self.kind.__name__}")
        if issubclass(kind, self.kind) and not re.search(self.match, str(error)):
            raise AssertionError(f"{error} does not match {self.match}")
        return issubclass(kind, self.kind)


def check(world, exchange, step):
    """One step on all ranks, checked; every rank stops at the first complaint of any."""
    complaint = run_checked_step(exchange, step)
    said = world.allgather(complaint and str(complaint), "comparing complaints")
    complaints = [words for words in said if words]
    if complaints:
        raise AssertionError("\n".join(complaints))


def config(world, shape, max_tokens, **fields):
    return ep.EpConfig(ranks=world.size, max_tokens=max_tokens, **(SHAPES[shape] | fields))


def steps_of(world, shape):
    """50 steps on one buffer: every routing, T that changes, some ranks or all without tokens."""
    config_ = config(world, shape, max_tokens=6)
    cases = [
        Case(config=config_, routing=routing, uneven=uneven, norm=norm, seed=seed)
        for seed, (routing, uneven, norm) in enumerate(
            (routing, uneven, norm)
            for routing in Routing
            for uneven in (False, True)
            for norm in (False, True)
        )
    ]
    with ep.Exchange(world, config_) as exchange:
        for number in range(50):
            case = cases[number % len(cases)]
            # 5 tokens, then fewer, then none on any rank, then all that fit.
            tokens = (5, 2, 1, 0, 6)[number // 2 % 5]
            check(world, exchange, case.step(number, tokens))


class OddStep(Step):
    """A step whose payload is every bit pattern that somebody could take for something else."""

    PATTERNS: tuple[int, ...] = (
        0xFFFF,
        0x7FFF,
        0x7F80,
        0xFF80,
        0x8000,
        0x0001,
        0x807F,
        0x0000,
        0x7F7F,
        0x3F80,
    )

    def _odd(self, clean, salt):
        shape, rows = clean.shape, len(clean)
        words = np.array(self.PATTERNS, np.uint16)
        pick = (np.arange(rows)[:, None] * 7 + np.arange(shape[1]) // 5 + salt) % len(words)
        odd = words[pick]
        # Blocks that are NaN throughout, and rows that are clean, stand between them.
        odd[rows // 2 :, : shape[1] // 2] = 0x7FC1
        return np.where((np.arange(rows) % 3 == 2)[:, None], clean.view(np.uint16), odd).view(BF16)

    def inputs(self, rank):
        inputs = super().inputs(rank)
        weights = inputs.weights.copy()
        weights[::2, ::2] = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)[self.number % 4]
        return inputs._replace(x=self._odd(inputs.x, rank), weights=weights)

    def partials(self, rank, source):
        live = source >= 0
        partials = super().partials(rank, source)
        # By the source word, so that the oracle on the source finds the same bytes.
        order = np.where(live, source & 0xFFFF, 0)
        words = np.array(self.PATTERNS, np.uint16)
        pick = (order[:, None] * 3 + np.arange(partials.shape[1]) // 7 + rank) % len(words)
        odd = (words[pick]).view(BF16)
        return np.where((live & (order % 3 != 2))[:, None], odd, partials)


class AllOnesStep(OddStep):
    """A step whose payload is all ones, which is how nothing looks in the fence-free protocol."""

    PATTERNS = (0xFFFF,)

    def inputs(self, rank):
        inputs = super().inputs(rank)
        return inputs._replace(weights=np.full(inputs.weights.shape, -1, np.int32).view(np.float32))


def odd_payloads(world):
    """NaN, Inf, subnormals, -0 and all-ones in x, weights and partials; then clean rows again."""
    config_ = config(world, "gpt_oss_120b", max_tokens=7, hidden=288)
    with ep.Exchange(world, config_) as exchange:
        for number in range(12):
            case = Case(config=config_, norm=number % 2 == 1, seed=3)
            step = case.step(number, (7, 4, 1)[number % 3])
            kind = (OddStep, AllOnesStep, OddStep, Step)[number % 4]
            check(
                world,
                exchange,
                kind(**{f.name: getattr(step, f.name) for f in dataclasses.fields(step)}),
            )


def several_exchanges(world):
    """Two instances used unevenly: A A B A B B."""
    first, second = config(world, "tiny", 5), config(world, "gpt_oss_120b", 3)
    with ep.Exchange(world, first) as a, ep.Exchange(world, second) as b:
        for number, which in enumerate("AABABB" * 3):
            exchange, case = (a, Case(config=first)) if which == "A" else (b, Case(config=second))
            check(world, exchange, case.step(number, 1 + number % 3))


def open_and_close(world):
    """Thirty exchanges in a row leave no file, no descriptor and nothing in the shared folder."""
    folder = Path("/proc/self/fd")
    shared = Path(os.environ["EP_SHM_DIR"])
    config_ = config(world, "tiny", 2)
    before = None
    for number in range(30):
        with ep.Exchange(world, config_) as exchange:
            assert not list(shared.iterdir())
            check(world, exchange, Case(config=config_).step(number, 2))
        if number == 2:
            before = len(list(folder.iterdir()))
    assert len(list(folder.iterdir())) == before
    assert not list(shared.iterdir())


def different_config(world):
    """A field that differs on one rank fails on all, naming field, values and ranks."""
    for field, value in (("max_tokens", 9), ("hidden", 64), ("timeout_s", 11.0)):
        fields = {field: value} if world.rank == 2 else {}
        with raises(ep.CollectiveError) as caught:
            ep.Exchange(world, config(world, "tiny", fields.pop("max_tokens", 2), **fields))
        words = str(caught.error)
        assert f"EpConfig.{field} differs: " in words, words
        assert f"{value} on rank 2" in words, words
        assert "on ranks 0-1, 3" in words, words
    with ep.Exchange(world, config(world, "tiny", 2)) as exchange:
        check(world, exchange, Case(config=exchange.config).step(0, 2))


def full_memory(world):
    """Memory that is short on one rank fails on all, in words; then there is enough again."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    with raises(ep.HeapError, match=r"on 1 of 4 ranks: rank 2: cannot allocate [0-9]+ "):
        ep.Exchange(world, config(world, "tiny", 4))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with ep.Exchange(world, config(world, "tiny", 4)) as exchange:
        check(world, exchange, Case(config=exchange.config).step(0, 4))


def wrong_input(world):
    """One rank's wrong argument is its own affair: it calls again, and nothing is lost."""
    config_ = config(world, "tiny", 4)
    case = Case(config=config_)
    with ep.Exchange(world, config_) as exchange:
        check(world, exchange, case.step(0, 4))
        if world.rank == 1:
            inputs = case.step(1, 4).inputs(1)
            for x in (inputs.x[:, :16], np.zeros((5, 32), BF16)):
                with raises(ep.ArgumentError):
                    exchange.dispatch(x, inputs.ids, inputs.weights)
        check(world, exchange, case.step(1, 4))


def late_rank(world):
    """Ranks that come late are waited for, in both phases."""
    config_ = config(world, "tiny", 4)
    with ep.Exchange(world, config_) as exchange:
        for number in range(6):
            time.sleep(0.05 * (world.rank == number % world.size))
            check(world, exchange, Case(config=config_, uneven=True).step(number, 4))


def absent_rank(world):
    """A rank that never comes ends the others' wait in time, by name; then they say so again."""
    config_ = config(world, "tiny", 4, timeout_s=0.5, grace_s=0)
    case = Case(config=config_)
    exchange = ep.Exchange(world, config_)
    check(world, exchange, case.step(0, 4))
    step = case.step(1, 4)
    inputs = step.inputs(world.rank)
    if world.rank != 1:
        start = time.monotonic()
        with raises(ep.EpTimeout) as caught:
            exchange.dispatch(*inputs)
        assert 0.5 <= time.monotonic() - start < 2
        error = caught.error
        assert (error.phase, error.step, error.rank) == ("dispatch", 2, world.rank)
        assert (error.awaited, error.seen) == ((1,), (1,))
        assert "waited 0.5 s for rank 1 (their last seen step: 1)" in str(error)
        with raises(ep.StateError, match="this Exchange stopped at: rank"):
            exchange.dispatch(*inputs)
    world.barrier()
    exchange.close()


def crash(world):
    """One rank's error ends the job; the others are inside a dispatch."""
    with ep.Exchange(world, config(world, "tiny", 4, timeout_s=60)) as exchange:
        if world.rank == 1:
            raise RuntimeError("rank one gives up")
        exchange.dispatch(*Case(config=exchange.config).step(0, 4).inputs(world.rank))


def crash_outside(world):
    """The same without a context manager."""
    exchange = ep.Exchange(world, config(world, "tiny", 4, timeout_s=60))
    if world.rank == 1:
        raise RuntimeError("rank one gives up")
    exchange.dispatch(*Case(config=exchange.config).step(0, 4).inputs(world.rank))


def leave(world):
    """One rank leaves by sys.exit with a code of its own."""
    with ep.Exchange(world, config(world, "tiny", 4, timeout_s=60)) as exchange:
        if world.rank == 1:
            sys.exit(3)
        exchange.dispatch(*Case(config=exchange.config).step(0, 4).inputs(world.rank))


def missing_at_start(world):
    """A rank that does not take part in making the exchange is named."""
    if world.rank == 3:
        time.sleep(3)
        return
    world._timeout_s = 1
    with raises(ep.EpTimeout, match=r"configuration waited .* for rank 3") as caught:
        ep.Exchange(world, config(world, "tiny", 4))
    assert caught.error.awaited == (3,)
    print("named", flush=True)
    # The launcher ends the others as soon as it sees one go.
    time.sleep(1.5)
    os._exit(0)


CASES = {
    function.__name__: function
    for function in (
        odd_payloads,
        several_exchanges,
        open_and_close,
        different_config,
        full_memory,
        wrong_input,
        late_rank,
        absent_rank,
        crash,
        leave,
        missing_at_start,
    )
}


def main(name):
    if name == "never_come":
        # It ends before it has said anything to anybody, MPI included.
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            return
        ep.World.connect(backend="host", timeout_s=1.5)
    if name == "crash_outside":
        crash_outside(ep.World.connect(backend="host"))
        return
    with ep.World.connect(backend="host") as world:
        if name.startswith("steps:"):
            steps_of(world, name.removeprefix("steps:"))
        else:
            CASES[name](world)
        world.barrier()
        if world.rank == 0:
            print(f"passed {name} on {world.size}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
