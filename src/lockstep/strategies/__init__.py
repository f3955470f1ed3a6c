"""Ways to train: one file each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.errors import ConfigError, nearest
from lockstep.reduce import open_reducer
from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.single import Single

__all__ = [
    "STRATEGIES",
    "Compute",
    "DistributedDataParallel",
    "Single",
    "StepResult",
    "Strategy",
    "open_strategy",
]

STRATEGIES = ("single", "ddp")


class StrategyOptions(Protocol):
    """What a strategy is told."""

    @property
    def strategy(self) -> str: ...  # fields of RunOptions
    @property
    def micro_batches(self) -> int: ...
    @property
    def reduce(self) -> str: ...
    @property
    def running_buffers(self) -> Sequence[str]: ...
    @property
    def timeout(self) -> float: ...
    @property
    def shared_memory(self) -> bool: ...


def open_strategy(
    options: StrategyOptions, group: dist.ProcessGroup | None, device: torch.device
) -> Strategy:
    """The strategy of that name for the ranks of ``group``; in a world of one every strategy is ``single``. Collective.

    Raises:
        ConfigError: the name is not known, or ``single`` was asked for in a larger world.
    """
    if options.strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy {options.strategy!r} is not known.{nearest(options.strategy, STRATEGIES)}"
        )
    if group is None:
        return Single(device, options.micro_batches, running_buffers=options.running_buffers)
    if options.strategy == "single":
        raise ConfigError(
            f"strategy 'single' trains on one device, and {dist.get_world_size(group)} processes were started. "
            "Use strategy 'ddp', or start one process."
        )
    reducer = open_reducer(options.reduce, group, device, options.timeout, options.shared_memory)
    return DistributedDataParallel(device, options.micro_batches, reducer, group, options.running_buffers)
