"""Node 0's end of the link: listens, calls the roll, and hears all other hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import EXIT_CONFIG, ConfigError
from lockstep.launch.hosts.channel import Channel, Fault
from lockstep.launch.hosts.options import HostOptions
from lockstep.launch.hosts.peer import Peer
from lockstep.launch.hosts.roll_call import Hello, absent, compare
from lockstep.launch.hosts.switchboard import Switchboard

_GREETING_LIMIT = 5.0
_MOST_STRANGERS = 64
_BEAT = 1.0


class Hub:
    """Listens on one address for the other hosts.

    Args:
        options: how many hosts there are, the port and the token.
        address: of this host; nothing listens on another.
        hello: of this host.
        say: takes a line for the terminal.
    """

    def __init__(self, options: HostOptions, address: str, hello: Hello, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._listener = listen(address, options.port)
        self._switchboard = Switchboard()
        self._switchboard.listen(self._listener)
        self._strangers: list[Channel] = []
        self._refused: set[str] = set()
        self.hellos = {0: hello}
        """Of every host that has arrived, by its number."""
        self.peers: dict[int, Peer] = {}
        """The other hosts, by their numbers."""
        self._state: dict[str, Any] = {}
        self._told_at = 0.0

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._switchboard.fileno()

    def gather(self) -> None:
        """Waits until every host has arrived, and compares what they will run.

        Raises:
            RankError: not all came in time; names those that did not.
            ConfigError: the hosts would not run the same.
        """
        deadline = time.monotonic() + self._options.start_limit
        while len(self.hellos) < self._options.nodes:
            if time.monotonic() > deadline:
                raise absent(self.hellos, self._options.nodes, self._options.start_limit)
            self.wait(min(_BEAT, deadline - time.monotonic()))
            self.turn({})
            for node in [node for node, peer in self.peers.items() if peer.lost]:
                del self.peers[node], self.hellos[node]  # it may come again
        compare(self.hellos)

    def wait(self, seconds: float) -> None:
        """Returns when something has happened, or after ``seconds``."""
        self._switchboard.wait(seconds)

    def turn(self, state: dict[str, Any]) -> None:
        """Hears every host, and tells each the state of the run when it has changed or a second is over."""
        self._accept()
        for channel in list(self._strangers):
            self._meet(channel)
        for peer in self.peers.values():
            peer.hear()
        now = time.monotonic()
        if state != self._state or now - self._told_at >= _BEAT:
            self._state, self._told_at = state, now
            for peer in self.peers.values():
                if peer.channel is not None and not peer.lost:
                    peer.channel.send({**state, "now": now})
        for peer in self.peers.values():
            if peer.channel is not None:
                peer.channel.flush()
        self._switchboard.settle()

    def close(self) -> None:
        """Closes the port and every connection."""
        self._switchboard.close()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody is there, or it was reset before it was taken
                return
            if len(self._strangers) >= _MOST_STRANGERS:
                self._strangers.pop(0).close()
            channel = Channel(connection, self._options.token, "hub")
            self._switchboard.add(channel)
            self._strangers.append(channel)

    def _meet(self, channel: Channel) -> None:
        """Finds out which host a connection comes from."""
        where = _address_of(channel)
        messages = channel.receive()
        if messages:
            self._strangers.remove(channel)
            self._introduce(channel, messages[0])
        elif not channel.is_open or time.monotonic() - channel.born > _GREETING_LIMIT:
            self._strangers.remove(channel)
            fault = Fault.STRANGER if channel.is_open else channel.fault
            channel.close()
            if fault in (Fault.STRANGER, Fault.TOKEN) and where not in self._refused:
                self._refused.add(where)
                self._say(f"Refused a connection from {where or 'an unknown address'}: {fault.value}.")

    def _introduce(self, channel: Channel, message: dict[str, Any]) -> None:
        """Lets a host in, or back in, or says why not."""
        try:
            hello = Hello.from_json(message["hello"])
        except (KeyError, ValueError, TypeError):
            channel.close(Fault.STRANGER)
            return
        refusal = self._refusal(hello)
        if refusal:
            channel.send({"refused": refusal, "code": EXIT_CONFIG})
            channel.close()
            return
        if hello.node not in self.peers:
            self.hellos[hello.node] = hello
            self.peers[hello.node] = Peer(hello.text, self._say, self._options.silence_limit)
            self._say(f"{hello.text} has come, {len(self.hellos)} of {self._options.nodes} hosts are here")
        self.peers[hello.node].connect(channel)
        self.peers[hello.node].take(message)
        self._told_at = 0.0

    def _refusal(self, hello: Hello) -> str:
        if not 0 < hello.node < self._options.nodes:
            return (
                f"node-rank {hello.node} has come to a run of {self._options.nodes} hosts, in which the others have "
                f"numbers 1 to {self._options.nodes - 1}. Give every host the same --nnodes."
            )
        former = self.hellos.get(hello.node)
        if former is not None and former.instance != hello.instance:
            return (
                f"node-rank {hello.node} was announced twice, by {former.name} and {hello.name}. "
                "Give each host its own number."
            )
        if former is not None and (lost := self.peers[hello.node].lost):
            return f"the run went on without this host: it {lost}."
        if former is None and len(self.hellos) == self._options.nodes:
            return "the run has all its hosts."
        return ""


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address of this host alone.

    Raises:
        ConfigError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--master names port {port}, and this host cannot listen on {address}:{port}: {error.strerror}. "
            "Another run may use it: choose a port which is free, with the one after it."
        ) from error
    listener.setblocking(False)
    return listener


def _address_of(channel: Channel) -> str:
    try:
        return str(channel.connection.getpeername()[0])
    except OSError:
        return ""
