"""The running buffers of a model whose layers lie on several devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.buffers.running import RunningBuffers


class RunningBuffersOnDevices(RunningBuffers):
    """The running buffers of a model whose layers lie on several devices, seen as one.

    Args:
        model: the model, its layers in their places.
        declared: as for ``RunningBuffers``.
    """

    def __init__(self, model: nn.Module, declared: Sequence[str] = ()) -> None:
        names = RunningBuffers.names(model, declared)
        devices = dict.fromkeys(b.device for name, b in model.named_buffers() if name in names)
        self._parts = [RunningBuffers(model, declared, device) for device in devices or [None]]
        self._sizes = [part.numel for part in self._parts]

    @property
    def numel(self) -> int:
        """See ``RunningBuffers``."""
        return sum(self._sizes)

    @property
    def counters(self) -> int:
        """See ``RunningBuffers``."""
        return sum(part.counters for part in self._parts)

    @property
    def dtype(self) -> torch.dtype:
        """See ``RunningBuffers``."""
        return self._parts[0].dtype

    @property
    def device(self) -> torch.device:
        """Where what ``take`` gives is: the first of the devices."""
        return self._parts[0].device

    def begin_step(self) -> None:
        """See ``RunningBuffers``."""
        for part in self._parts:
            part.begin_step()

    def begin_micro_batch(self) -> None:
        """See ``RunningBuffers``."""
        for part in self._parts:
            part.begin_micro_batch()

    def take(self) -> tuple[Tensor, Tensor]:
        """See ``RunningBuffers``; the devices' values one after the other."""
        taken = [part.take() for part in self._parts]
        return tuple(torch.cat([each.to(self.device) for each in kind]) for kind in zip(*taken))  # type: ignore[return-value]  # two

    def finish_step(self, total: Tensor, leaves: int, advanced: Tensor) -> None:
        """See ``RunningBuffers``."""
        counts = torch.split(advanced, [part.counters for part in self._parts])
        for part, values, own in zip(self._parts, torch.split(total, self._sizes), counts):
            part.finish_step(values.to(part.device), leaves, own.to(part.device))

    def remember_others(self) -> None:
        """See ``RunningBuffers``."""
        self._parts[0].remember_others()

    def refuse_changed_others(self) -> None:
        """See ``RunningBuffers``."""
        self._parts[0].refuse_changed_others()
