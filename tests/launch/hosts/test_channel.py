"""The authenticated connection: what each end takes from the other, and what it never takes."""

import contextlib
import json
import random
import socket

import pytest

from lockstep.launch.hosts.channel import LONGEST_LINE, Fault, HostChannel

TOKEN = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def pair():
    """Two connected sockets."""
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def greet(hub, member):
    """Lets both ends say all that they have to say; returns what each has heard."""
    heard = [], []
    for _ in range(6):
        for end, messages in zip((hub, member), heard, strict=True):
            end.flush()
            messages += end.receive()
    return heard


def test_both_ends_of_the_same_token_hear_each_other(pair):
    hub, member = HostChannel(pair[0], TOKEN, "hub"), HostChannel(pair[1], TOKEN, "member")
    assert not hub.send({"too": "early"})
    greet(hub, member)
    assert hub.is_proven
    assert member.is_proven
    for number in range(3):
        assert hub.send({"number": number})
        assert member.send({"number": -number, "text": "é\n"})
    assert greet(hub, member) == (
        [{"number": -n, "text": "é\n"} for n in range(3)],
        [{"number": n} for n in range(3)],
    )


@pytest.mark.fault("X2")
def test_another_token_is_found_on_both_ends_and_nothing_is_delivered(pair):
    hub, member = HostChannel(pair[0], TOKEN, "hub"), HostChannel(pair[1], TOKEN[::-1], "member")
    assert greet(hub, member) == ([], [])
    assert (hub.fault, member.fault) == (Fault.TOKEN, Fault.TOKEN)
    assert not hub.send({"secret": 1})


def test_what_one_end_says_cannot_be_sent_back_to_it(pair):
    """A client without the token mirrors every line."""
    hub, client = HostChannel(pair[0], TOKEN, "hub"), pair[1]
    for _ in range(2):
        client.sendall(client.recv(65536))
        assert hub.receive() == []
    assert hub.fault is Fault.TOKEN


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b'{"hello": "lockstep 1"}\n',
        b'{"hello": "lockstep 2", "nonce": "' + b"0" * 64 + b'"}\n',
        b'{"hello": "lockstep 1", "nonce": 3}\n',
        b'{"hello": "lockstep 1", "nonce": "' + b"\\ud800" * 64 + b'"}\n',
        b'{"hello": "lockstep 1", "nonce": ' + b"9" * 900 + b"}\n",
        b'{"hello": "lockstep 1", "nonce": "' + b"0" * 64 + b'"}\n{"proof": "' + b"\\ud800" * 64 + b'"}\n',
        b"[" * 1000 + b"\n",
        b"\xff\xfe\n",
        b"\n",
        b"x" * 2000,
    ],
)
def test_whoever_does_not_speak_as_lockstep_is_cut_off(pair, line):
    hub = HostChannel(pair[0], TOKEN, "hub")
    pair[1].sendall(line)
    assert hub.receive() == []
    assert hub.fault is Fault.UNKNOWN_PROTOCOL


def test_ten_thousand_changed_greetings_and_lines_never_pass_and_never_raise():
    draw = random.Random(20)
    good = b'{"hello": "lockstep 1", "nonce": "' + b"0" * 64 + b'"}\n{"proof": "' + b"1" * 64 + b'"}\n{"stop": true}\n'
    for number in range(10_000):
        words = bytearray(made_up(draw) if number % 2 else good)
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(words))
            words[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        channel = HostChannel(Said(bytes(words)), TOKEN, "hub")
        assert channel.receive() == []
        assert not channel.is_proven


def made_up(draw):
    """A greeting with any JSON in place of what it says, and one that is none."""
    values = [json_value(draw, draw.randrange(6)) for _ in range(3)]
    hello = f'{{"hello": {draw.choice([values[0], QUOTED])}, "nonce": {draw.choice([values[1], NONCE])}}}'
    return f'{hello}\n{{"proof": {values[2]}}}\n'.encode(errors="surrogatepass")


NONCE, QUOTED = f'"{"0" * 64}"', '"lockstep 1"'


def json_value(draw, depth):
    """Text of every kind of JSON value, of the numbers and strings that Python takes and of some that it does not."""
    kind = draw.randrange(6 if depth else 4)
    if kind == 0:
        return draw.choice(["null", "true", "NaN", "-Infinity", "1e999", "-0", "9" * 500, "0.1", "1E-400", "[" * 300])
    if kind < 4:
        parts = [
            "\\ud800",
            "\\udfff",
            "\\u0000",
            "\ud800",
            "é",
            "٣",
            "0" * 64,
            "ff" * 32,
            "\\n",
            "\\x",
            "\x00",
        ]
        return '"' + "".join(draw.choices(parts, k=draw.randrange(4))) + '"'
    inner = [json_value(draw, depth - 1) for _ in range(draw.randrange(3))]
    return f"[{', '.join(inner)}]" if kind == 4 else "{" + ", ".join(f'"{n}": {v}' for n, v in enumerate(inner)) + "}"


class Said:
    """A connection over which everything has been said."""

    def __init__(self, words):
        self.words = words

    def recv(self, size):
        part, self.words = self.words[:size], self.words[size:]
        return part

    def send(self, words):
        return len(words)

    def setblocking(self, flag): ...
    def setsockopt(self, *_): ...
    def close(self): ...


class Between:
    """Passes bytes between two channels, and may change them."""

    def __init__(self):
        (self.near_hub, self.hub_end), (self.near_member, self.member_end) = (
            socket.socketpair(),
            socket.socketpair(),
        )
        self.hub, self.member = (
            HostChannel(self.hub_end, TOKEN, "hub"),
            HostChannel(self.member_end, TOKEN, "member"),
        )
        for _ in range(6):
            self.near_hub.sendall(self.take(self.member, self.near_member))
            self.near_member.sendall(self.take(self.hub, self.near_hub))
        assert self.hub.is_proven
        assert self.member.is_proven

    @staticmethod
    def take(channel, near):
        channel.receive()
        channel.flush()
        near.setblocking(False)
        try:
            return near.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self):
        for end in (self.near_hub, self.hub_end, self.near_member, self.member_end):
            end.close()


@pytest.fixture
def between():
    made = Between()
    yield made
    made.close()


@pytest.mark.fault("X2")
def test_a_line_that_is_sent_again_is_not_taken_again(between):
    between.member.send({"stop": True})
    line = between.take(between.member, between.near_member)
    between.near_hub.sendall(line + line)
    assert between.hub.receive() == [{"stop": True}]
    assert between.hub.fault is Fault.FORGED


@pytest.mark.fault("X2")
def test_a_line_that_was_changed_is_not_taken(between):
    between.member.send({"stop": False, "step": 1})
    line = between.take(between.member, between.near_member)
    between.near_hub.sendall(line.replace(b'"step": 1', b'"step": 2'))
    assert between.hub.receive() == []
    assert between.hub.fault is Fault.FORGED


def test_an_overheard_session_cannot_be_sent_to_another_connection(pair):
    hub, member = HostChannel(pair[0], TOKEN, "hub"), HostChannel(pair[1], TOKEN, "member")
    greet(hub, member)
    first, second = socket.socketpair()
    with first, second:
        other = HostChannel(first, TOKEN, "hub")
        second.sendall(json.dumps({"hello": "lockstep 1", "nonce": member._handshake.nonce.hex()}).encode() + b"\n")
        proof = member._handshake.proof(hub._handshake.nonce).hex()
        second.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        assert other.receive() == []
        assert other.fault is Fault.TOKEN


def test_a_line_that_never_ends_is_cut_off(between):
    part = b"0" * (1 << 16)
    while between.hub.is_open:
        with contextlib.suppress(BlockingIOError):
            between.near_hub.send(part)
        between.hub.receive()
        assert len(between.hub._received) <= LONGEST_LINE + 2 * len(part)
    assert between.hub.fault is Fault.UNKNOWN_PROTOCOL


def test_a_closed_connection_is_seen(between):
    between.near_hub.close()
    assert between.hub.receive() == []
    assert between.hub.fault is Fault.GONE


def test_a_message_waits_for_the_one_before_it(between):
    """The newest state is worth sending, not every one of them."""
    large = {"text": "x" * (1 << 20)}
    assert between.hub.send(large)
    assert between.hub.has_unsent
    assert not between.hub.send({"text": "later"})
    heard = []
    while not heard:
        between.near_member.sendall(between.take(between.hub, between.near_hub))
        heard = between.member.receive()
    assert heard == [large]
    assert between.hub.send({"text": "later"})
