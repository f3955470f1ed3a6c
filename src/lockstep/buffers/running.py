"""Running statistics (BatchNorm's, and buffers the user declares) that do not depend on who ran which micro-batch.

Every micro-batch of a step starts from the step's old values. The step's new values are the tree mean of what the
micro-batches left behind; a module that no micro-batch used in training mode keeps its old ones, bit for bit.
Integer counters advance once per step. All values live in one flat tensor, so that taking and putting them back is
one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.buffers.finding import find, names
from lockstep.errors import ConfigError
from lockstep.fingerprint import digest_tensors


class RunningBuffers:
    """The buffers of a model that its forward pass changes.

    Args:
        model: the model, on its device; its running buffers become views of one flat tensor.
        declared: name patterns of further floating-point buffers to average (``["ema.*"]``).
        on: take only the buffers on this device; None for all.
    """

    def __init__(
        self, model: nn.Module, declared: Sequence[str] = (), on: torch.device | None = None
    ) -> None:
        self._model = model
        groups, counters = find(model, declared)
        self._known = names(groups, counters)
        groups = [group for group in groups if on in (None, group.places[0].buffer.device)]
        counters = [place for place in counters if on in (None, place.buffer.device)]
        averaged = [place for group in groups for place in group.places]
        self._places = [*averaged, *counters]
        dtype = averaged[0].buffer.dtype if averaged else torch.float32
        self._flat = _flatten([place.buffer for place in averaged], dtype)
        self._counts = _flatten([place.buffer for place in counters], torch.int64)
        self._old, self._old_counts = self._flat.clone(), self._counts.clone()
        compared = [group for group in groups if group.counter is None]
        signal = {id(group): number for number, group in enumerate(compared, len(counters))}
        signal |= {id(g): counters.index(g.counter) for g in groups if g.counter is not None}
        sizes = torch.tensor([group.numel for group in groups], dtype=torch.int64)
        of_group = torch.tensor([signal[id(group)] for group in groups], dtype=torch.int64)
        self._signal_of = torch.repeat_interleave(of_group, sizes).to(self._flat.device)
        ends = sizes.cumsum(0).tolist()
        self._compared = [
            slice(end - group.numel, end) for group, end in zip(groups, ends) if group.counter is None
        ]
        self._others: dict[str, str] | None = None

    @property
    def numel(self) -> int:
        """How many values are averaged."""
        return self._flat.numel()

    @property
    def counters(self) -> int:
        """How many numbers tell which buffers were used: the integer counters, and one for each other group."""
        return self._counts.numel() + len(self._compared)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values: float32, or float64 for a model of float64."""
        return self._flat.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self._flat.device

    def begin_step(self) -> None:
        """Remembers the step's old values."""
        if self._places:
            self._take_back(keep=True)
            self._old.copy_(self._flat)
            self._old_counts.copy_(self._counts)

    def begin_micro_batch(self) -> None:
        """Puts the old values back before a forward pass."""
        if self._places:
            self._take_back(keep=False)
            self._flat.copy_(self._old)
            self._counts.copy_(self._old_counts)

    def take(self) -> tuple[Tensor, Tensor]:
        """What a forward pass left: values (numel,), and how often each group was used (counters,), as copies."""
        self._take_back(keep=True)
        advanced = self._counts - self._old_counts
        if self._compared:
            changed = [(self._flat[part] != self._old[part]).any() for part in self._compared]
            advanced = torch.cat([advanced, torch.stack(changed).to(advanced.dtype)])
        return self._flat.clone(), advanced

    def finish_step(self, total: Tensor, leaves: int, advanced: Tensor) -> None:
        """Sets the new values.

        Args:
            total: tree sum over the micro-batches of what ``take`` gave, shape (numel,).
            leaves: number of micro-batches in it.
            advanced: sum over the micro-batches of how often each group was used, shape (counters,).
        """
        self._take_back(keep=False)
        unused = (advanced == 0).index_select(0, self._signal_of)
        torch.where(unused, self._old, total / leaves, out=self._flat)
        self._counts.copy_(self._old_counts + (advanced[: self._counts.numel()] > 0))

    def _take_back(self, *, keep: bool) -> None:
        """Makes the model hold our views again where it was given other tensors, as ``self.mean = ...`` does."""
        for place in self._places:
            found = place.holder[place.key]
            if found is not place.buffer:
                if keep and found is not None:
                    with torch.no_grad():
                        place.buffer.copy_(found)
                place.holder[place.key] = place.buffer

    @staticmethod
    def names(model: nn.Module, declared: Sequence[str] = ()) -> set[str]:
        """The names of a model's running buffers and their counters."""
        return names(*find(model, declared))

    def take_over(self, other: RunningBuffers) -> None:
        """Sets the values to those of the same model's buffers elsewhere."""
        if self._places:
            self._take_back(keep=False)
            self._flat.copy_(other._flat)
            self._counts.copy_(other._counts)

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
        return digest_tensors({n: b for n, b in self._model.named_buffers() if n not in self._known})


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
