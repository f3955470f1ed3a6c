"""Opens a pipeline for a mesh, after checking that the micro-batches suffice for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lockstep.reduce import Reducer
from lockstep.strategies.groups import Groups
from lockstep.strategies.pipeline.strategy import Pipeline
from lockstep.strategy_options import PipelineOptions


def open_pipeline(
    kind: type[Pipeline],
    options: PipelineOptions,
    groups: Groups,
    device: torch.device,
    micro_batches: int,
    running_buffers: Sequence[str],
    make_reducer: Callable[[dist.ProcessGroup], Reducer],
) -> Pipeline:
    """The strategy for a mesh with more than one rank along ``pipeline``, and maybe along ``kind.axis``. Collective.

    Args:
        kind: the strategy's class.
        options: schedule and cuts.
        groups: of the mesh.
        device: of this rank.
        micro_batches: K of the recipe.
        running_buffers: as for ``Pipeline``.
        make_reducer: opens a reducer over the ranks of a group.

    Raises:
        ConfigError: there are too few micro-batches.
    """
    options.check_micro_batches(micro_batches, groups.size(kind.axis), groups.size("pipeline"))
    holders = groups.along(kind.axis)
    reducers = []
    if holders is not None:
        # Stages finish in another order on every holder, so each has a group of its own.
        lines = [holders, *(_one_more(groups, kind.axis) for _ in range(1, options.stages_of_a_rank))]
        reducers = [make_reducer(line) for line in lines]
    return kind(device, micro_batches, groups, reducers, options, running_buffers)


def _one_more(groups: Groups, axis: str) -> dist.ProcessGroup:
    """One more group of this rank's line of an axis. Collective over the world."""
    everyone = dist.get_process_group_ranks(groups.world)
    mine: dist.ProcessGroup | None = None
    for line in groups.mesh.lines(axis):
        group = dist.new_group([everyone[rank] for rank in line])
        mine = group if groups.rank in line else mine
    assert mine is not None, "every rank is in one line"
    return mine
