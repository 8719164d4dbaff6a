"""The cache of compiled kernels: what is loaded from it, and what never is."""

import hashlib
import logging
import os
import pwd
import stat
import threading

import pytest

import ep
from ep.kernels import cache
from ep.kernels import compile as compiler
from ep.kernels.options import KernelOptions

LAYOUT = ep.EpLayout(ep.EpConfig(ranks=1, hidden=32, experts=1, top_k=1, max_tokens=1))
PARAMS = (("x", "u64"), ("rank", "u32"))


@pytest.fixture
def built(monkeypatch):
    """What was compiled, by a compiler that is quick."""
    images = []

    def build(kind, layout, options, arch):
        cubin = b"\x7fELF\n\0" + os.urandom(64)
        images.append(compiler.Image(f"ep_{kind}", arch, 64, PARAMS, cubin))
        return images[-1]

    monkeypatch.setattr(compiler, "build", build)
    return images


@pytest.fixture
def folder(tmp_path, monkeypatch, built):
    folder = tmp_path / "made" / "cache"
    monkeypatch.setenv("EP_CACHE_DIR", str(folder))
    cache._warn.cache_clear()
    yield folder
    cache._warn.cache_clear()


def get(kind=compiler.Kind.DISPATCH):
    """As a new process would."""
    compiler._images.clear()
    return compiler.get_image(kind, LAYOUT, KernelOptions(), "sm_90a")


@pytest.fixture
def file(folder, built):
    """The one file of a cache that holds one kernel."""
    get()
    (path,) = folder.iterdir()
    assert get() == built[0]
    assert len(built) == 1
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_folder_and_files_are_the_users_alone(file):
    assert (mode(file.parent), mode(file)) == (0o700, 0o600)


def test_the_name_depends_on_sources_and_options_alone(file, tmp_path, monkeypatch):
    monkeypatch.setenv("EP_CACHE_DIR", str(tmp_path / "another"))
    get()
    assert [path.name for path in (tmp_path / "another").iterdir()] == [file.name]


def test_a_copy_is_good_where_there_is_no_compiler(file, tmp_path, monkeypatch, built):
    copy = tmp_path / "copy"
    copy.mkdir(0o755)
    (copy / file.name).write_bytes(file.read_bytes())
    (copy / file.name).chmod(0o444)
    monkeypatch.setenv("EP_CACHE_DIR", str(copy))
    monkeypatch.setattr(compiler, "build", None)
    assert get() == built[0]


@pytest.mark.parametrize("place", [0, 30, 64, 65, 80, 140, -70, -1])
def test_a_wrong_byte_anywhere_is_noticed(file, built, place):
    whole = bytearray(file.read_bytes())
    whole[place] ^= 1
    file.write_bytes(whole)
    assert get() == built[1]
    assert get() == built[1], "the good one has taken its place"


@pytest.mark.parametrize("keep", [0, 1, 64, 65, 100, -65, -1])
def test_a_truncated_file_is_noticed(file, built, keep):
    file.write_bytes(file.read_bytes()[:keep])
    assert get() == built[1]


@pytest.mark.parametrize("body", [b"", b"[]\n", b"{}\n", b"[" * 100_000, b"\xff\n", b"{\n"])
def test_a_digest_alone_is_not_enough(body):
    data = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    assert compiler.Image.loads(data, "key") is None


def test_a_swapped_file_is_noticed(file, built):
    combine = get(compiler.Kind.COMBINE)
    (other,) = set(file.parent.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    assert get() == built[2]
    assert built[2].entry != combine.entry


@pytest.mark.parametrize("bits", [0o620, 0o602])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(file, built, caplog, what, bits):
    path = file if what == "file" else file.parent
    path.chmod(bits | 0o100)
    assert get() == built[1]
    get()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, "once a process"
    assert f"{path.name} can be written by others; chmod go-w it" in told[0]
    # A file of this user's own folder is replaced; into a folder of others nothing is written.
    assert len(built) == (2 if what == "file" else 3)


@pytest.mark.parametrize("sticky", [True, False])
def test_a_folder_for_all_is_refused_though_it_is_sticky(folder, built, caplog, sticky):
    folder.mkdir(parents=True)
    folder.chmod(0o1777 if sticky else 0o777)
    get()
    assert "can be written by others" in caplog.text
    assert not list(folder.iterdir())


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_another_user_owns_is_not_loaded(file, built, caplog, monkeypatch, what):
    real = os.fstat
    other = (file if what == "file" else file.parent).stat()

    def fstat(descriptor):
        status = real(descriptor)
        if status.st_ino != other.st_ino:
            return status
        return os.stat_result([*status[:4], os.geteuid() + 1, *status[5:10]])

    monkeypatch.setattr(os, "fstat", fstat)
    assert get() == built[1]
    assert f"belongs to user {os.geteuid() + 1}; remove it, or set EP_CACHE_DIR" in caplog.text


def test_what_root_has_put_there_is_loaded(file, built, monkeypatch):
    real = os.fstat

    def fstat(descriptor):
        status = real(descriptor)
        return os.stat_result([*status[:4], 0, *status[5:10]])

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert get() == built[0]


def test_a_link_is_not_followed_to_a_file_but_to_the_folder(file, built, tmp_path, monkeypatch):
    linked = tmp_path / "linked"
    linked.symlink_to(file.parent)
    monkeypatch.setenv("EP_CACHE_DIR", str(linked))
    assert get() == built[0]
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert get() == built[1]
    assert not file.is_symlink()
    assert elsewhere.exists()


@pytest.mark.parametrize("kind", ["fifo", "folder", "huge"])
def test_what_is_no_plain_file_does_not_hang(file, built, caplog, kind):
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir(0o700)
    else:
        with file.open("wb") as handle:
            handle.truncate(cache.MAX_FILE_BYTES + 1)
        file.chmod(0o600)
    assert get() == built[1]
    assert f"{file.name} is no file of a compiled kernel; remove it" in caplog.text


def test_the_folder_that_was_checked_is_the_one_that_is_read(file, built, tmp_path, monkeypatch):
    """Another user who owns the parent swaps the folder between the check and the read."""
    planted, real = tmp_path / "planted", cache._check_private

    def check(descriptor, name):
        status = real(descriptor, name)
        if not planted.exists():
            file.parent.rename(planted)
            file.parent.mkdir()
            file.write_bytes(b"planted")
        return status

    monkeypatch.setattr(cache, "_check_private", check)
    assert get() == built[0]


def test_a_cache_that_cannot_be_written_costs_time_and_a_warning(folder, built, caplog):
    folder.parent.mkdir()
    folder.touch()
    assert get() == built[0]
    assert get() == built[1]
    assert "the cache of compiled kernels is not used: " in caplog.text


def test_a_full_disk_leaves_nothing(folder, built, monkeypatch):
    def replace(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert get() == built[0]
    assert not list(folder.iterdir())


def test_threads_compile_once(folder, built):
    compiler._images.clear()
    arguments = (compiler.Kind.DISPATCH, LAYOUT, KernelOptions(), "sm_90a")
    threads = [threading.Thread(target=compiler.get_image, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_no_compiler_and_no_cache_is_told_with_the_remedy(folder, monkeypatch):
    def build(*arguments):
        raise ModuleNotFoundError("No module named 'cutlass'")

    monkeypatch.setattr(compiler, "build", build)
    with pytest.raises(ep.EpError, match=r"no dispatch kernel .* sm_90a, and there is no compiler"):
        get()


# Which folder.


@pytest.fixture
def homeless(monkeypatch):
    for name in ("EP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_uid):
        raise KeyError(_uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)


def test_a_user_without_a_home_has_no_cache(homeless, built, caplog):
    cache._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert get() == built[0]
    cache._warn.cache_clear()
    assert "EP_CACHE_DIR='' is not allowed: a folder, but not in a home that is not" in caplog.text


def test_which_folder(homeless, monkeypatch, tmp_path):
    with pytest.raises(ep.ConfigError, match="EP_CACHE_DIR=''"):
        cache.cache_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "ep"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache.cache_dir()) == "/xdg/ep"
    monkeypatch.setenv("EP_CACHE_DIR", "~/mine")
    assert cache.cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("EP_CACHE_DIR", "~no_such_user_here/mine")
    with pytest.raises(ep.ConfigError, match="EP_CACHE_DIR='~no_such_user_here/mine'"):
        cache.cache_dir()


def test_image_survives_the_disk():
    image = compiler.Image("entry", "sm_90a", 64, (("rank", "u32"),), b"\n\0cubin")
    assert compiler.Image.loads(image.dumps("key"), "key") == image
    assert compiler.Image.loads(image.dumps("key"), "another") is None
