"""The supervisor's end of the fork server: starts it, speaks JSON lines with it, and ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

_PROGRAM = "from lockstep.launch.fork_server import main; main()"


class ServerProcess:
    """A running fork server.

    It has a session of its own, so that Ctrl-C at the terminal reaches the supervisor alone.

    Args:
        order: what to import and which ranks to start.
        environment: of the server and so of every rank.
        signal_pipe: descriptor that the ranks inherit.
    """

    def __init__(self, order: Mapping[str, Any], environment: Mapping[str, str], signal_pipe: int) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            arguments = [str(theirs.fileno()), str(signal_pipe), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                env=dict(environment),
                pass_fds=(theirs.fileno(), signal_pipe),
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._received = b""
        self.closed = False
        """Whether the server has closed its end."""
        self._send(order)
        self._channel.setblocking(False)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the server, and with it whatever ranks are left."""
        self._channel.close()
        if kind is not None:
            self._process.kill()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fileno(self) -> int:
        """The descriptor to wait on for events."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def events(self) -> list[dict[str, Any]]:
        """The events that have arrived; never blocks."""
        try:
            while part := self._channel.recv(65536):
                self._received += part
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Sends a signal to ranks that have not ended; SIGKILL also to everything they started."""
        try:
            self._send({"signal": int(number), "ranks": list(ranks)})
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def kill(self) -> None:
        """Ends the server, and by the parent-death signal its ranks, at once."""
        self._process.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")
