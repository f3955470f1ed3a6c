"""When each rank of a pipeline computes what, by the schedules that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import ConfigError, nearest
from lockstep.explain.words import Chosen, at_least_one
from lockstep.strategies.pipeline.schedule import SCHEDULES, Action, Span, bubble, order_of, timeline, waiting
from lockstep.strategy_options import PipelineOptions

MOST_RANKS = 12
MOST_PASSES = 100_000


@dataclass(frozen=True)
class Timeline:
    """What the ranks do under one schedule."""

    schedule: str
    stages_per_rank: int
    spans: tuple[tuple[Span, ...], ...]
    """Of each rank that is drawn; a forward pass through a stage is one unit of time, a backward pass two."""
    length: int
    """Units until the step is done; with several stages per rank a unit is as many times shorter."""
    waits: float
    """The part of the time in which ranks wait, counted in the timeline of all ranks."""
    bubble: float
    """The same by formula."""
    kept: float
    """The most micro-batches whose activations any rank keeps at once, in units of all its stages."""


@dataclass(frozen=True)
class Pipeline:
    """All that the picture says."""

    ranks: Chosen
    micro_batches: int
    timelines: tuple[Timeline, ...]
    refused: tuple[str, ...]
    """Why a schedule is not shown, a sentence each."""

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``."""
        return asdict(self)


def explain_pipeline(
    *,
    stages: int = 4,
    micro_batches: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    stages_per_rank: int = 2,
) -> Pipeline:
    """The timeline of a step, where all stages take equally long and sending takes no time.

    Args:
        stages: ranks of the pipeline, each with a stage (interleaved: with several).
        micro_batches: that go through; by default 8, or as many as there are ranks.
        schedules: which of ``SCHEDULES``.
        stages_per_rank: of the interleaved schedule.

    Raises:
        ConfigError: the numbers do not go together under any of the schedules.
    """
    count = _next_multiple(8, stages) if micro_batches is None else micro_batches
    at_least_one(stages=stages, micro_batches=count, stages_per_rank=stages_per_rank)
    if stages * stages_per_rank * count > MOST_PASSES:
        raise ConfigError(
            f"--stages={stages}, --stages-per-rank={stages_per_rank} and --micro-batches={count} make more than the "
            f"{MOST_PASSES:,} passes that are drawn. Use smaller numbers."
        )
    shown = Chosen.of(stages, MOST_RANKS)
    timelines, refused = _possible(schedules, stages, stages_per_rank, count, shown)
    if not timelines:
        raise ConfigError(refused[0])
    return Pipeline(shown, count, tuple(timelines), tuple(dict.fromkeys(refused)))


def _possible(
    schedules: Sequence[str], stages: int, stages_per_rank: int, count: int, shown: Chosen
) -> tuple[list[Timeline], list[str]]:
    """The timelines of the schedules that the numbers fit, and why they do not fit the others."""
    timelines: list[Timeline] = []
    refused: list[str] = []
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ConfigError(f"--schedule={schedule} is not known.{nearest(schedule, SCHEDULES)}")
        each = stages_per_rank if schedule == "interleaved" else 1
        try:
            PipelineOptions(schedule=schedule, stages_per_rank=each).check_micro_batches(count, 1, stages)
        except ConfigError as error:
            refused.append(str(error))
        else:
            timelines.append(_timeline(schedule, stages, each, count, shown))
    return timelines, refused


def _next_multiple(least: int, of: int) -> int:
    return -(-least // max(1, of)) * of


def _timeline(schedule: str, ranks: int, stages_per_rank: int, count: int, shown: Chosen) -> Timeline:
    orders = [order_of(schedule, rank, ranks, stages_per_rank, count) for rank in range(ranks)]
    spans = timeline(orders)
    return Timeline(
        schedule,
        stages_per_rank,
        tuple(tuple(spans[rank]) for rank in shown.shown),
        round(max(span.stop for mine in spans for span in mine)),
        waiting(spans),
        bubble(ranks, stages_per_rank, count),
        max(map(_most_kept, orders)) / stages_per_rank,
    )


def _most_kept(order: Sequence[Action]) -> int:
    """The most forward passes of a rank whose backward pass is still to come."""
    now = most = 0
    for action in order:
        now += 1 if action.forward else -1
        most = max(most, now)
    return most
