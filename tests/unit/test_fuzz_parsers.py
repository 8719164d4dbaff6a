"""Whatever is put in where `ep` reads: a result, or an error of `ep`'s that can be printed."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ep
import ep.bench.cli
import ep.tune.cli
from ep.bootstrap.address import rendezvous_of
from ep.bootstrap.launcher import detect
from ep.kernels.options import KernelOptions
from ep.kernels.tuning import load_table, read_table
from ep.routing import Routing, route
from ep.settings import is_set
from ep.testing import run_ranks
from ep.tune import table
from tests.strategies import ODD, anything, configs
from tests.unit.test_tuning import ENTRY

GOOD: dict[str, Any] = {"ranks": 4, "hidden": 64, "experts": 10, "top_k": 2, "max_tokens": 8}
FIELDS = (*GOOD, "dispatch_format", "timeout_s", "protocol")
MOST_WORDS = 1500


def result_of(function, *arguments, **options):
    """What `function` gives; None if it refuses, which must be by an error that is fit to print."""
    try:
        return function(*arguments, **options)
    except ep.EpError as error:
        words = f"{error} {error!r}"
    assert 20 < len(words) < 2 * MOST_WORDS
    return None


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "odd.toml"


# Configurations.


@given(st.dictionaries(st.sampled_from(FIELDS), anything(), min_size=1, max_size=3))
@example({"ranks": 10**5000})
@example({"timeout_s": 10**400})
@example({"timeout_s": np.complex128(1)})
def test_a_config_of_anything(fields):
    config = result_of(ep.EpConfig, **(GOOD | fields))
    if config is not None:
        assert 1 <= config.ranks <= 72
        assert config.hidden % 32 == 0
        assert 0 < config.timeout_s <= 86400
        assert ep.EpConfig(**{name: getattr(config, name) for name in FIELDS}) == config


@pytest.mark.parametrize("make", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_field(field, make):
    result_of(ep.EpConfig, **(GOOD | {field: make()}))
    result_of(ep.EpConfig.load, "kimi_k3", **(GOOD | {field: make()}))
    result_of(ep.EpConfig.load, "kimi_k3", **(GOOD | {"layers": make()}))


@given(anything(), st.dictionaries(st.sampled_from([*FIELDS, "layers"]), anything(), max_size=2))
@example("~no_such_user_here/shape.toml", {})
def test_a_shape_from_anywhere(source, fields):
    assert isinstance(result_of(ep.EpConfig.load, source, **fields), ep.EpConfig | None)


VALUES = (
    *("0x" + "f" * 5000, "9" * 5000, "[" * 3000 + "]" * 3000, "nan", "-inf", "1e999", "0o7"),
    *("1979-05-27T07:32:00Z", "true", "''", "{}", "[]", "{a = {b = [1]}}", '"""x\n"""', "-1", "2"),
)
NAMES = st.sampled_from([*FIELDS, "model", "source", "layers", "a.b", '"\\u0000"', ""])
LINES = st.tuples(NAMES, st.sampled_from(VALUES)).map(" = ".join)
SHAPE = "hidden = 64\nexperts = 10\ntop_k = 2\n"


def check_shape(file, data):
    file.write_bytes(data)
    loaded = result_of(ep.EpConfig.load, file, ranks=2, max_tokens=3)
    assert isinstance(loaded, ep.EpConfig | None)


@given(st.binary(max_size=200))
def test_a_shape_of_bytes(file, data):
    check_shape(file, data)


@given(st.lists(LINES | st.sampled_from(SHAPE.splitlines()), max_size=6))
@example(["max_tokens = " + VALUES[0], *SHAPE.splitlines()])
@example(["timeout_s = " + VALUES[0], *SHAPE.splitlines()])
@example(["layers = " + VALUES[2]])
def test_a_shape_of_odd_lines(file, lines):
    check_shape(file, "\n".join(lines).encode())


@given(configs(experts=2**31 - 2))
def test_a_layout_of_any_config_is_small_and_does_not_overlap(config):
    layout = ep.EpLayout(config)
    ends = 0
    for field in layout.fields.values():
        last = zip(field.shape, field.strides_bytes, strict=True)
        inside = sum((length - 1) * step for length, step in last) + np.dtype(field.dtype).itemsize
        assert field.offset_bytes == ends
        assert inside <= field.size_bytes
        ends += field.size_bytes
    assert ends == layout.total_bytes < 2**43
    assert len(layout.fields) < 16


@given(anything())
def test_a_layout_of_anything(config):
    result_of(ep.EpLayout, config)


@given(configs(experts=10**6), anything())
@example(ep.EpConfig(**(GOOD | {"experts": 1000})), np.array([1, 100], np.int8))
@example(ep.EpConfig(**(GOOD | {"experts": 1000})), np.array([2**64 - 1, 999], np.uint64))
@example(ep.EpConfig(**(GOOD | {"experts": 1000})), np.int64(-(2**63)))
@example(ep.EpConfig(**GOOD), [[1], [2, 3]])
def test_experts_of_anything(config, value):
    result_of(config.local_experts, value)
    owner = result_of(config.owner_of, value)
    if owner is not None:
        assert owner.shape == np.shape(value)
        for expert, rank in zip(np.ravel(value), owner.ravel(), strict=True):
            is_expert = 0 <= int(expert) < config.experts
            assert (int(expert) in config.local_experts(rank)) if is_expert else rank == -1


# Options, variables, tables.

NAMED = ("pdl", "late", "fences", "cta", "warm", "norm", "stamps", "protocol=", "flags", "default")
WORDS = st.sampled_from([*"=, ;|\0\n٣", *NAMED])


@given(anything() | st.lists(WORDS | st.text(max_size=3)).map("".join))
@example("pdl=late," * 10_000)
def test_kernel_options_of_anything(text):
    assert isinstance(result_of(KernelOptions.parse, text), KernelOptions | None)


@given(
    st.dictionaries(
        st.sampled_from(["pdl", "fences", "warm", "boundaries", "norm", "stamps"]),
        anything() | st.sampled_from(["off", "late", "cta", "peers", "fenced"]),
    )
)
def test_kernel_options_made_of_anything(fields):
    options = result_of(KernelOptions, **fields)
    if options is not None:
        assert isinstance(options.has_warm, bool)
        assert isinstance(options.norm, bool)


LAUNCHER = st.sampled_from(
    [
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"),
        *("EP_RANK", "EP_RANKS", "EP_LOCAL_RANK", "EP_RENDEZVOUS"),
        *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("SLURM_STEP_RESV_PORTS", "SLURM_STEP_TASKS_PER_NODE"),
    ]
)
NUMBERS = st.integers(-2, 9).map(str) | st.sampled_from(["9" * 5000, "٣", "²", " 1", "1_0", "0x1"])


ADDRESSES = st.sampled_from(
    ["head", "head:1", "[::1]:2-3", "nvl[0-3]", "4(x2),1", "12000-12003", "::1"]
)


@given(st.dictionaries(LAUNCHER, NUMBERS | st.text(max_size=3) | ADDRESSES, max_size=9))
@example({"PMI_RANK": "0", "PMI_SIZE": "9" * 5000})
def test_a_launcher_of_anything(environ):
    launch = result_of(detect, environ)
    if launch is not None:
        assert 0 <= launch.rank < launch.size < 10**9
        place = result_of(rendezvous_of, environ, launch)
        assert place is None or (place.host and place.ports and str(place))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_variables_of_anything(value):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EP_CHECK", "EP_TUNING", "PMI_RANK"):
            patch.setenv(name, value)
        assert isinstance(result_of(is_set, "EP_CHECK"), bool | None)
        assert isinstance(result_of(load_table), dict | None)
        assert result_of(ep.World.connect, "host", timeout_s=1) is None


TABLE = table.dumps({"sm_90a": ENTRY, "sm_100a": ENTRY}).splitlines()
PLACES = st.integers(0, len(TABLE) - 1)
CHANGES = st.tuples(PLACES, st.sampled_from(VALUES) | st.text(max_size=5) | st.none())


@given(st.lists(CHANGES, max_size=4), st.integers(0, 3000))
@example([(TABLE.index("margin_percent = 2.0"), VALUES[0])], 3000)
@example([(TABLE.index("gpus = 3"), VALUES[0])], 3000)
def test_a_table_with_odd_lines(file, changes, length):
    lines: list[str] = list(TABLE)
    for place, value in changes:
        name = lines[place].split(" = ")[0]
        lines[place] = name if value is None else f"{name} = {value}"
    # A file that was not written to its end.
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass")[:length])
    assert isinstance(result_of(read_table, file), dict | None)


# Ranks.


@given(anything(), anything())
def test_ranks_of_anything(size, backend):
    result_of(run_ranks, size, lambda world: world.rank, backend=backend)
    result_of(ep.World.connect, backend)


@given(anything())
def test_an_exchange_of_anything(value):
    config = ep.EpConfig(**(GOOD | {"ranks": 1}))
    with ep.World.connect("host") as world:
        for arguments in ((value, config), (world, value)):
            assert result_of(ep.Exchange, *arguments) is None
        if value is not None:
            assert result_of(ep.Exchange, world, config, kernel_options=value) is None
        ep.Exchange(world, config).close()


@given(
    st.sampled_from(Routing),
    st.integers(0, 2**80),
    configs(experts=300, max_tokens=40),
    st.floats(0, 1),
)
@settings(max_examples=50)
def test_a_routing_of_any_shape_stays_inside(routing, seed, config, masked):
    ids, weights = route(
        routing,
        seed,
        config.ranks - 1,
        num_tokens=config.max_tokens,
        top_k=config.top_k,
        ranks=config.ranks,
        experts=config.experts,
        seed=seed,
        masked_ratio=masked,
    )
    assert ids.shape == weights.shape == (config.max_tokens, config.top_k)
    assert ids.min() >= (-1 if routing is Routing.MASKED else 0)
    assert ids.max() < config.experts
    assert ((weights > 0) & (weights < 1)).all()


# Commands.

COMMANDS = {"bench": ep.bench.cli, "tune": ep.tune.cli}
OPTIONS = st.sampled_from(
    [
        *("--config", "--tokens", "--max-tokens", "--routing", "--uneven", "--steps", "--warmup"),
        *("--graph", "--eager", "--pairs", "--share-gpus", "--compare", "--breakdown", "--seed"),
        *("--norm", "--no-norm", "--backend", "--json", "--per-sm", "--margin", "--output"),
        *("--dry-run", "--", "-x"),
    ]
)
ARGUMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | (
    st.sampled_from(
        [
            *(str(10**30), "-1", "nan", "inf", "1e400", "9" * 5000, "0x10", "1,2,nan", "1,,2", "٣"),
            *("8", "1,8", "host", "uniform", "kimi_k3", "/", "/dev/null", "~nobody_at_all/x.toml"),
            *("x" * 5000, "\udcff", "2.0", "70000", "0", "", "default"),
        ]
    )
)


@pytest.mark.parametrize("name", COMMANDS)
@given(st.lists(st.tuples(OPTIONS, ARGUMENTS), max_size=4))
@example([("--steps", str(10**30))])
@example([("--warmup", str(10**30))])
@example([("--pairs", str(10**30))])
@example([("--seed", "9" * 5000)])
@example([("--seed", "-1")])
@example([("--tokens", f"1,{10**30}")])
@example([("--margin", "nan")])
@example([("--tokens", ""), ("--tokens", "0")])
@settings(max_examples=60)
def test_a_command_with_any_arguments(name, chosen):
    module, joined = COMMANDS[name], []

    def connect(backend, *, share_gpus):
        joined.append(backend)
        raise ep.BootstrapError("this is as far as it goes")

    arguments = list(itertools.chain(*chosen))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        patch.setattr(module, "connect", connect)
        for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
            patch.delenv(variable, raising=False)
        ended = CliRunner().invoke(module.command, arguments)
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert ended.exit_code == (1 if joined else 2), ended.output
    # A plan that is let through can be carried out; of an option given twice the last counts.
    for option, value in dict(chosen).items():
        if joined and option in ("--steps", "--warmup", "--pairs", "--tokens"):
            assert max(map(int, value.split(","))) <= 10**6


def test_variables_of_a_launcher_that_are_nonsense_are_told_by_the_commands(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "x")
    for module in COMMANDS.values():
        ended = CliRunner().invoke(module.command, [])
        assert ended.exit_code == 1
        assert "PMI_RANK='x' is not a number" in ended.output


@given(st.lists(WORDS, max_size=5).map("".join))
@settings(max_examples=50)
def test_a_build_of_anything(variant):
    config = ep.EpConfig(**(GOOD | {"ranks": 1}))
    with ep.World.connect("host") as world:
        exchange = result_of(ep.bench.cli._open, world, config, variant)
        if exchange is not None:
            exchange.close()


def test_a_shape_with_experts_beyond_the_routing_is_refused(tmp_path):
    path = tmp_path / "wide.toml"
    path.write_text("hidden = 64\nexperts = 2147483646\ntop_k = 2\n")
    ended = CliRunner().invoke(ep.bench.cli.command, ["--config", str(path), "--backend", "host"])
    assert ended.exit_code == 2
    assert "experts=2147483646 is not allowed here: 1..65536" in ended.output
