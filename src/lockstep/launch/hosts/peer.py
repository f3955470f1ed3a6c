"""Another host as one supervisor hears it: its last words, how long ago, and whether it is lost.

silent for 3 s      mentioned on the terminal; it may come back
silent for 13 s     lost
closed for 3 s      lost: its command has ended, or it would have connected again
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.hosts.channel import Channel

_WORTH_MENTIONING = 3.0
_CLOSED_LIMIT = 3.0


@dataclass
class Peer:
    """One other host."""

    text: str
    """As in ``host 1 (fb)``."""
    say: Callable[[str], None]
    """Takes a line for the terminal."""
    silence_limit: float
    channel: Channel | None = None
    state: dict[str, Any] = field(default_factory=dict)
    """The last that it has said; each message says everything."""
    offset: float = float("inf")
    """Seconds to add to its ``time.monotonic()``, from the message that travelled fastest."""
    lost: str = ""
    """Why it counts as lost; empty while it does not."""
    heard_at: float = field(default_factory=time.monotonic)
    _closed_at: float | None = None
    _is_mentioned: bool = False

    def connect(self, channel: Channel) -> None:
        """Takes a new connection, over which the host has proven itself, in place of the former one."""
        if self.channel is not None and self.channel is not channel:
            self.channel.close()
        self.channel = channel
        self._closed_at = None
        self._note_life(time.monotonic())

    def hear(self) -> None:
        """Takes what has arrived, and decides whether the host is lost."""
        messages = [] if self.channel is None else self.channel.receive()
        for message in messages:
            self.take(message)
        self._judge(time.monotonic())

    def take(self, message: dict[str, Any]) -> None:
        """Takes one message of it."""
        now = time.monotonic()
        self._note_life(now)
        self.state = message
        if isinstance(sent := message.get("now"), int | float):
            self.offset = min(self.offset, now - sent)

    def _note_life(self, now: float) -> None:
        if self._is_mentioned:
            self.say(f"{self.text} is back after {now - self.heard_at:.0f} s.")
            self._is_mentioned = False
        self.heard_at = now

    def _judge(self, now: float) -> None:
        if self.lost:
            return
        silence = now - self.heard_at
        if left := self.state.get("left"):
            self.lost = f"has left: {left}"
        elif refused := self.state.get("refused"):
            self.lost = f"refuses this one: {refused}"
        elif self._is_closed_for(_CLOSED_LIMIT, now):
            self.lost = "has closed the connection and not come back: its command has ended"
        elif silence > self.silence_limit:
            self.lost = f"has not been heard of for {silence:.0f} s"
        elif silence > _WORTH_MENTIONING and not self._is_mentioned:
            self._is_mentioned = True
            self.say(f"{self.text} has not been heard of for {silence:.0f} s; it may come back.")
        if self.lost and "refused" not in self.state:
            self.say(f"{self.text} {self.lost}.")

    def _is_closed_for(self, limit: float, now: float) -> bool:
        if self.channel is not None and self.channel.is_open:
            self._closed_at = None
            return False
        self._closed_at = now if self._closed_at is None else self._closed_at
        return now - self._closed_at > limit
