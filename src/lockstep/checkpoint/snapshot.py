"""A copy of a run's state on the host, so that training can go on while it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.checkpoint.state import CheckpointState


@dataclass(frozen=True)
class Snapshot:
    """A state that nothing changes any more."""

    state: CheckpointState
    copied: tuple[torch.cuda.Event, ...] = ()
    """One per GPU: when its tensors have arrived on the host."""

    def wait(self) -> CheckpointState:
        """The state, once every copy from a GPU has arrived."""
        for event in self.copied:
            event.synchronize()
        return self.state


def snapshot(state: CheckpointState) -> Snapshot:
    """Copies all tensors of a state to the host, in row order.

    What lies on a GPU goes to page-locked memory without holding up the host: the copies stand in the queue of the
    current stream, so the optimizer's next update comes after them.
    """
    copied = dataclasses.replace(state, model=_copies(state.model), optimizer=_copies(state.optimizer))
    tensors = [*state.model.values(), *state.optimizer.values()]
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    return Snapshot(copied, tuple(_mark(device) for device in devices))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy(tensor.detach()) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.to("cpu").clone(memory_format=torch.contiguous_format)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def _mark(device: int) -> torch.cuda.Event:
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record()
    return event
