"""How the tensors of a pipeline get from one rank to another: by a process group, or through memory that both share.

    memory of a link   | written | read | places of messages, in turn | the messages, where there is room

The sender copies a message in, writes down its place and counts it as written; the receiver copies it out and counts it
as read, which makes its room free. A message that finds no room goes by the process group, and its place says so, so
the sender never waits for the receiver. The order of messages is that of their places in both cases.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.shared_memory import CACHE_LINE, Word
from lockstep.errors import ConfigError, StallError

_PLACES = 1024
"""Messages that may be on their way at once."""
_ROOM_BYTES = 64 << 20
"""For the messages of a link that are on their way. Only what is used of it takes memory."""
_BY_GROUP = -1
"""The place of a message that the process group brings."""
_HEAD_BYTES = 2 * CACHE_LINE + 16 * _PLACES
LINK_BYTES = _HEAD_BYTES + _ROOM_BYTES
"""The memory of a link."""

OTHER_FREEZING = (
    "The ranks of a pipeline do not agree on which parameters are trained in this step. Freeze layers, and thaw them, "
    "on every rank, not under a condition on the rank, such as run.is_main."
)


Arrival = Callable[[], object]
"""Waits until a message that is expected is there."""


class GroupLink:
    """One direction between two ranks, by messages of a process group. What one sends, the other must receive.

    Args:
        group: of both ranks. On CUDA the links of a rank need groups of their own: NCCL runs what goes through one
            group in order, so two ranks that first send to each other would wait for ever.
        peer: global rank of the other.
        tag: tells links of one group apart, where the backend knows tags.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self.group: dist.ProcessGroup | None = group
        self._peer, self._tag = peer, tag
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Sends flat memory; does not wait for the receiver."""
        work = dist.isend(tensor, self._peer, group=self.group, tag=self._tag)
        assert work is not None
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, tensor: Tensor) -> Arrival:
        """Fills flat memory with the next message. Arrivals must be waited for in the order of these calls."""
        work = dist.irecv(tensor, self._peer, group=self.group, tag=self._tag)
        assert work is not None
        return work.wait

    def flush(self) -> None:
        """Waits until all that was sent has been received."""
        while self._sent:
            self._sent.popleft()[0].wait()


class SharedMemoryLink:
    """A link through memory of two CPU ranks of one host.

    A rank that waits longer than ``timeout`` seconds raises ``StallError``.

    Args:
        memory: of this link, zeroed, which both ranks see: ``_HEAD_BYTES`` and the room for messages.
        beside: brings what finds no room.
        timeout: in seconds.
        stay_awake: see ``Word.wait_until``.
    """

    def __init__(self, memory: memoryview, beside: GroupLink, peer: int, timeout: float, *, stay_awake: bool) -> None:
        self._written, self._read = (Word(memory[place : place + 4]) for place in (0, CACHE_LINE))
        self._places = memory[2 * CACHE_LINE : _HEAD_BYTES].cast("q")
        self._room = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD_BYTES)
        self._beside, self._peer, self._timeout, self._stay_awake = beside, peer, timeout, stay_awake
        self._count = 0
        """Of messages sent, or received."""
        self._expected = 0
        self._on_the_way: deque[tuple[int, int, int]] = deque()
        """Of messages in the room: their number, begin and end."""

    def send(self, tensor: Tensor) -> None:
        """See ``GroupLink.send``."""
        self._wait(self._read, self._count + 1 - _PLACES)
        size, at = tensor.nbytes, 2 * (self._count % _PLACES)
        begin = self._find_room(size)
        self._count += 1
        self._places[at], self._places[at + 1] = begin, size
        if begin == _BY_GROUP:
            self._beside.send(tensor)
        elif size:
            self._room[begin : begin + size].copy_(tensor.view(torch.uint8))
            self._on_the_way.append((self._count, begin, begin + size))
        self._written.advance()
        self._written.wake()

    def receive(self, tensor: Tensor) -> Arrival:
        """See ``GroupLink.receive``."""
        self._expected += 1
        return partial(self._take, tensor, self._expected)

    def _take(self, tensor: Tensor, number: int) -> None:
        """Waits for message ``number`` and fills ``tensor`` with it; ``ConfigError`` if its size differs."""
        assert number == self._count + 1, "messages are waited for in another order than they were expected in"
        at = 2 * (self._count % _PLACES)
        self._wait(self._written, self._count + 1)
        self._count += 1
        begin, size = self._places[at], self._places[at + 1]
        if size != tensor.nbytes:
            raise ConfigError(OTHER_FREEZING)
        if begin == _BY_GROUP:
            self._beside.receive(tensor)()
        elif size:
            tensor.view(torch.uint8).copy_(self._room[begin : begin + size])
        self._read.advance()

    def flush(self) -> None:
        """See ``GroupLink.flush``."""
        self._wait(self._read, self._count)
        self._beside.flush()

    def _find_room(self, size: int) -> int:
        """The first place with room for a message, or ``_BY_GROUP``."""
        while self._on_the_way and not self._read.is_behind(self._on_the_way[0][0]):
            self._on_the_way.popleft()
        begin = 0
        for _, start, end in sorted(self._on_the_way, key=lambda message: message[1]):
            if begin + size <= start:
                break
            begin = -(-end // CACHE_LINE) * CACHE_LINE
        return begin if begin + size <= self._room.numel() else _BY_GROUP

    def _wait(self, word: Word, count: int) -> None:
        if word.is_behind(count) and not word.wait_until(
            count, time.monotonic() + self._timeout, stay_awake=self._stay_awake
        ):
            raise StallError(
                f"Rank {dist.get_rank()} timed out after {self._timeout:.0f} s waiting for rank {self._peer}, which "
                f"has another stage of the pipeline. Missing ranks: [{self._peer}]. They hang, or left the loop early."
            )
