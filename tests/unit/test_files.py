"""Files of all kinds where a plain one is expected: nothing hangs, nothing fills the memory."""

import os

import pytest
from click.testing import CliRunner

import ep
from ep.bench.cli import command
from ep.files import MAX_TEXT_BYTES, append_text, read_text
from ep.kernels.tuning import read_table

KINDS = ("fifo", "folder", "device", "endless", "huge", "bytes", "missing", "loop", "long")


@pytest.fixture(params=KINDS)
def odd(request, tmp_path):
    path = tmp_path / "odd.toml"
    match request.param:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/null")
        case "endless":
            path.symlink_to("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(MAX_TEXT_BYTES + 1)
        case "bytes":
            path.write_bytes(b"\xff\xfe")
        case "loop":
            path.symlink_to(path)
        case "long":
            path = tmp_path / ("x" * 300 + ".toml")
    return path


def test_what_cannot_be_read_is_told(odd):
    with pytest.raises((OSError, ValueError)):
        read_text(odd)
    with pytest.raises(ep.ConfigError, match=r"config=.* is not allowed: "):
        ep.EpConfig.load(odd, ranks=1, max_tokens=1)
    with pytest.raises(ep.ConfigError, match=r"tuning table=.* is not allowed: "):
        read_table(odd)
    result = CliRunner().invoke(command, ["--config", str(odd)])
    assert result.exit_code == 2, result.output


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    path = tmp_path / "marked"
    path.write_bytes(b"\xef\xbb\xbfhidden")
    assert read_text(path) == "hidden"


def test_lines_are_appended(tmp_path):
    path = tmp_path / "rows"
    for text in ("", "1\n", "2\n"):
        append_text(path, text)
    assert path.read_text() == "1\n2\n"


def test_nobody_waits_for_a_reader(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):
        append_text(path, "1\n")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    append_text(path, "1\n")
    assert os.read(reader, 9) == b"1\n"
    with pytest.raises(BlockingIOError):
        append_text(path, "x" * (1 << 20))
    os.close(reader)


@pytest.mark.parametrize("path", ["/", "/dev/full", "/dev/null/below"])
def test_what_takes_no_text_is_told(path):
    with pytest.raises(OSError, match="Errno"):
        append_text(path, "1\n")


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_the_benchmark_tells_before_the_work(kind, tmp_path, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "rows"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    result = CliRunner().invoke(command, ["--backend", "host", "--json", str(path)])
    assert result.exit_code == (1 if kind == "fifo" else 2), result.output
    assert "--json" in result.output
