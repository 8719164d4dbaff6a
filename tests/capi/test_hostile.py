"""The exported library's own code under sanitizers."""

import os
import shutil

import pytest

from ep.export.library import ASSEMBLY, MEMBERS, write_sources
from tests.capi.made import DRIVER, HERE, STRICT, make, make_driver, run

SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CALLS = 40_000
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")


@pytest.fixture
def folder(tmp_path):
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    try:
        run("cc", *SANITIZERS, probe, "-o", tmp_path / "probe")
        run(tmp_path / "probe")
    except AssertionError:
        pytest.skip("needs a C compiler with sanitizers")
    plan, images = make(tmp_path / "made")
    write_sources(plan, images, tmp_path / "made")
    make_driver(tmp_path / "made")
    return tmp_path / "made"


def test_random_calls(folder):
    sources = (*MEMBERS, ASSEMBLY, HERE / "hostile.c")
    flags = ("-std=c11", "-D_GNU_SOURCE", *STRICT, *SANITIZERS, "-I.")
    run("cc", *flags, *sources, "-o", "hostile", "-ldl", "-pthread", cwd=folder)
    assert (folder / DRIVER).exists()
    told = run("./hostile", CALLS, cwd=folder, env={**os.environ, "LD_LIBRARY_PATH": "."})
    ok, argument, abi, order, device, driver, expired = map(int, told.split())
    assert min(ok, argument, abi, order, driver) > CALLS // 1000
    assert (device, expired) == (0, 0)
