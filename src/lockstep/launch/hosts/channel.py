"""One end of a connection between two supervisors: JSON lines, each proven to come from the holder of the token.

    both        {"hello": "lockstep 1", "nonce": ...}
    both        {"proof": HMAC(token, own side, own nonce, other nonce)}
    then        HMAC(session key, side, number of the line, text) text

The session key comes from the token and both nonces, and lines are numbered, so that nothing which was overheard can
be sent again. What is said is not secret. Nothing is unpickled, and a line has a longest length.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import time
from contextlib import suppress
from enum import Enum
from typing import Any

_HELLO = "lockstep 1"
_LONGEST_GREETING = 1024
LONGEST_LINE = 4 << 20
"""Bytes; a host with more ranks than fit is cut off with a message."""
_PROOF = 64
"""Length of a proof in hexadecimal digits."""
_NOT_CONNECTED_YET = (errno.ENOTCONN, errno.EINPROGRESS, errno.EALREADY)


class Fault(Enum):
    """Why a channel was closed."""

    NONE = ""
    GONE = "it closed the connection"
    STRANGER = "it does not speak as Lockstep does"
    TOKEN = "it holds another token"
    FORGED = "a line was changed on its way"


class Channel:
    """A connection that never blocks and delivers only what the other end has proven to have said.

    Args:
        connection: a connected socket, or one that is being connected.
        token: the shared secret.
        side: ``hub`` or ``member``; each end has its own, so that what one says cannot be sent back to it.
    """

    def __init__(self, connection: socket.socket, token: bytes, side: str) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._token, self._side = token, side
        self._other = "member" if side == "hub" else "hub"
        self._nonce, self._other_nonce = secrets.token_hex(32), ""
        self._key = b""
        self._sent, self._heard = 0, 0
        self._received, self._out = b"", b""
        self.born = time.monotonic()
        self.fault = Fault.NONE
        """Why it was closed; ``NONE`` while it is open."""
        self.why = ""
        """What the system said when the connection broke."""
        self._queue({"hello": _HELLO, "nonce": self._nonce})

    @property
    def is_open(self) -> bool:
        """Whether the other end may still be heard."""
        return self.fault is Fault.NONE

    @property
    def is_proven(self) -> bool:
        """Whether the other end has shown that it knows the token."""
        return bool(self._key)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the connection."""
        return bool(self._out)

    def send(self, message: dict[str, Any]) -> bool:
        """Sends a message, unless an earlier one is still on its way; says whether it did."""
        self.flush()
        if not self.is_open or not self._key or self._out:
            return False
        text = json.dumps(message)
        proof = self._proof_of_line(self._side, self._sent, text)
        self._sent += 1
        self._out = f"{proof} {text}\n".encode()
        self.flush()
        return True

    def flush(self) -> None:
        """Hands to the network what it takes now."""
        while self._out and self.is_open:
            try:
                self._out = self._out[self.connection.send(self._out) :]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NOT_CONNECTED_YET:
                    self._read()  # its last words say why
                    self._break(error)
                return

    def receive(self) -> list[dict[str, Any]]:
        """The proven messages that have arrived."""
        if self.is_open:
            self._read()
        messages = []
        while b"\n" in self._received and self.fault in (Fault.NONE, Fault.GONE):
            line, _, self._received = self._received.partition(b"\n")
            if not self._key:
                self._greet(line)
            elif (message := self._proven(line)) is not None:
                messages.append(message)
        if len(self._received) > (LONGEST_LINE if self._key else _LONGEST_GREETING):
            self.close(Fault.STRANGER)
        return messages

    def close(self, fault: Fault = Fault.GONE) -> None:
        """Closes the connection; that it has gone is the least of reasons."""
        if self.fault in (Fault.NONE, Fault.GONE):
            self.fault = fault
        self.connection.close()

    def _read(self) -> None:
        """Reads what is there, at most as much as a longest line at a time."""
        try:
            while len(self._received) <= (LONGEST_LINE if self._key else _LONGEST_GREETING):
                part = self.connection.recv(65536)
                if not part:
                    self.close(Fault.GONE)
                    return
                self._received += part
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        if error.errno not in _NOT_CONNECTED_YET:
            self.why = error.strerror or str(error)
            self.close(Fault.GONE)

    def _greet(self, line: bytes) -> None:
        """Takes the other end's nonce, then its proof."""
        try:
            said = json.loads(line)
            if not self._other_nonce:
                nonce = str(said["nonce"])
                if said["hello"] != _HELLO or len(nonce) != len(self._nonce):
                    raise ValueError
                self._other_nonce = nonce
                self._queue({"proof": self._proof_of_side(self._side, self._nonce, nonce)})
                return
            proof = str(said["proof"])
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close(Fault.STRANGER)
            return
        if not _equal(proof, self._proof_of_side(self._other, self._other_nonce, self._nonce)):
            self.close(Fault.TOKEN)
            return
        nonces = sorted([f"{self._side} {self._nonce}", f"{self._other} {self._other_nonce}"])
        self._key = hmac.digest(self._token, " ".join(["session", *nonces]).encode(), "sha256")

    def _proven(self, line: bytes) -> dict[str, Any] | None:
        try:
            text = line[_PROOF + 1 :].decode()
            proof = line[:_PROOF].decode()
            if _equal(proof, self._proof_of_line(self._other, self._heard, text)):
                message = json.loads(text)
                self._heard += 1
                if isinstance(message, dict):
                    return message
        except (ValueError, RecursionError):
            pass
        self.close(Fault.FORGED)
        return None

    def _proof_of_side(self, side: str, own: str, other: str) -> str:
        return hmac.new(self._token, f"greeting {side} {own} {other}".encode(), "sha256").hexdigest()

    def _proof_of_line(self, side: str, number: int, text: str) -> str:
        return hmac.new(self._key, f"{side} {number} {text}".encode(), "sha256").hexdigest()

    def _queue(self, greeting: dict[str, str]) -> None:
        self._out += json.dumps(greeting).encode() + b"\n"
        self.flush()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
