"""Trains the small ResNet with one reducer, with or without BatchNorm over the global batch, and notes its bytes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from harness.gate import Gate
from harness.workloads import WORKLOADS
from torch import nn

import lockstep
from lockstep.core.world import World


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=Path, required=True, help="the harness' socket")
    parser.add_argument("--sent", type=Path, required=True, help="where rank 0 writes its bytes per step")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--options", type=json.loads, required=True, help="of lockstep.init, as JSON")
    return parser.parse_args()


def train(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    workload, world = WORKLOADS[given.workload], World.from_environment()
    run = lockstep.init(global_batch=workload.global_batch, micro_batches=8, seed=0, **given.options)
    model = workload.build_model()
    model, optimizer = run.prepare(model, workload.build_optimizer(model))
    dataset, steps = workload.build_data("items"), 0
    gate = Gate(given.control, world.rank)
    for _ in run.epochs(10**6):
        for batch in run.batches(dataset, workers=0):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if world.is_main:
                given.sent.write_text(str(run.strategy.bytes_sent / steps))
            if not gate.step_done():
                return


if __name__ == "__main__":
    train(read_arguments())
