"""A step of one micro-batch for each holder, which is thrown away; what it calls, and the buffers before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.core.plan import Share
from lockstep.data.batch import Batch, MicroBatch, map_leaves
from lockstep.data.keyed import generators_kept
from lockstep.numerics.hidden_state import Snapshot
from lockstep.run.means import Deviation, copies_of, deviation, has_rows
from lockstep.run.step import StepCompute
from lockstep.strategies.absent import AbsentParameter, AbsentTensor
from lockstep.strategies.sharding import value_of

if TYPE_CHECKING:
    from lockstep.run.state import PreparedRun


@dataclass(frozen=True)
class RehearsalCompute(StepCompute):
    """The forward pass and the loss of a short step, under the keys of the step that it is taken from."""

    numbers: Mapping[int, int] = field(default_factory=dict)
    """The number of each micro-batch in that step."""
    deviations: list[Deviation] | None = None
    """Gets what kind of mean the loss of each micro-batch is, where its rows tell that; None: nobody asks."""
    is_number: list[bool] = field(default_factory=list)
    """Gets for each call of the loss whether its value is one number."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """See ``StepCompute.begin``."""
        super().begin(self._numbered(micro_batch))

    def resume(self, micro_batch: MicroBatch, phase: str) -> None:
        """See ``StepCompute.resume``."""
        super().resume(self._numbered(micro_batch), phase)

    def pause(self, micro_batch: MicroBatch) -> Callable[[], None]:
        """See ``StepCompute.pause``."""
        return super().pause(self._numbered(micro_batch))

    def value(self, output: Any, target: Any) -> Any:
        """See ``StepCompute.value``."""
        value = super().value(output, target)
        self.is_number.append(isinstance(value, Tensor) and value.dim() == 0)
        return value

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See ``StepCompute.loss``; notes what kind of mean it is."""
        rows = len(micro_batch) if micro_batch.k < self.plan.leaves else 0
        if self.deviations is None or rows == 0:
            return super().loss(output, target, micro_batch)
        if rows == 1 or not has_rows((output, target), rows):
            result = super().loss(output, target, micro_batch)
            if self.is_number[-1] and rows == max(map(len, self.plan.indices)):  # else a larger one tells
                self.deviations.append(Deviation.WITHOUT_ROWS)
            return result
        seen, wanted = copies_of((output, target))  # the loss may write into what it is given
        result = super().loss(output, target, micro_batch)
        with generators_kept(), self.autocast():
            self.deviations.append(deviation(self.function, seen, wanted, rows))
        return result

    def _numbered(self, micro_batch: MicroBatch) -> MicroBatch:
        return replace(micro_batch, k=self.numbers.get(micro_batch.k, micro_batch.k))


class Buffers:
    """The buffers of some models, and what puts them back."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        holders = {id(m): m._buffers for model in models for m in model.modules()}
        self._kept = [
            (holder, {key: (buffer, _values_of(buffer)) for key, buffer in holder.items()})
            for holder in holders.values()
            if holder
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers as they stand."""
        return [each for holder, _ in self._kept for each in holder.values() if each is not None]

    def restore(self) -> None:
        """Puts back the tensors, and their values."""
        with torch.no_grad():
            for holder, kept in self._kept:
                holder.clear()
                for key, (buffer, values) in kept.items():
                    holder[key] = buffer
                    if buffer is not None and values is not None:
                        buffer.detach().copy_(values)


@contextmanager
def unchanged(model: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Puts back what calls of a model, and of the user's own ``forward``, in the block have changed in them."""
    buffers = Buffers((model,))
    before = Snapshot({"": model, "forward=": forward}, buffers.tensors)
    try:
        yield
    finally:
        before.restore()
        buffers.restore()


def _values_of(buffer: Tensor | None) -> Tensor | None:
    """A copy of a buffer that is held here."""
    return None if buffer is None or isinstance(buffer, AbsentTensor) or buffer.is_meta else buffer.clone()


def shortened(batch: Batch, compute: StepCompute, share: Share, most: int) -> tuple[Batch, RehearsalCompute]:
    """A step of the first micro-batches of each holder, ``most`` at most, as this process sees it; what computes it."""
    plan = batch.plan
    firsts = [share.of(plan.leaves, holder)[:most] for holder in range(min(share.holders, plan.leaves))]
    first = [k for held in firsts for k in held]
    short = replace(plan, indices=tuple(plan.indices[k] for k in first))
    own = tuple(
        replace(each, k=k)
        for each, k in zip(batch.micro_batches[:most], share.of(short.leaves), strict=False)
    )
    given = {each.name: getattr(compute, each.name) for each in fields(compute)}
    rehearsal = RehearsalCompute(**{**given, "plan": short, "metrics": None}, numbers=dict(enumerate(first)))
    return Batch(short, own), rehearsal


def with_own_data(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch with a copy of its data, into which a forward pass may write."""
    return replace(micro_batch, data=map_leaves(micro_batch.data, _copied))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        # From pageable memory a copy to a GPU would be waited for.
        return torch.empty_like(value, pin_memory=True).copy_(value) if value.is_pinned() else value.clone()
    try:
        return copy.deepcopy(value)
    except Exception:
        # An object of the user's may refuse in any way, and is then given as it is.
        return value


def parameter_values(model: nn.Module) -> dict[str, tuple[int, int]]:
    """See ``value_of``, of each parameter that is held here between steps."""
    return {
        name: value_of(parameter)
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, AbsentParameter) and not parameter.is_meta
    }


class CalledModules:
    """Notes the modules that a forward pass or a loss calls and that do not belong to the prepared model.

    Args:
        prepared: the run.
        before: the state of ``roots``, to which what is called is added.
        roots: what user code is looked at, by name.
    """

    def __init__(self, prepared: PreparedRun, before: Snapshot, roots: dict[str, Any]) -> None:
        parts = prepared.state.parts
        own = (parts.model, prepared.compute.model)
        self._own = {id(module) for each in own for module in each.modules()}
        self._parameters = {id(parameter) for each in own for parameter in each.parameters()}
        self._kept = {id(module) for each in parts.modules for module in each.modules()}
        self._before, self._roots = before, roots
        self._is_compiled = any("forward" in vars(module) for each in own for module in each.modules())
        self._seen: dict[int, nn.Module] = {}
        self.wrong: dict[str, str] = {}
        """Those that cannot be right, by name, with the reason."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes them inside; not where modules are compiled, as torch's compiler reads such hooks too."""
        if self._is_compiled:
            yield
            return
        handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, _: object) -> None:
        if id(module) in self._own or id(module) in self._seen:
            return
        self._seen[id(module)] = module
        name = self._before.name_of(module)
        if not name:
            name = f"a {type(module).__qualname__}"
            self._before.add(name, module)
            self._roots[name] = module
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            self.wrong[name] = (
                f"changes its running statistics (a {type(module).__qualname__} in training mode)"
            )
        trained = [
            key
            for key, each in module.named_parameters(recurse=False)
            if each.requires_grad
            and id(each) not in self._parameters  # a copy.copy of a module has the model's
        ]
        if trained and torch.is_grad_enabled() and id(module) not in self._kept:
            self.wrong[name] = (
                f"has parameters that require gradients ({trained[0]}), which nobody sums or updates"
            )
