"""Memory instructions of the machine, one by one, and the mutations of those that are whole."""

import numpy as np
import pytest

from tests.ptx.arena import Fault
from tests.ptx.codegen import load
from tests.ptx.litmus import on, outcomes
from tests.ptx.machine import Machine, Mode
from tests.ptx.mutations import mutants
from tests.ptx.test_litmus import (
    ALLOWED,
    FORBIDDEN,
    GPU,
    ONE,
    READ_ONE,
    SEE,
    SEND,
    SYS,
    WEAK,
    check,
    writer,
)

HEAD = """.visible .entry k(.param .u64 a) {
.reg .pred %p<2>; .reg .b32 %r<16>; .reg .b64 %d<4>;
ld.param.b64 %d0, [a]; mov.u32 %r0, %laneid;
"""
START = [11, 12, 13, 14, 0, 0, 0, 0]


def run(*lines, mode=Mode.RANDOM, words=512):
    """Words of own memory after one warp has run `lines` with %d0 = its address, %r0 = its lane."""
    machine = Machine(1, 0, mode)
    start = np.zeros(words, np.uint32)
    start[: len(START)] = START
    own = machine.memory.allocate(start, 0)
    machine.stream(0).launch(load(HEAD + "\n".join(lines) + "ret; }"), 1, 32, [own], pdl=False)
    machine.run()
    return machine.memory.peek(own, 4 * words).view(np.uint32).tolist()


def stored(register, at):
    """Lines that store a register of lane l at word `at` + l."""
    place = "mul.wide.u32 %d3, %r0, 4; add.s64 %d3, %d3, %d0;"
    return f"{place} st.global.b32 [%d3+{4 * at}], {register};"


PREDICATED = """mov.b32 %r7, 101; mov.b32 %r8, 102; mov.b32 %r9, 103; mov.b32 %r10, 104;
setp.lt.u32 %p0, %r0, 8; selp.b32 %r6, 1, 0, %p0;
{ .reg .pred p; .reg .b64 lo, hi; .reg .b128 all; setp.ne.u32 p, %r6, 0;
mov.b32 %r1, %r7; mov.b32 %r2, %r8; mov.b32 %r3, %r9; mov.b32 %r4, %r10;
@p ld.relaxed.sys.global.b128 all, [%d0]; @p mov.b128 {lo, hi}, all;
@p mov.b64 {%r1, %r2}, lo; @p mov.b64 {%r3, %r4}, hi; }
"""


@pytest.mark.parametrize("mode", Mode)
def test_a_predicated_b128_load_leaves_the_other_lanes_alone(mode):
    shown = [stored(f"%r{1 + word}", 32 * (1 + word)) for word in range(4)]
    found = run(PREDICATED, *shown, mode=mode)
    for word in range(4):
        lanes = found[32 * (1 + word) :][:32]
        assert lanes == 8 * [11 + word] + 24 * [101 + word]


def test_no_lane_without_its_predicate_touches_memory():
    far = PREDICATED.replace("[%d0]", "[%d1]").replace("%r0, 8", "%r0, 0")
    assert run("mov.b64 %d1, 0;", far, stored("%r1", 32))[32:64] == 32 * [101]
    with pytest.raises(Fault, match="0x0"):
        run("mov.b64 %d1, 0;", far.replace("%r0, 0", "%r0, 1"))


def test_pack_under_a_predicate():
    found = run(
        "setp.lt.u32 %p0, %r0, 4; mov.b64 %d1, {%r0, %r0};",
        "mov.b32 %r1, 5; @%p0 mov.b64 %d1, {%r1, %r1};",
        "{ .reg .b128 b; mov.b128 b, {%d1, %d1}; mov.b64 %d2, 0; @%p0 mov.b128 b, {%d2, %d2};",
        "mov.b128 {%d1, %d2}, b; }",
        "cvt.u32.u64 %r2, %d1;",
        stored("%r2", 32),
    )
    assert found[32:64] == 4 * [0] + list(range(4, 32))


def test_bits_set_by_all_lanes():
    setting = "mov.b32 %r1, 1; shl.b32 %r1, %r1, %r0;"
    for what in ("atom.relaxed.gpu.global.or.b32 %r2, [%d0+16], %r1;", "red.relaxed.gpu"):
        one = what if what.endswith(";") else f"{what}.global.or.b32 [%d0+16], %r1;"
        assert run(setting, one)[4] == 0xFFFFFFFF
    found = run(setting, "atom.relaxed.gpu.global.or.b32 %r2, [%d0], %r1;", stored("%r2", 32))
    assert found[0] == 0xFFFFFFFF
    assert found[32:64] == [11 | (1 << lane) - 1 for lane in range(32)]


def test_volatile_is_relaxed_at_system_scope():
    volatile = SEE.replace("ld.{}", "ld.volatile") + "{}ld.global.b32 %a1, [x];"
    for fence, weak in (("", ALLOWED), (GPU, ALLOWED), (SYS, FORBIDDEN)):
        ctas = [on(0, writer(SYS)), on(1, volatile.format(fence))]
        check(ctas, ["1.0.a0", "1.0.a1"], (1, 0), weak)
    twice = "ld.volatile.global.b32 %a0, [x]; ld.volatile.global.b32 %a1, [x];"
    strong = SEND.replace("st.", "st.relaxed.sys.")
    check([on(0, strong), on(1, twice)], ["1.0.a0", "1.0.a1"], (1, 0), FORBIDDEN)


def test_other_caches_and_sleep():
    found = run(
        "nanosleep.u32 20; ld.global.cg.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];",
        "{ .reg .b32 drop; ld.volatile.global.b32 drop, [%d0]; }",
        "ld.global.nc.v4.b32 {%r5, %r6, %r7, %r8}, [%d0]; add.s32 %r9, %r4, %r5;",
        stored("%r9", 32),
    )
    assert found[32:64] == 32 * [25]


def test_the_read_only_path_refuses_what_others_write():
    reading = "ld.global.nc.b32 %a0, [x];"
    with pytest.raises(Fault, match="another thread has written"):
        set(outcomes([on(0, SEND), on(1, reading)], ["1.0.a0"], WEAK))
    ctas = [on(0, SEND + "boundary;" + reading)]
    assert set(outcomes(ctas, ["0.0.a0"], WEAK)) == {(1,)}


def test_lanes_with_the_same_value():
    lines = ("and.b32 %r1, %r0, 3; match.any.sync.b32 %r2, %r1, -1;", stored("%r2", 32))
    assert run(*lines)[32:64] == 8 * [0x11111111 << lane for lane in range(4)]


def changed(ptx):
    return {mutant.name: mutant.ptx for mutant in mutants(ptx, {"chunk store", "chunk load"})}


def plain(ptx):
    """With the registers that inline assembly has."""
    return ptx.replace("%b0", "all").replace("[x]", "[%c0+0]")


@pytest.mark.parametrize("kind", ["gpu", "halves", "words", "weak words"])
def test_chunks_that_are_not_whole_tear(kind):
    results = [f"1.0.a{word}" for word in range(4)]
    bodies = [f"{{ .reg .b128 all; {plain(ptx)} }}" for ptx in (ONE, READ_ONE)]
    mutated = [
        changed(bodies[0])[f"chunk store 0 {kind}"],
        changed(bodies[1])[f"chunk load 0 {kind}"],
    ]
    pairs = [(mutated[0], bodies[1]), (bodies[0], mutated[1])]
    for write, read in pairs:
        found = set(outcomes([on(0, write), on(1, read)], results, WEAK, 100))
        assert {(0, 0, 0, 0), (1, 1, 1, 1)} < found
    found = set(outcomes([on(0, bodies[0]), on(1, bodies[1])], results, WEAK, 100))
    assert found == {(0, 0, 0, 0), (1, 1, 1, 1)}


def test_mutants_of_a_chunk_load_keep_its_predicate():
    names = ["gpu", "halves", "words", "weak words"]
    made = changed(HEAD + PREDICATED + "ret; }")
    assert list(made) == [f"chunk load 0 {name}" for name in names]
    for ptx in made.values():
        found = run(ptx.removeprefix(HEAD).removesuffix("ret; }"), stored("%r4", 32))
        assert found[32:64] == 8 * [14] + 24 * [104]


def test_a_removed_chunk_and_an_early_trigger():
    assert "b128" not in changed("st.relaxed.sys.global.b128 [%rd1], all;")["chunk store 0 removed"]
    text = "griddepcontrol.wait; mov.u32 %r0, 1;\ngriddepcontrol.launch_dependents;"
    (moved,) = mutants(text, {"trigger after the wait"})
    assert moved.name == "trigger after the wait 0 moved before"
    assert moved.ptx.index("launch") < moved.ptx.index("wait;") < moved.ptx.index("mov")
