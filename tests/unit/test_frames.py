"""Frames and greetings: what one side makes the other takes, and nothing else."""

import itertools
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ep.bootstrap.frames import HEADER, MAC_BYTES, BadFrame, Frame, Kind, Opener, Sealer
from ep.bootstrap.greeting import (
    ANSWER,
    CLAIM,
    HELLO,
    MAGIC,
    Party,
    Reply,
    Unwelcome,
    check_answer,
    check_claim,
    claim,
    claim_bytes,
    hello,
    refusal,
)
from ep.bootstrap.proof import SharedSecret

KEY = b"k" * 32
FRAMES = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=90)), max_size=6
)


def taken(opener, data, cuts=()):
    """Every frame of `data` that comes in pieces; the last is `BadFrame` where it is no frame."""
    found = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in itertools.pairwise(bounds):
        opener.feed(data[start:end])
        try:
            while (frame := opener.next()) is not None:
                found.append(frame)
        except BadFrame:
            return [*found, BadFrame]
    return found


@given(FRAMES, st.lists(st.integers(0, 900), max_size=8))
def test_frames_come_whole_however_they_are_cut(frames, cuts):
    sealer = Sealer(KEY)
    data = b"".join(sealer.seal(*frame) for frame in frames)
    assert taken(Opener(KEY), data, cuts) == [Frame(*frame) for frame in frames]


@given(st.binary(max_size=200))
@example(HEADER.pack(4, 0, 0) + bytes(MAC_BYTES))
@example(HEADER.pack(4, 1 << 31, 0))
def test_garbage_gives_no_frame(data):
    assert taken(Opener(KEY), data) in ([], [BadFrame])


def three():
    sealer = Sealer(KEY)
    return [sealer.seal(Kind.ROUND, number, bytes([number] * 8)) for number in (1, 2, 3)]


@given(st.integers(0, 55), st.integers(1, 255))
def test_a_byte_that_was_changed_ends_it(index, flip):
    first, second, third = three()
    changed = bytearray(second)
    changed[index] ^= flip
    found = taken(Opener(KEY), first + changed + third)
    # A longer length waits for more, which then does not fit.
    assert [frame for frame in found if frame is not BadFrame] == [Frame(Kind.ROUND, 1, b"\1" * 8)]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 1), (0, 2), (1,)])
def test_frames_that_are_moved_repeated_or_left_out_end_it(order):
    frames = three()
    found = taken(Opener(KEY), b"".join(frames[index] for index in order))
    assert found[-1] is BadFrame
    assert len(found) == (2 if order[0] == 0 else 1)


def test_a_length_beyond_the_bound_is_refused_before_it_is_kept():
    opener = Opener(KEY, max_payload=100)
    opener.feed(HEADER.pack(Kind.ROUND, 101, 0))
    with pytest.raises(BadFrame):
        opener.next()


# Greetings.


def parties(secrets=(b"s" * 16, b"s" * 16), jobs=("job", "job"), sizes=(4, 4)):
    return [
        Party(rank, size, job, SharedSecret(secret), 1000 * rank)
        for rank, size, job, secret in zip((0, 2), sizes, jobs, secrets, strict=True)
    ]


def greet(host, guest):
    """What the host makes of the guest's claim, and the guest of its answer."""
    said = hello(host)
    words, key, bound = claim(guest, host.rank, said)
    claimed: Any
    keys: Any
    try:
        answer, claimed = check_claim(host, said, words)
    except Unwelcome as error:
        answer, claimed = refusal(error.reply or Reply.WELCOME), error
    try:
        keys = check_answer(guest, key, bound, answer)
    except Unwelcome as error:
        keys = error
    return claimed, keys


def test_a_greeting_gives_both_the_same_keys():
    claimed, keys = greet(*parties())
    assert (claimed.rank, claimed.port) == (2, 2000)
    assert claimed.keys.pad == keys.pad
    for one, other in ((claimed.keys, keys), (keys, claimed.keys)):
        other.opener.feed(one.sealer.seal(Kind.ROUND, 7, b"x"))
        assert other.opener.next() == Frame(Kind.ROUND, 7, b"x")
    # What one says is not what the other could have said.
    keys.opener.feed(keys.sealer.seal(Kind.ROUND, 8, b"x"))
    with pytest.raises(BadFrame):
        keys.opener.next()


def test_what_hides_a_key_is_not_shown():
    claimed, keys = greet(*parties())
    for shown in (repr(keys), repr(claimed), f"{keys}"):
        assert "pad" not in shown
        assert repr(keys.pad) not in shown


@pytest.mark.parametrize(
    ("odd", "host_says", "guest_says"),
    [
        (
            {"secrets": (b"s" * 16, b"t" * 16)},
            "a rank that could not prove EP_SECRET",
            "does not take this one's proof of EP_SECRET",
        ),
        ({"jobs": ("job", "other")}, "a rank of another job", "a rank of another job listens"),
        ({"sizes": (4, 5)}, "rank 2 of 5, not of 4,", "is not of 5 ranks"),
    ],
)
def test_what_differs_is_told_on_both_sides(odd, host_says, guest_says):
    claimed, keys = greet(*parties(**odd))
    assert host_says in str(claimed)
    assert guest_says in str(keys)


def is_welcome(host, said, came):
    """Whether a door would let in who says this, and no more."""
    try:
        if claim_bytes(came) > len(came):
            return False
        check_claim(host, said, bytes(came))
    except Unwelcome:
        return False
    return True


def test_a_claim_is_of_one_hello():
    host, guest = parties()
    said = hello(host)
    words, _, _ = claim(guest, 0, said)
    assert is_welcome(host, said, words)
    with pytest.raises(Unwelcome, match="could not prove"):
        check_claim(host, hello(host), words)


@given(st.integers(0, CLAIM.size - 1), st.integers(1, 255))
def test_a_claim_that_was_changed_proves_nothing(index, flip):
    host, guest = parties()
    said = hello(host)
    changed = bytearray(claim(guest, 0, said)[0])
    changed[index] ^= flip
    assert not is_welcome(host, said, changed)


@given(st.binary(min_size=ANSWER.size, max_size=ANSWER.size) | st.integers(0, 255))
def test_an_answer_of_a_stranger_gives_no_keys(said):
    host, guest = parties()
    _, key, bound = claim(guest, 0, hello(host))
    if isinstance(said, int):
        said = ANSWER.pack(MAGIC, said, bytes(32))
    with pytest.raises(Unwelcome):
        check_answer(guest, key, bound, said)


@given(st.binary(max_size=CLAIM.size + 20) | st.binary(max_size=200).map(lambda data: MAGIC + data))
@example(MAGIC + struct.pack("!HH", 1, 0xFFFF) + bytes(200))
def test_garbage_is_no_claim(data):
    host, _ = parties()
    assert not is_welcome(host, hello(host), data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: b"SSH-2.0-"}, "is no rank of ep"),
        ({1: 2}, "meets by version 2, this one by 1"),
        ({2: 2}, "does not prove EP_SECRET: set EP_SECRET alike"),
        ({3: 1}, "rank 1 listens there, not rank 0"),
    ],
)
def test_a_hello_that_is_not_answered(change, words):
    host, guest = parties()
    fields = list(HELLO.unpack(hello(host)))
    for index, value in change.items():
        fields[index] = value
    with pytest.raises(Unwelcome, match=words):
        claim(guest, 0, HELLO.pack(*fields))


@pytest.mark.parametrize(
    "came",
    [
        b"G",
        b"GET / HTTP/1.1",
        MAGIC + struct.pack("!HH", 2, 0) + bytes(CLAIM.size),
        MAGIC + struct.pack("!HH", 1, 4097) + bytes(CLAIM.size),
    ],
)
def test_what_can_be_no_claim_is_told_at_once(came):
    with pytest.raises(Unwelcome):
        claim_bytes(came)
