"""Messages over sockets: a fixed header, JSON, raw bytes of tensors. Nothing is ever unpickled.

    | "LSPS" | length of the JSON: 4 bytes | length of the body: 8 bytes | JSON | body | signature: 32 bytes |

A connection begins with both sides proving that they know the run's token (``lockstep.distributed.authentication``).
Between hosts each message is signed with the key of the connection and numbered; on one host there are no signatures.
Lengths are checked before memory is allocated for them.

A server reads each rank's connection in a thread of its own and takes messages in order of arrival in one loop; a rank
that stops in the middle of a message blocks only its own thread. Strangers share one thread, which waits for none of
them: the number connected at a time, and the time of each, are limited, and the oldest goes first.
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.authentication import NONCE_BYTES, PROOF_BYTES, Handshake, Refused, Seal
from lockstep.errors import RankError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"LSPS"
_LARGEST_JSON = 1 << 26
_AT_ONCE = 1 << 22
_HANDSHAKE_SECONDS = 10.0
_MOST_GREETINGS = 256
_PAUSE = 0.1
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN)
"""Errors of ``accept`` after which it may succeed again."""
LOST = "Connection closed by peer"
"""Start of the message of a lost connection; the supervisor takes it for the consequence of another rank's end."""


@dataclass(frozen=True)
class ServerMessage:
    """A message between two processes."""

    kind: str
    content: dict[str, Any] = field(default_factory=dict)
    """Must survive JSON."""
    body: bytes | bytearray | memoryview = b""


class ServerChannel:
    """One end of a connection.

    Args:
        connection: with a timeout.
        seal: of the connection; None: its messages are not signed.
    """

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        self.connection, self._seal = connection, seal

    def send(self, message: ServerMessage) -> None:
        """Sends a message whole. Raises ``ConnectionError`` or ``TimeoutError``."""
        text = json.dumps({"kind": message.kind, **message.content}).encode()
        body = memoryview(message.body)
        head = _HEADER.pack(_MAGIC, len(text), body.nbytes) + text
        signature = b"" if self._seal is None else self._seal.sign(head, body)
        for part in (head, body, signature):
            if len(part):
                self.connection.sendall(part)

    def receive(self, largest: int) -> ServerMessage:
        """Returns the next message. Waits for it without limit, and for the socket's timeout once it has begun.

        Args:
            largest: limit of the body in bytes.

        Raises:
            Refused: the bytes are not a message, it is too large, or its signature is wrong.
            ConnectionError: the other side closed the connection.
            TimeoutError: the message began and was not completed.
        """
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        poll.poll()
        header = _exactly(self.connection, _HEADER.size)
        magic, text_size, body_size = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise Refused(f"the message begins with {magic!r}, not {_MAGIC!r}")
        if text_size > _LARGEST_JSON or body_size > largest:
            raise Refused(
                f"a message of {text_size} + {body_size} bytes exceeds the limit of {_LARGEST_JSON} + {largest}"
            )
        text, body = _exactly(self.connection, text_size), bytearray()
        if self._seal is not None:
            body = _exactly(self.connection, body_size)
            self._seal.check(_exactly(self.connection, PROOF_BYTES), header + text, body)
        try:
            content = json.loads(text)
            kind = content.pop("kind")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise Refused("the message is not a JSON object with a kind") from error
        if not isinstance(kind, str):
            raise Refused("the kind of the message is not a string")
        return ServerMessage(kind, content, body or _exactly(self.connection, body_size))


@dataclass(frozen=True)
class TransportSettings:
    """The data with which a process connects to the others of its run."""

    rank: int
    """The process's own."""
    token: bytes = field(repr=False)
    """The run's secret."""
    timeout: float
    """Seconds that a message may take once it has begun, in either direction."""
    host: str = "127.0.0.1"
    """This host's address, on which its servers listen."""
    is_signed: bool = False
    """True if every message is signed, since connections leave the host."""

    def open(self, connection: socket.socket, side: str) -> ServerChannel:
        """Proves to the other process, and has it prove, that both know the token. Raises ``Refused``.

        Args:
            connection: connected, with a timeout.
            side: ``server`` where this process listened, ``client`` where it connected.
        """
        greeting = _Greeting(connection, self, side)
        while not greeting.why:
            if (channel := greeting.receive()) is not None:
                return channel
        raise Refused(greeting.why)


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


class _Greeting:
    """One side of a handshake; where the connection does not block, it never waits."""

    def __init__(self, connection: socket.socket, settings: TransportSettings, side: str) -> None:
        self.connection, self._settings = connection, settings
        self._sides = side, "client" if side == "server" else "server"
        self._handshake, self._received = Handshake(settings.token, *self._sides), b""
        self.born = time.monotonic()
        self.why = ""
        """Why the process is refused; empty while it may still prove itself."""
        self._send(self._handshake.nonce)

    def _send(self, data: bytes) -> None:
        try:
            if self.connection.send(data) < len(data):  # a new connection takes a few bytes at once
                self.why = "the process does not read"
        except OSError as error:
            self.why = str(error)

    def receive(self) -> ServerChannel | None:
        """Reads what has arrived; returns the channel once the process has proven itself."""
        try:
            part = self.connection.recv(NONCE_BYTES + PROOF_BYTES - len(self._received))
        except BlockingIOError:
            return None
        except OSError as error:
            self.why = str(error)
            return None
        if not part:
            self.why = f"{LOST}."
        has_answered = len(self._received) >= NONCE_BYTES
        self._received += part
        nonce, proof = self._received[:NONCE_BYTES], self._received[NONCE_BYTES:]
        if not has_answered and len(nonce) == NONCE_BYTES:
            self._send(self._handshake.proof(nonce))
        if self.why or len(proof) < PROOF_BYTES:
            return None
        if not self._handshake.accepts(nonce, proof):
            self.why = "the other process does not know the run's token"
            return None
        is_signed, session_key = self._settings.is_signed, self._handshake.session_key(nonce)
        return ServerChannel(self.connection, Seal(session_key, *self._sides) if is_signed else None)


def _drop_strangers(greetings: list[_Greeting], selector: selectors.BaseSelector) -> None:
    """Closes the connections of those that were refused, took too long, or are the oldest of too many."""
    late = time.monotonic() - _HANDSHAKE_SECONDS
    for greeting in greetings[:]:
        if greeting.why or greeting.born < late or len(greetings) > _MOST_GREETINGS:
            why = greeting.why or "the process did not prove itself in time"
            logger.warning("Refused a connection to the parameter server: %s.", why)
            greetings.remove(greeting)
            selector.unregister(greeting.connection)
            greeting.connection.close()


class ServerTransport:
    """Listens, and receives messages of processes that know the token.

    Args:
        largest: limit of a message's body in bytes.
    """

    def __init__(self, settings: TransportSettings, largest: int) -> None:
        self._settings, self._largest = settings, largest
        self._arrived: queue.SimpleQueue[tuple[int, ServerMessage | None]] = queue.SimpleQueue()
        self._channels: dict[int, ServerChannel] = {}
        self._claiming = threading.Lock()
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._listener = socket.create_server((settings.host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = (settings.host, self._listener.getsockname()[1])
        """Where the others connect."""
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._accept, args=(selector,), daemon=True, name="parameter server: accept").start()

    def join(self, rank: int, address: tuple[str, int]) -> None:
        """Connects to another server's transport; both sides may then send."""
        channel = connect(address, self._settings)
        with self._claiming:
            self._channels[rank] = channel
        self._start(self._read, rank, channel)

    def get(self, timeout: float | None = None) -> tuple[int, ServerMessage | None]:
        """Returns the sender's rank and its next message, or None where the sender has disconnected.

        Raises:
            queue.Empty: nothing arrived within ``timeout`` seconds.
        """
        return self._arrived.get(timeout=timeout)

    def send(self, rank: int, message: ServerMessage) -> bool:
        """Sends a message to a connected rank and returns whether it was sent; disconnects a rank that fails."""
        channel = self._channels.get(rank)
        if channel is None:
            return False
        try:
            channel.send(message)
        except OSError:
            self.cut(rank)
            return False
        return True

    def cut(self, rank: int) -> None:
        """Closes a connection; ``get`` then reports the loss."""
        if (channel := self._channels.get(rank)) is not None:
            with suppress(OSError):
                channel.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for rank in list(self._channels):
            self.cut(rank)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Accepts connections and has strangers prove, all in this thread, that they know the token."""
        greetings: list[_Greeting] = []
        with selector:
            while self._listener.fileno() >= 0 and self._greet(selector, greetings):
                _drop_strangers(greetings, selector)
        for greeting in greetings:
            greeting.connection.close()

    def _greet(self, selector: selectors.BaseSelector, greetings: list[_Greeting]) -> bool:
        """Takes one turn of those who connect and those who answer; returns False where the listener is closed."""
        for key, _ in selector.select(1.0):
            if isinstance(key.data, _Greeting):
                if (channel := key.data.receive()) is not None:
                    channel.connection.settimeout(_HANDSHAKE_SECONDS)
                    greetings.remove(key.data)
                    selector.unregister(key.data.connection)
                    self._start(self._admit, channel)
                continue
            try:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                greeting = _Greeting(connection, self._settings, "server")
            except OSError as error:
                if error.errno not in _PASSING:
                    return False
                time.sleep(_PAUSE)
                continue
            greetings.append(greeting)
            selector.register(greeting.connection, selectors.EVENT_READ, greeting)
        return True

    def _start(self, read: Callable[..., None], *of: Any) -> None:
        threading.Thread(target=read, args=of, daemon=True, name="parameter server: rank").start()

    def _admit(self, channel: ServerChannel) -> None:
        """Takes in a process that has proven to know the token, and reads its messages."""
        try:
            hello = channel.receive(1 << 10)
            rank = hello.content.get("rank")
            if hello.kind != "hello" or not isinstance(rank, int):
                raise Refused("the process did not send its rank")
            _prepare(channel.connection, self._settings.timeout)
            with self._claiming:  # of two connections of a rank at the same time one is refused
                if rank in self._channels:
                    raise Refused(f"rank {rank} is already connected")
                self._channels[rank] = channel
        except (OSError, Refused) as error:
            logger.warning("Refused a connection to the parameter server: %s.", error)
            channel.connection.close()
            return
        self._read(rank, channel)

    def _read(self, rank: int, channel: ServerChannel) -> None:
        try:
            while True:
                self._arrived.put((rank, channel.receive(self._largest)))
        except Refused as error:
            logger.warning("Disconnected rank %d from the parameter server: %s.", rank, error)
        except (OSError, ValueError):  # either side has closed the connection
            pass
        with suppress(OSError):
            channel.connection.close()
        self._arrived.put((rank, None))


def connect(address: tuple[str, int], settings: TransportSettings) -> ServerChannel:
    """Connects to a transport and authenticates both sides.

    Raises:
        RankError: nothing listens there, or the process there does not know the token.
    """
    host, port = address
    with ExitStack() as stack:
        try:
            connection = socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS)
            stack.enter_context(connection)
            channel = settings.open(connection, "client")
            channel.send(ServerMessage("hello", {"rank": settings.rank}))
            _prepare(connection, settings.timeout)
            stack.pop_all()
        except (OSError, Refused) as error:
            raise RankError(
                f"Rank {settings.rank} cannot connect to the parameter server at {host}:{port}: {error}."
            ) from error
    return channel


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
