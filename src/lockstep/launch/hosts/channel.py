"""One end of a connection between two supervisors: JSON lines, each authenticated with the token.

    both        {"hello": "lockstep 2", "nonce": ...}
    both        {"proof": see ``lockstep.distributed.authentication``}
    then        HMAC(session key, side, number of the line, text) text

The session key is derived from the token and both nonces, and lines are numbered, so a recorded line cannot be
replayed. Messages are authenticated, not encrypted. Nothing is unpickled, and the length of a line is limited.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from contextlib import suppress
from enum import Enum
from typing import Any

from lockstep.distributed.authentication import (
    LONGEST_GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    Refused,
    Seal,
    parse_hex,
    parse_object,
)

_HELLO = "lockstep 2"
LONGEST_LINE = 4 << 20
"""Bytes; a longer line closes the connection."""
_PROOF = 2 * PROOF_BYTES  # in hexadecimal digits
_NOT_CONNECTED_YET = (errno.ENOTCONN, errno.EINPROGRESS, errno.EALREADY)


class Fault(Enum):
    """Why a channel was closed."""

    NONE = ""
    GONE = "it closed the connection"
    UNKNOWN_PROTOCOL = "it does not speak the Lockstep protocol"
    TOKEN = "it uses another token"
    FORGED = "a message failed authentication"


class HostChannel:
    """A non-blocking connection, made or being made, that delivers only authenticated messages.

    ``side`` is ``server`` or ``client``: different at both ends, so a message cannot be reflected to its sender.
    """

    def __init__(self, connection: socket.socket, token: bytes, side: str) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._sides = (side, "client" if side == "server" else "server")
        self._handshake = Handshake(token, *self._sides)
        self._other_nonce = b""
        self._seal: Seal | None = None
        self._received, self._out = b"", b""
        self.born = time.monotonic()
        self.fault = Fault.NONE
        self.why = ""
        """The system's message when the connection broke."""
        self._queue({"hello": _HELLO, "nonce": self._handshake.nonce.hex()})

    @property
    def is_open(self) -> bool:
        """True until the connection is closed."""
        return self.fault is Fault.NONE

    @property
    def is_proven(self) -> bool:
        """True once the other end has proven that it knows the token."""
        return self._seal is not None

    @property
    def has_unsent(self) -> bool:
        """True while part of a message waits to be sent."""
        return bool(self._out)

    def send(self, message: dict[str, Any]) -> bool:
        """Sends a message, unless an earlier one is still being sent; returns whether it did."""
        self.flush()
        if not self.is_open or self._seal is None or self._out:
            return False
        text = json.dumps(message)
        self._out = f"{self._seal.sign(text.encode()).hex()} {text}\n".encode()
        self.flush()
        return True

    def flush(self) -> None:
        """Sends as much as the socket accepts now."""
        while self._out and self.is_open:
            try:
                self._out = self._out[self.connection.send(self._out) :]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NOT_CONNECTED_YET:
                    self._read()  # its last message says why
                    self._break(error)
                return

    def receive(self) -> list[dict[str, Any]]:
        """Returns the authenticated messages that have arrived."""
        if self.is_open:
            self._read()
        messages = []
        while b"\n" in self._received and self.fault in (Fault.NONE, Fault.GONE):
            line, _, self._received = self._received.partition(b"\n")
            if self._seal is None:
                self._greet(line)
            elif (message := self._verified(line, self._seal)) is not None:
                messages.append(message)
        if len(self._received) > self._longest:
            self.close(Fault.UNKNOWN_PROTOCOL)
        return messages

    def close(self, fault: Fault = Fault.GONE) -> None:
        """Closes the connection; any other fault replaces ``GONE``."""
        if self.fault in (Fault.NONE, Fault.GONE):
            self.fault = fault
        self.connection.close()

    @property
    def _longest(self) -> int:
        """Bytes of a line that is accepted at this point."""
        return LONGEST_LINE if self.is_proven else LONGEST_GREETING

    def _read(self) -> None:
        """Reads what has arrived, at most one longest line."""
        try:
            while len(self._received) <= self._longest:
                part = self.connection.recv(65536)
                if not part:
                    self.close()
                    return
                self._received += part
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        if error.errno not in _NOT_CONNECTED_YET:
            self.why = error.strerror or str(error)
            self.close()

    def _greet(self, line: bytes) -> None:
        """Handles the other end's nonce, then its proof."""
        try:
            greeting = parse_object(line)
            if not self._other_nonce:
                if greeting.get("hello") != _HELLO:
                    raise Refused(f"a greeting is not {_HELLO!r}")
                self._other_nonce = parse_hex(greeting.get("nonce"), NONCE_BYTES)
                self._queue({"proof": self._handshake.proof(self._other_nonce).hex()})
                return
            proof = parse_hex(greeting.get("proof"), PROOF_BYTES)
        except Refused:
            self.close(Fault.UNKNOWN_PROTOCOL)
            return
        if self._handshake.accepts(self._other_nonce, proof):
            self._seal = Seal(self._handshake.session_key(self._other_nonce), *self._sides)
        else:
            self.close(Fault.TOKEN)

    def _verified(self, line: bytes, seal: Seal) -> dict[str, Any] | None:
        proof, text = line[:_PROOF], line[_PROOF + 1 :]
        with suppress(Refused, ValueError, RecursionError):
            seal.check(parse_hex(proof.decode("ascii"), PROOF_BYTES), text)
            message = json.loads(text)
            if isinstance(message, dict):
                return message
        self.close(Fault.FORGED)
        return None

    def _queue(self, greeting: dict[str, str]) -> None:
        self._out += json.dumps(greeting).encode() + b"\n"
        self.flush()
