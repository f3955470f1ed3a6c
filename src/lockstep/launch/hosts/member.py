"""The end of the link on every host but node 0: connects, connects again when it hears nothing, and listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import ConfigError, RankError
from lockstep.launch.hosts.channel import Channel, Fault
from lockstep.launch.hosts.interface import resolve
from lockstep.launch.hosts.options import HostOptions
from lockstep.launch.hosts.peer import Peer
from lockstep.launch.hosts.roll_call import Hello
from lockstep.launch.hosts.switchboard import Switchboard

_BEAT = 1.0
_ATTEMPT = 2.0
"""Seconds that an attempt to connect may take."""
_PAUSE = 0.5
_SILENT = 2.5
"""Seconds without a word after which a second connection is tried: a stuck one waits ever longer to try again."""


class Member:
    """Keeps a connection to node 0.

    Args:
        options: the address of node 0 and the token.
        hello: of this host.
        say: takes a line for the terminal.
    """

    def __init__(self, options: HostOptions, hello: Hello, say: Callable[[str], None]) -> None:
        self._options, self._hello = options, hello
        self._addresses = resolve(options.host, options.port)
        self._switchboard = Switchboard()
        self._attempt: Channel | None = None
        self._next_attempt, self._why_not = 0.0, "no connection was made yet"
        self._state: dict[str, Any] = {}
        self._told_at = 0.0
        self.peer = Peer("host 0", say, options.silence_limit)
        """Node 0."""

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._switchboard.fileno()

    def await_plan(self) -> dict[str, Any]:
        """Waits for what node 0 decides when every host has arrived.

        Raises:
            RankError: node 0 was not reached in time, or not all hosts were.
            ConfigError: node 0 refuses this host.
        """
        deadline = time.monotonic() + self._options.start_limit
        while True:
            self.turn({})
            if self.peer.channel is None and time.monotonic() > deadline:
                raise RankError(
                    f"host 0 was not reached at {self._options.master} within {self._options.start_limit:g} s: "
                    f"{self._why_not}. Start the same command there with --node-rank 0, and check that the "
                    "network lets the port through."
                )
            state = self.peer.state
            if refused := state.get("refused"):
                kind = ConfigError if state.get("code") == ConfigError.exit_code else RankError
                raise kind(str(refused))
            if self.peer.lost:
                raise RankError(f"host 0 {self.peer.lost}, before every host had arrived.")
            if isinstance(plan := state.get("plan"), dict):
                self.peer.text = f"host 0 ({plan['name']})"
                return plan
            self.wait(_PAUSE)

    def wait(self, seconds: float) -> None:
        """Returns when something has happened, or after ``seconds``."""
        self._switchboard.wait(seconds)

    def turn(self, state: dict[str, Any]) -> None:
        """Hears node 0, and tells it the state of this host when it has changed or a second is over."""
        self._keep_connected()
        if self.peer.channel is not None:
            self.peer.hear()
        now = time.monotonic()
        if state != self._state or now - self._told_at >= _BEAT:
            self._state, self._told_at = state, now
            self._tell(now)
        if self.peer.channel is not None:
            self.peer.channel.flush()
        self._switchboard.settle()

    def close(self) -> None:
        """Closes the connection."""
        self._switchboard.close()

    def _tell(self, now: float) -> None:
        if self.peer.channel is not None:
            self.peer.channel.send({**self._state, "now": now, "hello": self._fields})

    @property
    def _fields(self) -> dict[str, Any]:
        return {**vars(self._hello), "settings": dict(self._hello.settings)}

    def _keep_connected(self) -> None:
        now = time.monotonic()
        if self._attempt is not None:
            self._follow_attempt(self._attempt, now)
        channel = self.peer.channel
        needed = channel is None or not channel.is_open or now - self.peer.heard_at > _SILENT
        if self._attempt is None and needed and not self.peer.lost and now >= self._next_attempt:
            self._next_attempt = now + _PAUSE
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        """Dials the next address of node 0; a name may have several, of which it listens on one."""
        address = self._addresses[0]
        self._addresses = [*self._addresses[1:], address]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect((address, self._options.port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._why_not = error.strerror or str(error)
            connection.close()
            return
        self._attempt = Channel(connection, self._options.token, "member")
        self._switchboard.add(self._attempt)

    def _follow_attempt(self, attempt: Channel, now: float) -> None:
        attempt.flush()
        messages = attempt.receive()
        if attempt.is_proven and attempt.is_open:
            self._attempt = None
            self.peer.connect(attempt)
            self._tell(now)
            for message in messages:
                self.peer.take(message)
        elif attempt.fault in (Fault.TOKEN, Fault.STRANGER):
            self._attempt = None
            raise ConfigError(
                f"What answers at {self._options.master} was refused: {attempt.fault.value}. Check the address, and "
                "copy the token file of the host of node-rank 0 to this one."
            )
        elif not attempt.is_open or now - attempt.born > _ATTEMPT:
            self._why_not = attempt.why or "no answer"
            attempt.close()
            self._attempt = None
