"""Dropout masks that belong to micro-batches although one forward pass runs several of them.

    rows        | k0 | k2 | k4 |            of one forward pass
    mask        | m0 | m2 | m4 |            each drawn with the key (seed, step, k, module, call)

So a sample's mask does not depend on which samples share its forward pass. ``RefuseDraws`` finds all other random
numbers that a forward pass draws, and reports the line.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.seeding import derive_seed
from lockstep.errors import ConfigError
from lockstep.runtime.stack_dump import package_folder


class MicroBatchKeys:
    """The micro-batches of the rows of the current forward pass, and the key of each.

    Copies of a model share it: generators cannot be copied.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, int]] = []
        self._calls: dict[str, int] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self.is_drawing = False
        """True if masks are being drawn, with a key each."""

    def begin(self, parts: Sequence[tuple[int, int]]) -> None:
        """Starts a forward pass over micro-batches of (rows, key), in the order of the rows."""
        self._parts, self._calls = list(parts), {}

    def end(self) -> None:
        """Ends the step: until the next, modules draw as torch's do."""
        self._parts = []

    @property
    def is_active(self) -> bool:
        """True if a step is under way."""
        return bool(self._parts)

    def draw(self, unit: str, shape: Sequence[int], keep: float, device: torch.device) -> Tensor:
        """Ones with probability ``keep``, else zeros; float32.

        Args:
            unit: name of the module.
            shape: the first entry is the number of rows.
            keep: a probability.
            device: of the result.

        Raises:
            ConfigError: the rows are not those of the micro-batches, or the call cannot be told when it is run again.
        """
        rows = sum(size for size, _ in self._parts)
        if not shape or shape[0] != rows:
            raise ConfigError(
                f"With sync_batch_norm, dropout belongs to samples, and {unit or 'the model'!r} was given a tensor of "
                f"shape {tuple(shape)} where this process has {rows} samples. Apply it where the first dimension is "
                "the sample."
            )
        call = self._call(unit)
        generator = self._generators.setdefault(device, torch.Generator(device))
        masks = []
        self.is_drawing = True
        for size, key in self._parts:
            generator.manual_seed(derive_seed(key, "dropout", unit, call))
            masks.append(torch.empty((size, *shape[1:]), device=device).bernoulli_(keep, generator=generator))
        self.is_drawing = False
        return torch.cat(masks)

    def _call(self, unit: str) -> int:
        """The number of this call in the forward pass; that of the only one where backward runs it again."""
        calls = self._calls.get(unit, 0)
        if torch._C._current_graph_task_id() == -1:
            self._calls[unit] = calls + 1
            return calls
        if calls != 1:
            raise ConfigError(
                f"With sync_batch_norm, {unit or 'the model'!r} is called {calls} times in one forward pass and "
                "recomputed in backward by activation checkpointing, and the calls cannot be told apart. Use a module "
                "for each."
            )
        return 0

    def __deepcopy__(self, memo: dict[int, object]) -> MicroBatchKeys:
        return self

    def __reduce__(self) -> tuple[type[MicroBatchKeys], tuple[()]]:
        return MicroBatchKeys, ()


class _Keyed(nn.Module):
    """A dropout module that takes its masks from ``MicroBatchKeys`` while a step is under way."""

    keys: MicroBatchKeys
    unit: str
    p: float

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Zeroes entries, or channels, with probability p and scales the others by 1 / (1 - p)."""
        if not (self.training and self.keys.is_active and self.p > 0):
            output: Tensor = super().forward(input)
            return output
        if self.p == 1:
            return input * 0
        shape = input.shape
        if not isinstance(self, nn.Dropout):  # Dropout1d, 2d and 3d drop whole channels
            shape = torch.Size([*shape[:2], *[1] * (len(shape) - 2)])
        mask = self.keys.draw(self.unit, shape, 1 - self.p, input.device)
        return input * mask.div_(1 - self.p).to(input.dtype)


class KeyedDropout(_Keyed, nn.Dropout):
    """``nn.Dropout`` with masks of micro-batches."""


class KeyedDropout1d(_Keyed, nn.Dropout1d):
    """``nn.Dropout1d`` with masks of micro-batches."""


class KeyedDropout2d(_Keyed, nn.Dropout2d):
    """``nn.Dropout2d`` with masks of micro-batches."""


class KeyedDropout3d(_Keyed, nn.Dropout3d):
    """``nn.Dropout3d`` with masks of micro-batches."""


_KEYED: dict[type[nn.Module], type[_Keyed]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
    nn.Dropout3d: KeyedDropout3d,
}


def key_dropouts(model: nn.Module) -> MicroBatchKeys:
    """Lets the dropout modules of a model draw a mask for each micro-batch; returns what tells them which those are."""
    keys = MicroBatchKeys()
    for name, module in model.named_modules():
        if type(module) in _KEYED:
            module.__class__ = _KEYED[type(module)]
            module.keys, module.unit = keys, name
    return keys


_OFF = {"p": 0.0, "dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
"""Arguments of operators that may draw, with the values at which they do not."""
_NOT_THE_USERS = (package_folder("torch"), package_folder("lockstep"))


class RefuseDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """While entered, an operator that draws anything but the masks of ``keys`` raises ``ConfigError``.

    torch marks such operators itself, so unknown modules, ``F.dropout`` and ``torch.rand`` are all found, as far as
    they run.
    """

    def __init__(self, keys: MicroBatchKeys) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._keys = keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, or refuses it."""
        kwargs = kwargs or {}
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded and not self._keys.is_drawing and _draws(func, args, kwargs):
            raise ConfigError(
                f"With sync_batch_norm a process runs its whole share of a step in one forward pass, and "
                f"{func.overloadpacket} in {_line()} would draw random numbers that depend on what shares it. Use "
                "nn.Dropout modules, which get a mask for each micro-batch, or leave sync_batch_norm out."
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= {**{each.name: value for each, value in zip(arguments, args)}, **kwargs}
    return not any(
        name in given and not isinstance(given[name], torch.Tensor) and given[name] == off
        for name, off in _OFF.items()
    )


def _line() -> str:
    """The innermost line of code that is neither torch's nor ours: ``model.py:31``."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS):
            return f"{path.name}:{frame.lineno}"
    return "the model"
