"""Slurm's lists of hosts and tasks."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ep
from ep.bootstrap.slurm import MAX_HOSTS, expand_hosts, is_step, nodes_of_ranks


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("nvl0", ["nvl0"]),
        ("nvl[0-3]", ["nvl0", "nvl1", "nvl2", "nvl3"]),
        ("a[01-03,07]b2,c5", ["a01b2", "a02b2", "a03b2", "a07b2", "c5"]),
        ("r[1-2]n[08-10]", [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
        ("x[9-11]", ["x9", "x10", "x11"]),
        ("a,b[1,3],c.d-e_f", ["a", "b1", "b3", "c.d-e_f"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_hosts(text, hosts):
    assert expand_hosts(text) == hosts


NAMES = st.text("abz-._09", min_size=1, max_size=4)
NUMBERS = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))


def compressed(parts):
    """A name as Slurm would write it, and what it stands for, counted in the plainest way."""
    texts, hosts = [], [""]
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            hosts = [host + part for host in hosts]
            continue
        texts.append(
            "["
            + ",".join(
                f"{first:0{width}}" if not more else f"{first:0{width}}-{first + more:0{width}}"
                for first, more, width in part
            )
            + "]"
        )
        numbers = [
            f"{first + index:0{len(f'{first:0{width}}')}}"
            for first, more, width in part
            for index in range(more + 1)
        ]
        hosts = [host + number for host in hosts for number in numbers]
    return "".join(texts), hosts


@given(
    st.lists(
        st.lists(NAMES | st.lists(NUMBERS, min_size=1, max_size=3), min_size=1, max_size=3).map(
            compressed
        ),
        min_size=1,
        max_size=3,
    )
)
def test_hosts_are_those_of_the_expansion(items):
    text = ",".join(item for item, _ in items)
    assert expand_hosts(text) == [host for _, hosts in items for host in hosts]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1", "a[1-", "a[1-]", "a[-1]"),
        *("a[3-1]", "a[1,]", "a[x]", "a[[1]]", "a b", "a\n", "ä", "a[٣]", "a[1-9999999999]"),
        *("a[0-999999999]", "a[" + ",".join(["0-60000"] * 5000) + "]"),
        *(f"a[0-{MAX_HOSTS}]", "a[0-9999][0-9999]", "a[0-65535],b", ",".join(["a"] * 70000)),
        "[" * 65000,
        "a" + "[0-1]" * 12000,
        ",".join(["a[0-60000]"] * 3000),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_list_is_refused_at_once(text):
    with pytest.raises(ep.BootstrapError, match="is no list of at most 65536 hosts") as caught:
        expand_hosts(text)
    assert len(str(caught.value)) < 500


@given(st.text() | st.text("a0,-[]"))
@example("a[0-1]" * 17)
def test_any_text_gives_hosts_or_an_error(text):
    try:
        hosts = expand_hosts(text)
    except ep.BootstrapError:
        return
    assert 0 < len(hosts) <= MAX_HOSTS
    assert all(hosts)


BLOCK = {
    "SLURM_STEP_NODELIST": "nvl[0-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURMD_NODENAME": "nvl1",
}


def test_nodes_of_ranks():
    assert nodes_of_ranks(BLOCK, 4, 9) == ("nvl0",) * 4 + ("nvl1",) * 4 + ("nvl2",)


@pytest.mark.parametrize(
    "odd",
    [
        {"SLURM_DISTRIBUTION": "cyclic"},
        {"SLURMD_NODENAME": "nvl0"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x999999999)"},
        {"SLURM_STEP_TASKS_PER_NODE": "9"},
        {"SLURM_STEP_TASKS_PER_NODE": "x"},
        {"SLURM_STEP_TASKS_PER_NODE": "0(x9),9"},
        {"SLURM_STEP_NODELIST": "nvl[0-1"},
    ],
    ids=str,
)
def test_what_does_not_tell_the_nodes(odd):
    assert nodes_of_ranks(BLOCK | odd, 4, 9) == ()


@given(st.text(max_size=12) | st.text("0123456789(x),", max_size=12))
def test_any_tasks_give_nodes_or_nothing(text):
    nodes = nodes_of_ranks(BLOCK | {"SLURM_STEP_TASKS_PER_NODE": text}, 4, 9)
    assert len(nodes) in (0, 9)


@pytest.mark.parametrize(
    ("text", "want"),
    [(None, False), ("0", True), ("17", True), ("4294967291", False), ("4294967294", False)],
)
def test_a_step(text, want):
    assert is_step({} if text is None else {"SLURM_STEP_ID": text}) is want
