"""That nothing ends the doctor, and what it tells then."""

import json
import os
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ep.doctor import child, cli, report
from ep.doctor.result import (
    MAX_ALIKE,
    Check,
    Context,
    Finding,
    Mark,
    Options,
    Result,
    failed,
    merge,
    passed,
    skipped,
    warned,
)
from ep.doctor.supervise import Outcome, supervise

# Results.


def test_every_fail_and_warning_says_what_to_do():
    for give in (failed, warned):
        with pytest.raises(ValueError, match="remedy ''"):
            give("words", "")
    with pytest.raises(ValueError, match="pass with remedy"):
        Finding(Mark.PASS, "words", "do something")


def test_a_check_that_breaks_is_a_fail_of_its_own():
    def broken(_context):
        raise OSError(5, "Input/output error")

    (result,) = Check("area", "name", broken).run(Context({}, Options()))
    assert result.finding.mark is Mark.FAIL
    assert result.finding.words == "the check broke: OSError: [Errno 5] Input/output error"
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result


FINDINGS = st.sampled_from([passed("a"), passed("b"), warned("c", "d"), failed("e", "f")])
RESULTS = st.builds(Result, st.just("area"), st.sampled_from("xyz"), FINDINGS)


@given(st.lists(st.lists(RESULTS, max_size=4), min_size=1, max_size=6))
def test_ranks_that_found_the_same_are_told_together(said):
    merged = merge(said)
    told = {(result.name, result.finding): result.ranks for result in merged}
    assert len(told) == len(merged)
    wanted: dict[Any, set[int]] = {}
    for rank, results in enumerate(said):
        for result in results:
            wanted.setdefault((result.name, result.finding), set()).add(rank)
    assert told == {key: tuple(sorted(ranks)) for key, ranks in wanted.items()}


def test_of_many_that_differ_some_are_told_and_none_is_lost():
    said = [[Result("area", "name", failed(f"words {rank}", "do"))] for rank in range(9)]
    merged = merge(said)
    assert len(merged) == MAX_ALIKE
    assert {rank for result in merged for rank in result.ranks} == set(range(9))
    assert merged[-1].finding.words == "words 3 (of rank 3; the others' differ)"


# A child that hangs or dies.

HEAD = """
import json, os, signal, sys, time
request = json.loads(sys.stdin.read())
def say(**message):
    os.write(int(sys.argv[1]), json.dumps(message).encode() + b"\\n")
result = {"area": "a", "name": "n", "mark": "pass", "words": "w", "remedy": "", "ranks": []}
document = {"results": [], "in_order": True}
"""
DIES_ONCE = """
if not request["done"]:
    say(begins=0, stage="check 0")
    say(results=[result], facts={"one": 1})
    say(begins=1, stage="check 1")
    print("a library said so", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
assert request["facts"] == {"one": 1} and len(request["results"]) == 2
say(stage="joining"); say(document=document)
"""


def supervised(code, timeout_s=60.0):
    return supervise(Options(timeout_s=timeout_s), command=(sys.executable, "-c", HEAD + code))


def test_the_next_child_does_without_the_check_that_killed_the_first():
    outcome = supervised(DIES_ONCE)
    assert outcome.document == {"results": [], "in_order": True}
    assert outcome.facts == {"one": 1}
    first, second = outcome.results
    assert first.finding == passed("w")
    assert (second.area, second.name) == (child.CHECKS[1].area, child.CHECKS[1].name)
    assert second.finding.words == (
        "check 1: the process ended (SIGKILL); its last words: a library said so"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("say(stage='joining'); say(error='in words'); sys.exit(1)", "joining: in words"),
        ("say(stage='joining'); sys.exit(3)", "joining: the process ended (exit code 3)"),
        ("say(stage='joining'); os.abort()", "joining: the process ended (SIGABRT)"),
        ("say(document=document); say(stage='leaving'); os.abort()", "leaving: the process ended"),
        ("say(stage='joining'); time.sleep(60)", "joining: nothing came of it in 3 s"),
        ("say(begins=1, stage='check'); time.sleep(60)", "check: nothing came of it in 3 s"),
    ],
)
def test_what_a_child_does_not_survive_is_told(code, words, monkeypatch):
    # What would end the second child, too, does not come again.
    code = f"if request['done'] > 1: say(document=document); sys.exit()\n{code}"
    monkeypatch.setattr("ep.doctor.supervise.SPARE_S", 2.0)
    start = time.monotonic()
    outcome = supervised(code, timeout_s=1.0)
    assert time.monotonic() - start < 20
    (result,) = outcome.results
    assert result.finding.mark is Mark.FAIL
    assert result.finding.words.startswith(words)


# What is shown.


def shown(outcome, rank=0, size=1, json_path=None, capsys=None):
    code = cli._report(outcome, Options(), rank, size, json_path)
    return code, capsys.readouterr()


def test_a_rank_that_did_not_meet_the_others_tells_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "LINGER_S", 0.0)
    lost = Result("job", "ranks together", failed("nobody came", "look"))
    fine = Result("area", "name", passed("all is well"))
    outcome = Outcome([fine, lost], {"fact": 1}, output="libc: no\n")
    path = tmp_path / "found.json"
    code, said = shown(outcome, 3, 4, str(path), capsys)
    assert code == 1
    assert not said.out
    assert said.err.splitlines() == [
        "rank 3: fail  job, ranks together: nobody came",
        "rank 3:       -> look",
        "rank 3: | libc: no",
    ]
    written = json.loads((tmp_path / "found.json.3").read_text())
    assert (written["rank"], written["size"], written["facts"]) == (3, 4, {"fact": 1})
    assert written["counts"] == {"pass": 1, "warn": 0, "fail": 1, "skip": 0}
    code, said = shown(outcome, 0, 4, None, capsys)
    assert "all is well" in said.out
    assert "libc: no" in said.err


def test_warnings_do_not_change_the_exit_code(capsys):
    results = [Result("area", "name", finding) for finding in (warned("w", "r"), skipped("s"))]
    document: dict[str, Any] = {
        "results": [result.to_json() for result in results],
        "ranks": [],
        "in_order": True,
    }
    assert shown(Outcome([], {}, document), capsys=capsys)[0] == 0
    document["results"].append(Result("area", "name", failed("f", "r")).to_json())
    code, said = shown(Outcome([], {}, document), capsys=capsys)
    assert code == 1
    assert said.out.index("fail  area, name: f") < said.out.index("warn  area, name: w")


def test_json_that_cannot_be_written(tmp_path, capsys):
    document = {"results": [], "ranks": [], "in_order": True}
    code, said = shown(
        Outcome([], {}, document), json_path=str(tmp_path / "no" / "file"), capsys=capsys
    )
    assert code == 1
    assert "--json was not written" in said.err


def test_words_in_brackets_are_no_markup(capsys):
    odd = Result("area", "name", failed("[bold] x[3]", "[red]do"), (1,))
    report.show({"ranks": []}, [odd])
    assert capsys.readouterr().out.count("[bold] x[3]") == 2


@pytest.mark.parametrize("option", ["--backend=tpu", "--config=none", "--steps=-1", "--timeout=0"])
def test_mistakes_are_told(option):
    assert CliRunner().invoke(cli.command, [option]).exit_code == 2


def test_a_pipe_without_a_reader_does_not_hold_the_report(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):
        report.write(str(pipe), {})


def test_a_report_takes_the_place_of_an_old_one(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("x" * 1000)
    report.write(str(path), {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_bound_is_a_number():
    ended = CliRunner().invoke(cli.command, ["--timeout", "nan"])
    assert ended.exit_code == 2
    assert "nan is not allowed" in ended.output
