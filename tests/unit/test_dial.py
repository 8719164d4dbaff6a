"""How long a rank tries to reach another, and where: names, several addresses, who drips."""

import contextlib
import dataclasses
import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import ep
from ep.bootstrap import door, rendezvous, tcp
from ep.bootstrap.address import Rendezvous
from ep.bootstrap.frames import HEADER, Kind
from ep.bootstrap.greeting import Party
from ep.bootstrap.launcher import Launch
from tests.plain import free_port
from tests.unit.test_rendezvous import SECRET, check_mesh, close, meet

LOCAL = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))


@pytest.fixture
def place():
    return Rendezvous("job", "127.0.0.1", (free_port(),), "EP_RENDEZVOUS")


def test_a_resolver_that_hangs_costs_no_more_than_the_time_and_a_thread(place, monkeypatch):
    asked, wakes = [], threading.Event()

    def hang(*given, **_):
        asked.append(given)
        wakes.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "hung")

    monkeypatch.setattr(rendezvous, "LEAST_KNOCK_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    start = time.monotonic()
    (error,) = meet(2, dataclasses.replace(place, host="head"), ranks=[1], timeout_s=0.6).values()
    wakes.set()
    assert time.monotonic() - start < 5
    assert error.awaited == (0,)
    assert "its name was not looked up in time" in str(error)
    assert len(asked) == 1


def test_a_name_that_is_made_later_is_found(place, monkeypatch):
    tries = []

    def resolve(*_given, **_):
        tries.append(0)
        if len(tries) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [LOCAL]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = meet(2, place, places={1: dataclasses.replace(place, host="head")})
    check_mesh(found, 2)
    close(found)


def test_a_stranger_at_the_first_address_of_a_host_is_passed_by(place, monkeypatch):
    monkeypatch.setattr(rendezvous, "LEAST_KNOCK_S", 0.4)
    silent = (*LOCAL[:4], ("127.0.0.2", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_given, **_: [silent, LOCAL])
    with socket.create_server(("127.0.0.2", place.ports[0])):
        found = meet(2, place, places={1: dataclasses.replace(place, host="head")})
    check_mesh(found, 2)
    close(found)


def test_one_who_drips_in_rank_0s_place_does_not_hold_a_rank_beyond_its_time(place, monkeypatch):
    """Who stands in the middle can keep ranks from meeting, but for no longer."""
    monkeypatch.setattr(rendezvous, "LEAVE_S", 0.1)
    party, over = Party(0, 2, "job", SECRET), threading.Event()

    def drip_frame():
        with socket.create_server((place.host, place.ports[0])) as listener:
            one = door.Door(listener, party, {1}, door.Notes())
            until = time.monotonic() + 10
            while one.absent() and time.monotonic() < until:
                one.attend(0.1)
            link = one.links[1]
            with contextlib.suppress(OSError):
                link.socket.send(HEADER.pack(Kind.WAITING, 1 << 20, 0))
                while not over.wait(0.0005) and time.monotonic() < until:
                    link.socket.send(b"x")
            one.close()
            link.socket.close()

    with ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip_frame)
        start = time.monotonic()
        (error,) = meet(2, place, ranks=[1], timeout_s=0.4).values()
        over.set()
        assert time.monotonic() - start < 3
        assert error.awaited == (0,)
        dripping.result()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (b"", "rank 0 was there, and went before all had come"),
        (b"x" * 16, "what came for rank 0 was not its own; the connection was cut"),
    ],
)
def test_how_rank_0_was_lost_is_told(place, words, told):
    def come_and_go():
        listener = door.listen(place.host, place.ports[0], is_local=True)
        one = door.Door(listener, Party(0, 2, "job", SECRET), {1}, door.Notes())
        until = time.monotonic() + 10
        while one.absent() and time.monotonic() < until:
            one.attend(0.1)
        one.close()
        one.links[1].socket.send(words)
        one.links[1].socket.close()

    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(come_and_go)
        (error,) = meet(2, place, ranks=[1], timeout_s=0.5).values()
        gone.result()
    assert error.awaited == (0,)
    assert told in error.notes


# What a rank cannot have, and who goes before the mesh is there.


class Full(socket.socket):
    """One that listens where no descriptors are left."""

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")


def test_that_there_are_no_descriptors_for_who_comes_is_told(caplog):
    notes = door.Notes()
    with Full() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        one = door.Door(listener, Party(0, 2, "job", SECRET), {1}, notes)
        with socket.create_connection(listener.getsockname()):
            one.attend(5)
        one.close()
    assert "rank 0 cannot let in who comes: [Errno 24] Too many open files" in notes.last()[0]
    assert "raise ulimit -n" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_sockets_fails_by_name(place, monkeypatch, rank):
    def none(*_given, **_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_server", none)
    # What other tests have left in this process.
    for name in ("_left_without", "_closed"):
        monkeypatch.setattr(tcp, name, [])
    with pytest.raises(ep.BootstrapError, match=r"rank \d.* at 127.0.0.1:.*Too many open files"):
        tcp.open_tcp_channel(Launch("ep", rank, 2), place, SECRET, 5.0)


@pytest.mark.parametrize("last", [(1, 2), (3, 4)])
def test_ranks_do_not_wait_for_those_that_rank_0_has_not_told(place, monkeypatch, last):
    """It goes after it has told two of four; the others cannot know where anybody is."""
    hidden, hide = threading.local(), rendezvous._hide

    def hide_twice(key, link):
        hidden.number = getattr(hidden, "number", 0) + 1
        if hidden.number == 3:
            raise ep.BootstrapError("rank 0 goes")
        return hide(key, link)

    monkeypatch.setattr(rendezvous, "_hide", hide_twice)
    monkeypatch.setattr(rendezvous, "LEAST_KNOCK_S", 0.1)
    # Whether they connect to those, or wait for them.
    found = meet(5, place, timeout_s=1.2, late=dict.fromkeys(last, 0.2))
    assert isinstance(found[0], ep.BootstrapError)
    for rank, error in found.items():
        if rank in last:
            assert error.awaited == (0,)
        elif rank:
            assert error.gone == {0: ""}, error
            assert error.waited_s < 1.0
