"""What each rank does in tests of ranks that fail: `python failures.py CASE`."""

import os
import signal
import sys
import time
from typing import Any

import ep
import ep.memory.host as host
from ep.bench.cases import Case
from tests.multirank.worker import check, config, raises


class Stop(BaseException):
    """As a handler of a signal may raise it."""


def stop(*arguments):
    raise Stop


def interrupted(world):
    """A step that an alarm ends on one rank: that rank says so, the others time out; then anew."""
    config_ = config(world, "tiny", 4, timeout_s=1, grace_s=0)
    case = Case(config=config_)
    signal.signal(signal.SIGALRM, stop)
    for phase in ("dispatch", "combine"):
        exchange = ep.Exchange(world, config_)
        check(world, exchange, case.step(0, 4))
        step = case.step(1, 4)
        inputs = step.inputs(world.rank)
        partials = step.partials(world.rank, step.expected_rows(world.rank).source)
        world.barrier(f"before {phase}")
        if phase == "combine":
            exchange.dispatch(*inputs)
        if world.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        if world.rank == 1:
            time.sleep(0.5)
        if world.rank:
            with raises(ep.EpTimeout, "waited 1.0 s for rank 0"):
                if phase == "dispatch":
                    exchange.dispatch(*inputs)
                exchange.combine(partials, inputs.ids)
                exchange.dispatch(*inputs)
        else:
            with raises(Stop):
                if phase == "dispatch":
                    exchange.dispatch(*inputs)
                exchange.combine(partials, inputs.ids)
            words = f"stopped at: {phase}, ended by Stop"
            with raises(ep.StateError, words):
                exchange.dispatch(*inputs)
            with raises(ep.StateError, words):
                exchange.combine(partials, inputs.ids)
        exchange.close()
    with ep.Exchange(world, config_) as exchange:
        check(world, exchange, case.step(2, 4))


def stopped(world):
    """A stopped rank does not come to the end: closing fails in time, and ends the job."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def stopped_and_caught(world):
    """The same, but the error is caught and the world is not closed: MPI must not wait at exit."""
    exchange = ep.Exchange(world, config(world, "tiny", 4, timeout_s=1, grace_s=0))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with raises(ep.EpTimeout, "for rank 1"):
        exchange.dispatch(*Case(config=exchange.config).step(0, 4).inputs(world.rank))
    print("caught", flush=True)


def missing_and_caught(world):
    """The same for a wait of the world itself."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with raises(ep.EpTimeout, "for rank 1"):
        world.barrier()
    print("caught", flush=True)


def killed(world):
    """A rank is killed while the shared files have names."""
    if world.rank == 2:
        host._map = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    else:
        # So that nobody tidies up before the job is ended.
        host._map = lambda *arguments: time.sleep(20)  # type: ignore[assignment]
    ep.Exchange(world, config(world, "tiny", 4))


def forked(world):
    """Children of a fork end as they like: the job goes on, and their codes are their own."""
    exchange = ep.Exchange(world, config(world, "tiny", 4))
    if world.rank == 1:
        for end, code in (("return", 0), ("exit", 5), ("raise", 1)):
            child = os.fork()
            if child == 0:
                with world:
                    if end == "exit":
                        sys.exit(5)
                    if end == "raise":
                        raise RuntimeError("only the child")
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    check(world, exchange, Case(config=exchange.config).step(0, 4))
    exchange.close()


def leave_with_256(world):
    """A code whose low byte is 0 is no success."""
    if world.rank == 1:
        sys.exit(256)
    world.barrier()


def unsent(world):
    """A rank that sends but never takes what it is sent is missing, too."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    channel = world._channel

    class Never:
        def Test(self):  # noqa: N802 - as in MPI
            return False

    class Comm:
        def Irecv(self, box, source, tag):  # noqa: N802
            class Here:
                def Test(self):  # noqa: N802
                    return True

            return Here()

        def Isend(self, payload, dest, tag):  # noqa: N802
            return Never() if dest == 1 else self.Irecv(None, 0, 0)

    channel._comm = Comm()
    with raises(ep.EpTimeout, "waited 2.0 s for rank 1;"):
        world.barrier()
    print("named", flush=True)


def cut_short(world):
    """Messages of a round that was cut short are no news, though their tag comes round."""
    channel: Any = world._channel
    before = channel._round
    world._timeout_s = 0.5
    if world.rank == 1:
        time.sleep(1)
    with raises(ep.EpTimeout):
        # Whoever comes late finds the others' words, but they have given up.
        world.allgather([world.rank, "old"])
        world.allgather([world.rank, "older"])
    world._timeout_s = 20
    world.regroup()
    world.barrier()
    # As if tags had come round.
    channel._round = before
    for number in range(3):
        value = [world.rank, number] * (1 + 1000 * number)
        said = world.allgather(value)
        assert [one[0] for one in said] == list(range(world.size)), said
        assert all(one[1] == number and len(one) == len(value) for one in said)


def mixed(world):
    """Ranks that exclude different ones are told at once, though a rank of some does not come."""
    if world.rank == 3:
        time.sleep(2)
    else:
        start = time.monotonic()
        with raises(ep.CollectiveError, "the ranks exclude different ranks"):
            world.regroup([3] if world.rank == 0 else [])
        assert time.monotonic() - start < 1.5
        # Whoever has not been told yet would meet those who try again, and agree.
        time.sleep(1)
    world.regroup()
    world.barrier()


CASES = {
    function.__name__: function
    for function in (
        interrupted,
        stopped,
        stopped_and_caught,
        missing_and_caught,
        killed,
        forked,
        leave_with_256,
        unsent,
        cut_short,
        mixed,
    )
}


def main(name):
    world = ep.World.connect(backend="host", timeout_s=2 if name != "interrupted" else 20)
    if name.endswith("caught") or name in ("unsent", "forked"):
        CASES[name](world)
    if name.endswith("caught") or name == "unsent":
        return
    with world:
        if name != "forked":
            CASES[name](world)
        world.barrier("the end")
        if world.rank == 0:
            print(f"passed {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
