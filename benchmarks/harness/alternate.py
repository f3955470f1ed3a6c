"""Rounds in turn: A B C A B C ..., each of the same number of steps for all sides."""

from __future__ import annotations

from collections.abc import Mapping

from harness.sides import Command, running

Rounds = dict[str, list[float]]
"""Milliseconds per step of each side, one number an alternation."""

WARM_UP = 5
"""Steps before the clock starts, in each round: they use up what a side fetched ahead while it slept."""


def alternate(
    commands: Mapping[str, Command],
    processes: int | Mapping[str, int],
    *,
    alternations: int,
    seconds: float,
    peaks: dict[str, float] | None = None,
) -> Rounds:
    """Runs every side once to warm up, then ``alternations`` times in turn.

    ``seconds`` is about how long a round of the slowest side lasts; the number of steps is the same for all. ``peaks``
    takes the greatest peak memory of each side's ranks, in bytes.
    """
    with running(commands, processes) as sides:
        slowest = max(side.round(WARM_UP, WARM_UP) for side in sides)
        steps = max(WARM_UP, round(1000 * seconds / slowest))
        times: Rounds = {side.name: [] for side in sides}
        for _ in range(alternations):
            for side in sides:
                times[side.name].append(side.round(WARM_UP, steps))
        if peaks is not None:
            peaks.update({side.name: max(side.peaks) for side in sides})
    return times
