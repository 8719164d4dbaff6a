"""The table of grids: what is read, what is refused, and which grid comes of it."""

import dataclasses
import errno
import fcntl
import functools
import os
import string
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ep
from ep.config import MAX_TOKENS, TUNING_FILE, configs_dir
from ep.errors import CollectiveError, ConfigError
from ep.gpu import GpuEngine, loading
from ep.kernels import tuning
from ep.kernels.compile import Kind
from ep.kernels.grid import NO_LIMITS, Grid, Limits
from ep.kernels.tuning import FORMULA, MEASURED, PerSm, Point, Tuning, load_table, read_table
from ep.memory.cuda import Device
from ep.testing import run_ranks
from ep.tune import table

SMS = 132
RESIDENT = 264
RANKS = 2
CONFIG = ep.EpConfig(ranks=RANKS, hidden=96, experts=7, top_k=2, max_tokens=40)
VALUES = {str: "text", int: 3, bool: True, float: 2.0, dict: {"ep": "0.1"}}
HOW = {name: VALUES[kind] for name, kind in MEASURED.items()}
HOW |= {name: getattr(CONFIG, name) for name in ("ranks", "hidden", "top_k")}
ENTRY = Tuning(
    (Point(8, FORMULA), Point(64, PerSm(0.5, None))), (Point(16, PerSm(None, 2.0)),), HOW
)


def written(tmp_path, entries):
    path = tmp_path / "table.toml"
    path.write_text(table.dumps(entries))
    return path


def test_the_shipped_table_is_what_the_command_writes(monkeypatch):
    monkeypatch.delenv("EP_TUNING", raising=False)
    path = configs_dir() / TUNING_FILE
    assert tuning.table_path() == path
    assert table.dumps(load_table()) == path.read_text()


def test_it_is_no_shape():
    assert Path(TUNING_FILE).stem not in ep.EpConfig.available()


def test_points_say_up_to_how_many_tokens():
    def found(kind, counts):
        return [ENTRY.find(kind, count) for count in counts]

    half, two = PerSm(0.5, None), PerSm(None, 2.0)
    assert found(Kind.DISPATCH, (0, 8, 9, 64, 65)) == [FORMULA, FORMULA, half, half, FORMULA]
    assert found(Kind.COMBINE, (0, 16, 17)) == [two, two, FORMULA]
    assert Tuning().find(Kind.DISPATCH, 5) == FORMULA


@pytest.mark.parametrize(
    ("per_sm", "sms", "limits"),
    [
        (FORMULA, SMS, NO_LIMITS),
        (PerSm(0.5, 2.0), SMS, Limits(66, 264)),
        (PerSm(0.5, 2.0), 148, Limits(74, 296)),
        (PerSm(0.001, None), SMS, Limits(1, None)),
        (PerSm(1.0, 0.5), SMS / 16, Limits(8, 4)),
    ],
)
def test_numbers_are_for_each_sm(per_sm, sms, limits):
    assert per_sm.limits(sms) == limits


text = st.text(st.characters(codec="utf-8"))
measured = st.fixed_dictionaries(
    {
        name: {
            str: text,
            int: st.integers(0, 2**62),
            bool: st.booleans(),
            float: st.floats(0, 1e300),
            dict: st.dictionaries(text, text, max_size=4),
        }[kind]
        for name, kind in MEASURED.items()
    }
)
per_sms = st.none() | st.floats(0, tuning.MAX_PER_SM, exclude_min=True)


def points():
    counts = st.lists(st.integers(1, MAX_TOKENS), unique=True, max_size=5).map(sorted)
    choice = st.builds(PerSm, per_sms, per_sms)
    return counts.flatmap(
        lambda ups: st.tuples(*(st.builds(Point, st.just(up_to), choice) for up_to in ups))
    )


archs = st.builds("sm_{}{}".format, st.integers(0, 999), st.sampled_from(["", "a", "f"]))


@given(st.dictionaries(archs, st.builds(Tuning, points(), points(), measured), max_size=3))
def test_what_is_written_is_read(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("table") / "table.toml"
    path.write_text(table.dumps(entries), encoding="utf-8")
    assert read_table(path) == entries


def test_merging_leaves_the_other_entries_alone(tmp_path):
    path = tmp_path / "new.toml"
    table.merge(path, "sm_90a", ENTRY)
    table.merge(path, "sm_100a", Tuning(measured=HOW))
    assert read_table(path) == {"sm_90a": ENTRY, "sm_100a": Tuning(measured=HOW)}
    other = Tuning((Point(3, PerSm(1.0, 1.0)),), (), HOW)
    table.merge(path, "sm_90a", other)
    assert read_table(path) == {"sm_90a": other, "sm_100a": Tuning(measured=HOW)}
    assert sorted(file.name for file in tmp_path.iterdir()) == [".new.toml.lock", "new.toml"]


def test_no_entry_is_lost_where_many_merge_at_once(tmp_path, monkeypatch):
    path, real = tmp_path / "new.toml", table.read_if_there

    def slowly(path):
        entries = real(path)
        time.sleep(0.02)
        return entries

    monkeypatch.setattr(table, "read_if_there", slowly)
    archs = [f"sm_{number}" for number in range(8)]
    with ThreadPoolExecutor(len(archs)) as pool:
        list(pool.map(lambda arch: table.merge(path, arch, ENTRY), archs))
    assert read_table(path) == dict.fromkeys(archs, ENTRY)


def test_a_lock_that_is_kept_is_told_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "new.toml"
    with (
        table._locked(path),
        pytest.raises(TimeoutError, match=r"another process has kept .*\.new\.toml\.lock locked"),
    ):
        table.merge(path, "sm_90a", ENTRY)
    table.merge(path, "sm_90a", ENTRY)


def test_where_nothing_can_be_locked_it_is_written_all_the_same(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    table.merge(tmp_path / "new.toml", "sm_90a", ENTRY)
    assert read_table(tmp_path / "new.toml") == {"sm_90a": ENTRY}


def test_a_file_that_is_no_table_stays_as_it_is(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("hidden = 3\n")
    with pytest.raises(ConfigError, match="an architecture"):
        table.merge(path, "sm_90a", ENTRY)
    with pytest.raises(ConfigError, match="an architecture"):
        table.check_writable(path)
    assert path.read_text() == "hidden = 3\n"
    with pytest.raises(OSError, match="no folder that can be written to"):
        table.check_writable(tmp_path / "nowhere" / "table.toml")
    os.mkfifo(tmp_path / "fifo")
    for refuse in (table.check_writable, lambda path: table.merge(path, "sm_90a", ENTRY)):
        with pytest.raises(ConfigError, match="fifo is no plain file"):
            refuse(tmp_path / "fifo")


GOOD = table.dumps({"sm_90a": ENTRY})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sm_90a", "hopper", r"entry='hopper' .*sm_90a"),
        ("up_to = 64", "up_to = 8", r"sm_90a\.dispatch\[1\]\.up_to=8 .*9\.\.65535"),
        ("up_to = 64", "up_to = 70000", r"dispatch\[1\]\.up_to=70000 .*9\.\.65535"),
        ("up_to = 64", "up_to = 64.0", r"dispatch\[1\]\.up_to=64\.0 .*an integer"),
        ("up_to = 64", "up_to = true", r"dispatch\[1\]\.up_to=True .*an integer"),
        ("up_to = 64\n", "", r"dispatch\[1\]=\['senders'\] .*it lacks up_to"),
        ("senders = 0.5", "senders = 0", r"dispatch\[1\]\.senders=0 .*above 0 and at most 32"),
        ("senders = 0.5", "senders = 33", r"dispatch\[1\]\.senders=33 .*at most 32"),
        ("senders = 0.5", "senders = nan", r"dispatch\[1\]\.senders=nan .*at most 32"),
        ("senders = 0.5", "senders = true", r"dispatch\[1\]\.senders=True .*at most 32"),
        ("senders = 0.5", 'senders = "1"', r"dispatch\[1\]\.senders='1' .*at most 32"),
        ("senders = 0.5", "reducers = 1", r"\.reducers=1 .*fields are up_to, senders, receivers"),
        ("reducers = 2.0", "receivers = 1", r"combine\[0\]\.receivers=1 .*senders, reducers"),
        ("[[sm_90a.combine]]", "[[sm_90a.merge]]", r"sm_90a\.merge=.*fields are measured, disp"),
        ("[[sm_90a.combine]]", "[sm_90a.combine]", r"sm_90a\.combine=.*an array of tables"),
        ("gpus = 3\n", "", r"sm_90a\.measured=.*it lacks gpus"),
        ("gpus = 3", 'gpus = "3"', r"sm_90a\.measured\.gpus='3' .*an integer"),
        ("gpus = 3", "gpus = true", r"sm_90a\.measured\.gpus=True .*an integer"),
        ("norm = true", "norm = 1", r"sm_90a\.measured\.norm=1 .*true or false"),
        ("gpus = 3", "gpus = 3\nnodes = 1", r"sm_90a\.measured\.nodes=1 .*fields are commit"),
        ('ep = "0.1"', "ep = 0.1", r"sm_90a\.measured\.versions\.ep=0\.1 .*text"),
        ("up_to = 64", "up_to = ", "readable TOML"),
        (GOOD, "sm_90a = 3", r"sm_90a=3 .*a table of measured, dispatch, combine"),
    ],
)
def test_a_bad_table_is_refused_in_words(tmp_path, old, new, words):
    path = tmp_path / "bad.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=words) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


def test_the_environment_chooses_the_table(tmp_path, monkeypatch):
    path = written(tmp_path, {"sm_90a": ENTRY})
    monkeypatch.setenv("EP_TUNING", str(path))
    assert load_table() == {"sm_90a": ENTRY}
    for off in ("off", "0", "no"):
        monkeypatch.setenv("EP_TUNING", off)
        assert load_table() == {}
    monkeypatch.setenv("EP_TUNING", "")
    assert tuning.table_path() == configs_dir() / TUNING_FILE
    monkeypatch.setenv("EP_TUNING", str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match=r"missing\.toml.*a file that exists"):
        load_table()


def test_each_rank_takes_the_entry_of_its_gpu_and_all_hear_of_a_bad_table(tmp_path, monkeypatch):
    def read(world, **other):
        world.device = Device(0, "uuid", "GPU", (9 + world.rank, 0), SMS, None)
        return loading.read_tuning(world, dataclasses.replace(CONFIG, **other))

    path = written(tmp_path, {"sm_90a": ENTRY})
    monkeypatch.setenv("EP_TUNING", str(path))
    assert run_ranks(RANKS, read) == [ENTRY, Tuning()]
    for other in ({"ranks": 3}, {"hidden": 128}, {"top_k": 1}):
        assert run_ranks(RANKS, functools.partial(read, **other)) == [Tuning(), Tuning()]
    assert run_ranks(RANKS, functools.partial(read, max_tokens=9)) == [ENTRY, Tuning()]
    path.write_text("sm_90a = 3\n")
    with pytest.raises(CollectiveError, match=r"on 2 of 2 ranks: .*table\.toml: sm_90a=3"):
        run_ranks(RANKS, read)


def test_what_is_imposed_comes_before_the_table():
    made = object.__new__(GpuEngine)
    made._config, made._sms, made._tuning = CONFIG, SMS, ENTRY
    made._resident = {
        (Kind.DISPATCH, False): RESIDENT,
        (Kind.COMBINE, False): RESIDENT,
        (Kind.COMBINE, True): 20,
    }
    made._imposed = None
    assert made.per_sm(Kind.DISPATCH, 40) == PerSm(0.5, None)
    made.impose({Kind.DISPATCH: PerSm(0.0625, 0.125), Kind.COMBINE: PerSm(0.0625, 0.25)})
    assert made.grid(Kind.DISPATCH, 40, norm=True) == Grid(8, 24)
    assert made.grid(Kind.COMBINE, 40, norm=False) == Grid(8, 41)
    assert made.grid(Kind.COMBINE, 40, norm=True) == Grid(1, 20)
    made.impose(None)
    assert made.grid(Kind.DISPATCH, 40, norm=False) == Grid(40, 80)


def test_keys_are_quoted_where_toml_wants_it():
    entry = Tuning(measured=HOW | {"versions": {string.punctuation: "\x7f\x00\n\\"}})
    text = table.dumps({"sm_90a": entry})
    assert tomllib.loads(text)["sm_90a"]["measured"]["versions"] == {
        string.punctuation: "\x7f\x00\n\\"
    }
