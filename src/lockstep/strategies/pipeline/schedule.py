"""In which order each rank of a pipeline computes: pure lists of actions, and the timeline they lead to.

Four micro-batches on two ranks; F forward, B backward (twice as long), time to the right:

    gpipe          rank 0  F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --      keeps the activations of all micro-batches
                   rank 1  .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 --

    1f1b           rank 0  F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --      keeps those of at most as many as there are
                   rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --            ranks

    interleaved    the same with several, shorter stages per rank (rank 0: stages 0 and 2, rank 1: stages 1 and 3), so
                   that the pipeline fills sooner

The orders are those of torch's ScheduleGPipe, Schedule1F1B and ScheduleInterleaved1F1B, and a test holds them equal.
On every stage both the forward and the backward passes come in order of the micro-batches, which the gradient tree
needs. Why torch's runtime is not underneath: docs/decisions/0012-pipeline-runtime.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True, order=True)
class Action:
    """One pass of one micro-batch through one stage."""

    stage: int
    place: int
    """Number of the micro-batch among those of the holder."""
    forward: bool

    def __str__(self) -> str:
        return f"{self.stage}{'F' if self.forward else 'B'}{self.place}"


@lru_cache(maxsize=256)
def order_of(schedule: str, rank: int, ranks: int, stages_per_rank: int, count: int) -> tuple[Action, ...]:
    """Returns the actions of a rank, in order.

    A count that the interleaved schedule cannot run, as in the short last step of an epoch, takes the order of the next
    that it can, without the micro-batches that are not there: what is left of an order that cannot deadlock cannot
    either.

    Args:
        schedule: one of ``SCHEDULES``.
        rank: place in the pipeline.
        ranks: length of the pipeline.
        stages_per_rank: stage ``s`` belongs to rank ``s % ranks``.
        count: micro-batches that go through.
    """
    if schedule == "gpipe":
        forward = [Action(rank, place, True) for place in range(count)]
        return (*forward, *(Action(rank, place, False) for place in range(count)))
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(rank, ranks, 1, count, warm=ranks - rank - 1))
    full = -(-count // ranks) * ranks
    warm = (stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1)
    order = _one_forward_one_backward(rank, ranks, stages_per_rank, full, warm=warm)
    return tuple(action for action in order if action.place < count)


def _one_forward_one_backward(rank: int, ranks: int, stages_per_rank: int, count: int, *, warm: int) -> list[Action]:
    """``warm`` forward passes, then one forward and one backward in turn, then the backward passes that are left.

    With several stages per rank, rounds of ``ranks`` micro-batches go through one stage after the other.
    """
    turns = [
        (local, first + inner)
        for first in range(0, count, ranks)
        for local in range(stages_per_rank)
        for inner in range(min(ranks, count - first))
    ]
    forward = [Action(local * ranks + rank, place, True) for local, place in turns]
    backward = [Action((stages_per_rank - 1 - local) * ranks + rank, place, False) for local, place in turns]
    warm = min(warm, len(forward))
    order = forward[:warm]
    for ahead, behind in zip(forward[warm:], backward):
        order += [ahead, behind]
    return order + backward[len(forward) - warm :]


def bubble(ranks: int, stages_per_rank: int, count: int) -> float:
    """The part of the time that a rank waits in theory, where all stages take equally long and nothing else does.

    (ranks - 1) / (ranks - 1 + stages_per_rank * count): the formula of the papers on GPipe (Huang et al., 2019) and on
    the interleaved schedule (Narayanan et al., 2021).
    """
    return (ranks - 1) / (ranks - 1 + stages_per_rank * count)


@dataclass(frozen=True)
class ScheduledPass:
    """The time of an action, in units from the start of the step."""

    action: Action
    start: float
    stop: float


def usual(action: Action) -> float:
    """The duration of a pass, where a backward pass takes twice as long as a forward pass."""
    return 1.0 if action.forward else 2.0


def timeline(
    orders: list[tuple[Action, ...]], duration: Callable[[Action], float] = usual
) -> list[list[ScheduledPass]]:
    """Returns the times of each rank's actions, if sending takes no time.

    Raises:
        ValueError: the orders wait for one another for ever.
    """
    last = max((action.stage for order in orders for action in order), default=0)
    done: dict[Action, float] = {}
    spans: list[list[ScheduledPass]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for order, mine in zip(orders, spans):
            while len(mine) < len(order) and all(n in done for n in needs(order[len(mine)], last)):
                action = order[len(mine)]
                ready = max((done[need] for need in needs(action, last)), default=0.0)
                start = max(ready, mine[-1].stop if mine else 0.0)
                done[action] = start + duration(action)
                mine.append(ScheduledPass(action, start, done[action]))
                left -= 1
        if left == before:
            raise ValueError("the orders of the ranks wait for one another")
    return spans


def needs(action: Action, last: int) -> list[Action]:
    """Returns the actions that must precede an action, where ``last`` is the last stage."""
    if action.forward:
        return [Action(action.stage - 1, action.place, True)] if action.stage else []
    after = [Action(action.stage + 1, action.place, False)] if action.stage < last else []
    return [Action(action.stage, action.place, True), *after]


def waiting(spans: list[list[ScheduledPass]]) -> float:
    """The part of the time from the first start to the last stop in which ranks wait, over all ranks."""
    every = [span for mine in spans for span in mine]
    length = max(span.stop for span in every) - min(span.start for span in every)
    return 1 - sum(span.stop - span.start for span in every) / (length * len(spans))
