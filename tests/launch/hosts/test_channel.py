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


def greet(server, client):
    """Lets both ends say all that they have to say; returns what each has heard."""
    heard = [], []
    for _ in range(6):
        for end, messages in zip((server, client), heard, strict=True):
            end.flush()
            messages += end.receive()
    return heard


def test_both_ends_of_the_same_token_hear_each_other(pair):
    server, client = HostChannel(pair[0], TOKEN, "server"), HostChannel(pair[1], TOKEN, "client")
    assert not server.send({"too": "early"})
    greet(server, client)
    assert server.is_proven
    assert client.is_proven
    for number in range(3):
        assert server.send({"number": number})
        assert client.send({"number": -number, "text": "é\n"})
    assert greet(server, client) == (
        [{"number": -n, "text": "é\n"} for n in range(3)],
        [{"number": n} for n in range(3)],
    )


@pytest.mark.fault("X2")
def test_another_token_is_found_on_both_ends_and_nothing_is_delivered(pair):
    server, client = HostChannel(pair[0], TOKEN, "server"), HostChannel(pair[1], TOKEN[::-1], "client")
    assert greet(server, client) == ([], [])
    assert (server.fault, client.fault) == (Fault.TOKEN, Fault.TOKEN)
    assert not server.send({"secret": 1})


def test_what_one_end_says_cannot_be_sent_back_to_it(pair):
    """A client without the token mirrors every line."""
    server, client = HostChannel(pair[0], TOKEN, "server"), pair[1]
    for _ in range(2):
        client.sendall(client.recv(65536))
        assert server.receive() == []
    assert server.fault is Fault.TOKEN


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b'{"hello": "lockstep 2"}\n',
        b'{"hello": "lockstep 1", "nonce": "' + b"0" * 64 + b'"}\n',
        b'{"hello": "lockstep 2", "nonce": 3}\n',
        b'{"hello": "lockstep 2", "nonce": "' + b"\\ud800" * 64 + b'"}\n',
        b'{"hello": "lockstep 2", "nonce": ' + b"9" * 900 + b"}\n",
        b'{"hello": "lockstep 2", "nonce": "' + b"0" * 64 + b'"}\n{"proof": "' + b"\\ud800" * 64 + b'"}\n',
        b"[" * 1000 + b"\n",
        b"\xff\xfe\n",
        b"\n",
        b"x" * 2000,
    ],
)
def test_whoever_does_not_speak_as_lockstep_is_cut_off(pair, line):
    server = HostChannel(pair[0], TOKEN, "server")
    pair[1].sendall(line)
    assert server.receive() == []
    assert server.fault is Fault.UNKNOWN_PROTOCOL


def test_ten_thousand_changed_greetings_and_lines_never_pass_and_never_raise():
    draw = random.Random(20)
    good = b'{"hello": "lockstep 2", "nonce": "' + b"0" * 64 + b'"}\n{"proof": "' + b"1" * 64 + b'"}\n{"stop": true}\n'
    for number in range(10_000):
        words = bytearray(made_up(draw) if number % 2 else good)
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(words))
            words[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        channel = HostChannel(Said(bytes(words)), TOKEN, "server")
        assert channel.receive() == []
        assert not channel.is_proven


def made_up(draw):
    """A greeting with any JSON in place of what it says, and one that is none."""
    values = [json_value(draw, draw.randrange(6)) for _ in range(3)]
    hello = f'{{"hello": {draw.choice([values[0], QUOTED])}, "nonce": {draw.choice([values[1], NONCE])}}}'
    return f'{hello}\n{{"proof": {values[2]}}}\n'.encode(errors="surrogatepass")


NONCE, QUOTED = f'"{"0" * 64}"', '"lockstep 2"'


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
        (self.near_server, self.server_end), (self.near_client, self.client_end) = (
            socket.socketpair(),
            socket.socketpair(),
        )
        self.server, self.client = (
            HostChannel(self.server_end, TOKEN, "server"),
            HostChannel(self.client_end, TOKEN, "client"),
        )
        for _ in range(6):
            self.near_server.sendall(self.take(self.client, self.near_client))
            self.near_client.sendall(self.take(self.server, self.near_server))
        assert self.server.is_proven
        assert self.client.is_proven

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
        for end in (self.near_server, self.server_end, self.near_client, self.client_end):
            end.close()


@pytest.fixture
def between():
    made = Between()
    yield made
    made.close()


@pytest.mark.fault("X2")
def test_a_line_that_is_sent_again_is_not_taken_again(between):
    between.client.send({"stop": True})
    line = between.take(between.client, between.near_client)
    between.near_server.sendall(line + line)
    assert between.server.receive() == [{"stop": True}]
    assert between.server.fault is Fault.FORGED


@pytest.mark.fault("X2")
def test_a_line_that_was_changed_is_not_taken(between):
    between.client.send({"stop": False, "step": 1})
    line = between.take(between.client, between.near_client)
    between.near_server.sendall(line.replace(b'"step": 1', b'"step": 2'))
    assert between.server.receive() == []
    assert between.server.fault is Fault.FORGED


def test_an_overheard_session_cannot_be_sent_to_another_connection(pair):
    server, client = HostChannel(pair[0], TOKEN, "server"), HostChannel(pair[1], TOKEN, "client")
    greet(server, client)
    first, second = socket.socketpair()
    with first, second:
        other = HostChannel(first, TOKEN, "server")
        second.sendall(json.dumps({"hello": "lockstep 2", "nonce": client._handshake.nonce.hex()}).encode() + b"\n")
        proof = client._handshake.proof(server._handshake.nonce).hex()
        second.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        assert other.receive() == []
        assert other.fault is Fault.TOKEN


def test_a_line_that_never_ends_is_cut_off(between):
    part = b"0" * (1 << 16)
    while between.server.is_open:
        with contextlib.suppress(BlockingIOError):
            between.near_server.send(part)
        between.server.receive()
        assert len(between.server._received) <= LONGEST_LINE + 2 * len(part)
    assert between.server.fault is Fault.UNKNOWN_PROTOCOL


def test_a_closed_connection_is_seen(between):
    between.near_server.close()
    assert between.server.receive() == []
    assert between.server.fault is Fault.GONE


def test_a_message_waits_for_the_one_before_it(between):
    """The newest state is worth sending, not every one of them."""
    large = {"text": "x" * (1 << 20)}
    assert between.server.send(large)
    assert between.server.has_unsent
    assert not between.server.send({"text": "later"})
    heard = []
    while not heard:
        between.near_client.sendall(between.take(between.server, between.near_server))
        heard = between.client.receive()
    assert heard == [large]
    assert between.server.send({"text": "later"})
