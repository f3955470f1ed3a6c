"""What the events of a timeline say: lanes of boxes, and how much of the reading nobody had to wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.explain.words import Chosen
from lockstep.timeline import file
from lockstep.timeline.events import Event
from lockstep.timeline.recorder import LANES

MOST_RANKS = 4
_WAITING = LANES["data"]


@dataclass(frozen=True)
class Box:
    """Something that took time; milliseconds from the first event of any rank."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class Lane:
    """One kind of work of one rank."""

    title: str
    boxes: tuple[Box, ...]
    busy: float
    """Milliseconds in which there is some box."""


@dataclass(frozen=True)
class RankLanes:
    """What one rank did."""

    title: str
    lanes: tuple[Lane, ...]
    reading: float
    """Milliseconds in which one of its workers read samples to train on."""
    hidden: float
    """Of those, the milliseconds in which the rank did not wait for data."""


@dataclass(frozen=True)
class Trace:
    """All that the picture says."""

    milliseconds: float
    """From the first event to the last."""
    chosen: Chosen
    ranks: tuple[RankLanes, ...]
    """Those that are drawn."""

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``."""
        return asdict(self)


def explain_timeline(path: Path) -> Trace:
    """Reads the timeline of a run.

    Raises:
        ConfigError: it cannot be read, is none, or is empty because the run ended before its first step.
    """
    events = file.read(path)
    try:
        spans = [event for event in events if event["ph"] == "X"]
        numbers = sorted({event["pid"] for event in spans})
        origin = min((event["ts"] for event in spans), default=0.0)
        end = max((event["ts"] + event["dur"] for event in spans), default=0.0)
        chosen = Chosen.of(len(numbers), MOST_RANKS)
        ranks = tuple(_rank(events, numbers[place], origin) for place in chosen.shown)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"'{path}' is a trace of another program: its events lack what those of a run have. Give the {file.FILE} "
            "of a run with --profile."
        ) from error
    if not ranks:
        raise ConfigError(
            f"The timeline '{path}' is empty: the run ended before the first step that it was to hold. Ask for an "
            "earlier one, for example --profile 0:5."
        )
    return Trace((end - origin) / 1000, chosen, ranks)


def _rank(events: Sequence[Event], rank: int, origin: float) -> RankLanes:
    own = [event for event in events if event["pid"] == rank]
    names = {
        (event["name"], event["tid"]): event["args"]["name"]
        for event in own
        if event["name"].endswith("_name")
    }
    lanes = []
    for lane in sorted({event["tid"] for event in own if event["ph"] == "X"}):
        boxes = tuple(_box(event, origin) for event in own if event["ph"] == "X" and event["tid"] == lane)
        ordered = tuple(sorted(boxes, key=lambda box: (box.began, -box.ended)))
        lanes.append(Lane(names["thread_name", lane], ordered, _length(_union(ordered))))
    reading = _union(box for lane in lanes if lane.title.startswith("loader, worker") for box in lane.boxes)
    waiting = _union(box for lane in lanes if lane.title == _WAITING for box in lane.boxes)
    hidden = _length(reading) - _length(_common(reading, waiting))
    return RankLanes(names["process_name", 0], tuple(lanes), _length(reading), hidden)


def _box(event: Event, origin: float) -> Box:
    began = (event["ts"] - origin) / 1000
    return Box(event["name"], began, began + event["dur"] / 1000)


def _union(boxes: Iterable[Box]) -> list[tuple[float, float]]:
    """The time that some box covers, as intervals in order that do not touch."""
    found: list[tuple[float, float]] = []
    for box in sorted(boxes, key=lambda box: box.began):
        if found and box.began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], box.ended)
        else:
            found.append((box.began, box.ended))
    return found


def _common(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The time that both cover."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(began, ended) for began, ended in pairs if began < ended]


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(ended - began for began, ended in intervals)
