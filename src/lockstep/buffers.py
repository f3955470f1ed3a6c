"""Running statistics (BatchNorm's, and buffers the user declares) that do not depend on who ran which micro-batch.

Every micro-batch of a step starts from the step's old values. The step's new values are the tree mean of what the
micro-batches left behind; a module that no micro-batch used in training mode keeps its old ones, bit for bit.
Integer counters advance once per step. All values live in one flat tensor, so that taking and putting them back is
one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.errors import ConfigError
from lockstep.fingerprint import digest_tensors


class RunningBuffers:
    """The buffers of a model that its forward pass changes.

    Args:
        model: the model, on its device; its running buffers become views of one flat tensor.
        declared: name patterns of further floating-point buffers to average (``["ema.*"]``).
    """

    def __init__(self, model: nn.Module, declared: Sequence[str] = ()) -> None:
        self._model = model
        self._averaged, self._counters = _find(model, declared)
        self._flat = _flatten([buffer for _, buffer, _ in self._averaged], torch.float32)
        self._counts = _flatten([buffer for _, buffer in self._counters], torch.int64)
        self._old, self._old_counts = self._flat.clone(), self._counts.clone()
        sizes = torch.tensor([buffer.numel() for _, buffer, _ in self._averaged], dtype=torch.int64)
        counter_of = torch.tensor([-1 if c is None else c for _, _, c in self._averaged], dtype=torch.int64)
        counter_of = torch.repeat_interleave(counter_of, sizes).to(self._flat.device)
        self._has_counter, self._counter_of = counter_of >= 0, counter_of.clamp(min=0)
        self._others: dict[str, str] | None = None

    @property
    def numel(self) -> int:
        """How many values are averaged."""
        return self._flat.numel()

    @property
    def counters(self) -> int:
        """How many integer counters there are."""
        return len(self._counters)

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self._flat.device

    def begin_step(self) -> None:
        """Remembers the step's old values."""
        if self._averaged:
            self._old.copy_(self._flat)
            self._old_counts.copy_(self._counts)

    def begin_micro_batch(self) -> None:
        """Puts the old values back before a forward pass."""
        if self._averaged:
            self._flat.copy_(self._old)
            self._counts.copy_(self._old_counts)

    def take(self) -> tuple[Tensor, Tensor]:
        """What a forward pass left: values (numel,) and by how much each counter advanced (counters,), as copies."""
        return self._flat.clone(), self._counts - self._old_counts

    def finish_step(self, total: Tensor, leaves: int, advanced: Tensor) -> None:
        """Sets the new values.

        Args:
            total: tree sum over the micro-batches of what ``take`` gave, shape (numel,).
            leaves: number of micro-batches in it.
            advanced: how often each counter advanced over all micro-batches, shape (counters,).
        """
        unused = (advanced == 0).index_select(0, self._counter_of) & self._has_counter
        torch.where(unused, self._old, total / leaves, out=self._flat)
        self._counts.copy_(self._old_counts + (advanced > 0))

    def remember_others(self) -> None:
        """Notes the values of all buffers that are not averaged, to see later whether a forward pass changed one."""
        self._others = self._digest_others()

    def refuse_changed_others(self) -> None:
        """Raises ``ConfigError`` naming a buffer that changed although nobody said how to combine it."""
        if self._others is None:
            return
        before, self._others = self._others, None
        changed = [name for name, digest in self._digest_others().items() if before.get(name) != digest]
        if changed:
            raise ConfigError(
                f"The forward pass changes the buffer {changed[0]!r}, and how its values from several micro-batches "
                f"combine is not known. Declare it to be averaged with running_buffers=[{changed[0]!r}], or change it "
                "outside of the forward pass."
            )

    def _digest_others(self) -> dict[str, str]:
        known = {name for name, _, _ in self._averaged} | {name for name, _ in self._counters}
        return digest_tensors({name: b for name, b in self._model.named_buffers() if name not in known})


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model computes statistics over the rows of a micro-batch, which needs at least two of them."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _find(
    model: nn.Module, declared: Sequence[str]
) -> tuple[list[tuple[str, Tensor, int | None]], list[tuple[str, Tensor]]]:
    """Averaged buffers as (name, buffer, index of the counter that tells whether it was used) and the counters."""
    averaged: list[tuple[str, Tensor, int | None]] = []
    counters: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
            path = f"{prefix}." if prefix else ""
            if module.num_batches_tracked is not None:
                counters.append((f"{path}num_batches_tracked", module.num_batches_tracked))
            counter = len(counters) - 1 if module.num_batches_tracked is not None else None
            averaged.append((f"{path}running_mean", module.running_mean, counter))
            averaged.append((f"{path}running_var", module.running_var, counter))
    found = {name for name, _, _ in averaged}
    buffers = dict(model.named_buffers())
    for pattern in declared:
        names = [name for name in buffers if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(f"running_buffers names {pattern!r}, which no buffer of the model matches.")
        averaged += [(name, buffers[name], None) for name in names if name not in found]
    for name, buffer, _ in averaged:
        if buffer.dtype != torch.float32:
            raise ConfigError(f"The running buffer {name!r} is {buffer.dtype}; only float32 ones can be averaged.")
    return averaged, counters


def _flatten(buffers: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Moves the buffers into one flat tensor, of which they become views, and returns it."""
    if not buffers:
        return torch.empty(0, dtype=dtype)
    flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
    position = 0
    for buffer in buffers:
        buffer.data = flat[position : position + buffer.numel()].view(buffer.shape)
        position += buffer.numel()
    return flat
