"""Messages over a socket: a fixed header, JSON, raw bytes of tensors. Nothing is ever unpickled.

    | "LSPS" | length of the JSON: 4 bytes | length of the body: 8 bytes | JSON | body |

A connection begins with proof on both sides that they know the run's token, by HMAC-SHA256 over two fresh numbers; the
token itself never travels. Lengths are refused before memory is taken for them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import LockstepError

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"LSPS"
_LARGEST_JSON = 1 << 26
_FRESH = 32
_AT_ONCE = 1 << 22
LOST = "Connection closed by peer"
"""How the error of a lost connection begins; the supervisor reads it as the consequence of another rank's end."""


class Refused(LockstepError):
    """A message that is none, is too large, or comes from somebody who does not know the token."""


@dataclass(frozen=True)
class Message:
    """What one process tells another."""

    kind: str
    content: dict[str, Any] = field(default_factory=dict)
    """Must survive JSON."""
    body: bytes | bytearray | memoryview = b""


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message whole. Raises ``ConnectionError`` or ``TimeoutError``."""
    text = json.dumps({"kind": message.kind, **message.content}).encode()
    size = memoryview(message.body).nbytes
    connection.sendall(_HEADER.pack(_MAGIC, len(text), size) + text)
    if size:
        connection.sendall(message.body)


def receive(connection: socket.socket, largest: int) -> Message:
    """The next message, waited for without limit; once it has begun, for as long as the socket's timeout.

    Args:
        connection: with a timeout.
        largest: bytes that a body may have.

    Raises:
        Refused: it is no message, or larger.
        ConnectionError: the other side has gone.
        TimeoutError: it was begun and did not come.
    """
    _wait(connection)
    magic, text_size, body_size = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if magic != _MAGIC:
        raise Refused(f"a message begins with {magic!r}, not {_MAGIC!r}")
    if text_size > _LARGEST_JSON or body_size > largest:
        raise Refused(
            f"a message of {text_size} + {body_size} bytes is larger than {_LARGEST_JSON} + {largest}"
        )
    text = _exactly(connection, text_size)
    try:
        content = json.loads(text)
        kind = content.pop("kind")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Refused("a message holds no JSON object with a kind") from error
    if not isinstance(kind, str):
        raise Refused("a message's kind is no text")
    return Message(kind, content, _exactly(connection, body_size))


def prove_to_client(connection: socket.socket, token: bytes) -> None:
    """The side that listens: lets the other prove that it knows the token, then proves it too. Raises ``Refused``."""
    own = secrets.token_bytes(_FRESH)
    connection.sendall(own)
    answer = bytes(_exactly(connection, 2 * _FRESH))
    theirs, proof = answer[:_FRESH], answer[_FRESH:]
    if not hmac.compare_digest(proof, _proof(token, b"client", own, theirs)):
        raise Refused("a process without the run's token tried to connect")
    connection.sendall(_proof(token, b"server", own, theirs))


def prove_to_server(connection: socket.socket, token: bytes) -> None:
    """The side that connects: see ``prove_to_client``. Raises ``Refused``."""
    theirs, own = bytes(_exactly(connection, _FRESH)), secrets.token_bytes(_FRESH)
    connection.sendall(own + _proof(token, b"client", theirs, own))
    if not hmac.compare_digest(bytes(_exactly(connection, _FRESH)), _proof(token, b"server", theirs, own)):
        raise Refused("what answers at the parameter server's address does not know the run's token")


def _wait(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()


def _proof(token: bytes, side: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.new(token, side + of_server + of_client, hashlib.sha256).digest()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. Memory grows with what arrives, so a length alone takes none."""
    found = bytearray(min(size, _AT_ONCE))
    done = 0
    while done < size:
        if done == len(found):
            found.extend(bytes(min(size - done, max(_AT_ONCE, done))))
        with memoryview(found) as view:
            count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionResetError(f"{LOST}.")
        done += count
    return found
