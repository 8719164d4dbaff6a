"""The exported library and header, and what the library does over a played driver."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ep import EpLayout
from ep.export.binding import Arming, Hang, Options, Received, Status
from ep.export.cli import command
from ep.export.library import symbols
from ep.export.plan import ABI_VERSION, ExportPlan
from ep.export.tables import SOURCES
from ep.kernels.options import Pdl
from ep.layout import LINE_BYTES
from tests.capi.cases import CASES
from tests.capi.made import CONFIG, HERE, STRICT, make, make_driver, run

TOOLS = ("cc", "c++", "nm", "readelf")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"
)
STRICTER = (*STRICT, "-Wconversion", "-Wsign-conversion", "-Wshadow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capi")
    make(folder)
    make_driver(folder)
    return folder


@pytest.fixture(scope="module")
def said(folder):
    return json.loads(run(sys.executable, "-m", "tests.capi.cases", folder, cwd=HERE.parents[1]))


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_library(said, name):
    assert not said[name], said[name]


def test_it_exports_just_its_functions(folder):
    listed = run("nm", "-D", "--defined-only", folder / "libep.so").splitlines()
    names = sorted(line.split()[2].split("@")[0] for line in listed if " T " in line)
    assert names == symbols() == sorted(symbols())
    assert {line.split()[1] for line in listed} == {"T", "A"}
    declared = re.findall(r"(?m)^EP_API .*?\b(ep_\w+)\(", (folder / "ep.h").read_text())
    assert sorted(declared) == symbols()


def test_it_needs_the_c_library_alone(folder):
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", folder / "libep.so"))
    assert set(needed) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def test_it_calls_no_function_of_another_such_library(folder):
    """Where several are loaded, a name that both export is the first one's."""
    relocations = run("readelf", "-rW", folder / "libep.so")
    assert "R_X86_64" in relocations or "R_AARCH64" in relocations
    assert not re.findall(r"\bep_\w+", relocations)


@pytest.mark.parametrize("language", [("cc", "-xc", "-std=c11"), ("c++", "-xc++", "-std=c++17")])
def test_header_is_clean(folder, tmp_path, language):
    layout = EpLayout(CONFIG)
    sizes = {"options": Options, "arming": Arming, "received": Received, "hang": Hang}
    facts = {
        "EP_RANKS": 4,
        "EP_HIDDEN": 64,
        "EP_EXPERTS": 9,
        "EP_TOP_K": 3,
        "EP_MAX_TOKENS": 20,
        "EP_STRIDE": layout.stride,
        "EP_ROWS": layout.rows,
        "EP_SCALES": 2,
        "EP_BUFFER_BYTES": layout.total_bytes,
        "EP_BUFFER_ALIGN": LINE_BYTES,
        "EP_OFFSET_X": layout.fields["x"].offset_bytes,
        "EP_OFFSET_HEADER": layout.fields["header"].offset_bytes,
        "EP_ABI_VERSION": ABI_VERSION,
        **{f"sizeof(ep_{name})": sizeof(kind) for name, kind in sizes.items()},
        "EP_OK": Status.OK,
        "EP_TIMED_OUT": Status.TIMED_OUT,
    }
    assertion = "static_assert" if "++" in language[0] else "_Static_assert"
    lines = [f'{assertion}({name} == {int(value)}, "{name}");' for name, value in facts.items()]
    source = tmp_path / "user.c"
    source.write_text(
        '#include "ep.h"\n#include "ep.h"\n#include <stddef.h>\n'
        + "\n".join(lines)
        + "\nint main(void) { ep_options options = EP_OPTIONS_INIT; ep_arming a = EP_ARMING_INIT;\n"
        "ep_hang hang = EP_HANG_INIT; ep_received r = EP_RECEIVED_INIT; ep_exchange* e = NULL;\n"
        "return options.rank + (int)a.step + (int)hang.phase + (int)r.source_stride\n"
        "  + (int)ep_open(&options, &e); }\n"
    )
    link = (f"-L{folder}", "-lep", f"-Wl,-rpath,{folder}")
    run(*language, *STRICTER, f"-I{folder}", source, *link, "-o", tmp_path / "user")


def sizeof(kind):
    import ctypes

    return ctypes.sizeof(kind)


def test_driver_structs_are_those_of_cuda(tmp_path):
    nvidia = pytest.importorskip("nvidia.cu13")
    include = Path(next(iter(nvidia.__path__))) / "include"
    if not (include / "cuda.h").exists():
        pytest.skip("no cuda.h is installed")
    members = {
        "gridDimX": "grid_dim_x",
        "blockDimX": "block_dim_x",
        "sharedMemBytes": "shared_mem_bytes",
        "hStream": "stream",
        "attrs": "attrs",
        "numAttrs": "num_attrs",
    }
    constants = {
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": "LAUNCH_ATTRIBUTE_PROGRAMMATIC_"
        "STREAM_SERIALIZATION",
        **{
            f"CU_{name}": name
            for name in (
                "DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
                "DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
                "DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
                "STREAM_NON_BLOCKING",
                "STREAM_CAPTURE_MODE_RELAXED",
                "MEMHOSTALLOC_PORTABLE",
                "MEMHOSTALLOC_DEVICEMAP",
            )
        },
    }
    # The same names twice: once as CUDA has them, once as the library.
    types = "result|device(ptr)?|context|stream|library|kernel|function"
    ours = re.sub(rf"\b(CU({types}))\b", r"ep_\1", (SOURCES / "driver.h").read_text())
    pairs = [
        (f"offsetof(CUlaunchConfig, {theirs})", f"offsetof(launch_config, {mine})")
        for theirs, mine in members.items()
    ]
    pairs += [(f"(int){theirs}", f"(int){mine}") for theirs, mine in constants.items()]
    pairs += [
        ("sizeof(CUlaunchConfig)", "sizeof(launch_config)"),
        ("sizeof(CUlaunchAttribute)", "sizeof(launch_attribute)"),
        ("offsetof(CUlaunchAttribute, value)", "offsetof(launch_attribute, value)"),
    ]
    checks = [f'_Static_assert({theirs} == {mine}, "{mine}");' for theirs, mine in pairs]
    source = tmp_path / "same.c"
    source.write_text(f"#include <cuda.h>\n{ours}\n" + "\n".join(checks) + "\nint unused;\n")
    run("cc", "-std=c11", "-Wall", "-Werror", f"-I{include}", "-c", source, "-o", os.devnull)


def test_without_a_driver_it_says_so(folder):
    code = (
        "import sys, ctypes; from pathlib import Path; from ep.export.binding import Library\n"
        "library = Library(Path(sys.argv[1]))\n"
        "try: library.open(0, 1 << 30, [rank << 30 for rank in range(1, 5)])\n"
        "except Exception as error: print(error)\n"
    )
    done = run(sys.executable, "-c", code, folder / "libep.so")
    assert "DEVICE: " in done
    assert "libcuda" in done or "context" in done


def test_export_command(tmp_path):
    shape = tmp_path / "odd na*me.toml"
    shape.write_text("hidden = 64\nexperts = 9\ntop_k = 3\n")
    given = f"--config '{shape}' --ranks 4 --max-tokens 20 --arch sm_90a --no-sharing"
    given += f" -o {tmp_path}/made --sources {tmp_path}/sources"
    result = CliRunner().invoke(command, given)
    assert result.exit_code == 0, result.output
    made = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert made == ["ep.h", "libep.so"]
    header = (tmp_path / "made" / "ep.h").read_text()
    assert "odd_na_me" in header
    layout = EpLayout(CONFIG)
    assert f"#define EP_BUFFER_BYTES UINT64_C({layout.total_bytes})\n" in header
    # The sources make the same library elsewhere.
    again = (
        *("cc", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-fvisibility=hidden"),
        *(path.name for path in (tmp_path / "sources").glob("*.[cs]")),
    )
    run(*again, "-o", "libep.so", cwd=tmp_path / "sources")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 0 --max-tokens 1", "--ranks"),
        ("--ranks 4 --max-tokens 0", "--max-tokens"),
        ("--ranks 4", "--max-tokens"),
        ("--ranks 4 --max-tokens 1 --arch sm_70", "sm_90a, sm_100a, sm_103a"),
        ("--ranks 4 --max-tokens 1 --arch sm_90a,sm_90a", "each once"),
        ("--ranks 4 --max-tokens 1 --config nothing", "kimi_k3"),
    ],
)
def test_wrong_options(tmp_path, words, said):
    result = CliRunner().invoke(command, f"{words} -o {tmp_path}/made")
    assert result.exit_code == 2
    assert said in re.sub(r"[\s│]+", " ", result.output)
    assert not (tmp_path / "made").exists()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    given = "--config mixtral_8x7b --ranks 4 --max-tokens 20 --arch sm_90a --no-sharing"
    monkeypatch.setattr(ExportPlan, "images", lambda _plan, _tell: [])
    monkeypatch.setattr("ep.export.library.write_sources", lambda *_: None)
    result = CliRunner().invoke(command, f"{given} -o {tmp_path}")
    assert result.exit_code == 1
    assert "no-such-compiler" in result.output


def test_ids_differ_where_buffers_or_kernels_do():
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"ranks": 5},
        {"max_tokens": 21},
        {"experts": 10},
        {"top_k": 2},
    )
    ids = {ExportPlan("a", dataclasses.replace(CONFIG, **change)).config_id for change in changes}
    assert len(ids) == 5
    plan = ExportPlan("a", CONFIG)
    same = ExportPlan("b", dataclasses.replace(CONFIG, timeout_s=1), ("sm_90a",), (Pdl.LATE,))
    assert plan.config_id == same.config_id
