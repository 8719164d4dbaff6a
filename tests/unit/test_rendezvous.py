"""Ranks that meet over TCP, played by threads, and strangers who come as well."""

import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ep
from ep.bootstrap import door, rendezvous
from ep.bootstrap.address import Rendezvous
from ep.bootstrap.dial import receive
from ep.bootstrap.frames import Kind
from ep.bootstrap.greeting import ANSWER, HELLO, MAGIC, Party, Unwelcome, check_answer, claim
from ep.bootstrap.proof import SharedSecret
from ep.bootstrap.rendezvous import Meeting
from tests.plain import free_port

SECRET = SharedSecret(b"0123456789abcdef")
OTHER = SharedSecret(b"another secret!!")


@pytest.fixture
def place():
    return Rendezvous("job", "127.0.0.1", (free_port(),), "EP_RENDEZVOUS")


def meet(size, place, ranks=None, secrets=None, places=None, timeout_s=20.0, late=None):
    """Play some ranks; what each of them gets, or raises."""

    def play(rank):
        time.sleep((late or {}).get(rank, 0))
        secret = (secrets or {}).get(rank, SECRET)
        where = (places or {}).get(rank, place)
        try:
            return Meeting(rank, size, where, secret, timeout_s).meet()
        except ep.EpError as error:
            return error

    ranks = range(size) if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(play, ranks), strict=True))


def check_mesh(found, size):
    """Each rank has each other one, and they understand each other both ways."""
    assert all(set(found[rank]) == set(range(size)) - {rank} for rank in range(size)), found
    for rank, links in found.items():
        for peer, link in links.items():
            link.socket.setblocking(True)
            link.socket.sendall(link.keys.sealer.seal(Kind.ROUND, rank, bytes([peer])))
    for rank, links in found.items():
        for peer, link in links.items():
            link.socket.settimeout(5)
            link.keys.opener.feed(link.socket.recv(1 << 16))
            assert link.keys.opener.next() == (Kind.ROUND, peer, bytes([rank]))


def close(found):
    for links in found.values():
        for link in links.values() if isinstance(links, dict) else ():
            link.socket.close()


@pytest.mark.parametrize("size", [2, 3, 9])
def test_all_meet_all(place, size):
    found = meet(size, place)
    check_mesh(found, size)
    close(found)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_comes_late_is_waited_for(place, rank):
    found = meet(4, place, late={rank: 0.5})
    check_mesh(found, 4)
    close(found)


def test_all_are_told_who_is_missing(place):
    place = Rendezvous(place.job, place.host, place.ports, "here", ("a", "a", "b", "b", "b"))
    found = meet(5, place, ranks=[0, 1, 3], timeout_s=1.2)
    for rank, error in found.items():
        assert isinstance(error, ep.EpTimeout), error
        assert (error.phase, error.rank, error.awaited) == ("TCP start-up", rank, (2, 4))
        assert "Slurm has ranks 2, 4 on node b" in str(error)
        assert "they meet at 127.0.0.1:" in str(error)


def test_all_but_rank_0_say_that_it_does_not_come(place):
    found = meet(3, place, ranks=[1, 2], timeout_s=0.4)
    assert [error.awaited for error in found.values()] == [(0,), (0,)]


def test_a_wrong_secret_is_told_on_both_sides(place, caplog):
    found = meet(3, place, secrets={2: OTHER}, timeout_s=1.5)
    assert "a rank that could not prove EP_SECRET came from 127.0.0.1" in str(found[0])
    assert "does not take this one's proof of EP_SECRET: set it alike" in str(found[2])
    assert [error.awaited for error in found.values()] == [(2,), (2,), (0,)]
    assert any("could not prove EP_SECRET" in one.message for one in caplog.records)
    told = " ".join(one.message for one in caplog.records) + str(found)
    assert "another secret" not in told
    assert "0123456789abcdef" not in told


def test_a_wrong_size_is_told(place):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, 3, place, [1], timeout_s=1.5)
        found = meet(2, place, ranks=[0], timeout_s=1.5)
        assert "rank 1 of 3, not of 2, came from 127.0.0.1" in str(found[0])
        assert "the rank there is not of 3 ranks" in str(other.result()[1])


def test_two_jobs_at_one_range_of_ports_do_not_meet():
    port = free_port()
    ports = tuple(range(port, port + 4))
    places = [Rendezvous(job, "127.0.0.1", ports, "here") for job in ("one", "two")]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(meet, 3, place) for place in places]
        # The same name, but another secret.
        jobs.append(pool.submit(meet, 3, places[0], secrets=dict.fromkeys(range(3), OTHER)))
        for job in jobs:
            check_mesh(job.result(), 3)
            close(job.result())


def test_a_port_that_another_has_is_waited_for(place):
    with socket.create_server((place.host, place.ports[0])) as squatter:
        threading.Timer(0.5, squatter.close).start()
        found = meet(2, place)
    check_mesh(found, 2)
    close(found)


def test_a_port_that_stays_taken_is_told(place):
    with socket.create_server((place.host, place.ports[0])):
        (error,) = meet(2, place, ranks=[0], timeout_s=0.3).values()
    assert isinstance(error, ep.BootstrapError)
    assert "rank 0 cannot listen at 127.0.0.1:" in str(error)


# Strangers.


def knock(place):
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((place.host, place.ports[0]), 5)
        time.sleep(0.01)
    raise AssertionError("nobody listens")


def scan(place):
    for _ in range(20):
        knock(place).close()


def talk_http(place):
    with knock(place) as came, contextlib.suppress(OSError):
        came.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        came.recv(1000)
        came.recv(1000)


def drip(place):
    with knock(place) as came, contextlib.suppress(OSError):
        for byte in MAGIC + bytes(60):
            came.sendall(bytes([byte]))
            time.sleep(0.01)


def hold_many(place):
    held = [knock(place) for _ in range(30)]
    time.sleep(0.5)
    for one in held:
        one.close()


def claim_falsely(place, rank=1, size=4, job="job", secret=OTHER):
    """Say all that a rank would, but for the secret."""
    with knock(place) as came, contextlib.suppress(OSError):
        said = receive(came, HELLO.size, time.monotonic() + 5)
        came.sendall(claim(Party(rank, size, job, secret), 0, said)[0])
        came.recv(1000)


def claim_twice(place):
    claim_falsely(place, rank=1, secret=SECRET)
    claim_falsely(place, rank=77, secret=SECRET)


def replay(place):
    """Say again what a rank has said to another hello."""
    with knock(place) as one, knock(place) as other, contextlib.suppress(OSError):
        said = receive(one, HELLO.size, time.monotonic() + 5)
        came = claim(Party(1, 4, "job", SECRET), 0, said)[0]
        other.sendall(came)
        other.recv(1000)


@pytest.mark.parametrize(
    "stranger", [scan, talk_http, drip, hold_many, claim_falsely, claim_twice, replay]
)
def test_strangers_do_not_disturb(place, stranger):
    with ThreadPoolExecutor(2) as pool:
        came = pool.submit(stranger, place)
        # The last rank leaves them the time.
        found = meet(4, place, late={3: 0.6})
        check_mesh(found, 4)
        close(found)
        came.result()


def test_a_service_that_listens_where_ranks_meet_is_told_nothing(place, monkeypatch):
    """It is passed by for the next port, and hears no word."""
    monkeypatch.setattr(rendezvous, "LEAST_KNOCK_S", 0.3)
    heard = []
    two = Rendezvous(place.job, place.host, (place.ports[0], place.ports[0] + 1), "here")
    with socket.create_server((place.host, place.ports[0])) as service:

        def serve():
            for _ in range(2):
                came, _ = service.accept()
                with came:
                    came.settimeout(5)
                    heard.append(came.recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        found = meet(3, two)
        check_mesh(found, 3)
        close(found)
        thread.join()
    assert heard == [b"", b""]


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: MAGIC + data))
@settings(max_examples=60, deadline=None)
def test_a_door_stands_whatever_comes(data):
    listener = door.listen("127.0.0.1", 0, is_local=True)
    notes = door.Notes()
    one = door.Door(listener, Party(0, 4, "job", SECRET), {1, 2, 3}, notes)
    with socket.create_connection(listener.getsockname()) as came:
        came.sendall(data)
        came.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 5
        while not notes.last() and time.monotonic() < until:
            one.attend(0.05)
    one.close()
    assert one.absent() == [1, 2, 3]
    assert "127.0.0.1" in notes.last()[0]


def test_a_door_lets_in_each_awaited_rank_once():
    listener = door.listen("127.0.0.1", 0, is_local=True)
    notes = door.Notes()
    one = door.Door(listener, Party(0, 4, "job", SECRET), {1, 2}, notes)

    def come(rank):
        came = socket.create_connection(listener.getsockname())
        one.attend(5)
        said = receive(came, HELLO.size, time.monotonic() + 5)
        guest = Party(rank, 4, "job", SECRET)
        words, key, bound = claim(guest, 0, said)
        came.sendall(words)
        one.attend(5)
        answer = receive(came, ANSWER.size, time.monotonic() + 5)
        try:
            check_answer(guest, key, bound, answer)
        except Unwelcome as error:
            came.close()
            return str(error)
        return came

    first = come(1)
    assert one.absent() == [2]
    assert come(1) == "the rank there has a rank 1 already"
    assert come(3) == "the rank there does not await rank 3"
    assert one.absent() == [2]
    # One that has given up may come again.
    first.close()
    one.attend(5)
    assert one.absent() == [1, 2]
    again = come(1)
    assert one.absent() == [2]
    again.close()
    one.links[1].socket.close()
    one.close()


def test_who_drips_has_no_more_time_than_others(monkeypatch):
    monkeypatch.setattr(door, "PATIENCE_S", 0.2)
    listener = door.listen("127.0.0.1", 0, is_local=True)
    notes = door.Notes()
    one = door.Door(listener, Party(0, 4, "job", SECRET), {1}, notes)
    with socket.create_connection(listener.getsockname()) as came:
        for byte in MAGIC + bytes(60):
            with contextlib.suppress(OSError):
                came.send(bytes([byte]))
            time.sleep(0.02)
            one.attend(0)
            if notes.last():
                break
    one.close()
    assert notes.last() == ("a stranger came from 127.0.0.1: it took too long to prove itself",)


def test_strangers_are_few_at_a_time(monkeypatch):
    monkeypatch.setattr(door, "MAX_GUESTS", 3)
    listener = door.listen("127.0.0.1", 0, is_local=True)
    notes = door.Notes()
    one = door.Door(listener, Party(0, 4, "job", SECRET), {1}, notes)
    came = [socket.create_connection(listener.getsockname()) for _ in range(10)]
    for _ in range(20):
        one.attend(0.01)
    assert len(one._guests) == 3
    assert notes.last() == ("a stranger came from 127.0.0.1: too many came at once",)
    one.close()
    for each in came:
        each.close()


def test_notes_are_few(caplog):
    caplog.set_level(logging.WARNING)
    notes = door.Notes()
    for number in range(1000):
        notes.add(f"{number}", uninvited=True)
    assert notes.last() == ("997", "998", "999")
    assert len(caplog.records) == door.MAX_LOGGED
