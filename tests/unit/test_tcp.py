"""The channel over TCP, its ranks played by threads that have a connection each to each."""

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import ep
from ep.bootstrap import tcp, world
from ep.bootstrap.channel import REGROUPING
from ep.bootstrap.door import Link
from ep.bootstrap.frames import Kind, Opener, Sealer
from ep.bootstrap.greeting import Keys
from ep.bootstrap.tcp import TcpChannel
from tests.plain import path


def mesh(size):
    """Channels of `size` ranks, and the links that they stand on."""
    links: list[dict[int, Link]] = [{} for _ in range(size)]
    for low, high in itertools.combinations(range(size), 2):
        for (rank, peer), end in zip(((low, high), (high, low)), socket.socketpair(), strict=True):
            end.setblocking(False)
            mine, theirs = (bytes([one, other]) * 16 for one, other in ((rank, peer), (peer, rank)))
            links[rank][peer] = Link(end, Keys(Sealer(mine), Opener(theirs), b""), "", 0)
    return [TcpChannel(rank, size, links[rank]) for rank in range(size)], links


def on_all(channels, function):
    """What each gives, or raises."""

    def play(channel):
        try:
            return function(channel)
        except ep.EpError as error:
            return error

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(play, channels))


def said(channel, words=b"", timeout_s=5.0):
    return channel.allgather(words or bytes([channel.rank]), timeout_s, "a round")


def leave(links, rank):
    for link in links[rank].values():
        link.socket.shutdown(socket.SHUT_RDWR)


def test_all_hear_all():
    channels, _ = mesh(5)
    for _ in range(3):
        assert on_all(channels, said) == [[bytes([rank]) for rank in range(5)]] * 5


def test_words_beyond_any_buffer():
    channels, _ = mesh(3)
    words = os.urandom(5 << 20)
    assert on_all(channels, lambda one: said(one, words)) == [[words] * 3] * 3


def test_words_beyond_the_bound_are_refused():
    channels, _ = mesh(2)
    with pytest.raises(ep.ArgumentError, match="says 67108865 bytes; allowed are 67108864"):
        said(channels[0], bytes((1 << 26) + 1))


def test_who_is_missing_is_named():
    channels, _ = mesh(4)
    errors = on_all([channels[0], channels[2]], lambda one: said(one, timeout_s=0.3))
    for error in errors:
        assert isinstance(error, ep.EpTimeout)
        assert (error.phase, error.awaited) == ("a round", (1, 3))
    assert channels[0].gone() == frozenset()


def test_a_rank_that_is_gone_is_not_waited_for():
    channels, links = mesh(4)
    leave(links, 2)
    start = time.monotonic()
    errors = on_all([channels[rank] for rank in (0, 1, 3)], lambda one: said(one, timeout_s=30))
    assert time.monotonic() - start < 10
    assert [error.awaited for error in errors] == [(2,)] * 3
    assert all(error.waited_s < 10 for error in errors)
    assert all(channels[rank].gone() == {2} for rank in (0, 1, 3))


def test_what_a_rank_said_before_it_went_is_heard():
    channels, links = mesh(3)
    first = on_all(channels[:1], lambda one: said(one, timeout_s=0.01))
    assert isinstance(first[0], ep.EpTimeout)
    leave(links, 0)
    assert on_all(channels[1:], said) == [[bytes([rank]) for rank in range(3)]] * 2


@pytest.mark.parametrize("dead", [0, 2])
def test_ranks_regroup_without_one_and_old_words_are_no_news(dead):
    channels, links = mesh(4)
    left = [one for one in channels if one.rank != dead]
    # One round more than the others have been in.
    said_alone = on_all(left[:1], lambda one: said(one, b"old", 0.05))
    assert isinstance(said_alone[0], ep.EpTimeout)
    leave(links, dead)
    on_all(left, lambda one: said(one, b"old", 0.05))
    assert on_all(left, lambda one: one.regroup(frozenset([dead]), 5)) == [None] * 3
    want = [b"" if rank == dead else bytes([rank]) for rank in range(4)]
    for _ in range(3):
        assert on_all(left, said) == [want] * 3
    assert not any(one._rounds for one in left)


def test_ranks_that_exclude_different_ones_are_told():
    channels, _ = mesh(4)

    def regroup(one):
        one.regroup(frozenset([3] if one.rank == 0 else []), 5)

    errors = on_all(channels[:3], regroup)
    for error in errors:
        assert isinstance(error, ep.CollectiveError), errors
        # Of those that have not spoken yet nothing is said.
        assert "the ranks exclude different ranks: " in str(error)
        assert "rank 0: [3]" in str(error)
    assert on_all(channels, lambda one: one.regroup(frozenset(), 5)) == [None] * 4
    assert on_all(channels, said) == [[bytes([rank]) for rank in range(4)]] * 4


def test_a_meeting_that_was_missed_may_be_repeated():
    channels, _ = mesh(3)
    for _ in range(2):
        errors = on_all(channels[:2], lambda one: one.regroup(frozenset(), 0.2))
        assert [(error.phase, error.awaited) for error in errors] == [(REGROUPING, (2,))] * 2
    assert on_all(channels, lambda one: one.regroup(frozenset(), 5)) == [None] * 3
    assert on_all(channels, said) == [[bytes([rank]) for rank in range(3)]] * 3


@pytest.mark.parametrize("what", ["changed", "unsealed", "repeated"])
def test_words_that_are_not_a_ranks_own_cut_the_connection(what, caplog):
    channels, links = mesh(3)
    on_all(channels, said)
    link = links[1][0]
    frame = link.keys.sealer.seal(Kind.ABORT, 3, b"")
    if what == "changed":
        frame = frame[:-1] + bytes([frame[-1] ^ 1])
    if what == "unsealed":
        frame = frame[:-32] + bytes(32)
    if what == "repeated":
        link.keys.sealer._counter -= 2
        frame = link.keys.sealer.seal(Kind.ABORT, 3, b"")
    link.socket.send(frame)
    # The abort is not obeyed, or this very process would have ended.
    (error,) = on_all(channels[:1], lambda one: said(one, timeout_s=30))
    assert error.awaited[0] == 1
    assert channels[0].gone() == {1}
    assert channels[2].gone() == frozenset()
    assert any("rank 1's connection carries what it did not send" in m for m in caplog.messages)


FORK = """
import os, socket, sys, warnings
from tests.unit.test_tcp import mesh, said
channels, links = mesh(2)
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    # Neither a word nor an end in the parent's name.
    channels[0].abort(7)
    closed = [link.socket.fileno() for one in links for link in one.values()]
    os._exit(0 if closed == [-1, -1] else 5)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(code, list(pool.map(said, channels)), [sorted(one.gone()) for one in channels])
"""


def test_a_forked_child_holds_no_connection_and_says_nothing():
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONPATH": path()},
        check=False,
    )
    assert done.stdout.strip() == "0 [[b'\\x00', b'\\x01'], [b'\\x00', b'\\x01']] [[], []]", done


def test_a_world_tells_whose_connection_has_ended():
    """Its process may be on another node, where nobody here can look."""
    channels, links = mesh(3)
    worlds = on_all(channels, lambda one: ep.World(one, "host", 20))
    leave(links, 2)
    node = worlds[0].places[2].node
    for error in on_all(worlds[:2], lambda world: world.barrier("a barrier")):
        assert f"for rank 2; rank 2's process on node {node} is gone; look at" in str(error)
        assert error.gone == {2: node}
    assert on_all(worlds[:2], lambda world: world.regroup([2])) == [None, None]
    assert on_all(worlds[:2], lambda world: world.allgather(world.rank)) == [[0, 1, None]] * 2
    # Who is excluded is no news.
    error = ep.EpTimeout("a step", 1, 0, (1,), (0,), 1.0, None, ("seen",))
    told = worlds[0].explain(error)
    assert told.gone == {}
    assert told.notes == ("seen",)


def test_a_rank_that_goes_before_it_has_said_where_it_is():
    channels, links = mesh(3)
    leave(links, 2)
    for error in on_all(channels[:2], lambda one: ep.World(one, "host", 20)):
        assert "start-up waited" in str(error)
        assert "for rank 2; rank 2's process is gone" in str(error)


def test_a_world_that_is_refused_on_all_ranks_leaves_its_channel_to_the_next(monkeypatch):
    channels, _ = mesh(2)
    mine, closed = threading.local(), list[TcpChannel]()
    monkeypatch.setattr(tcp, "_closed", closed)
    monkeypatch.setattr(world, "open_channel", lambda *_: mine.channel)

    def refused(channel):
        mine.channel = channel
        ep.World.connect("host" if channel.rank else "auto", timeout_s=5)

    errors = on_all(channels, refused)
    assert [type(error) for error in errors] == [ep.CollectiveError] * 2, errors
    assert sorted(one.rank for one in closed) == [0, 1]
    assert on_all(channels, said) == [[b"\0", b"\1"]] * 2
