"""The link between supervisors: node 0 runs a ``ControlServer``, every other host a ``ControlClient``.

Both exchange states: each message holds everything that its sender has to say, so a lost message needs no repetition
and a new connection continues where the former one broke.

silent for 3 s      a warning on the terminal; the host may come back
silent for 13 s     lost
closed for 3 s      lost: its command has ended, or it would have connected again
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.network import resolve
from lockstep.errors import EXIT_CONFIG, ConfigError, RankError
from lockstep.launch.hosts.channel import Fault, HostChannel
from lockstep.launch.hosts.roll_call import Hello, HostOptions, absent, compare
from lockstep.launch.options import new_run_id

_WARN_AFTER = 3.0
_CLOSED_LIMIT = 3.0
_INTERVAL = 1.0
"""Seconds after which an unchanged state is sent again."""
_GREETING_LIMIT = 5.0
_MOST_UNAUTHENTICATED = 64
_ATTEMPT = 2.0
"""Seconds that an attempt to connect may take."""
_PAUSE = 0.5
_SILENT = 2.5
"""Seconds of silence after which a second connection is tried: a stuck one waits ever longer to send again."""


@dataclass
class Peer:
    """One other host: its last message, how long ago that arrived, and whether the host is lost."""

    text: str
    """As in ``host 1 (fb)``."""
    say: Callable[[str], None]
    """Prints a line on the terminal."""
    silence_limit: float
    channel: HostChannel | None = None
    state: dict[str, Any] = field(default_factory=dict)
    """Its last message."""
    offset: float = float("inf")
    """Seconds to add to its ``time.monotonic()``, from the message that travelled fastest."""
    lost: str = ""
    """Why it counts as lost; empty while it does not."""
    received_at: float = field(default_factory=time.monotonic)
    _judged_at: float = field(default_factory=lambda: time.monotonic())
    _closed_at: float | None = None
    _is_warned: bool = False

    @property
    def is_connected(self) -> bool:
        """True while a connection is open."""
        return self.channel is not None and self.channel.is_open

    def connect(self, channel: HostChannel) -> None:
        """Replaces the connection by a new, authenticated one."""
        if self.channel is not None and self.channel is not channel:
            self.channel.close()
        self.channel = channel
        self._closed_at = None
        self._note_life(time.monotonic())

    def receive(self) -> None:
        """Handles the messages that have arrived, and decides whether the host is lost."""
        for message in [] if self.channel is None else self.channel.receive():
            self.handle(message)
        self._judge(time.monotonic())

    def handle(self, message: dict[str, Any]) -> None:
        """Stores one message."""
        now = time.monotonic()
        self._note_life(now)
        self.state = message
        if isinstance(sent := message.get("now"), int | float):
            self.offset = min(self.offset, now - sent)

    def _note_life(self, now: float) -> None:
        if self._is_warned:
            self.say(f"{self.text} is back after {now - self.received_at:.0f} s.")
            self._is_warned = False
        self.received_at = now

    def _judge(self, now: float) -> None:
        pause = now - self._judged_at
        self._judged_at = now
        if pause > _WARN_AFTER:  # this process was suspended, as by ``scontrol suspend``, and heard nobody
            self.received_at += pause
        if self.is_connected:
            self._closed_at = None
        elif self._closed_at is None:
            self._closed_at = now
        if self.lost:
            return
        silence = now - self.received_at
        if left := self.state.get("left"):
            self.lost = f"left: {left}"
        elif refused := self.state.get("refused"):
            self.lost = f"refused this host: {refused}"
        elif self._closed_at is not None and now - self._closed_at > _CLOSED_LIMIT:
            self.lost = "closed the connection and did not reconnect: its command has ended"
        elif silence > self.silence_limit:
            self.lost = f"has sent nothing for {silence:.0f} s"
        elif silence > _WARN_AFTER and not self._is_warned:
            self._is_warned = True
            self.say(f"{self.text} has sent nothing for {silence:.0f} s; it may come back.")
        if self.lost and "refused" not in self.state:
            self.say(f"{self.text} {self.lost}.")


class _ControlLink:
    """Connections that are watched behind one descriptor, and the state that is sent over them."""

    def __init__(self, options: HostOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._selector = selectors.DefaultSelector()
        self._state: dict[str, Any] = {}
        self._sent_at = 0.0
        self.peers: dict[int, Peer] = {}
        """The other hosts that this one is connected to, by their numbers."""

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._selector.fileno()

    def wait(self, seconds: float) -> None:
        self._selector.select(max(0.0, seconds))

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _open_channel(self, connection: socket.socket, side: str) -> HostChannel:
        """Watches a connection until it is closed."""
        channel = HostChannel(connection, self._options.token, side)
        self._update_interest()  # the descriptor may be a closed channel's
        if channel.is_open:
            self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, channel)
        return channel

    def _update_interest(self) -> None:
        """Unregisters closed channels, and waits for room only where something is unsent."""
        for key in list(self._selector.get_map().values()):
            channel = key.data
            if not isinstance(channel, HostChannel):
                continue
            if not channel.is_open:
                self._selector.unregister(key.fileobj)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            if events != key.events:
                self._selector.modify(key.fileobj, events, channel)

    def _is_due(self, state: dict[str, Any], now: float) -> bool:
        """Stores the state; returns whether it is to be sent: it has changed, or a second is over."""
        if state == self._state and now - self._sent_at < _INTERVAL:
            return False
        self._state, self._sent_at = state, now
        return True


class ControlServer(_ControlLink):
    """Listens for the other hosts, on one address of this host and on no other; ``say`` prints a line."""

    def __init__(self, options: HostOptions, address: str, hello: Hello, say: Callable[[str], None]) -> None:
        super().__init__(options, say)
        self._listener = listen(address, options.port)
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self.run_id = new_run_id()
        """Of this start of the command."""
        self._unauthenticated: list[HostChannel] = []
        self._refused: set[str] = set()
        self.hellos = {0: hello}
        """Of every host that has connected, by its number."""

    def wait_for_hosts(self) -> None:
        """Waits until every host has connected (else ``RankError``), and compares their settings (``ConfigError``)."""
        deadline = time.monotonic() + self._options.start_limit
        while len(self.hellos) < self._options.nodes:
            if time.monotonic() > deadline:
                raise absent(self.hellos, self._options.nodes, self._options.start_limit)
            self.wait(min(_INTERVAL, deadline - time.monotonic()))
            self.exchange({})
            for node in [node for node, peer in self.peers.items() if peer.lost]:
                del self.peers[node], self.hellos[node]  # it may connect again
        compare(self.hellos)

    def exchange(self, state: dict[str, Any]) -> None:
        """Receives from every host, and sends each the state when it has changed or a second is over."""
        self._accept()
        for channel in list(self._unauthenticated):
            self._authenticate(channel)
        for peer in self.peers.values():
            peer.receive()
        now = time.monotonic()
        is_due = self._is_due(state, now)
        for peer in self.peers.values():
            if peer.channel is not None:
                if is_due and not peer.lost:
                    peer.channel.send({**state, "now": now})
                peer.channel.flush()
        self._update_interest()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no connection is waiting, or it was reset
                return
            if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                self._unauthenticated.pop(0).close()
            self._unauthenticated.append(self._open_channel(connection, "server"))

    def _authenticate(self, channel: HostChannel) -> None:
        """Waits for the first authenticated message, which says which host it is."""
        try:
            address = str(channel.connection.getpeername()[0])
        except OSError:
            address = ""
        messages = channel.receive()
        if messages:
            self._unauthenticated.remove(channel)
            self._admit(channel, messages[0])
        elif not channel.is_open or time.monotonic() - channel.born > _GREETING_LIMIT:
            self._unauthenticated.remove(channel)
            fault = Fault.UNKNOWN_PROTOCOL if channel.is_open else channel.fault
            channel.close()
            if fault in (Fault.UNKNOWN_PROTOCOL, Fault.TOKEN) and address not in self._refused:
                self._refused.add(address)
                self._say(f"refused a connection from {address or 'an unknown address'}: {fault.value}.")

    def _admit(self, channel: HostChannel, message: dict[str, Any]) -> None:
        """Adds or reconnects a host, or tells it why it is refused."""
        try:
            hello = Hello.from_json(message["hello"])
        except (KeyError, ValueError, TypeError):
            channel.close(Fault.UNKNOWN_PROTOCOL)
            return
        refusal = self._refusal(hello)
        if refusal:
            channel.send({"refused": refusal, "code": EXIT_CONFIG})
            channel.close()
            return
        if hello.node not in self.peers:
            self.hellos[hello.node] = hello
            self.peers[hello.node] = Peer(hello.text, self._say, self._options.silence_limit)
            self._say(f"{hello.text} connected ({len(self.hellos)}/{self._options.nodes})")
        self.peers[hello.node].connect(channel)
        self.peers[hello.node].handle(message)
        self._sent_at = 0.0

    def _refusal(self, hello: Hello) -> str:
        if hello.run_id not in ("", self.run_id):
            return (
                f"host 0 was started anew, with the run {self.run_id}, and this host is of the run {hello.run_id}, "
                "which has ended. Start the command again here too."
            )
        if not 0 < hello.node < self._options.nodes:
            return (
                f"node-rank {hello.node} tried to join a run of {self._options.nodes} hosts, in which the other hosts "
                f"have the numbers 1 to {self._options.nodes - 1}. Give every host the same --nnodes."
            )
        former = self.hellos.get(hello.node)
        if former is not None and former.instance != hello.instance:
            return (
                f"node-rank {hello.node} is used twice, by {former.name} and {hello.name}. "
                "Give each host its own number."
            )
        if former is not None and (lost := self.peers[hello.node].lost):
            return f"the run continued without this host: it {lost}."
        if former is None and len(self.hellos) == self._options.nodes:
            return "the run already has all its hosts."
        return ""


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens on one address of this host; ``ConfigError`` if the port is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(
            f"--master names port {port}, and this host cannot listen on {address}:{port}: {why}. "
            "Another run may use it: choose a port that is free, and whose next port is free too."
        ) from error
    listener.setblocking(False)
    return listener


class ControlClient(_ControlLink):
    """Keeps a connection to node 0, and connects again when nothing arrives; ``say`` prints a line."""

    def __init__(self, options: HostOptions, hello: Hello, say: Callable[[str], None]) -> None:
        super().__init__(options, say)
        self._hello = {**vars(hello), "settings": dict(hello.settings)}
        self._addresses = resolve(options.host, options.port)
        self._attempt: HostChannel | None = None
        self._next_attempt, self._why_not = 0.0, "no connection was made yet"
        self.peer = Peer("host 0", say, options.silence_limit)
        """Node 0."""
        self.peers[0] = self.peer

    def wait_for_plan(self) -> dict[str, Any]:
        """Waits for the plan of node 0, which it sends when every host has connected.

        ``RankError`` if node 0 was not reached in time, or not all hosts were; ``ConfigError`` if it refuses this host.
        """
        deadline = time.monotonic() + self._options.start_limit
        while True:
            self.exchange({})
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
                raise RankError(f"host 0 {self.peer.lost}, before every host had connected.")
            if isinstance(plan := state.get("plan"), dict):
                self.peer.text = f"host 0 ({plan['name']})"
                # A host 0 that was restarted does not take it in.
                self._hello["run_id"] = plan.get("run_id", "")
                return plan
            self.wait(_PAUSE)

    def exchange(self, state: dict[str, Any]) -> None:
        """Receives from node 0, and sends it the state of this host when it has changed or a second is over."""
        self._keep_connected()
        if self.peer.channel is not None:
            self.peer.receive()
        now = time.monotonic()
        if self._is_due(state, now):
            self._send(now)
        if self.peer.channel is not None:
            self.peer.channel.flush()
        self._update_interest()

    def _send(self, now: float) -> None:
        if self.peer.channel is not None:
            self.peer.channel.send({**self._state, "now": now, "hello": self._hello})

    def _keep_connected(self) -> None:
        now = time.monotonic()
        if self._attempt is not None:
            self._follow_attempt(self._attempt, now)
        is_needed = not self.peer.is_connected or now - self.peer.received_at > _SILENT
        if self._attempt is None and is_needed and not self.peer.lost and now >= self._next_attempt:
            self._next_attempt = now + _PAUSE
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        """Connects to the next address of node 0; a name may have several, of which it listens on one."""
        address = self._addresses[0]
        self._addresses = [*self._addresses[1:], address]
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect((address, self._options.port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._why_not = error.strerror or str(error)
            connection.close()
            return
        self._attempt = self._open_channel(connection, "client")

    def _follow_attempt(self, attempt: HostChannel, now: float) -> None:
        attempt.flush()
        messages = attempt.receive()
        if attempt.is_proven and attempt.is_open:
            self._attempt = None
            self.peer.connect(attempt)
            self._send(now)
            for message in messages:
                self.peer.handle(message)
        elif attempt.fault in (Fault.TOKEN, Fault.UNKNOWN_PROTOCOL):
            self._attempt = None
            raise ConfigError(
                f"The process that answers at {self._options.master} was refused: {attempt.fault.value}. Check the "
                "address, and copy the token file of the host of node-rank 0 to this host."
            )
        elif not attempt.is_open or now - attempt.born > _ATTEMPT:
            self._why_not = attempt.why or "no answer"
            attempt.close()
            self._attempt = None
