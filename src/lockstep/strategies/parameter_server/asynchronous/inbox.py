"""A server's end of all connections: one thread reads each, one loop takes what has come, in the order of arrival.

Threads only read bytes. A process that is stopped in the middle of a message, or a stranger that says nothing, holds up
its own thread and nobody else.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from contextlib import ExitStack, suppress

from lockstep.errors import RankError
from lockstep.strategies.parameter_server.asynchronous.wire import (
    Message,
    Refused,
    prove_to_client,
    prove_to_server,
    receive,
    send,
)

logger = logging.getLogger(__name__)
_GREETING_SECONDS = 10.0
_LONGEST_GREETING = 1 << 10
_WAITING = 64


class Inbox:
    """Listens on this host alone, and takes messages of processes that know the token.

    Args:
        token: the run's secret.
        rank: this process's.
        largest: bytes that the body of a message may have.
        patience: seconds that a message which was begun, in either direction, may take.
    """

    def __init__(self, token: bytes, rank: int, largest: int, patience: float) -> None:
        self._token, self._rank, self._largest, self._patience = token, rank, largest, patience
        self._arrived: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._connections: dict[int, socket.socket] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_WAITING)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens, on loopback."""
        threading.Thread(target=self._accept, daemon=True, name="parameter server: accept").start()

    def join(self, rank: int, port: int) -> None:
        """Connects to another server's inbox, over which both may speak."""
        connection = connect(port, self._token, self._rank, self._patience)
        self._connections[rank] = connection
        self._start_reading(rank, connection)

    def get(self, timeout: float | None = None) -> tuple[int, Message | None]:
        """The next message and its sender's rank; None instead of a message where the sender has gone.

        Raises:
            queue.Empty: nothing came within ``timeout`` seconds.
        """
        return self._arrived.get(timeout=timeout)

    def send(self, rank: int, message: Message) -> bool:
        """Sends a message to a rank that is connected; whether it went out. Who does not take it, is cut off."""
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
        """Ends a connection; the loss arrives as a message would."""
        if (connection := self._connections.get(rank)) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all connections."""
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
        """Lets in who knows the token and says which rank it is."""
        try:
            connection.settimeout(_GREETING_SECONDS)
            prove_to_client(connection, self._token)
            hello = receive(connection, _LONGEST_GREETING)
            rank = hello.content.get("rank")
            if hello.kind != "hello" or not isinstance(rank, int) or rank in self._connections:
                raise Refused("a process did not say which rank it is, or another had said so before")
        except (OSError, Refused) as error:
            logger.warning("A connection to the parameter server was refused: %s.", error)
            connection.close()
            return
        _prepare(connection, self._patience)
        self._connections[rank] = connection
        self._read(rank, connection)

    def _start_reading(self, rank: int, connection: socket.socket) -> None:
        threading.Thread(
            target=self._read, args=(rank, connection), daemon=True, name=f"parameter server: rank {rank}"
        ).start()

    def _read(self, rank: int, connection: socket.socket) -> None:
        try:
            while True:
                self._arrived.put((rank, receive(connection, self._largest)))
        except Refused as error:
            logger.warning("Rank %d is cut off from the parameter server: %s.", rank, error)
        except (OSError, ValueError):  # it has gone, or this side has closed
            pass
        with suppress(OSError):
            connection.close()
        self._arrived.put((rank, None))


def connect(port: int, token: bytes, rank: int, patience: float) -> socket.socket:
    """A connection to an inbox on this host, proven on both sides.

    Raises:
        RankError: nobody listens there, or somebody who does not know the token.
    """
    with ExitStack() as stack:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=_GREETING_SECONDS)
            stack.enter_context(connection)
            prove_to_server(connection, token)
            send(connection, Message("hello", {"rank": rank}))
            _prepare(connection, patience)
            stack.pop_all()
        except (OSError, Refused) as error:
            raise RankError(
                f"Rank {rank} cannot reach the parameter server on port {port} of this host: {error}."
            ) from error
    return connection


def _prepare(connection: socket.socket, patience: float) -> None:
    connection.settimeout(patience)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
