"""Ranks without MPI: plain processes that meet over TCP."""

import os
import re
import signal

import pytest

from tests.multirank import deaths, failures, life, meetings, worker
from tests.plain import Ranks, free_port, play

WORKER, DEATHS, LIFE = worker.__file__, deaths.__file__, life.__file__
FAILURES, MEETINGS = failures.__file__, meetings.__file__
pytestmark = pytest.mark.ranks


def passes(size, script, *words, **options):
    jobs = play(size, script, *words, **options)
    if any(jobs.codes) or f"passed {words[0]}" not in jobs.out:
        pytest.fail(str(jobs))
    return jobs


@pytest.mark.parametrize(
    ("script", "case"),
    [
        (FAILURES, "forked"),
        (FAILURES, "cut_short"),
        (FAILURES, "mixed"),
        (LIFE, "worlds"),
    ],
    ids=lambda word: word.rpartition("/")[2],
)
def test_the_job_goes_on(script, case, tmp_path):
    passes(4, script, case, EP_SHM_DIR=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_bench():
    options = ("--tokens", "1,5", "--steps", "20", "--warmup", "2", "--backend", "host")
    jobs = play(4, "-m", "ep.bench", *options)
    assert jobs.codes == [0] * 4, jobs
    assert jobs[0].out, jobs


@pytest.mark.parametrize("case", ["in_steps", "in_bootstrap"])
def test_survivors_go_on(case, tmp_path):
    jobs = play(6, DEATHS, case, EP_TEST_DONE=tmp_path / "done", EP_SHM_DIR=tmp_path)
    dead = {2, 3} if case == "in_steps" else {2}
    assert {rank for rank, job in jobs.items() if job.code == -signal.SIGKILL} == dead, jobs
    assert {job.code for rank, job in jobs.items() if rank not in dead} == {0}, jobs
    assert f"passed {case}" in jobs.out, jobs
    assert "Traceback" not in jobs.err, jobs


def test_the_death_of_rank_0_is_told_at_once_and_survived():
    jobs = play(4, MEETINGS, "without_first")
    assert jobs.codes == [-signal.SIGKILL, 0, 0, 0], jobs
    assert jobs.out.count("went on") == 3, jobs


def test_a_rank_that_never_comes_is_named_by_all():
    jobs = Ranks(4).start(MEETINGS, "connect", ranks=[0, 1, 3]).wait(20)
    for rank, job in jobs.items():
        assert job.code == 1, jobs
        words = rf"rank {rank}: TCP start-up waited [0-9.]+ s for rank 2; they meet at"
        assert re.search(words, job.err), jobs


def test_a_rank_without_the_secret_is_told():
    ranks = Ranks(3).start(MEETINGS, "connect", ranks=[0, 1])
    jobs = ranks.start(MEETINGS, "connect", ranks=[2], secret="another secret!!").wait(20)
    assert jobs.codes == [1, 1, 1], jobs
    assert "could not prove EP_SECRET came from 127.0.0.1" in jobs[0].err, jobs
    assert "does not take this one's proof of EP_SECRET" in jobs[2].err, jobs
    assert "another secret" not in jobs.out + jobs.err


def test_two_jobs_at_once_do_not_meet():
    port = free_port()
    both = [Ranks(4, f"127.0.0.1:{port}-{port + 3}") for _ in range(2)]
    with both[0], both[1]:
        for rank in range(4):
            for number, ranks in enumerate(both):
                ranks.start(MEETINGS, "tell", number, ranks=[rank])
        for number, ranks in enumerate(both):
            jobs = ranks.wait(30)
            assert jobs.codes == [0] * 4, jobs
            assert jobs.out.count(f"heard {[number] * 4}") == 4, jobs


@pytest.mark.parametrize(
    ("script", "words", "code"),
    [
        (WORKER, ["crash_outside"], 1),
        (WORKER, ["leave"], 3),
        (FAILURES, ["leave_with_256"], 1),
        (LIFE, ["fails", "step"], 1),
    ],
    ids=lambda word: str(word)[-20:],
)
def test_a_rank_that_fails_ends_the_job_with_its_code(script, words, code, tmp_path):
    jobs = play(4, script, *words, timeout_s=30, EP_SHM_DIR=tmp_path)
    assert jobs.codes == [code] * 4, jobs
    assert jobs.err.count(f"rank 1 of 4 ends the job, with code {code}") == 3, jobs
    assert jobs.err.count("Traceback") == (words[0] not in ("leave", "leave_with_256")), jobs
    assert not list(tmp_path.iterdir())


def test_a_process_ends_with_its_own_code():
    """Nobody's end waits for another: neither with the world open, nor after a timeout."""
    jobs = play(4, LIFE, "all_leave", 3)
    assert jobs.codes == [3] * 4, jobs
    jobs = play(4, LIFE, "shutdown", "barrier")
    assert jobs.codes == [0] * 4, jobs
    assert jobs.out.count("left barrier") == 4, jobs


def test_a_stopped_rank_ends_when_it_wakes_up():
    """No launcher has ended it; what the others have said lies in its connections."""
    ranks = Ranks(4).start(FAILURES, "stopped")
    with ranks:
        assert [ranks.processes[rank].wait(20) for rank in (0, 2, 3)] == [1, 1, 1]
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        jobs = ranks.wait(20)
    assert jobs[1].code == 1, jobs
    assert "of 4 ends the job, with code 1" in jobs[1].err, jobs
