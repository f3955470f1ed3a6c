"""Messages over sockets: a fixed header, JSON, raw bytes of tensors. Nothing is ever unpickled.

    | "LSPS" | length of the JSON: 4 bytes | length of the body: 8 bytes | JSON | body |

A connection begins with both sides proving that they know the run's token (``lockstep.distributed.authentication``).
Lengths are checked before memory is allocated for them.

A server reads each connection in a thread of its own and takes messages in order of arrival in one loop. A process that
stops in the middle of a message, or an unauthenticated one that sends nothing, blocks only its own thread.
"""

from __future__ import annotations

import json
import logging
import queue
import select
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.authentication import NONCE_BYTES, PROOF_BYTES, Handshake, Refused
from lockstep.errors import RankError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"LSPS"
_LARGEST_JSON = 1 << 26
_AT_ONCE = 1 << 22
_HANDSHAKE_SECONDS = 10.0
LOST = "Connection closed by peer"
"""Start of the message of a lost connection; the supervisor takes it for the consequence of another rank's end."""


@dataclass(frozen=True)
class ServerMessage:
    """A message between two processes."""

    kind: str
    content: dict[str, Any] = field(default_factory=dict)
    """Must survive JSON."""
    body: bytes | bytearray | memoryview = b""


def send(connection: socket.socket, message: ServerMessage) -> None:
    """Sends a message whole. Raises ``ConnectionError`` or ``TimeoutError``."""
    text = json.dumps({"kind": message.kind, **message.content}).encode()
    size = memoryview(message.body).nbytes
    connection.sendall(_HEADER.pack(_MAGIC, len(text), size) + text)
    if size:
        connection.sendall(message.body)


def receive(connection: socket.socket, largest: int) -> ServerMessage:
    """Returns the next message. Waits for it without limit, and for the socket's timeout once it has begun.

    Args:
        connection: with a timeout.
        largest: limit of the body in bytes.

    Raises:
        Refused: the bytes are no message, or it is too large.
        ConnectionError: the other side closed the connection.
        TimeoutError: the message began and was not completed.
    """
    _wait(connection)
    magic, text_size, body_size = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if magic != _MAGIC:
        raise Refused(f"the message begins with {magic!r}, not {_MAGIC!r}")
    if text_size > _LARGEST_JSON or body_size > largest:
        raise Refused(
            f"a message of {text_size} + {body_size} bytes exceeds the limit of {_LARGEST_JSON} + {largest}"
        )
    text = _exactly(connection, text_size)
    try:
        content = json.loads(text)
        kind = content.pop("kind")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Refused("the message is not a JSON object with a kind") from error
    if not isinstance(kind, str):
        raise Refused("the kind of the message is not a string")
    return ServerMessage(kind, content, _exactly(connection, body_size))


def authenticate(connection: socket.socket, token: bytes, side: str) -> None:
    """Proves to the other process, and has it prove, that both know the token. Raises ``Refused``.

    Args:
        connection: connected.
        token: the run's.
        side: ``server`` where this process listened, ``client`` where it connected.
    """
    handshake = Handshake(token, side, "client" if side == "server" else "server")
    connection.sendall(handshake.nonce)
    theirs = bytes(_exactly(connection, NONCE_BYTES))
    connection.sendall(handshake.proof(theirs))
    if not handshake.accepts(theirs, bytes(_exactly(connection, PROOF_BYTES))):
        raise Refused("the other process does not know the run's token")


def _wait(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Reads ``size`` bytes. Memory grows with what arrives, so a length alone allocates none."""
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


class ServerTransport:
    """Listens on loopback, and receives messages of processes that know the token.

    Args:
        token: the run's secret.
        rank: this process's.
        largest: limit of a message's body in bytes.
        timeout: seconds that a message may take once it has begun, in either direction.
    """

    def __init__(self, token: bytes, rank: int, largest: int, timeout: float) -> None:
        self._token, self._rank, self._largest, self._timeout = token, rank, largest, timeout
        self._arrived: queue.SimpleQueue[tuple[int, ServerMessage | None]] = queue.SimpleQueue()
        self._connections: dict[int, socket.socket] = {}
        self._claiming = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        """Port on loopback."""
        threading.Thread(target=self._accept, daemon=True, name="parameter server: accept").start()

    def join(self, rank: int, port: int) -> None:
        """Connects to another server's transport; both sides may then send."""
        connection = connect(port, self._token, self._rank, self._timeout)
        with self._claiming:
            self._connections[rank] = connection
        self._start_reading(rank, connection)

    def get(self, timeout: float | None = None) -> tuple[int, ServerMessage | None]:
        """Returns the sender's rank and its next message, or None where the sender has disconnected.

        Raises:
            queue.Empty: nothing arrived within ``timeout`` seconds.
        """
        return self._arrived.get(timeout=timeout)

    def send(self, rank: int, message: ServerMessage) -> bool:
        """Sends a message to a connected rank and returns whether it was sent; disconnects a rank that fails."""
        connection = self._connections.get(rank)
        if connection is None:
            return False
        try:
            send(connection, message)
        except OSError:
            self.cut(rank)
            return False
        return True

    def cut(self, rank: int) -> None:
        """Closes a connection; ``get`` then reports the loss."""
        if (connection := self._connections.get(rank)) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for rank in list(self._connections):
            self.cut(rank)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._greet, args=(connection,), daemon=True, name="parameter server: greet"
            ).start()

    def _greet(self, connection: socket.socket) -> None:
        """Accepts a process that knows the token and sends its rank."""
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            authenticate(connection, self._token, "server")
            hello = receive(connection, 1 << 10)
            rank = hello.content.get("rank")
            if hello.kind != "hello" or not isinstance(rank, int):
                raise Refused("the process did not send its rank")
            self._claim(rank, connection)
        except (OSError, Refused) as error:
            logger.warning("Refused a connection to the parameter server: %s.", error)
            connection.close()
            return
        self._read(rank, connection)

    def _claim(self, rank: int, connection: socket.socket) -> None:
        """Assigns the connection to the rank, unless it has one; of two at the same time one is refused."""
        _prepare(connection, self._timeout)
        with self._claiming:
            if rank in self._connections:
                raise Refused(f"rank {rank} is already connected")
            self._connections[rank] = connection

    def _start_reading(self, rank: int, connection: socket.socket) -> None:
        threading.Thread(
            target=self._read, args=(rank, connection), daemon=True, name=f"parameter server: rank {rank}"
        ).start()

    def _read(self, rank: int, connection: socket.socket) -> None:
        try:
            while True:
                self._arrived.put((rank, receive(connection, self._largest)))
        except Refused as error:
            logger.warning("Disconnected rank %d from the parameter server: %s.", rank, error)
        except (OSError, ValueError):  # either side has closed the connection
            pass
        with suppress(OSError):
            connection.close()
        self._arrived.put((rank, None))


def connect(port: int, token: bytes, rank: int, timeout: float) -> socket.socket:
    """Connects to a transport on this host and authenticates both sides.

    Raises:
        RankError: nothing listens on the port, or the process there does not know the token.
    """
    with ExitStack() as stack:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=_HANDSHAKE_SECONDS)
            stack.enter_context(connection)
            authenticate(connection, token, "client")
            send(connection, ServerMessage("hello", {"rank": rank}))
            _prepare(connection, timeout)
            stack.pop_all()
        except (OSError, Refused) as error:
            raise RankError(
                f"Rank {rank} cannot connect to the parameter server on port {port} of this host: {error}."
            ) from error
    return connection


def _prepare(connection: socket.socket, timeout: float) -> None:
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def server_ended(rank: int) -> ConnectionError:
    """The error of a rank that lost its connection to a parameter server."""
    return ConnectionResetError(f"{LOST}: the parameter server on rank {rank} ended.")


def as_bytes(tensor: Tensor) -> bytes | memoryview:
    """The bytes of a tensor; may be the tensor's own memory."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def from_bytes(body: bytearray | memoryview, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor, shape (n,); on a CPU it is the message's own memory. Raises ``ValueError`` for odd sizes."""
    if not len(body):
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(body, dtype=dtype).to(device)
