"""Trains two steps and notes the most bytes of partial gradient sums that a rank holds between its micro-batches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from harness.workloads import WORKLOADS
from torch import Tensor

import lockstep
from lockstep.strategies.fsdp import FullyShardedDataParallel

STEPS = 2


def partial_sums(strategy: Any) -> list[Tensor]:
    """The nodes of the gradient tree that this rank holds now, of all parameters."""
    if isinstance(strategy, FullyShardedDataParallel):
        return [node for block in strategy._gathering.blocks for stack in block._stacks.values() for node in stack]
    return [node for slot in strategy._sums.tree.slots for node in slot.stack]


def main() -> None:
    given = read_command_line()
    torch.set_num_threads(1)
    workload = WORKLOADS["transformer"]
    run = lockstep.init(global_batch=workload.global_batch, micro_batches=given.micro_batches, strategy=given.strategy)
    model = workload.build_model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model, optimizer = run.prepare(model, workload.build_optimizer(model))
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(node.nbytes for node in partial_sums(run.strategy)))

    model.register_forward_pre_hook(look)
    for _, batch in zip(range(STEPS), run.batches(workload.build_data("items"), workers=0)):
        run.backward(batch, workload.loss)
        optimizer.step()
        optimizer.zero_grad()
    (given.output / f"rank-{run.world.rank}.json").write_text(json.dumps({"held": most, "whole": whole}))


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for one file a rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
