"""``single`` and ``ddp`` with one forward pass over all micro-batches of a process, as synchronised BatchNorm needs.

Inputs are joined into one batch, and outputs are split back by rows. Rank r takes the micro-batches r, r + W, ... . A
rank that a ragged step leaves without one runs micro-batch 0 as padding, so that the others need not wait: it counts
for neither the statistics, the gradients nor the loss.

Dropout masks belong to micro-batches although one forward pass runs several of them:

    rows        | k0 | k2 | k4 |            of one forward pass
    mask        | m0 | m2 | m4 |            each drawn with the key (seed, step, k, module, call)

So a sample's mask does not depend on which samples share its forward pass. ``RefuseDraws`` finds all other random
numbers that a forward pass draws, and reports the line.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.config.strategy_options import Level
from lockstep.core.plan import Share
from lockstep.core.seeding import derive_seed
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.numerics.sync_batch_norm import RankRows, synchronise
from lockstep.reduce import Reducer
from lockstep.runtime.stack_dump import package_folder
from lockstep.strategies.ddp import DistributedDataParallel, Replicated, Single
from lockstep.strategies.strategy import Compute, StepResult

_WHY = "With sync_batch_norm the inputs of a process's micro-batches are joined, so"


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One input from those of several micro-batches: tensors one below the other, all else as it is in each.

    Args:
        parts: nested tuples, lists and dicts, alike but for the values of tensors.
        sizes: samples of each micro-batch; every tensor has so many rows.

    Raises:
        ConfigError: the inputs do not fit together.
    """
    flattened = [tree_flatten(part) for part in parts]
    specs = [spec for _, spec in flattened]
    if any(spec != specs[0] for spec in specs):
        raise ConfigError(
            f"{_WHY} they must be alike. One is {specs[0]}, another {next(s for s in specs if s != specs[0])}."
        )
    columns = zip(*(leaves for leaves, _ in flattened))
    return tree_unflatten([_join_leaves(column, sizes) for column in columns], specs[0])


def split(output: Any, sizes: Sequence[int]) -> list[Any]:
    """The part of each micro-batch of an output whose tensors have a row for each sample.

    Raises:
        ConfigError: a tensor has another number of rows.
    """
    leaves, spec = tree_flatten(output)
    rows = sum(sizes)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != rows):
            raise ConfigError(
                f"With sync_batch_norm a model is called once with all {rows} samples that a process has of a step, "
                f"and its output has the shape {tuple(leaf.shape)}. Let it return a row for each sample, and compute "
                "the loss in the loss function."
            )
    columns = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves
    ]
    return [tree_unflatten(list(part), spec) for part in zip(*columns)]


def _join_leaves(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if any(isinstance(leaf, Tensor) or leaf != first for leaf in column):
            raise ConfigError(
                f"{_WHY} values other than tensors must be equal in all of them. Found {first!r} and others."
            )
        return first
    for leaf, size in zip(column, sizes):
        fits = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        if not fits or leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype:
            found = [f"{tuple(each.shape)}" if isinstance(each, Tensor) else repr(each) for each in column]
            raise ConfigError(
                f"{_WHY} their tensors must have a row for each sample and otherwise one shape; {list(sizes)} samples "
                f"have {', '.join(found)}. Let the collate function pad to one length, or leave sync_batch_norm out."
            )
    return first if len(column) == 1 else torch.cat(list(column))


class _FusedForward(Replicated):
    """The base of both."""

    _rows: RankRows
    """Exchanges statistics."""

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Converts every BatchNorm and dropout module, and places the model. Collective.

        Raises:
            ConfigError: the model has no BatchNorm, or something in it cannot be run on several micro-batches at once.
        """
        _refuse_other_statistics(model, self._declared)
        self._norms = synchronise(model, self._rows)
        self._keys = key_dropouts(model)
        self._watched = False
        return super().setup_model(model)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this process's rows in one pass and reduces. See ``Strategy.backward``."""
        micro_batches = [each for each in batch.micro_batches if each.k < batch.plan.leaves]
        counts = bool(micro_batches)
        holder, holders = self.share.holder or 0, self.share.holders
        self._sums.begin(range(holder, holder + 1), holders)
        self._sums.begin_forward()
        for norm in self._norms:
            norm.counts = counts
        results = self._forward(micro_batches or list(batch.micro_batches[:1]), compute)
        self._sums.end_forward(holder)
        total = torch.stack([loss for loss, _ in results]).sum() * (scale if counts else 0.0)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub
        self._sums.end_backward()
        self._keys.end()
        for micro_batch in micro_batches:
            for call in self.events.micro_batch_end:
                call(micro_batch)
        counted = results if counts else []
        losses, weights = [loss.detach() for loss, _ in counted], [weight for _, weight in counted]
        return self._sums.reduce(losses, weights, stop, batch.plan.leaves)

    def _forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[tuple[Tensor, Tensor]]:
        """The forward pass over all rows; sum and weight of the loss of each micro-batch."""
        inputs, keys, sizes = [], [], [len(each) for each in micro_batches]
        for micro_batch in micro_batches:
            compute.begin(micro_batch)
            keys.append(torch.default_generator.initial_seed())
            inputs.append(compute.inputs(micro_batch))
        self._keys.begin(list(zip(sizes, keys)))
        arguments, named = join([(given, by_name) for given, by_name, _ in inputs], sizes)
        with nullcontext() if self._watched else RefuseDraws(self._keys):
            with compute.autocast():
                output = self._model(*arguments, **named)
            outputs, targets = split(output, sizes), [target for _, _, target in inputs]
            self._watched = True
            return [compute.loss(*each) for each in zip(outputs, targets, micro_batches)]


class SyncedSingle(_FusedForward, Single):
    """One forward pass over the global batch: what the other one is compared with."""

    level = Level.TOLERANCE
    _rows = RankRows(None)


class SyncedDistributedDataParallel(_FusedForward, DistributedDataParallel):
    """Data parallel with the statistics of every BatchNorm over the rows of all ranks."""

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        reducer: Reducer,
        group: dist.ProcessGroup,
        rows: RankRows,
        running_buffers: Sequence[str] = (),
    ) -> None:
        super().__init__(device, micro_batches, reducer, group, running_buffers)
        self.share: Share = replace(self.share, rounds=True)
        if self.level is Level.BITWISE:
            self.level = Level.TOLERANCE
        self._rows = rows

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        self._rows.release()


def _refuse_other_statistics(model: nn.Module, declared: Sequence[str]) -> None:
    """Buffers that a forward pass changes, and that are not those of a BatchNorm: each rank would have its own."""
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    if others or declared:
        named = f"the running statistics of {others[0]!r}" if others else f"running_buffers={list(declared)}"
        raise ConfigError(
            f"sync_batch_norm combines the statistics of BatchNorm over the global batch, and {named} would be those "
            "of one process's rows. Leave sync_batch_norm out, or train without them."
        )


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
