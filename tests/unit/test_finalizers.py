"""Nothing that the collector or the end of the interpreter runs asks another rank for anything."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

import ep
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.bootstrap.channel import SingleChannel

SRC = Path(ep.__file__).resolve().parents[1]
COLLECTIVE = {
    *("allgather", "regroup", "barrier", "agree", "agree_on", "connect", "reset", "exclude"),
    *("dispatch", "combine", "finalize", "Idup", "Isend", "Irecv", "Free", "Barrier"),
}
ALL = {
    # Device memory of this process alone.
    ("ep/memory/cuda.py", "__del__", "_Allocation.__del__"),
    # Descriptors of this process.
    ("ep/memory/bells.py", "weakref.finalize", "close_all"),
    # Ends the job or says why it ends; MPI_Abort is no collective call.
    ("ep/bootstrap/mpi.py", "atexit.register", "self._at_exit"),
    ("ep/bootstrap/ending.py", "atexit.register", "_tell_open"),
    ("ep/bootstrap/ending.py", "sys.excepthook", "end_jobs"),
}
HOOKS = ("weakref.finalize", "weakref.ref", "atexit.register", "threading._register_atexit")


def sources():
    for path in sorted((SRC / "ep").rglob("*.py")):
        yield path.relative_to(SRC).as_posix(), ast.parse(path.read_text())


TREES = dict(sources())


def finalizers(tree):
    """What a file leaves to be called by the collector, at exit or at an uncaught error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__del__":
                    yield "__del__", f"{node.name}.__del__"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in HOOKS:
            hook = ast.unparse(node.func)
            yield hook, ast.unparse(node.args[hook.startswith("weakref")])
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sys.excepthook":
            yield "sys.excepthook", ast.unparse(node.value)


def functions(tree, name):
    name = name.split(".")[-1]
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]


def reached(file, name, seen):
    """Names of all that `name` of `file` may call, through functions of the same file."""
    for function in functions(TREES[file], name):
        if function in seen:
            continue
        seen.add(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                yield called.split(".")[-1]
                # By another object's method or a library's: only its name is known.
                if called.removeprefix("self.").count(".") == 0:
                    yield from reached(file, called, seen)


def test_these_are_all_finalizers():
    found = {(file, *one) for file, tree in TREES.items() for one in finalizers(tree)}
    assert found == ALL


@pytest.mark.parametrize(("file", "hook", "name"), sorted(ALL))
def test_no_finalizer_makes_a_collective_call(file, hook, name):
    assert functions(TREES[file], name)
    assert not COLLECTIVE & set(reached(file, name, set()))


def test_what_an_uncaught_error_calls_of_the_world_is_no_collective_call():
    (watched,) = (
        ast.unparse(node.args[1])
        for node in ast.walk(TREES["ep/bootstrap/world.py"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "watch"
    )
    calls = set(reached("ep/bootstrap/world.py", watched, set()))
    for channel in ("mpi", "tcp"):
        calls |= set(reached(f"ep/bootstrap/{channel}.py", "abort", set()))
    assert {"Abort", "_exit"} <= calls
    assert not COLLECTIVE & calls


def forbid(monkeypatch, called):
    def forbidden(*arguments):
        called.append(arguments)
        raise AssertionError("a collective call")

    for name in ("allgather", "regroup", "abort", "note_timeout", "close"):
        monkeypatch.setattr(SingleChannel, name, forbidden)


@pytest.mark.parametrize("state", ["fresh", "used", "in a step"])
def test_the_collector_calls_nothing_of_the_channel(monkeypatch, state):
    config = ep.EpConfig(ranks=1, hidden=64, experts=4, top_k=2, max_tokens=3)
    step = Case(config=config).step(0, 3)
    world = ep.World.connect(backend="host")
    exchange = ep.Exchange(world, config)
    if state == "used":
        assert run_checked_step(exchange, step) is None
    if state == "in a step":
        exchange.dispatch(*step.inputs(0))
    called: list[object] = []
    forbid(monkeypatch, called)
    # What `__del__` raises is only printed, so the calls are counted.
    setattr(exchange, "myself", [world, exchange])  # noqa: B010 - it has none
    del exchange, world
    gc.collect()
    assert not called


AT_EXIT = """
import os
import ep
from ep.bootstrap.channel import SingleChannel

config = ep.EpConfig(ranks=1, hidden=64, experts=4, top_k=2, max_tokens=3)
world = ep.World.connect("host")
exchange = ep.Exchange(world, config)
for name in ("allgather", "regroup", "abort", "note_timeout", "close"):
    setattr(SingleChannel, name, lambda *arguments: os._exit(9))
"""


def test_the_end_of_the_interpreter_calls_nothing_of_the_channel():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exchange_ends_with_its_world():
    config = ep.EpConfig(ranks=1, hidden=64, experts=4, top_k=2, max_tokens=3)
    with ep.World.connect(backend="host") as world:
        exchange = ep.Exchange(world, config)
    words = "this World is closed, so are its exchanges"
    inputs = Case(config=config).step(0, 3).inputs(0)
    calls = (lambda: exchange.dispatch(*inputs), exchange.poll, exchange.check, exchange.reset)
    for call in (*calls, exchange.close):
        with pytest.raises(ep.StateError, match=words):
            call()
    # Its memory went all the same, with the first call.
    assert exchange._engine is None
    exchange.close()
