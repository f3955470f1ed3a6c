"""Two ends prove to each other that they hold the same secret; whatever a stranger sends is refused."""

import pytest

from lockstep.distributed.authentication import (
    LONGEST_GREETING,
    Handshake,
    Refused,
    Seal,
    parse_hex,
    parse_object,
    read_rank_key,
    sign,
    write_rank_key,
)

SECRET = b"0" * 32


def ends(first=SECRET, second=SECRET):
    return Handshake(first, "server", "client"), Handshake(second, "client", "server")


def test_both_ends_accept_each_other_and_share_a_key():
    server, client = ends()
    assert server.accepts(client.nonce, client.proof(server.nonce))
    assert client.accepts(server.nonce, server.proof(client.nonce))
    assert server.session_key(client.nonce) == client.session_key(server.nonce)
    again, _ = ends()
    assert again.session_key(client.nonce) != server.session_key(client.nonce)


def test_another_secret_a_mirror_and_an_older_proof_are_refused():
    server, client = ends(second=b"1" * 32)
    assert not server.accepts(client.nonce, client.proof(server.nonce))
    assert not server.accepts(server.nonce, server.proof(server.nonce))
    server, client = ends()
    later, _ = ends()
    assert not later.accepts(client.nonce, client.proof(server.nonce))
    assert not server.accepts(client.nonce, b"")


def test_a_signature_covers_where_its_parts_end():
    assert sign(SECRET, b"ab", b"c") == sign(SECRET, b"ab", b"c") != sign(SECRET, b"a", b"bc")


def test_each_message_of_a_connection_is_signed_once_and_in_order():
    server, client = Seal(SECRET, "server", "client"), Seal(SECRET, "client", "server")
    first, second = client.sign(b"one"), client.sign(b"two")
    server.check(first, b"one")
    server.check(second, b"two")
    for signature in (second, server.sign(b"two"), b""):
        with pytest.raises(Refused, match="failed authentication"):
            server.check(signature, b"two")


def test_ranks_get_a_key_of_this_run_alone_that_only_their_user_can_read(tmp_path):
    assert read_rank_key(str(tmp_path)) == read_rank_key("") == b""
    write_rank_key(tmp_path, SECRET, "run 1")
    key = read_rank_key(str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    write_rank_key(tmp_path, SECRET, "run 2")
    assert len({key, read_rank_key(str(tmp_path)), SECRET}) == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b"[" * 1000,
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"9" * 2 * LONGEST_GREETING + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(Refused):
        parse_object(data)


def test_an_object_is_read():
    assert parse_object(b'{"a": "\\u00e9", "b": [1.5, null]}') == {"a": "\u00e9", "b": [1.5, None]}


@pytest.mark.parametrize("text", [None, 3, "", "0", "zz", "0" * 62, "0" * 66, "\u0660" * 64, ["00"] * 32])
def test_a_field_of_other_digits_is_refused(text):
    with pytest.raises(Refused):
        parse_hex(text, 32)


def test_a_field_is_read():
    assert parse_hex("00ff", 2) == b"\x00\xff"
