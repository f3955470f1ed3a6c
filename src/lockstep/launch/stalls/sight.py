"""What can be seen of one rank from outside at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.beat import Beat
from lockstep.launch.stalls.stack_text import Frame, Stack, users_frame, waits_in


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has issued."""

    sequence: int
    operation: str
    """As in ``gloo:all_reduce``."""
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    pending: bool

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be equal on every rank."""
        return self.operation, self.sizes, self.types

    @property
    def text(self) -> str:
        """As in ``#41 gloo:all_reduce [7] Float``."""
        sizes = " ".join(str(list(size)) for size in self.sizes)
        return f"#{self.sequence} {self.operation} {sizes} {' '.join(self.types)}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One rank, as it stands."""

    rank: int
    pid: int
    state: str
    """The kernel's letter: R runs, S sleeps, D cannot be interrupted, T is stopped, empty: gone."""
    beat: Beat
    silence: float
    """Seconds since its last heartbeat."""
    limit: float
    """Seconds of silence from which it counts as stalled."""
    stack: Stack = ()
    workers: tuple[Stack, ...] = ()
    """Stacks of the processes it has forked, such as loader workers, that are at work."""
    collectives: tuple[Collective, ...] = ()
    """The last collectives, the newest last."""

    @property
    def waits_in(self) -> str:
        """The operation in which it waits for others; empty if it does not."""
        return waits_in(
            self.stack, collective_pending=bool(self.collectives) and self.collectives[-1].pending
        )

    @property
    def frame(self) -> Frame | None:
        """The line of the user's code at which it stands; of a loader worker's where it waits for one."""
        own = users_frame(self.stack)
        for stack in self.workers:
            inner = users_frame(stack)
            if (
                inner is not None
                and not inner.is_library
                and any("/data/" in f.file for f in self.stack[:12])
            ):
                return inner
        return own

    @property
    def is_overdue(self) -> bool:
        """Whether it has been silent for too long."""
        return self.silence > self.limit
