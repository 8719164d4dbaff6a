"""The C compiler that an export runs: how it is named, and what it may do instead of its work."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ep import EpConfig, EpError
from ep.bench import c_loop
from ep.export import library
from ep.export.cli import MOST_NAME, command
from ep.export.library import HEADER, LIBRARY, build_library, run_compiler
from ep.export.plan import ExportPlan
from ep.export.tables import SOURCES
from ep.kernels.compile import ARCHES
from ep.testing import run_ranks

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
CONFIG = EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=20)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Where the caller is, with a source in another folder."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "one.c").write_text("int one(void);\nint one(void) { return 1; }\n")
    monkeypatch.chdir(tmp_path)
    return folder


def script(path, text):
    path.write_bytes(b"#!/bin/sh\n" + text + b"\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("given", ["", "  ", "cc", "cc -O0 -g", "./my-cc", "'./my cc' -DX='a b'"])
def test_compilers_that_work(sources, monkeypatch, given):
    for name in ("my-cc", "my cc"):
        (sources.parent / name).symlink_to(str(shutil.which("cc")))
    monkeypatch.setenv("CC", given)
    run_compiler(sources, "one.c", "-c", "-o", "one.o")
    assert (sources / "one.o").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"printf 'caf\\351\\n' >&2; exit 3", "failed: caf\ufffd"),
        (b"exit 3", "failed: exit code 3"),
        (b"kill -9 $$", "failed: exit code -9"),
        # Its input is not that of the caller, for which it would wait.
        (b"cat; echo read >&2; exit 1", "failed: read"),
    ],
)
def test_compilers_that_fail(sources, monkeypatch, text, words):
    script(sources.parent / "bad", text)
    monkeypatch.setenv("CC", "./bad")
    with pytest.raises(EpError, match=f"the C compiler {words}"):
        run_compiler(sources, "one.c", "-c")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("'gcc", 'CC is "\'gcc", which is no command'),
        ("no-such-compiler -O2", "there is no C compiler 'no-such-compiler'"),
        ("./a\\ folder", "there is no C compiler './a folder'"),
        ("./garbage", "the C compiler failed: .*Exec format error"),
    ],
)
def test_no_compilers(sources, monkeypatch, given, words):
    (sources.parent / "garbage").write_bytes(b"garbage\0")
    (sources.parent / "garbage").chmod(0o755)
    monkeypatch.setenv("CC", given)
    with pytest.raises(EpError, match=words):
        run_compiler(sources, "one.c", "-c")


@pytest.mark.parametrize("name", [LIBRARY, HEADER])
def test_what_lay_there_stays_where_an_export_fails(tmp_path, monkeypatch, name):
    monkeypatch.setattr(library, "write_sources", lambda _plan, _images, to: make(to, "new"))
    monkeypatch.setattr(library, "run_compiler", lambda *_: None)
    plan = ExportPlan("a", CONFIG)
    make(tmp_path, "old")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    other = tmp_path / ({LIBRARY, HEADER} - {name}).pop()
    with pytest.raises(EpError, match=f"{name} is a folder"):
        build_library(plan, [], tmp_path)
    assert other.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((LIBRARY, HEADER))
    (tmp_path / name).rmdir()
    build_library(plan, [], tmp_path)
    assert other.read_text() == "new"


def test_a_compiler_that_gives_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "write_sources", lambda *_: None)
    monkeypatch.setenv("CC", "true")
    with pytest.raises(EpError, match=f"it gave no {LIBRARY}"):
        build_library(ExportPlan("a", CONFIG), [], tmp_path)
    assert not any(tmp_path.iterdir())


def make(folder, text):
    for name in (LIBRARY, HEADER):
        (folder / name).write_text(text)


def test_errors_have_room_for_what_a_library_is():
    """In the bytes of ep_last_error, with the words around it."""
    (room,) = re.findall(r"char last_error\[(\d+)\]", (SOURCES / "ep.c").read_text())
    largest = EpConfig(ranks=72, hidden=16384, experts=65535, top_k=32, max_tokens=65535)
    facts = ExportPlan("n" * MOST_NAME, largest, ARCHES).facts
    assert len(json.dumps(facts)) < int(room) - 230


def test_the_benchmark_leaves_c_out_where_one_rank_cannot_build_it(monkeypatch, caplog):
    def build(chain, _folder):
        if chain.exchange.world.rank == 1:
            raise EpError("trouble here")

    monkeypatch.setattr(c_loop, "_build", build)
    monkeypatch.setattr(c_loop, "Library", None)

    def rank(world):
        @dataclasses.dataclass
        class Has:
            world: object = None
            exchange: object = None

        with c_loop.c_loop(Has(exchange=Has(world=world))) as loop:  # type: ignore[arg-type]
            return loop

    assert run_ranks(3, rank) == [None] * 3
    assert "in C is not measured: trouble here" in caplog.text


def test_a_compiler_is_looked_for_before_kernels_are_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(ExportPlan, "images", None)
    given = f"--config mixtral_8x7b --ranks 4 --max-tokens 20 -o {tmp_path}/made"
    result = CliRunner().invoke(command, given)
    assert result.exit_code == 1
    assert "no-such-compiler" in result.output
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_export_that_is_ended_leaves_what_was_there(tmp_path, monkeypatch, number):
    # It ends its own parent, which is the export.
    ends = script(tmp_path / "cc", b"kill -%d $PPID; exec sleep 20" % number)
    monkeypatch.setenv("CC", str(ends))
    (tmp_path / "made").mkdir()
    make(tmp_path / "made", "old")
    (tmp_path / "a.toml").write_text("hidden = 64\nexperts = 9\ntop_k = 3\n")
    given = "--config a.toml --ranks 4 --max-tokens 20 --arch sm_90a --no-sharing -o made"
    words = [sys.executable, "-m", "ep.export", *given.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=50, check=False)
    assert done.returncode == {signal.SIGTERM: 143, signal.SIGINT: 1}[number]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [HEADER, LIBRARY]
    assert (tmp_path / "made" / LIBRARY).read_text() == "old"
