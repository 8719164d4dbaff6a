"""Both kernels compiled for every target, with no GPU: their instructions, registers and cache."""

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ep.config import EpConfig, Protocol
from ep.kernels import compile as compiler
from ep.kernels.grid import combine_ctas, dispatch_ctas
from ep.kernels.options import Boundaries, Fences, KernelOptions, Pdl, Warm
from ep.layout import EpLayout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
)

TARGETS = compiler.ARCHES
K3 = EpConfig(ranks=2, hidden=3584, experts=896, top_k=16, max_tokens=128)
SHAPES = {
    "k3_2": K3,
    "k3_16": dataclasses.replace(K3, ranks=16),
    "gpt_oss_72": EpConfig(ranks=72, hidden=2880, experts=128, top_k=4, max_tokens=128),
    "least": EpConfig(ranks=1, hidden=32, experts=1, top_k=1, max_tokens=1),
    "odd_33": EpConfig(ranks=33, hidden=7264, experts=20, top_k=7, max_tokens=3),
    # CTAs of 512 threads, the largest that two of might share an SM, and many ranks.
    "mixtral_72": EpConfig(ranks=72, hidden=4096, experts=8, top_k=2, max_tokens=128),
    "qwen_64": EpConfig(ranks=64, hidden=4096, experts=128, top_k=8, max_tokens=8192),
    "most": EpConfig(ranks=72, hidden=16384, experts=10**6, top_k=32, max_tokens=65535),
}
OPTIONS = {
    "late": KernelOptions(fences=Fences.THREAD),
    "off": KernelOptions(pdl=Pdl.OFF, fences=Fences.CTA),
    "early": KernelOptions(pdl=Pdl.EARLY, fences=Fences.THREAD),
}
KERNELS = [
    (compiler.Kind.DISPATCH, False),
    (compiler.Kind.COMBINE, False),
    (compiler.Kind.COMBINE, True),
]
FREE, FLAGS = Protocol


@functools.cache
def built(kind, norm, shape, arch, options="late", protocol=FREE):
    return compiler.build(
        kind,
        EpLayout(dataclasses.replace(SHAPES[shape], protocol=protocol)),
        dataclasses.replace(OPTIONS[options], norm=norm),
        arch,
    )


def every_kernel(*shapes):
    return pytest.mark.parametrize(
        ("kind", "norm", "shape", "arch", "protocol"),
        [
            (*kernel, shape, arch, protocol)
            for kernel, shape, arch, protocol in itertools.product(
                KERNELS, shapes, TARGETS, Protocol
            )
        ],
    )


def resources(cubin):
    """Registers, and bytes of stack of the CUBIN's one kernel, from its ELF attributes."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + entry_bytes * idx) for idx in range(count)
    ]
    strings = sections[names][4]
    found = {}
    for section in sections:
        name = cubin[strings + section[0] :].split(b"\0", 1)[0]
        if name == b".nv.info":
            at, end = section[4], section[4] + section[5]
            while at < end:
                form, attribute, size = struct.unpack_from("<BBH", cubin, at)
                at += 4
                if form == 4:
                    found[attribute] = struct.unpack_from("<II", cubin, at)[1]
                    at += size
    return {"registers": found[0x2F], "frame": found[0x11], "stack": found[0x12]}


@functools.cache
def ptxas():
    """The assembler of the pip package nvidia-cuda-nvcc, else of a toolkit, else None."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    for place in places or []:
        for path in sorted(Path(place).glob("*/bin/ptxas")):
            return str(path)
    return shutil.which("ptxas")


@every_kernel(*SHAPES)
def test_compiles_without_local_memory(kind, norm, shape, arch, protocol):
    image = built(kind, norm, shape, arch, protocol=protocol)
    assert f".target {arch}" in image.ptx
    assert ".local" not in image.ptx
    used = resources(image.cubin)
    assert used["frame"] == used["stack"] == 0
    assert used["registers"] * image.threads <= 65536


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kind", [compiler.Kind.EMPTY, compiler.Kind.PING_PONG])
def test_probes_compile(kind, arch):
    image = built(kind, False, "least", arch)
    assert resources(image.cubin)["frame"] == 0


@every_kernel("k3_2", "k3_16", "gpt_oss_72")
def test_ptxas_neither_spills_nor_refuses_an_instruction(
    kind, norm, shape, arch, protocol, tmp_path
):
    if ptxas() is None:
        pytest.skip("the CUBIN was checked; ptxas itself is not here (nvidia-cuda-nvcc)")
    image = built(kind, norm, shape, arch, protocol=protocol)
    (tmp_path / "kernel.ptx").write_text(image.ptx)
    done = subprocess.run(
        [ptxas(), "-v", "-arch", arch, "kernel.ptx", "-o", "kernel.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr


def accesses(ptx):
    """Forms of all global accesses: {"ld.global.v4.b32": 3, ...}."""
    forms = re.findall(r"\b((?:ld|st|atom|red)\.[\w.]*global[\w.]*) ", ptx)
    return {form: forms.count(form) for form in set(forms)}


@pytest.mark.parametrize("arch", TARGETS)
def test_dispatch_accesses(arch):
    found = accesses(built(compiler.Kind.DISPATCH, False, "k3_2", arch, "off").ptx)
    # To each of two ranks elements and choices; scales, heads and announcements by lane; and all
    # ones once a chunk was read.
    assert found["st.relaxed.sys.global.b128"] == 2 + 2 + 3 + 1
    # Chunk, head and announcement, and this of the herald, too; it acquires the clearance.
    assert found["ld.relaxed.sys.global.b128"] == 3 + 1
    assert found.pop("ld.acquire.sys.global.b128") == 1
    # Two of the tokens' loads, twice; the step of each of three roles.
    assert found["ld.global.v4.b32"] == 4 + 3
    check_nothing_else_is_strong(found)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("norm", [False, True])
def test_combine_accesses(norm, arch):
    found = accesses(built(compiler.Kind.COMBINE, norm, "k3_2", arch, "off").ptx)
    # To the slot, all ones into each of two slots that were read; the clearance by lane.
    assert found["st.relaxed.sys.global.b128"] == 1 + 2 + 1
    assert found["ld.relaxed.sys.global.b128"] == 2
    # The first row, the first of more, the next one; the step of each of three roles.
    assert found["ld.global.v4.b32"] == 3 + norm + 3
    check_nothing_else_is_strong(found)


def check_nothing_else_is_strong(found):
    """Beside the chunks only the report of a wait that has expired, and who looks for one."""
    strong = {form for form in found if re.match(r"\w+\.(relaxed|acquire|release|acq_rel)", form)}
    assert strong == {
        "st.relaxed.sys.global.b128",
        "ld.relaxed.sys.global.b128",
        "ld.relaxed.gpu.global.b32",
        "st.relaxed.gpu.global.b32",
        "atom.relaxed.gpu.global.or.b32",
        "atom.relaxed.gpu.global.exch.b32",
        "st.release.sys.global.b32",
    }
    assert found["st.release.sys.global.b32"] == 1


@pytest.mark.parametrize(("kind", "norm"), KERNELS)
def test_only_the_herald_fences_and_no_sender_waits_for_its_cta(kind, norm):
    is_combine = kind is compiler.Kind.COMBINE
    ptx = built(kind, norm, "k3_16", "sm_103a").ptx
    assert ptx.count("fence.acq_rel.sys") == is_combine
    assert ptx.count("fence") == is_combine
    # Of the herald, before a row is emptied, and in the norm.
    assert ptx.count("bar.sync") == (2 + norm if is_combine else 0)
    trusted = compiler.build(
        kind,
        EpLayout(K3),
        KernelOptions(norm=norm, boundaries=Boundaries.TRUSTED),
        "sm_90a",
    ).ptx
    assert not re.search(r"fence|acquire|membar", trusted)


@pytest.mark.parametrize(("kind", "norm"), KERNELS)
def test_stamps_cost_nothing_where_they_are_off(kind, norm):
    plain = built(kind, norm, "k3_2", "sm_90a").ptx
    stamped = compiler.build(
        kind, EpLayout(K3), dataclasses.replace(OPTIONS["late"], norm=norm, stamps=True), "sm_90a"
    ).ptx
    # Waits that are long, and the report of those that have expired, look at the clock.
    looks = 2 + (2 if kind is compiler.Kind.DISPATCH else 1)
    assert plain.count("%globaltimer") == looks
    assert stamped.count("%globaltimer") >= looks + 6


@pytest.mark.parametrize(("kind", "norm"), KERNELS)
def test_nothing_but_the_table_is_used_before_the_wait(kind, norm):
    """What is touched before is dropped, and nothing is stored."""
    for options in ("early", "late"):
        ptx = built(kind, norm, "k3_2", "sm_90a", options).ptx
        # Each role of the kernel has its own.
        assert ptx.count("griddepcontrol.wait") == 3
        first = ptx[: ptx.index("griddepcontrol.wait")]
        assert "griddepcontrol.launch_dependents" not in first
        used = set(re.findall(r"\b((?:ld|st|atom|red)\.[\w.]*global[\w.]*) ", first))
        assert used <= {"ld.global.b64", "ld.volatile.global.b32"}
    assert "griddepcontrol" not in built(kind, norm, "k3_2", "sm_90a", "off").ptx


@pytest.mark.parametrize(("kind", "norm"), KERNELS)
def test_products_and_sums_are_never_fused_or_flushed(kind, norm):
    ptx = built(kind, norm, "k3_2", "sm_90a").ptx
    assert not re.findall(r"\b(?:add|mul|sub|fma|div)\.(?!rn\.)[\w.]*f32\b", ptx)
    assert ".ftz" not in ptx


def test_rank_and_tokens_are_arguments_only():
    names = [name for name, _ in built(compiler.Kind.COMBINE, True, "k3_2", "sm_90a").params]
    assert names == [
        "table",
        "partials",
        "ids",
        "norm_weight",
        "out",
        "record",
        "timeout_ns",
        "grace_ns",
        "eps",
        "rank",
        "num_tokens",
        "num_senders",
        "stamps",
    ]
    names = [name for name, _ in built(compiler.Kind.DISPATCH, False, "k3_2", "sm_90a").params]
    assert names == [
        *("table", "x", "ids", "weights", "record", "timeout_ns", "grace_ns"),
        *("rank", "num_tokens", "num_senders", "stamps"),
    ]


def test_grids():
    config = SHAPES["k3_16"]
    assert [dispatch_ctas(tokens) for tokens in (0, 1, 128)] == [1, 1, 128]
    assert combine_ctas(config, 0, 264) == 128
    assert combine_ctas(config, 128, 264) == 264
    assert combine_ctas(config, 128, 0) == 1
    assert combine_ctas(SHAPES["least"], 1, 264) == 1


# The cache, as the compiler fills it; test_cache.py has the rest.


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_images", {})
    return tmp_path


def get_least(**changes):
    layout = EpLayout(SHAPES["least"])
    return compiler.get_image(compiler.Kind.DISPATCH, layout, KernelOptions(**changes), "sm_90a")


def test_a_second_process_compiles_nothing_and_imports_no_compiler(fresh_cache):
    first = get_least()
    assert get_least() is first
    (path,) = fresh_cache.iterdir()
    whole = path.read_bytes()
    script = (
        "import hashlib, sys, test_kernels as t; t.compiler.build = None; image = t.get_least();"
        "print(image.entry, image.params, hashlib.sha256(image.cubin).hexdigest());"
        "sys.exit('cutlass' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
        text=True,
    )
    digest = hashlib.sha256(first.cubin).hexdigest()
    assert done.stdout == f"{first.entry} {first.params} {digest}\n"
    assert path.read_bytes() == whole
    assert [*fresh_cache.iterdir()] == [path]


def test_key_tells_all_that_matters_apart():
    def key(config, arch="sm_90a", kind=compiler.Kind.DISPATCH, **options):
        return compiler.cache_key(kind, EpLayout(config), KernelOptions(**options), arch)

    config = SHAPES["k3_2"]
    keys = {
        key(config),
        key(config, arch="sm_100a"),
        key(config, kind=compiler.Kind.COMBINE),
        key(config, pdl=Pdl.OFF),
        key(config, fences=Fences.THREAD),
        key(config, warm=Warm.OFF),
        key(config, stamps=True),
        key(dataclasses.replace(K3, protocol=FLAGS)),
        key(config, norm=True),
        key(dataclasses.replace(K3, max_tokens=127)),
    }
    assert len(keys) == 10
    assert key(dataclasses.replace(K3, timeout_s=1.0)) == key(config)
