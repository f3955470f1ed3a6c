"""How fast the ranks of all hosts go on: node 0 names the rank, or the exchange between the hosts, that holds up a run.

    rank 3 works 40 ms on a micro-batch, all others 20 ms              rank 3 is slow
    on each host every rank waits 90 ms of a step of 120 ms for data   the exchange between the hosts limits the run

If a rank were slow it would itself not wait; so where all wait, it is for the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lockstep.launch.slow_ranks import SlowRanks
from lockstep.launch.windows import Window

_SHARE = 0.5
"""Of a step that every rank waits before the exchange is spoken of."""
_NOTEWORTHY = 0.010
"""Seconds of it: below, a step is too short to be worth a word."""
_WINDOWS = 2
"""In how many windows in a row."""


class SharedPace:
    """The last windows of this host's ranks, and on node 0 the judgement over those of all hosts."""

    def __init__(self) -> None:
        self._number = 0
        self._own: Mapping[int, Window] = {}
        self._judged: dict[str, int] = {}
        self._slow_ranks = SlowRanks()
        self._in_a_row, self._is_told = 0, False

    def take(self, windows: Mapping[int, Window]) -> str:
        """Takes what this host's ranks did in a window, nothing while it lasts; it is node 0 that says something."""
        if windows:
            self._number, self._own = self._number + 1, windows
        return ""

    def to_json(self) -> dict[str, Any]:
        """For node 0."""
        return {
            "number": self._number,
            "ranks": {str(rank): dataclasses.astuple(window) for rank, window in self._own.items()},
        }

    def judge(self, name: str, others: Mapping[str, Mapping[str, Any]]) -> str:
        """The lines to be said once every host has told of a new window; usually none.

        Args:
            name: of this host.
            others: by the name of each other host, what its ``to_json`` gave.
        """
        said = {name: self.to_json(), **others}
        numbers = {host: int(each.get("number", 0)) for host, each in said.items()}
        if any(number <= self._judged.get(host, 0) for host, number in numbers.items()):
            return ""
        self._judged = numbers
        windows = {host: _windows(each) for host, each in said.items()}
        everyone = {rank: window for host in windows.values() for rank, window in host.items()}
        return self._slow_ranks.take(everyone) + self._judge_exchange(windows)

    def _judge_exchange(self, windows: Mapping[str, Mapping[int, Window]]) -> str:
        computing = {host: [w for w in each.values() if w.work > 0] for host, each in windows.items()}
        least = {host: min(w.waited for w in each) for host, each in computing.items() if each}
        longest = max((w.step for each in computing.values() for w in each), default=0.0)
        limits = len(least) > 1 and min(least.values()) > max(_SHARE * longest, _NOTEWORTHY)
        self._in_a_row = self._in_a_row + 1 if limits else 0
        if self._in_a_row < _WINDOWS or self._is_told:
            return ""
        self._is_told = True
        waits = ", ".join(f"{host} {1e3 * seconds:.0f} ms" for host, seconds in least.items())
        return (
            f"lockstep: the exchange between the hosts limits this run: of {1e3 * longest:.0f} ms per step every rank "
            f"waits for data of others ({waits}). Look at the link and at the interface above; larger steps, or "
            "reduce = 'bf16' at level B, need less of it.\n"
        )


def _windows(said: Mapping[str, Any]) -> dict[int, Window]:
    fields = [field.name for field in dataclasses.fields(Window)]
    return {
        int(rank): Window(**dict(zip(fields, map(float, values), strict=True)))
        for rank, values in said["ranks"].items()
    }
