"""The flag protocol's kernels as they are compiled: what they access, and what orders it."""

import importlib.util

import pytest

from ep.kernels import compile as compiler
from tests.unit.test_kernels import FLAGS, KERNELS, TARGETS, accesses, built

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
)


@pytest.mark.parametrize("arch", TARGETS)
def test_flag_dispatch_accesses(arch):
    ptx = built(compiler.Kind.DISPATCH, False, "k3_2", arch, protocol=FLAGS).ptx
    found = accesses(ptx)
    narrow_stores = found.pop("st.global.b32")
    assert found == {
        "ld.global.v4.b32": 2,
        "st.global.v4.b32": 3,
        "ld.global.b64": 2,
        "ld.global.b32": 3,
        "ld.acquire.sys.global.b32": 1,
        "st.relaxed.sys.global.b32": 1,
        "st.release.sys.global.b32": 1,
        "atom.acq_rel.gpu.global.inc.u32": 1,
        "atom.relaxed.gpu.global.exch.b32": 1,
        "red.relaxed.gpu.global.add.u32": 1,
    }
    # Ids, weights and counts; five words of the hang record; the own flag.
    assert narrow_stores == 3 + 5 + 1


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("norm", [False, True])
def test_flag_combine_accesses(norm, arch):
    found = accesses(built(compiler.Kind.COMBINE, norm, "k3_2", arch, protocol=FLAGS).ptx)
    assert found["ld.relaxed.sys.global.v4.b32"] == 2
    assert found["ld.global.v4.b32"] == 2 + norm
    # The slot, the scales, the header and the result.
    assert found["st.global.v4.b32"] == 4
    # Ids and weights; the hang record; the own flag.
    assert found["st.global.b32"] == 2 + 5 + 1
    assert found["st.relaxed.sys.global.b32"] == found["st.release.sys.global.b32"] == 1
    assert not [form for form in found if ".nc" in form or ".b8" in form or ".b16" in form]


@pytest.mark.parametrize(("kind", "norm"), KERNELS)
def test_flag_kernels_have_the_pdl_and_fences_of_the_options(kind, norm):
    late, off, early = (
        built(kind, norm, "k3_2", "sm_90a", options, FLAGS).ptx
        for options in ("late", "off", "early")
    )
    flag_poll = "ld.acquire.sys"
    assert "griddepcontrol" not in off
    for ptx in (late, early):
        assert ptx.count("griddepcontrol.wait") == 1
        assert ptx.count("griddepcontrol.launch_dependents") == 1
        first_input = ptx.index("ld.global.b32")
        assert ptx.index("ld.global.b64") < ptx.index("griddepcontrol.wait") < first_input
    trigger = "griddepcontrol.launch_dependents"
    assert early.index(trigger) < early.index("ld.global.b32")
    assert late.index(flag_poll) < late.index(trigger)
    for ptx, thread_fences in ((late, True), (off, False), (early, True)):
        arrival = ptx.index("atom.acq_rel.gpu")
        assert ptx.count("fence.acq_rel.sys", arrival) == 1
        assert ptx.count("fence.acq_rel.sys", 0, arrival) == thread_fences
        barrier = ptx.rindex("bar.sync", 0, arrival)
        assert not ptx.count("fence", barrier, arrival)
