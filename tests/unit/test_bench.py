import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ep
from ep import reference
from ep.bench import record
from ep.bench.cases import Case, Step
from ep.bench.check import Complaint, Where, check_result, check_rows, run_checked_step
from ep.bench.cli import command, run
from ep.bench.record import Bytes, Row, Traffic, to_json
from ep.bench.sweep import Plan
from ep.bench.timing import Stats, Timing
from ep.host import HostEngine
from ep.routing import Routing
from ep.testing import run_ranks

RANKS = 3
CONFIG = ep.EpConfig(ranks=RANKS, hidden=96, experts=7, top_k=2, max_tokens=5)
STRIDE = ep.EpLayout(CONFIG).stride
CASE = Case(config=CONFIG)
STEP = Step(CASE, 4, (5, 0, 3))
STATS = Stats(median=2.0, p10=1.0, p90=3.0, p99=4.0, max=5.0)
TRAFFIC = Traffic(Bytes(1.0, 2.0), Bytes(3.0, 4.0), 6.0)


def plan(steps=4):
    return Plan("tiny", CASE, (5, 2), steps, warmup=1)


# Statistics.


def test_percentiles_are_in_us():
    times_ns = np.arange(101) * 1000
    assert Stats.of(times_ns) == Stats(median=50.0, p10=10.0, p90=90.0, p99=99.0, max=100.0)
    assert Stats.of([1500]) == Stats(median=1.5, p10=1.5, p90=1.5, p99=1.5, max=1.5)


def test_each_quantity_is_that_of_its_own_slowest_rank():
    def stats(median, largest):
        return Stats(median=median, p10=0.0, p90=0.0, p99=0.0, max=largest)

    # The largest single time is on another rank: the median decides.
    first = {"pair": stats(9.0, 10.0), "dispatch": stats(5.0, 6.0), "combine": stats(4.0, 4.0)}
    second = {"pair": stats(7.5, 99.0), "dispatch": stats(2.0, 98.0), "combine": stats(5.5, 6.0)}
    timing = Timing.of_ranks([first, second])
    assert timing == Timing(first["pair"], first["dispatch"], second["combine"], skew_us=1.5)


def test_traffic_counts_rows_to_other_ranks_only():
    rows = np.array([[9, 2, 0], [4, 9, 0], [0, 6, 9]])
    traffic = Traffic.of(CONFIG, rows, num_steps=2)
    row = 96 + 3 + 4 * 2 + 4 * 2 + 16
    assert traffic.dispatch == Bytes(4 / 2 * row, 6 / 2 * row)
    # What came in goes back: 4, 8 and 0 rows.
    assert traffic.combine == Bytes(4 / 2 * 2 * 96, 8 / 2 * 2 * 96)
    assert traffic.busiest == (4 * row + 8 * 2 * 96) / 2


def test_rows_to_counts_what_the_oracle_receives():
    for rank in range(RANKS):
        source = STEP.expected_rows(rank).source
        live = source[source != -1] >> 16
        counts = [int(STEP.rows_to(src)[rank]) for src in range(RANKS)]
        assert counts == np.bincount(live, minlength=RANKS).tolist()


# Records.


@pytest.mark.parametrize("timing", [None, Timing(STATS, STATS, STATS, 0.123456)])
def test_record_has_the_agreed_fields(timing):
    complaints = () if timing else ("rank 1 is wrong",)
    row = Row(5, complaints, timing, TRAFFIC)
    (fields,) = run_ranks(1, lambda world: to_json(row, plan(), world))
    fields = json.loads(json.dumps(fields))
    times = dataclasses.asdict(STATS) if timing else None
    assert {name: fields[name] for name in ("pair_us", "dispatch_us", "combine_us")} == {
        "pair_us": times,
        "dispatch_us": times,
        "combine_us": times,
    }
    assert fields["skew_us"] == (0.123 if timing else None)
    assert fields["check"] == ("passed" if timing else "failed")
    assert fields["sent_bytes"]["combine"] == {"mean": 3.0, "max": 4.0}
    wanted = {
        "backend": "host",
        "ranks": 3,
        "tokens": 5,
        "max_tokens": 5,
        "hidden": 96,
        "experts": 7,
        "top_k": 2,
        "routing": "uniform",
        "uneven": False,
        "norm": True,
        "steps": 4,
        "seed": 0,
    }
    assert {name: fields[name] for name in wanted} == wanted
    assert {"versions", "commit", "date", "host_cpus"} <= set(fields)
    assert {"ep", "numpy", "python", "mpi"} <= set(fields["versions"])


def test_no_commit_outside_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(ep, "__file__", str(tmp_path / "ep" / "__init__.py"))
    (tmp_path / "ep").mkdir()
    assert record.commit() is None


# Cases.


def test_expectations_of_one_rank_are_those_of_all():
    sent = [STEP.inputs(rank) for rank in range(RANKS)]
    ids = [inputs.ids for inputs in sent]
    sizes: Any = {"ranks": RANKS, "experts": CONFIG.experts, "stride": STRIDE}
    rows = reference.dispatch(
        [inputs.x for inputs in sent], ids, [inputs.weights for inputs in sent], **sizes
    )
    partials = [STEP.partials(rank, rows[rank].source) for rank in range(RANKS)]
    results = reference.combine(partials, ids, norm_weight=CASE.norm_weight, **sizes)
    for rank in range(RANKS):
        where = Where(rank, STEP.number, "dispatch")
        assert check_rows(STEP.expected_rows(rank), rows[rank], where, STRIDE) is None
        assert check_result(STEP.expected_result(rank), results[rank], where) is None


def test_steps_differ_and_repeat():
    again = Step(Case(config=CONFIG), 4, (5, 0, 3))
    assert np.array_equal(STEP.inputs(0).x, again.inputs(0).x)
    assert not np.array_equal(STEP.inputs(0).x, Step(CASE, 5, (5, 0, 3)).inputs(0).x)


# Checks: rows as the oracle gives them, then one thing planted.


def compare(mutate):
    """Complaint about rank 0's rows of `STEP`, after `mutate` changed them."""
    rows = STEP.expected_rows(0)
    mutate(rows)
    return check_rows(rows, STEP.expected_rows(0), Where(0, 4, "dispatch"), STRIDE)


def live_row():
    return int(np.flatnonzero(STEP.expected_rows(0).source != -1)[-1])


def empty_row():
    return int(np.flatnonzero(STEP.expected_rows(0).source == -1)[-1])


def test_right_rows_have_no_complaint():
    def loosen(rows):
        # Anything finite will do in an empty row.
        rows.x.view(np.uint8)[empty_row()] = 0x7E
        rows.scales.view(np.uint8)[empty_row()] = 0xFE

    assert compare(lambda rows: None) is None
    assert compare(loosen) is None


def flip(field, row, column, mask):
    def mutate(rows):
        array = getattr(rows, field)
        array.view(f"u{array.dtype.itemsize}")[row, column] ^= mask

    return mutate


@pytest.mark.parametrize(
    ("field", "column"), [("x", 95), ("scales", 2), ("ids", 1), ("weights", 0)]
)
def test_one_wrong_bit_of_a_live_row_is_found(field, column):
    complaint = compare(flip(field, live_row(), column, 1))
    assert complaint.field == field
    assert complaint.index == (live_row(), column)
    assert complaint.num_different == 1
    assert complaint.got != complaint.want
    assert "a live row" in complaint.place


@pytest.mark.parametrize(
    ("field", "value"), [("x", 0x7F), ("x", 0xFF), ("scales", 0xFF), ("ids", 0), ("weights", 1)]
)
def test_what_an_empty_row_may_not_hold_is_found(field, value):
    def mutate(rows):
        array = getattr(rows, field)
        array.view(f"u{array.dtype.itemsize}")[empty_row(), 0] = value

    complaint = compare(mutate)
    assert (complaint.field, complaint.index) == (field, (empty_row(), 0))
    assert "must be empty" in complaint.place


def test_a_stale_row_is_found():
    def mutate(rows):
        rows.source[empty_row()] = 2 << 16 | 4

    complaint = compare(mutate)
    assert (complaint.field, complaint.index) == ("source", (empty_row(),))
    assert (complaint.got, complaint.want) == (f"{2 << 16 | 4} (token 4 of rank 2)", "-1")


def test_a_missing_row_is_found():
    def mutate(rows):
        rows.source[live_row()] = -1

    complaint = compare(mutate)
    assert (complaint.field, complaint.got) == ("source", "-1")


def test_a_misplaced_row_is_found():
    def mutate(rows):
        for field in dataclasses.fields(rows):
            array = getattr(rows, field.name)
            array[[live_row(), empty_row()]] = array[[empty_row(), live_row()]]

    complaint = compare(mutate)
    assert (complaint.field, complaint.num_different) == ("source", 2)
    assert str(complaint).startswith("rank 0, after dispatch of step 4: source[")


def test_rows_of_a_wrong_kind_are_found():
    want = STEP.expected_rows(0)
    short = dataclasses.replace(want, ids=want.ids[:, :1])
    complaint = check_rows(short, want, Where(0, 4, "dispatch"), STRIDE)
    assert "ids (the whole array) is int32 [" in str(complaint)


def test_results_are_compared_by_bits_but_for_nans():
    where = Where(1, 2, "combine")
    want = np.array([[1.0, np.nan, 0.0]], ml_dtypes.bfloat16)
    got = want.copy()
    got.view(np.uint16)[0, 1] = 0xFFC1
    assert check_result(got, want, where) is None
    got.view(np.uint16)[0, 2] = 0x8000
    assert check_result(got, want, where) == Complaint(
        where, "result", (0, 2), "token 0", "-0 (0x8000)", "0 (0x0000)", 1, 3
    )
    for wrong, index in ((np.zeros_like(want), (0, 0)), (want[:0], ())):
        complaint = check_result(wrong, want, where)
        assert complaint is not None
        assert complaint.index == index


# Whole runs, ranks as threads.


@pytest.mark.parametrize("routing", Routing)
def test_the_host_backend_passes(routing):
    case = Case(config=CONFIG, routing=routing, uneven=True, norm=routing is not Routing.ZIPF)

    def play(world):
        with ep.Exchange(world, CONFIG) as exchange:
            complaints = []
            for number, num_tokens in enumerate((5, 2, 0, 1, 5), start=1):
                complaint = run_checked_step(exchange, case.step(number, num_tokens))
                complaints.append(complaint)
                world.barrier()
            return complaints

    assert run_ranks(RANKS, play) == [[None] * 5] * RANKS


def test_a_run_shows_a_row_for_each_number_of_tokens(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    codes = run_ranks(RANKS, lambda world: run(world, plan(), path))
    assert codes == [0] * RANKS
    output, errors = capsys.readouterr()
    table = [line.split() for line in output.splitlines() if line.endswith("passed")]
    assert [(row[0], len(row)) for row in table] == [("5", 11), ("2", 11)]
    assert errors == ""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tokens"], row["check"]) for row in rows] == [(5, "passed"), (2, "passed")]
    for row in rows:
        for times in (row["pair_us"], row["dispatch_us"], row["combine_us"]):
            assert 0 < times["p10"] <= times["median"] <= times["p90"] <= times["p99"]
            assert times["p99"] <= times["max"]
        assert row["skew_us"] >= 0


@pytest.mark.parametrize("bad_step", [2, 9], ids=["before timing", "after timing"])
def test_a_planted_error_fails_every_rank(bad_step, monkeypatch, capsys, tmp_path):
    """3 steps are checked, 1 + 4 timed, then 1 is checked again."""
    combine, calls = HostEngine.combine, Counter[int]()

    def wrong_combine(engine, partials, ids, norm_weight, eps, out, stream):
        combine(engine, partials, ids, norm_weight, eps, out, stream)
        rank = engine.buffers.rank
        calls[rank] += 1
        if rank == 1 and calls[rank] == bad_step:
            out.view(np.uint16)[0, 3] ^= 1

    monkeypatch.setattr(HostEngine, "combine", wrong_combine)
    path = tmp_path / "rows.jsonl"
    assert run_ranks(RANKS, lambda world: run(world, plan(), path)) == [1] * RANKS
    output, errors = capsys.readouterr()
    assert output.rstrip().endswith("failed")
    sentence = f"check failed: rank 1, after combine of step {bad_step}: result[0, 3] (token 0) is"
    assert errors.startswith(sentence)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["check"] == "failed"
    assert (row["pair_us"] is None) == (bad_step == 2)


def test_options_that_differ_are_refused_everywhere(capsys):
    codes = run_ranks(RANKS, lambda world: run(world, plan(steps=4 + (world.rank == 2))))
    assert codes == [1] * RANKS
    assert "steps differs: 4 on ranks 0-1, 5 on rank 2" in capsys.readouterr().err


# The command.


@pytest.fixture
def alone(monkeypatch):
    """No launcher's variables."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1,x"], "'1,x' is not allowed: numbers 0..65535 with commas between"),
        (["--tokens", ""], "'' is not allowed"),
        (["--tokens", "9" * 5000], f"'{'9' * 60}...' is not allowed: numbers 0..65535"),
        (["--tokens", "1,-2"], "is not allowed"),
        (["--tokens", "70000"], "is not allowed"),
        (["--tokens", "1,9", "--max-tokens", "8"], "8 is below the 9 of --tokens"),
        (["--config", "nosuch"], "a .toml file that exists, or (without .toml) one of"),
        (["--routing", "nosuch"], "'uniform', 'zipf', 'one-rank', 'one-expert', 'masked'"),
        (["--steps", "0"], "--steps"),
        (["--backend", "cpu"], "'auto', 'host', 'gpu'"),
    ],
)
def test_mistakes_in_options(alone, arguments, words):
    result = CliRunner().invoke(command, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in result.output


def test_a_file_that_cannot_be_written_is_told_before_the_work(alone, tmp_path):
    result = CliRunner().invoke(command, ["--json", str(tmp_path / "nosuch" / "rows.jsonl")])
    assert result.exit_code == 1
    assert "opening the file of --json failed on 1 of 1 ranks: rank 0" in result.output


def test_a_file_that_becomes_full_costs_no_table(alone, tmp_path):
    shape = tmp_path / "tiny.toml"
    shape.write_text("hidden = 64\nexperts = 4\ntop_k = 2\n")
    arguments = ["--config", str(shape), "--tokens", "3,1", "--steps", "2", "--backend", "host"]
    result = CliRunner().invoke(command, [*arguments, "--json", "/dev/full"])
    assert result.exit_code == 1, result.output
    assert result.output.count("passed") == 2
    assert "Error: --json lacks rows of this table: /dev/full: [Errno 28]" in result.output


def test_every_rank_ends_with_the_code_of_the_one_that_writes():
    codes = run_ranks(RANKS, lambda world: run(world, plan(), Path("/dev/full")))
    assert codes == [1] * RANKS


def test_help_names_every_option(alone):
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    options = (
        "--config --tokens --max-tokens --routing --uneven --steps --warmup --seed --norm --no-norm"
        " --backend --json"
    )
    assert all(option in result.output for option in options.split())


def test_the_command_runs_alone(alone, tmp_path):
    shape = tmp_path / "tiny.toml"
    shape.write_text("hidden = 64\nexperts = 4\ntop_k = 2\n")
    path = tmp_path / "rows.jsonl"
    arguments = ["--config", str(shape), "--tokens", "3,0", "--max-tokens", "4", "--steps", "2"]
    result = CliRunner().invoke(
        command, [*arguments, "--no-norm", "--backend", "host", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tokens"], row["max_tokens"], row["norm"]) for row in rows] == [
        (3, 4, False),
        (0, 4, False),
    ]
