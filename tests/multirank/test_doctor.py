"""`python -m ep.doctor` as users start it: under mpirun, and alone."""

import json
import os
import sys

import pytest

from tests.mpi import LAUNCHERS, ROOT, mpirun, run

pytestmark = pytest.mark.ranks

COMMAND = ("-m", "ep.doctor", "--backend", "host", "--steps", "12", "--max-tokens", "8")
ON_RANK_2 = """
import os, sys

if "2" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    {fault}
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
PLANTED = """
import os, signal, sys

from ep.doctor import child, cli, selfcheck, supervise

checked_step, started = selfcheck.run_checked_step, supervise.supervise


def planted_step(exchange, step, bridge):
    if step.number == 3 and exchange.world.rank == 2:
        {fault}
    return checked_step(exchange, step, bridge)


if len(sys.argv) == 2 and sys.argv[1].isdecimal():
    selfcheck.run_checked_step = planted_step
    child.main()
else:
    cli.supervise = lambda *asked: started(*asked, (sys.executable, __file__))
    cli.main()
"""


def found(document, name):
    """Findings of a check that are not well, with who found them."""
    return [
        (told["mark"], told["words"], told["ranks"])
        for told in document["results"]
        if told["name"] == name and told["mark"] in ("warn", "fail")
    ]


@pytest.mark.parametrize("ranks", [None, 4])
def test_all_is_well(ranks, tmp_path):
    path = tmp_path / "found.json"
    command = [*COMMAND, "--json", path]
    if ranks is None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        job = run([sys.executable, *command], 60, clean)
    else:
        job = mpirun(ranks, *command)
    assert job.code == 0, job
    assert job.out.count("12 steps on the host backend are right, bit for bit") == 1, job
    document = json.loads(path.read_text())
    assert document["counts"]["fail"] == 0, document
    assert len(document["ranks"]) == (ranks or 1)
    assert [told["rank"] for told in document["ranks"]] == list(range(ranks or 1))
    places = {(told["node"], told["process"]) for told in document["ranks"]}
    assert len(places) == (ranks or 1)


def test_a_folder_that_is_missing_and_a_name_that_is_wrong():
    faults = {"EP_SHM_DIR": "/nonexistent", "EP_SHARE_GPU": "1"}
    job = mpirun(4, *COMMAND, "--json", "-", env=faults)
    assert job.code == 1, job
    document = json.loads(job.out)
    words = "/nonexistent cannot be used: No such file or directory"
    assert found(document, "shared memory") == [("fail", words, [0, 1, 2, 3])]
    words = "nothing reads EP_SHARE_GPU=1"
    assert found(document, "EP_*") == [("warn", words, [0, 1, 2, 3])]
    ((mark, words, ranks),) = found(document, "steps")
    assert (mark, ranks) == ("fail", [0, 1, 2, 3])
    assert "cannot make a folder in /nonexistent" in words
    # Nothing but that: no words on NVSHMEM, which is not used, or on what the doctor left open.
    assert "NVSHMEM" not in document["results"][-1]["remedy"]
    assert "its world open" not in job.out + job.err, job


def test_a_variable_of_one_rank():
    code = ON_RANK_2.format(fault='os.environ["EP_TUNING"] = "off"')
    job = mpirun(4, "-c", code, *COMMAND, "--json", "-")
    assert job.code == 0, job
    words = "EP_TUNING: ranks 0-1, 3: none; rank 2: off"
    assert found(json.loads(job.out), "variables") == [("warn", words, [])]


def test_a_rank_that_never_comes():
    job = mpirun(4, "-c", ON_RANK_2.format(fault="sys.exit()"), *COMMAND, "--timeout", "3")
    assert job.code != 0, job
    assert job.seconds < 30, job
    assert "MPI start-up waited 3.0 s" in " ".join(job.out.split()), job
    # Each rank's own checks, those that are not well.
    for rank in (1, 3):
        assert f"rank {rank}: fail  job, ranks together: joining the ranks" in job.err, job
    assert "Traceback" not in job.err, job


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "step 3 of 12: the process ended (SIGKILL)"),
        ("signal.pause()", "collecting the results waited 6.0 s for rank 2"),
    ],
)
def test_a_rank_that_dies_or_hangs_in_the_self_check(fault, words, tmp_path):
    program = tmp_path / "planted.py"
    program.write_text(PLANTED.format(fault=fault))
    settings = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    job = mpirun(4, program, *COMMAND[2:], "--timeout", "6", env=settings)
    assert job.code != 0, job
    assert job.seconds < 50, job
    assert words in job.err, job
    assert "waited 6.0 s for rank 2" in " ".join(job.out.split()), job


def test_a_wrong_byte_on_one_rank_is_a_fail_on_all(tmp_path):
    program = tmp_path / "planted.py"
    fault = "step = step.case.step(4, 8) if exchange.world.rank == 2 else step"
    program.write_text(PLANTED.format(fault=fault))
    job = mpirun(4, program, *COMMAND[2:], "--json", "-")
    assert job.code == 1, job
    ((mark, words, ranks),) = found(json.loads(job.out), "steps")
    assert (mark, ranks) == ("fail", [0, 1, 2, 3])
    assert "after dispatch of step 3: " in words
