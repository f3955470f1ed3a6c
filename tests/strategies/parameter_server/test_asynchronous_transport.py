"""Messages over real sockets: what is malformed, too large or from a stranger is refused, and holds up nobody."""

import contextlib
import logging
import os
import resource
import select
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lockstep.distributed.authentication import NONCE_BYTES, Refused
from lockstep.errors import RankError
from lockstep.strategies.parameter_server import asynchronous_transport
from lockstep.strategies.parameter_server.asynchronous_transport import (
    ServerChannel,
    ServerMessage,
    ServerTransport,
    TransportSettings,
    connect,
)

TOKEN, LARGEST = b"t" * 32, 1 << 16
HEADER = struct.Struct("<4sIQ")


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    for each in (left, right):
        each.settimeout(5)
    with left, right:
        yield left, right


@pytest.fixture
def transport():
    one = ServerTransport(TransportSettings(0, TOKEN, timeout=5), LARGEST)
    yield one
    one.close()


@contextlib.contextmanager
def joined(transport, rank, token=TOKEN):
    """The channel of a process that has connected."""
    channel = connect(transport.address, TransportSettings(rank, token, timeout=5))
    with channel.connection:
        yield channel


def test_a_message_arrives_as_it_was_sent(pair):
    body = bytes(range(256)) * 64
    for message in (ServerMessage("push", {"weight": 0.1, "names": ["a"]}, body), ServerMessage("pull")):
        ServerChannel(pair[0]).send(message)
        assert ServerChannel(pair[1]).receive(LARGEST) == message


def frame(text, body=b"", magic=b"LSPS", text_size=None, body_size=None):
    sizes = len(text) if text_size is None else text_size, len(body) if body_size is None else body_size
    return HEADER.pack(magic, *sizes) + text + body


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(b"{}", magic=b"HTTP"), "begins with"),
        (b"GET / HTTP/1.1\r\n\r\n" * 2, "begins with"),
        (frame(b"not json"), "not a JSON object"),
        (frame(b"[]"), "not a JSON object"),
        (frame(b"{}"), "not a JSON object with a kind"),
        (frame(b'{"kind": 3}'), "not a string"),
        (frame(b"[" * 100_000), "not a JSON object"),
        (frame(b"\xff\xfe"), "not a JSON object"),
        (frame(b"{}", body_size=LARGEST + 1), "exceeds the limit"),
        (frame(b"{}", text_size=(1 << 32) - 1), "exceeds the limit"),
        (frame(b"{}", body_size=(1 << 64) - 1), "exceeds the limit"),
        (frame(b"\x80\x04\x95pickle"), "not a JSON object"),
    ],
)
def test_what_is_no_message_is_refused(pair, sent, why):
    writer = threading.Thread(target=pair[0].sendall, args=(sent,))
    writer.start()
    with pytest.raises(Refused, match=why):
        ServerChannel(pair[1]).receive(LARGEST)
    pair[1].close()
    writer.join()


@given(st.binary(max_size=200), st.sampled_from([b"", b"LSPS", HEADER.pack(b"LSPS", 20, 30)]))
@hypothesis_settings(max_examples=100)
def test_arbitrary_bytes_are_a_message_or_are_refused(sent, begin):
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(5)
        left.sendall(begin + sent)
        left.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Refused, ConnectionError):
            assert isinstance(ServerChannel(right).receive(LARGEST), ServerMessage)


def test_an_end_in_the_middle_of_a_message_is_a_lost_connection(pair):
    pair[0].sendall(frame(b'{"kind": "push"}', b"x" * 100)[:-1])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="Connection closed by peer"):
        ServerChannel(pair[1]).receive(LARGEST)


def test_a_message_that_was_begun_and_does_not_come_is_given_up(pair):
    pair[1].settimeout(0.05)
    pair[0].sendall(frame(b'{"kind": "push"}')[:5])
    with pytest.raises(TimeoutError):
        ServerChannel(pair[1]).receive(LARGEST)


@pytest.mark.parametrize("wrong", ["client", "server"])
def test_both_sides_must_know_the_token(pair, wrong):
    tokens = {"client": TOKEN, "server": TOKEN, wrong: b"f" * 32}
    found = []

    def listen():
        try:
            TransportSettings(0, tokens["server"], timeout=5).open(pair[0], "server")
        except (Refused, ConnectionError) as error:
            found.append(error)
        pair[0].shutdown(socket.SHUT_RDWR)

    listener = threading.Thread(target=listen)
    listener.start()
    with pytest.raises((Refused, ConnectionError)):
        TransportSettings(1, tokens["client"], timeout=5).open(pair[1], "client")
    listener.join()
    assert isinstance(found[0], Refused)
    assert "does not know the run's token" in str(found[0])


def sealed(pair):
    """Both ends of a connection between hosts: the listening one, and the one that connected."""
    settings, ends = TransportSettings(0, TOKEN, timeout=5, is_signed=True), []
    listener = threading.Thread(target=lambda: ends.append(settings.open(pair[0], "server")))
    listener.start()
    client = settings.open(pair[1], "client")
    listener.join()
    return ends[0], client


def test_signed_messages_arrive_in_both_directions(pair):
    server, client = sealed(pair)
    for message in (ServerMessage("push", {"weight": 0.1}, bytes(1000)), ServerMessage("pull")):
        client.send(message)
        assert server.receive(LARGEST) == message
        server.send(message)
        assert client.receive(LARGEST) == message


@pytest.mark.parametrize("forged", ["changed", "repeated", "reflected", "unsigned"])
def test_between_hosts_a_message_that_the_other_end_did_not_sign_is_refused(pair, forged):
    server, client = sealed(pair)
    client.send(ServerMessage("push", {"weight": 1}, b"gradient"))
    sent = pair[0].recv(1 << 12)
    if forged == "changed":
        pair[1].sendall(sent.replace(b"gradient", b"gradien!"))
    elif forged == "repeated":
        pair[1].sendall(sent * 2)
        assert server.receive(LARGEST).body == b"gradient"
    elif forged == "reflected":
        server.send(ServerMessage("values"))
        pair[1].sendall(pair[1].recv(1 << 12))
    else:
        pair[1].sendall(frame(b'{"kind": "pull"}') + bytes(32))
    with pytest.raises(Refused, match="failed authentication"):
        server.receive(LARGEST)


def test_an_inbox_takes_messages_and_says_who_has_gone(transport):
    with joined(transport, 3) as worker:
        worker.send(ServerMessage("push", {"number": 1}))
        assert transport.get(5) == (3, ServerMessage("push", {"number": 1}))
        assert transport.send(3, ServerMessage("values", {}, b"abc"))
        assert worker.receive(LARGEST) == ServerMessage("values", {}, b"abc")
    assert transport.get(5) == (3, None)


def test_an_inbox_listens_on_loopback_only(transport):
    assert transport._listener.getsockname()[0] == "127.0.0.1"


def test_a_stranger_is_refused_and_one_that_says_nothing_holds_up_nobody(transport, caplog):
    with socket.create_connection(transport.address):
        with pytest.raises(RankError, match="cannot connect to the parameter server"):
            connect(transport.address, TransportSettings(1, b"f" * 32, timeout=5))
        with joined(transport, 2) as worker:
            worker.send(ServerMessage("pull"))
            assert transport.get(5) == (2, ServerMessage("pull")), "the stranger's messages are not among these"


@pytest.mark.fault("X2")
def test_hundreds_of_silent_strangers_start_no_thread_and_keep_no_rank_out(transport, caplog):
    threads = set(threading.enumerate())
    with contextlib.ExitStack() as strangers:
        for _ in range(400):
            strangers.enter_context(socket.create_connection(transport.address))
        with joined(transport, 2) as worker:
            worker.send(ServerMessage("pull"))
            assert transport.get(5) == (2, ServerMessage("pull"))
            assert [each.name for each in threading.enumerate() if each not in threads] == ["parameter server: rank"]
    assert "the process did not prove itself in time" in caplog.text


@pytest.mark.fault("X2")
def test_strangers_that_take_all_descriptors_keep_no_rank_out_for_long(transport, monkeypatch, caplog):
    monkeypatch.setattr(asynchronous_transport, "_HANDSHAKE_SECONDS", 0.5)
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as strangers:
        strangers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, former)
        sockets = [strangers.enter_context(socket.socket()) for _ in range(50)]
        late = strangers.enter_context(socket.socket())
        most = os.open(os.devnull, os.O_RDONLY)
        os.close(most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 10, former[1]))
        for each in sockets:
            each.connect(transport.address)
        late.settimeout(10)
        late.connect(transport.address)
        channel = TransportSettings(2, TOKEN, timeout=5).open(late, "client")
        channel.send(ServerMessage("hello", {"rank": 2}))
        channel.send(ServerMessage("pull"))
        assert transport.get(5) == (2, ServerMessage("pull"))


def test_strangers_are_cut_off_at_the_end(transport):
    accepting = [each for each in threading.enumerate() if each.name == "parameter server: accept"][-1]
    with socket.create_connection(transport.address, timeout=5) as stranger:
        assert stranger.recv(NONCE_BYTES), "it was let in to prove itself"
        transport.close()
        accepting.join(5)
        assert not accepting.is_alive()
        assert stranger.recv(1) == b""


def test_a_second_process_of_one_rank_is_refused(transport, caplog):
    with joined(transport, 2) as first:
        first.send(ServerMessage("pull"))
        assert transport.get(5) == (2, ServerMessage("pull"))
        with joined(transport, 2) as second, pytest.raises(ConnectionError):
            second.receive(LARGEST)
        assert "rank 2 is already connected" in caplog.text
        first.send(ServerMessage("pull"))
        assert transport.get(5) == (2, ServerMessage("pull")), "the first is still heard"


class Crossing:
    """Where two greetings meet: the one that checks first goes on when the other is as far as it can come."""

    def __init__(self, lock):
        self._lock, self._came, self._changed = lock, set(), threading.Condition()

    def __enter__(self):
        self.arrive()
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()

    def arrive(self):
        with self._changed:
            self._came.add(threading.get_ident())
            self._changed.notify_all()

    def wait_for_both(self):
        self.arrive()
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._came) == 2, timeout=30)


class CheckedTogether(dict):
    """Connections; between the check for a rank and what follows from it, another greeting has its chance."""

    def __init__(self, crossing):
        self._crossing = crossing

    def __contains__(self, rank):
        found = super().__contains__(rank)
        self._crossing.wait_for_both()
        return found


def test_of_two_greetings_of_one_rank_at_the_same_time_one_is_refused(transport, caplog):
    transport._claiming = crossing = Crossing(transport._claiming)
    transport._channels = CheckedTogether(crossing)
    with (
        joined(transport, 2) as left,
        joined(transport, 2) as right,
    ):
        closed, _, _ = select.select([left.connection, right.connection], [], [], 20)
        assert len(closed) == 1
        assert closed[0].recv(1) == b""
        accepted = left if closed[0] is right.connection else right
        accepted.send(ServerMessage("pull"))
        assert transport.get(5) == (2, ServerMessage("pull"))
        assert transport.send(2, ServerMessage("values"))
        assert accepted.receive(LARGEST) == ServerMessage("values")
    assert "rank 2 is already connected" in caplog.text


def test_who_sends_what_is_no_message_is_cut_off(transport, caplog):
    with joined(transport, 4) as worker, caplog.at_level(logging.WARNING):
        worker.connection.sendall(frame(b"{}", body_size=1 << 40))
        assert transport.get(5) == (4, None)
    assert "Disconnected rank 4 from the parameter server: a message of 2 + 1099511627776 bytes" in caplog.text
    assert not transport.send(4, ServerMessage("values"))
