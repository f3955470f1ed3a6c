"""The connections of one supervisor, behind one descriptor that can be waited on."""

from __future__ import annotations

import selectors
import socket

from lockstep.launch.hosts.channel import Channel


class Switchboard:
    """Waits for whatever happens on any of its connections."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Readable when something has happened."""
        return self._selector.fileno()

    def listen(self, listener: socket.socket) -> None:
        """Watches a listening socket."""
        self._selector.register(listener, selectors.EVENT_READ)

    def add(self, channel: Channel) -> None:
        """Watches a channel until it is closed."""
        self.settle()  # a closed channel's number may be this one's
        if channel.is_open:
            self._selector.register(channel.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, channel)

    def settle(self) -> None:
        """Forgets closed channels, and waits for room only where something is unsent."""
        for key in list(self._selector.get_map().values()):
            channel = key.data
            if channel is None:
                continue
            if not channel.is_open:
                self._selector.unregister(key.fileobj)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            if events != key.events:
                self._selector.modify(key.fileobj, events, channel)

    def wait(self, seconds: float) -> None:
        """Returns when something has happened, or after ``seconds``."""
        self._selector.select(max(0.0, seconds))

    def close(self) -> None:
        """Closes the descriptor and every channel."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
