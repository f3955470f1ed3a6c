"""One pass of a rehearsal: computes a micro-batch on each rank, and restores what that has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.core.fingerprint import digest_tensor, sum_of_bits
from lockstep.core.generators import generators_kept
from lockstep.core.plan import Share
from lockstep.data.batch import Batch, MicroBatch, map_leaves
from lockstep.distributed.collectives import broadcast_tensors
from lockstep.numerics.hidden_state import Snapshot
from lockstep.numerics.running_buffers import persistent_buffers
from lockstep.run.checks.findings import Findings
from lockstep.run.checks.means import Deviation, checked
from lockstep.run.checks.rows import RowCopies, copies_of, has_rows
from lockstep.run.step import StepCompute
from lockstep.runtime.events import StepEvents
from lockstep.strategies import Strategy
from lockstep.strategies.absent import AbsentParameter, AbsentTensor
from lockstep.strategies.sharding import value_of

if TYPE_CHECKING:
    from lockstep.run.state import PreparedRun


@dataclass(frozen=True)
class RehearsalCompute(StepCompute):
    """The forward pass and the loss of a short step, under the keys of the step that it is taken from."""

    numbers: Mapping[int, int] = field(default_factory=dict)
    """The number in that step of each micro-batch."""
    judged: list[RowCopies | None] | None = None
    """Collects output and target of each micro-batch, or None for one without several rows; None: nothing is kept."""
    is_number: list[bool] = field(default_factory=list)
    """Collects for each call of the loss whether its value is one number."""

    def numbered(self, micro_batch: MicroBatch) -> MicroBatch:
        """See ``StepCompute.numbered``."""
        return replace(micro_batch, k=self.numbers.get(micro_batch.k, micro_batch.k))

    def value(self, output: Any, target: Any) -> Any:
        """See ``StepCompute.value``."""
        value = super().value(output, target)
        self.is_number.append(isinstance(value, Tensor) and value.dim() == 0)
        return value

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See ``StepCompute.loss``; keeps what tells whether it is a mean."""
        rows = len(micro_batch) if micro_batch.k < self.plan.leaves else 0
        if self.judged is None or rows == 0:
            return super().loss(output, target, micro_batch)
        has_several = rows > 1 and has_rows((output, target), rows)
        part = (*copies_of((output, target)), rows) if has_several else None  # the loss may write into them
        result = super().loss(output, target, micro_batch)
        is_largest = rows == max(map(len, self.plan.indices))  # otherwise a larger one tells
        if has_several or (self.is_number[-1] and is_largest):
            self.judged.append(part)
        return result

    def deviations(self) -> list[Deviation]:
        """The kinds of mean that the loss is, as far as ``judged`` tells."""
        begin = Buffers((self.forward_pass.model,)).restore  # as for each micro-batch, for a loss that calls the model
        with self.autocast():
            return [
                Deviation.WITHOUT_ROWS if part is None else checked(self.function, *part, trains=True, begin=begin)
                for part in self.judged or ()
            ]


@dataclass(frozen=True)
class PassBits:
    """The bits of one pass: of losses, and sums of those of gradients and buffers, by name."""

    losses: list[int]
    gradients: dict[str, int | None]
    buffers: dict[str, int]

    def other_gradients(self, *others: PassBits) -> list[str]:
        """The parameters whose gradients differ in any of these passes."""
        return [name for name, bits in self.gradients.items() if any(each.gradients[name] != bits for each in others)]

    def other_buffers(self, *others: PassBits) -> list[str]:
        """The buffers that have other values after any of these passes."""
        return [name for name, bits in self.buffers.items() if any(each.buffers.get(name) != bits for each in others)]


class Buffers:
    """The buffers of some models with copies of their values, which can be restored.

    Those that no ``state_dict()`` has are left out: what a forward pass keeps in them is judged as attributes are.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = {id(m._buffers): m for model in models for m in model.modules() if m._buffers}
        self._kept = [
            (m, {key: (buffer, _values_of(buffer)) for key, buffer in persistent_buffers(m).items()})
            for m in modules.values()
        ]
        self._names = {id(m): f"{name}." if name else "" for each in models[::-1] for name, m in each.named_modules()}

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers as they stand."""
        return [each for m, _ in self._kept for each in persistent_buffers(m).values() if each is not None]

    def bits(self) -> dict[str, int]:
        """A sum of the bits of each buffer that is held here, by name."""
        return {
            self._names[id(module)] + key: int(sum_of_bits(now))
            for module, kept in self._kept
            for key, (_, values) in kept.items()
            if values is not None and (now := module._buffers.get(key)) is not None and not now.is_quantized
        }

    def moved(self, model: nn.Module) -> list[str]:
        """The names of a model's buffers, of those that its state has, whose values have changed."""
        kept = {id(m._buffers): values for m, values in self._kept}
        return [
            f"{prefix}.{key}".lstrip(".")
            for prefix, module in model.named_modules()
            for key, (_, values) in kept.get(id(module._buffers), {}).items()
            if values is not None
            if (now := module._buffers.get(key)) is None or digest_tensor(now) != digest_tensor(values)
        ]

    def restore(self) -> None:
        """Restores the tensors and their values."""
        with torch.no_grad():
            for module, kept in self._kept:
                holder = module._buffers
                for key in persistent_buffers(module).keys() - kept.keys():
                    del holder[key]
                for key, (buffer, values) in kept.items():
                    holder[key] = buffer
                    if buffer is None or values is None:
                        continue
                    if buffer.shape != values.shape:
                        buffer.resize_(values.shape)
                    buffer.detach().copy_(values)


class Watched:
    """The user's models and functions, whose state can be compared and restored after calls.

    ``roots`` are these objects by the words for them in messages.
    """

    def __init__(self, roots: dict[str, Any], models: Sequence[nn.Module]) -> None:
        self.roots, self.buffers = roots, Buffers(models)
        self.before = Snapshot(roots, self.buffers.tensors)

    def now(self) -> Snapshot:
        """The state as it is now, for a comparison."""
        return Snapshot(self.roots, self.buffers.tensors, restorable=False)

    def restore(self) -> None:
        """Restores everything."""
        self.before.restore()
        self.buffers.restore()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts back what calls in the block have changed."""
        try:
            yield
        finally:
            self.restore()


@contextmanager
def put_back(strategy: Strategy, watched: Watched, events: StepEvents) -> Iterator[None]:
    """Puts back what a rehearsal in the block changes: gradients, what is watched, and generators of random numbers.

    No callbacks are called, and what is sent counts as that of a rehearsal.
    """
    prior, sent = {p: p.grad for p in strategy.trainable().values()}, strategy.bytes_sent
    for parameter in prior:
        parameter.grad = None
    try:
        with watched.restored(), events.silenced(), generators_kept():
            yield
    finally:
        for parameter, gradient in prior.items():
            parameter.grad = gradient
        strategy.bytes_outside_steps += strategy.bytes_sent - sent


def taken_gradients(strategy: Strategy) -> dict[str, int | None]:
    """A sum of the bits of each gradient, by parameter; the gradients are taken away."""
    trained = strategy.trainable()
    found = {name: None if p.grad is None else int(sum_of_bits(p.grad)) for name, p in trained.items()}
    for parameter in trained.values():
        parameter.grad = None
    return found


def _values_of(buffer: Tensor | None) -> Tensor | None:
    """A copy of a buffer that is held here."""
    return None if buffer is None or isinstance(buffer, AbsentTensor) or buffer.is_meta else buffer.clone()


def shortened(batch: Batch, compute: StepCompute, share: Share, most: int) -> tuple[Batch, RehearsalCompute]:
    """A step of at most ``most`` micro-batches of each holder, as this process sees it, and what computes it."""
    plan = batch.plan
    firsts = [share.of(plan.leaves, holder)[:most] for holder in range(min(share.holders, plan.leaves))]
    first = [k for held in firsts for k in held]
    short = replace(plan, indices=tuple(plan.indices[k] for k in first))
    own = tuple(replace(each, k=k) for each, k in zip(batch.micro_batches[:most], share.of(short.leaves), strict=False))
    numbers = dict(enumerate(first))
    return Batch(short, own), RehearsalCompute.taking(compute, plan=short, metrics=None, numbers=numbers)


def on_all_ranks(batch: Batch, compute: RehearsalCompute, strategy: Strategy) -> tuple[Batch, RehearsalCompute] | None:
    """The short step with rank 0's first micro-batch in place of every one, under the same keys. Collective.

    None where the data are not tensors, texts and numbers, or not of one structure on all ranks that have some.
    """
    leaves: list[Any] = []
    data = [each.data for each in batch.micro_batches]
    structure = repr(map_leaves(data, leaves.append))
    tensors = [leaf for leaf in leaves if type(leaf) is Tensor and leaf.layout is torch.strided]
    sendable = len(tensors) == sum(type(leaf) not in (str, int, float, bool, type(None)) for leaf in leaves)
    kinds = [
        [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] if type(leaf) is Tensor else [None, leaf]
        for leaf in leaves
    ]
    everyone = strategy.gather_records([structure, kinds if sendable else None])
    structures = {each for each, kinds in everyone if kinds != []}
    if len(structures) != 1 or not everyone[0][1] or None in (kinds for _, kinds in everyone):
        return None
    group = strategy.all_ranks
    assert group is not None, "there are several ranks"
    sent = [torch.empty(size, dtype=getattr(torch, dtype)) for size, dtype in everyone[0][1] if size is not None]
    if dist.get_rank(group) == 0:
        sent = [leaf.clone() for leaf in tensors]
    sent = [each.to(strategy.device) for each in sent]
    broadcast_tensors(sent, 0, group)
    received = iter(each.cpu() for each in sent)
    values = iter([value if size is None else next(received) for size, value in everyone[0][1]])
    data, first = map_leaves(data, lambda _: next(values)), batch.plan.indices[0]
    parts = tuple(replace(each, data=data[0], indices=first) for each in batch.micro_batches)
    plan = replace(batch.plan, indices=(first,) * batch.plan.leaves)
    numbers = dict.fromkeys(compute.numbers, compute.numbers[0])
    return Batch(plan, parts), replace(compute, plan=plan, numbers=numbers)


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


@contextmanager
def noting_mistakes(prepared: PreparedRun, watched: Watched, strategy: Strategy, findings: Findings) -> Iterator[None]:
    """Notes what calls in the block do to modules and parameters that makes a step wrong on any layout."""
    model, called = prepared.state.parts.model, CalledModules(prepared, watched, strategy)
    values = parameter_values(model)
    with called.noting(), strategy.watching_writes() as written:
        yield
    prepared.state.model.require_own_parameters()
    changed = [name for name, value in parameter_values(model).items() if value != values[name]]
    findings.foreign, findings.written = called.wrong, changed + sorted(written)


class CalledModules:
    """Notes the modules that a forward pass or a loss calls and that do not belong to the prepared model.

    They are added to what is ``watched``.
    """

    def __init__(self, prepared: PreparedRun, watched: Watched, strategy: Strategy) -> None:
        parts = prepared.state.parts
        own = [parts.model, prepared.forward_pass.model]
        if strategy.reference is not None:
            own.append(strategy.reference)
        self._own = {id(module) for each in own for module in each.modules()}
        self._parameters = {id(parameter) for each in own for parameter in each.parameters()}
        self._kept = {id(module) for each in parts.modules for module in each.modules()}
        self._watched = watched
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
        with register_module_forward_pre_hook(self._note):
            yield

    def _note(self, module: nn.Module, _: object) -> None:
        if id(module) in self._own or id(module) in self._seen:
            return
        self._seen[id(module)] = module
        name, kind = self._watched.before.name_of(module), type(module).__qualname__
        if not name:
            name = f"a {kind}"
            self._watched.before.add(name, module)
            self._watched.roots[name] = module
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            self.wrong[name] = f"changes its running statistics (a {kind} in training mode)"
        if id(module) in self._kept or not torch.is_grad_enabled():
            return
        for key, each in module.named_parameters(recurse=False):
            # A copy.copy of a module has the model's; what is computed, as by higher, passes its gradient on.
            if each.requires_grad and each.is_leaf and id(each) not in self._parameters:
                what = f"has parameters that require gradients ({key}), which nobody sums or updates"
                self.wrong[name] = what
                return
