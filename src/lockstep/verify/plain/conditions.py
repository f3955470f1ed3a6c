"""What a forward pass depends on beside weights and data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.fingerprint import device_model
from lockstep.run.optimizer import implementation
from lockstep.sync_batch_norm import SyncBatchNorm


def context(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """What stays for the whole run; asked within the forward pass, where autocast is known."""
    parameter = next(model.parameters())
    return {
        "threads": str(torch.get_num_threads()),
        "device": device_model(parameter.device),
        "torch": torch.__version__,
        "precision": _precision(parameter),
        "optimizers": ", ".join(implementation(each) for each in optimizers),
    }


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the modules that normalise with the statistics of this rank's batch."""
    own = (nn.SyncBatchNorm, SyncBatchNorm)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, own)
    ]


def generators() -> str:
    """Digest of the state of the generators that a model's forward pass draws from."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().data)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own lack
        digest.update(torch.cuda.get_rng_state().numpy().data)
    return digest.hexdigest()[:16]


def _precision(parameter: Tensor) -> str:
    """The type that the forward pass computes in."""
    device = parameter.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
    return str(kind).removeprefix("torch.")
