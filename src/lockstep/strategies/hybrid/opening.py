"""Opens a pipeline of sharded stages, after checking that what was asked for can be had with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.distributed as dist

from lockstep.errors import ConfigError
from lockstep.strategies.groups import Groups
from lockstep.strategies.hybrid.reduce_scatter import OrderedRowReducer
from lockstep.strategies.hybrid.strategy import ShardedPipeline
from lockstep.strategies.pipeline import Pipeline, open_pipeline
from lockstep.strategy_options import FsdpOptions, PipelineOptions


def open_sharded_pipeline(
    options: PipelineOptions,
    fsdp: FsdpOptions,
    groups: Groups,
    device: torch.device,
    micro_batches: int,
    running_buffers: Sequence[str],
) -> Pipeline:
    """The strategy for a mesh with more than one rank along both ``fsdp`` and ``pipeline``. Collective.

    Args:
        options: schedule and cuts.
        fsdp: must be the defaults.
        groups: of the mesh.
        device: of this rank.
        micro_batches: K of the recipe.
        running_buffers: as for ``Pipeline``.

    Raises:
        ConfigError: there are too few micro-batches, or an option is given that belongs to strategy ``fsdp`` alone.
    """
    for field in fields(FsdpOptions):
        if getattr(fsdp, field.name) != field.default:
            raise ConfigError(
                f"fsdp.{field.name} belongs to strategy 'fsdp', which gathers blocks; the mesh {groups.mesh} gathers a "
                "stage once in a step. Leave it out."
            )

    def make_reducer(group: dist.ProcessGroup) -> OrderedRowReducer:
        return OrderedRowReducer(group, device)

    return open_pipeline(
        ShardedPipeline, options, groups, device, micro_batches, running_buffers, make_reducer
    )
