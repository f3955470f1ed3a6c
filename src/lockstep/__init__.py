"""Lockstep trains a PyTorch model on any number of devices; the result does not depend on how many.

    import lockstep
    run = lockstep.init(global_batch=128, micro_batches=8, seed=0)
    model, optimizer = run.prepare(model, optimizer)
    for epoch in run.epochs(30):
        for batch in run.batches(train_set):
            loss = run.backward(batch, loss_fn)
            optimizer.step(); optimizer.zero_grad()
        run.print(run.evaluate(val_set, accuracy))

Importing the package imports nothing else, torch least of all: each name below is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.world import World
    from lockstep.errors import (
        CheckpointError,
        CheckpointMismatch,
        ConfigError,
        DataError,
        LockstepError,
        NonFiniteError,
        RankError,
        ReplicaError,
        StallError,
    )
    from lockstep.launch import launch
    from lockstep.run import Run, RunOptions, init
    from lockstep.runtime.heartbeat import heartbeat

__version__ = "0.1.0"

_HOMES = {
    "Run": "lockstep.run",
    "RunOptions": "lockstep.run",
    "World": "lockstep.core.world",
    "heartbeat": "lockstep.runtime.heartbeat",
    "init": "lockstep.run",
    "launch": "lockstep.launch",
}
"""The modules of public names that are no errors."""

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "ConfigError",
    "DataError",
    "LockstepError",
    "NonFiniteError",
    "RankError",
    "ReplicaError",
    "Run",
    "RunOptions",
    "StallError",
    "World",
    "heartbeat",
    "init",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "lockstep.errors")), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
