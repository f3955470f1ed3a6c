"""Notices that ranks make different calls of a run, as where one of them evaluates under ``if run.is_main:``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.strategies import Strategy
from lockstep.text import numbered

_CALLS = {
    "__init__": "lockstep.init",
    "__iter__": "run.batches",
    "__next__": "run.batches",
    "_steps": "run.batches",
}
"""Calls of a run by the names of the functions that the script, or a loop of it, enters."""


def gather_agreed(mine: object, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """A value of every rank, by rank; ``ConfigError`` where they come from different calls of the run. Collective."""
    everyone = gather_json([*_call(), mine], group, device)
    known = [
        each if isinstance(each, list) and len(each) == 3 else ["another call", "", each] for each in everyone
    ]
    if len({name for name, _, _ in known}) > 1:
        raise ConfigError(
            f"The ranks make different calls of the run: {by_rank([name + place for name, place, _ in known])}. Each "
            "has a part of the work, so all make the same calls in the same order: take them, and changes of their "
            "data sets, out of if run.is_main: and other conditions on the rank. What they return is the same "
            "everywhere, but of run.predict; run.print prints it once."
        )
    return [value for _, _, value in known]


def _call() -> tuple[str, str]:
    """The call of a run by which this process came here, and the line that made it."""
    name, place = "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("lockstep.run."):
            name, caller = frame.f_code.co_name, frame.f_back
            place = (
                f" ({Path(caller.f_code.co_filename).name}:{caller.f_lineno})" if caller is not None else ""
            )
        frame = frame.f_back
    return _CALLS.get(name, f"run.{name}"), place


def require_same_names(argument: str, names: Iterable[object], strategy: Strategy) -> None:
    """Raises ``ConfigError`` where ranks give metrics of other names. Collective.

    Args:
        argument: what they are, as in "The metrics of run.evaluate".
        names: of the metrics, in any order.
        strategy: over whose ranks.
    """
    group = strategy.all_ranks
    of_all = [] if group is None else gather_agreed(sorted(map(repr, names)), group, strategy.device)
    if any(each != of_all[0] for each in of_all):
        raise ConfigError(
            f"{argument} are not the same on every rank: {by_rank(of_all)}. Each rank computes them of a part of the "
            "samples. Give them on all ranks; run.print prints on one."
        )


def by_rank(values: list[Any]) -> str:
    """Values and the ranks that have them: ``32 on rank 0; 31 on ranks 1, 2``."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {numbered('rank', ranks)}" for value, ranks in groups.items())
