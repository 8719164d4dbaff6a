"""The sweep that makes the table of grids, with a clock of its own and no GPU."""

import json

import pytest
from click.testing import CliRunner

import ep
from ep.bench.cases import Case
from ep.bench.sweep import Plan
from ep.errors import CollectiveError
from ep.host import HostEngine
from ep.kernels.compile import Kind
from ep.kernels.grid import combine_grid, dispatch_grid
from ep.kernels.tuning import FORMULA, PerSm, Point, Tuning, read_table
from ep.memory.cuda import Device
from ep.testing import run_ranks
from ep.tune import cli, table
from ep.tune.report import Report
from ep.tune.search import CONFIRM, COORDINATES, candidates, search, winner
from ep.tune.trials import Sweep, TunePlan
from tests.unit.test_tuning import HOW

SMS = 132
RESIDENT = 264
RANKS = 2
TOKENS = 40
CONFIG = ep.EpConfig(ranks=RANKS, hidden=96, experts=7, top_k=2, max_tokens=TOKENS)
PLAN = TunePlan(
    Plan("tiny", Case(config=CONFIG), (2, TOKENS), steps=2, warmup=0, pairs=3),
    (0.0625, 0.25, 1.0),
    2.0,
)
PRESENT = {Kind.DISPATCH: FORMULA, Kind.COMBINE: FORMULA}
ENTRY = Tuning((Point(8, FORMULA), Point(64, PerSm(0.5, None))), (), HOW)


# The search.


def grids_of(choice, num_tokens=TOKENS):
    return tuple(
        plan(CONFIG, num_tokens, RESIDENT, choice[kind].limits(SMS))
        for kind, plan in ((Kind.DISPATCH, dispatch_grid), (Kind.COMBINE, combine_grid))
    )


class Clock:
    """Times that depend on the grids alone."""

    def __init__(self, cost):
        self.cost = cost
        self.runs = []

    def __call__(self, field, words):
        self.runs.append((words, len(field)))
        return [self.cost(*grids_of(choice)) for choice in field]


def test_candidates_that_come_to_the_same_are_left_out():
    first = COORDINATES[0]
    found = candidates(PRESENT, first, (0.0625, 0.25, 0.5, 1, 2), grids_of)
    # 66 CTAs and more are as good as the 40 that there are tokens for.
    assert [choice[Kind.DISPATCH] for choice in found] == [
        FORMULA,
        PerSm(0.0625, None),
        PerSm(0.25, None),
    ]
    again = candidates(found[1], first, (0.0625,), grids_of)
    assert [choice[Kind.DISPATCH] for choice in again] == [PerSm(0.0625, None), FORMULA]


def test_the_search_finds_each_coordinate_and_confirms():
    clock = Clock(
        lambda dispatch, combine: (
            100
            + abs(dispatch.senders - 33)
            + abs(dispatch.waiters - 8)
            + abs(combine.senders - 40)
            + abs(combine.waiters - 16)
        )
    )
    found = search(PRESENT, (0.0625, 0.125, 0.25, 1), grids_of, clock, 0.02)
    assert found == {Kind.DISPATCH: PerSm(0.25, 0.0625), Kind.COMBINE: PerSm(None, 0.125)}
    assert clock.runs == [(c.words, 4) for c in COORDINATES] + [(CONFIRM, 2)]


@pytest.mark.parametrize("gain", [0.0, 0.019])
def test_less_than_the_margin_changes_nothing(gain):
    clock = Clock(lambda dispatch, _combine: 1 - gain * (dispatch.senders == 8))
    assert search(PRESENT, (0.0625,), grids_of, clock, 0.02) is PRESENT
    assert CONFIRM not in dict(clock.runs)


def test_luck_is_not_confirmed():
    def measure(field, words):
        return [1.0] * len(field) if words == CONFIRM else [1.0] + [0.5] * (len(field) - 1)

    assert search(PRESENT, (0.0625,), grids_of, measure, 0.02) is PRESENT


def test_where_all_come_to_the_same_nothing_is_measured():
    clock = Clock(lambda *_grids: 1.0)
    assert search(PRESENT, (1.0, 2.0), grids_of, clock, 0.02) is PRESENT
    assert clock.runs == []


@pytest.mark.parametrize("when", [COORDINATES[0].words, COORDINATES[2].words, CONFIRM])
def test_a_failed_check_ends_the_search(when):
    def measure(field, words):
        return None if words == when else [1.0] + [0.5] * (len(field) - 1)

    assert search(PRESENT, (0.0625,), grids_of, measure, 0.02) is None


def test_the_first_wins_a_draw():
    field = [PRESENT, dict(PRESENT)]
    assert winner(field, [1.0, 1.0], 0.0) is field[0]
    assert winner(field, [1.0, 0.99], 0.0) is field[1]


# The sweep, on the host backend with grids that nobody launches.


class Engine:
    """What GpuEngine offers the sweep."""

    def __init__(self, entry=None):
        self.entry = entry or Tuning()
        self.imposed = None

    def impose(self, choice):
        self.imposed = choice

    def per_sm(self, kind, tokens):
        return self.entry.find(kind, tokens) if self.imposed is None else self.imposed[kind]

    def grid(self, kind, tokens, *, norm):
        assert norm
        plan = dispatch_grid if kind is Kind.DISPATCH else combine_grid
        return plan(CONFIG, tokens, RESIDENT, self.per_sm(kind, tokens).limits(SMS))


def sweep(world, output=None, json_path=None, entry=None):
    """Code of a sweep for which 8 senders of dispatch are best, on rank 1 much slower."""
    world.device = Device(0, "uuid", "GPU of tests", (9, 0), SMS, None)
    engine = Engine(entry)

    def timer(chains, pairs, num_timed, num_warmup):
        assert (pairs, num_timed, num_warmup) == (3, 2, 0)
        times = []
        for chain in chains:
            chain.run(pairs)
            assert engine.imposed is chain.choice
            senders = engine.grid(Kind.DISPATCH, max(chain.steps[0].counts), norm=True).senders
            ns = 1e6 * (1 + senders) if world.rank else 1e3
            times.append({name: [ns, ns] for name in ("pair", "dispatch", "combine")})
        return times

    with ep.Exchange(world, CONFIG) as exchange:
        cli.agree_on_devices(world, engine, PLAN)
        report = Report(world, PLAN, json_path) if world.rank == 0 else None
        tell = report.tell if report else lambda _trials: None
        made = Sweep(exchange, engine, PLAN, timer, tell)
        code = cli.sweep_and_write(made, world, PLAN, report, output)
        made.close()
        assert engine.imposed is None
    return code


def test_a_sweep_writes_what_was_best(tmp_path, capsys):
    output, json_path = tmp_path / "table.toml", tmp_path / "trials.jsonl"
    table.merge(output, "sm_100a", ENTRY)
    codes = run_ranks(RANKS, lambda world: sweep(world, output, json_path))
    assert codes == [0, 0]
    entries = read_table(output)
    assert entries["sm_100a"] == ENTRY
    assert entries["sm_90a"].dispatch == (Point(2, FORMULA), Point(TOKENS, PerSm(0.0625, None)))
    assert entries["sm_90a"].combine == (Point(2, FORMULA), Point(TOKENS, FORMULA))
    how = entries["sm_90a"].measured
    assert (how["gpu"], how["sms"], how["ranks"]) == ("GPU of tests", SMS, RANKS)
    assert (how["hidden"], how["margin_percent"]) == (96, 2.0)
    out = capsys.readouterr().out
    assert "40 tokens, chosen: dispatch senders 0.0625/SM; combine as the formula says" in out
    assert f"the entry sm_90a of {output} was written" in out


def test_every_trial_is_a_line(tmp_path):
    json_path = tmp_path / "trials.jsonl"
    run_ranks(RANKS, lambda world: sweep(world, json_path=json_path))
    lines = [json.loads(line) for line in json_path.read_text().splitlines()]
    assert {"commit", "versions", "date", "hidden", "ranks", "seed", "check"} <= set(lines[0])
    last = [line for line in lines if line["varied"] == CONFIRM]
    assert [line["per_sm"]["dispatch"]["senders"] for line in last] == [None, 0.0625]
    assert last[1]["ctas"] == {
        "dispatch": {"senders": 8, "receivers": 40},
        "combine": {"senders": 40, "reducers": 40},
    }
    # The slowest rank decides.
    assert [line["pair_us"]["median"] for line in last] == [41e3, 9e3]
    assert {line["arch"] for line in lines} == {"sm_90a"}


def test_what_the_table_has_is_what_must_be_beaten(tmp_path):
    output = tmp_path / "table.toml"
    entry = Tuning((Point(99, PerSm(0.01, None)),), (Point(99, PerSm(None, 0.1)),), HOW)
    run_ranks(RANKS, lambda world: sweep(world, output, entry=entry))
    found = read_table(output)["sm_90a"]
    assert found.dispatch == (Point(2, PerSm(0.01, None)), Point(TOKENS, PerSm(0.01, None)))
    assert found.combine == (Point(2, PerSm(None, 0.1)), Point(TOKENS, PerSm(None, 0.1)))


def test_a_wrong_result_ends_the_sweep_and_writes_nothing(tmp_path, monkeypatch, capsys):
    dispatch = HostEngine.dispatch

    def wrong(engine, *arguments):
        dispatch(engine, *arguments)
        if engine.buffers.rank == 1:
            engine.buffers.own("weights")[0] += 1

    monkeypatch.setattr(HostEngine, "dispatch", wrong)
    output = tmp_path / "table.toml"
    codes = run_ranks(RANKS, lambda world: sweep(world, output))
    assert codes == [1, 1]
    assert not output.exists()
    said = capsys.readouterr()
    assert "check failed: rank 1, after dispatch" in said.err
    assert "failed" in said.out


def test_a_table_that_cannot_be_written_is_told(tmp_path, capsys):
    codes = run_ranks(RANKS, lambda world: sweep(world, tmp_path / "none" / "table.toml"))
    assert codes == [1, 0]
    assert "the table was not written" in capsys.readouterr().err


def test_devices_must_be_alike():
    def unlike(world):
        world.device = Device(0, "uuid", "GPU", (9, 0), SMS + world.rank, None)
        cli.agree_on_devices(world, Engine(), PLAN)

    with pytest.raises(CollectiveError, match="SMs differs: 132 on rank 0, 133 on rank 1"):
        run_ranks(RANKS, unlike)


# The command.


def test_the_host_backend_is_refused_in_words(capsys):
    assert run_ranks(RANKS, lambda world: cli.run(world, PLAN)) == [1, 1]
    assert capsys.readouterr().err.count("the host backend has no grids to tune") == 1


def test_the_command_refuses_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(cli.command, ["--dry-run"])
    assert result.exit_code == 1
    assert "only the kernels of the GPU backend have grids to tune: " in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0,4"], "0 is not allowed"),
        (["--tokens", "4,x"], "'4,x' is not allowed"),
        (["--tokens", "9", "--max-tokens", "8"], "8 is below the 9 of --tokens"),
        (["--per-sm", "1,0"], "'1,0' is not allowed: numbers above 0, at most 32"),
        (["--per-sm", "nan"], "'nan' is not allowed"),
        (["--per-sm", "1,,2"], "'1,,2' is not allowed"),
        (["--margin", "51"], "51"),
        (["--config", "no_such"], "one of deepseek_v2"),
    ],
)
def test_mistakes_are_told(arguments, words):
    result = CliRunner().invoke(cli.command, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_the_flag_protocol_is_refused(tmp_path):
    path = tmp_path / "flags.toml"
    path.write_text('hidden = 64\nexperts = 4\ntop_k = 2\nprotocol = "flags"\n')
    result = CliRunner().invoke(cli.command, ["--config", str(path)])
    assert result.exit_code == 2
    assert "protocol is flags" in result.output


def test_help_names_every_option():
    result = CliRunner().invoke(cli.command, ["--help"])
    assert result.exit_code == 0
    for option in ("--config", "--tokens", "--max-tokens", "--steps", "--per-sm", "--margin"):
        assert option in result.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_what_forecasts_goes_into_the_table_in_use(ranks, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    monkeypatch.setenv("EP_TUNING", str(path))

    def outputs(world):
        found = [cli.default_output(world)]
        world.shares_gpus = True
        found.append(cli.default_output(world))
        world.shares_gpus = False
        return found

    assert run_ranks(ranks, outputs)[0] == [path if ranks > 1 else None, None]
