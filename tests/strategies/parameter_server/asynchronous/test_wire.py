"""Messages over real sockets: what is malformed, too large or from a stranger is refused, and holds up nobody."""

import contextlib
import logging
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RankError
from lockstep.strategies.parameter_server.asynchronous.inbox import Inbox, connect
from lockstep.strategies.parameter_server.asynchronous.wire import (
    Message,
    Refused,
    prove_to_client,
    prove_to_server,
    receive,
    send,
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
def inbox():
    one = Inbox(TOKEN, 0, LARGEST, patience=5)
    yield one
    one.close()


def test_a_message_arrives_as_it_was_sent(pair):
    body = bytes(range(256)) * 64
    for message in (Message("push", {"weight": 0.1, "names": ["a"]}, body), Message("pull")):
        send(pair[0], message)
        assert receive(pair[1], LARGEST) == message


def frame(text, body=b"", magic=b"LSPS", text_size=None, body_size=None):
    sizes = len(text) if text_size is None else text_size, len(body) if body_size is None else body_size
    return HEADER.pack(magic, *sizes) + text + body


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(b"{}", magic=b"HTTP"), "begins with"),
        (b"GET / HTTP/1.1\r\n\r\n" * 2, "begins with"),
        (frame(b"not json"), "no JSON object"),
        (frame(b"[]"), "no JSON object"),
        (frame(b"{}"), "no JSON object with a kind"),
        (frame(b'{"kind": 3}'), "no text"),
        (frame(b"[" * 100_000), "no JSON object"),
        (frame(b"\xff\xfe"), "no JSON object"),
        (frame(b"{}", body_size=LARGEST + 1), "larger"),
        (frame(b"{}", text_size=(1 << 32) - 1), "larger"),
        (frame(b"{}", body_size=(1 << 64) - 1), "larger"),
        (frame(b"\x80\x04\x95pickle"), "no JSON object"),
    ],
)
def test_what_is_no_message_is_refused(pair, sent, why):
    writer = threading.Thread(target=pair[0].sendall, args=(sent,))
    writer.start()
    with pytest.raises(Refused, match=why):
        receive(pair[1], LARGEST)
    pair[1].close()
    writer.join()


@given(st.binary(max_size=200), st.sampled_from([b"", b"LSPS", HEADER.pack(b"LSPS", 20, 30)]))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_are_a_message_or_are_refused(sent, begin):
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(5)
        left.sendall(begin + sent)
        left.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Refused, ConnectionError):
            assert isinstance(receive(right, LARGEST), Message)


def test_an_end_in_the_middle_of_a_message_is_a_lost_connection(pair):
    pair[0].sendall(frame(b'{"kind": "push"}', b"x" * 100)[:-1])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="Connection closed by peer"):
        receive(pair[1], LARGEST)


def test_a_message_that_was_begun_and_does_not_come_is_given_up(pair):
    pair[1].settimeout(0.05)
    pair[0].sendall(frame(b'{"kind": "push"}')[:5])
    with pytest.raises(TimeoutError):
        receive(pair[1], LARGEST)


@pytest.mark.parametrize("wrong", ["client", "server"])
def test_both_sides_must_know_the_token(pair, wrong):
    tokens = {"client": TOKEN, "server": TOKEN, wrong: b"f" * 32}
    found = []

    def listen():
        try:
            prove_to_client(pair[0], tokens["server"])
        except (Refused, ConnectionError) as error:
            found.append(error)
        pair[0].shutdown(socket.SHUT_RDWR)

    listener = threading.Thread(target=listen)
    listener.start()
    with pytest.raises((Refused, ConnectionError)):
        prove_to_server(pair[1], tokens["client"])
    listener.join()
    assert isinstance(found[0], Refused)
    assert "without the run's token" in str(found[0])


def test_an_inbox_takes_messages_and_says_who_has_gone(inbox):
    with connect(inbox.port, TOKEN, 3, patience=5) as worker:
        send(worker, Message("push", {"number": 1}))
        assert inbox.get(5) == (3, Message("push", {"number": 1}))
        assert inbox.send(3, Message("values", {}, b"abc"))
        assert receive(worker, LARGEST) == Message("values", {}, b"abc")
    assert inbox.get(5) == (3, None)


def test_an_inbox_listens_on_loopback_only(inbox):
    assert inbox._listener.getsockname()[0] == "127.0.0.1"


def test_a_stranger_is_refused_and_one_that_says_nothing_holds_up_nobody(inbox, caplog):
    with socket.create_connection(("127.0.0.1", inbox.port)):
        with pytest.raises(RankError, match="cannot reach the parameter server"):
            connect(inbox.port, b"f" * 32, 1, patience=5)
        with connect(inbox.port, TOKEN, 2, patience=5) as worker:
            send(worker, Message("pull"))
            assert inbox.get(5) == (2, Message("pull")), "the stranger's messages are not among these"


def test_a_second_process_of_one_rank_is_refused(inbox, caplog):
    with connect(inbox.port, TOKEN, 2, patience=5) as first:
        send(first, Message("pull"))
        assert inbox.get(5) == (2, Message("pull"))
        with connect(inbox.port, TOKEN, 2, patience=5) as second, pytest.raises(ConnectionError):
            receive(second, LARGEST)
        assert "or another had said so before" in caplog.text
        send(first, Message("pull"))
        assert inbox.get(5) == (2, Message("pull")), "the first is still heard"


def test_who_sends_what_is_no_message_is_cut_off(inbox, caplog):
    with connect(inbox.port, TOKEN, 4, patience=5) as worker, caplog.at_level(logging.WARNING):
        worker.sendall(frame(b"{}", body_size=1 << 40))
        assert inbox.get(5) == (4, None)
    assert "Rank 4 is cut off from the parameter server: a message of 2 + 1099511627776 bytes" in caplog.text
    assert not inbox.send(4, Message("values"))
