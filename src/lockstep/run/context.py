"""Says what the bits of a run will depend on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lockstep.fingerprint import Context, device_model
from lockstep.run.optimizer import implementation
from lockstep.run.options import RunOptions
from lockstep.run.session import Session


def describe(options: RunOptions, session: Session, optimizers: Sequence[Optimizer]) -> Context:
    """The fingerprint's context for a run."""
    return Context(
        global_batch=options.global_batch,
        micro_batches=options.micro_batches,
        seed=options.seed,
        precision=options.precision,
        reduce=options.reduce,
        threads=session.threads,
        device=device_model(session.device),
        torch=torch.__version__,
        compiled=options.compile,
        channels_last=options.channels_last,
        sync_batch_norm=options.sync_batch_norm,
        deterministic=session.device.type == "cuda",
        optimizers=tuple(implementation(each) for each in optimizers),
    )
