"""Trains a few steps of a program under every layout, and says what came out.

A program is a function that makes a ``Program``: its model, its loss, and what it does before and after ``prepare``.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensors
from lockstep.core.world import World
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

SINGLE = (1, {"strategy": "single"})
DP = (1, {"strategy": "dp", "dp": {"replicas": 3}})
LAYERS = (1, {"strategy": "layers", "layers": {"devices": 2}})
DDP = (3, {"strategy": "ddp"})
FSDP = (2, {"strategy": "fsdp"})
PIPELINE = (2, {"strategy": "pipeline"})
SERVERS = (3, {"strategy": "parameter_server", "parameter_server": {"servers": 2}})
SHARDED_PIPELINE = (4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"})
TENSOR = (2, {"strategy": "tensor"})
WIDTH = 40
"""A layer of this width is a block of its own under ``fsdp``."""


def rows(count=24):
    """Two steps of 10 rows and one of 4, which leaves ranks without a micro-batch."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 4)


@dataclass
class Program:
    """A user's program."""

    model: nn.Module
    loss: Callable = F.cross_entropy
    after: Callable[[nn.Module, nn.Module], None] | None = None
    """Called with the user's model and the prepared one, after ``prepare``."""
    forward: Callable | None = None
    """Makes the ``forward`` of ``run.backward`` from the prepared model."""
    data: Any = field(default_factory=rows)
    options: dict = field(default_factory=dict)


def chain(*more):
    return nn.Sequential(
        *(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), *more),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)),
    )


def train(world, make, settings):
    """The losses of a program, and digests of them, of its parameters and buffers."""
    torch.manual_seed(world.rank)
    program = make()
    options = {"global_batch": 10, "micro_batches": 5, "seed": 3, "threads": 1, **program.options, **settings}
    run = Run(RunOptions.of(**options), world)
    own = torch.optim.SGD(program.model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(program.model, own)
    if program.after:
        program.after(program.model, model)
    found, forward = {}, program.forward and program.forward(model)
    for _ in run.epochs(1):
        for step, batch in enumerate(run.batches(program.data)):
            found[f"loss {step}"] = run.backward(batch, program.loss, forward=forward)
            optimizer.step()
            optimizer.zero_grad()
    losses = [float(loss) for loss in found.values()]
    found |= {name: tensor.clone() for name, tensor in run.state_dict().items()}
    run.close()
    return {"losses": losses, **digest_tensors(found)}


def train_all(world, makes, settings):
    """The results of every program, by name; empty but on rank 0."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for make in makes:
        try:
            found[make.__name__] = train(world, make, settings)
        except Exception as error:
            error.add_note(f"in the program {make.__name__!r}")
            raise
    return found if world.is_main else {}


def under(layout, *makes):
    """The results of programs under a layout, by name; in this process where the layout has one."""
    ranks, settings = layout
    if ranks == 1:
        logger = logging.getLogger("lockstep")
        level = logger.level
        try:
            return train_all(World(), makes, settings)
        finally:
            logger.setLevel(level)
    return run_ranks(train_all, ranks, makes, settings, timeout=100)[0]


def differing(expected, found):
    """The names, of programs and what came out of them, with other bits."""
    return {
        make: [name for name in one if found[make].get(name) != one[name]]
        for make, one in expected.items()
        if found[make] != one
    }
