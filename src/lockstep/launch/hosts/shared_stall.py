"""A run that stands still, seen from all of its hosts: each tells what it sees, node 0 judges when it has heard all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.launch.beat import read_beat
from lockstep.launch.hosts.messages import sight_from_json, sight_to_json
from lockstep.launch.stalls import Stall, as_json, describe
from lockstep.launch.stalls.verdict import judge_stall


class SharedStall:
    """What is seen of this host's ranks since one of them is overdue, and the report of the whole run.

    Args:
        directory: the run directory of this host, with the heartbeats.
        logs: the log folder of this host.
    """

    def __init__(self, directory: Path, logs: Path) -> None:
        self._directory, self._logs = directory, logs
        self._stall: Stall | None = None
        self._until = 0.0
        self.lines: list[str] = []
        """The report; empty as long as the run goes on."""

    def weigh(self, stall: Stall, *, lasts: float) -> None:
        """Takes what was seen just now.

        Args:
            stall: of the ranks of this host.
            lasts: seconds for which it counts, at most; it ends when a rank goes on.
        """
        self._stall, self._until = stall, time.monotonic() + lasts

    def withdraw(self) -> None:
        """Forgets what was seen as soon as it is old, or a rank has gone on."""
        if self._stall is None:
            return
        beats = [(sight, read_beat(self._directory, sight.rank)) for sight in self._stall.sights]
        if time.monotonic() > self._until or any(beat != sight.beat for sight, beat in beats):
            self._stall = None

    def forget(self) -> None:
        """Forgets what was seen, because no rank of this host is left."""
        self._stall = None

    def to_json(self) -> list[dict[str, Any]]:
        """For node 0."""
        return [] if self._stall is None else [sight_to_json(sight) for sight in self._stall.sights]

    def judge(self, others: Sequence[tuple[Mapping[str, Any], float]], *, is_done: bool) -> None:
        """Writes the report, once every host with ranks that run has told what it sees, and it is a deadlock.

        Args:
            others: what each other host has said last, and the seconds to add to its times.
            is_done: whether no rank of this host is left.
        """
        sights = [] if self._stall is None else list(self._stall.sights)
        if self.lines or not (sights or is_done):
            return
        for said, offset in others:
            if not said.get("sights") and not said.get("done"):
                return
            sights += [sight_from_json(fields, offset) for fields in said["sights"]]
        verdict = judge_stall(sights) if sights else None
        if verdict is not None and verdict.is_deadlock:
            bundle = self._logs / "stall.json"
            bundle.write_text(as_json(verdict, sights))
            self.lines = describe(verdict, sights, bundle)
