r"""Data parallel in one process: a replica and a thread per device (torch's ``DataParallel``, with the tree's order).

    thread 0, device 0:  k0 k1 k2 k3 =\
                                       add in the tree's order on device 0 -> update replica 0 -> copy to the others
    thread 1, device 1:  k4 k5 k6 k7 =/

Replica 0 is the user's model. On CPUs the other replicas share its parameters' memory and have their own gradients and
running buffers; on GPUs each has a copy, updated before every step.

The replicas run one after the other, in the caller's thread, where threads would disturb each other: where the model
may draw random numbers, since torch has one generator to key; where it has hooks, since they may keep what they see;
and where it is compiled, since the compiler has one set of settings for all threads. So they do where the caller's
thread has settings that torch keeps for each thread: under autocast, and with a default device. (Leaving autocast in
any thread also empties torch's one cache of cast weights, and a weight that is then cast twice gets other bits.)

Where that happens on one device, the user's own model runs all micro-batches: the other replicas would gain nothing,
and what hooks keep, or the loss reads of the model, is as with one device.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.plan import share
from lockstep.core.summation_tree import TreeStack, nodes_within
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.numerics.hooks import (
    backward_hooks,
    forward_hooks,
    gradient_hooks,
    has_held_nodes,
    hooks_made,
    is_users,
    put_users_first,
    share_hooks,
)
from lockstep.numerics.randomness import draws_in_forward
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.runtime.devices import selected
from lockstep.strategies.ddp import Replicated
from lockstep.strategies.gradients import GradientTree, run_backward
from lockstep.strategies.strategy import Compute, StepResult
from lockstep.text import shorten


class Replica:
    """The model on one device."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        declared: Sequence[str],
        buffers: RunningBuffers | None = None,
        tree: GradientTree | None = None,
    ) -> None:
        self.model, self.device = model, device
        self.buffers = buffers if buffers is not None else RunningBuffers(model, declared)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tree = tree or GradientTree(trainable, None)
        running = RunningBuffers.names(model, declared)
        self._others = {name: b for name, b in model.named_buffers() if name not in running}
        self._is_known = tree is not None
        """True once it is known what the loss is computed from: of the user's own model, from the start."""
        self._hooks_seen = hooks_made()

    def follow(self, first: Replica) -> None:
        """Takes over what may have changed in replica 0: values, modes, numbers set by hand, hooks, what is frozen."""
        self.buffers.take_over(first.buffers)
        if self._hooks_seen != hooks_made():
            copy_hooks(first.model, self.model)
            self._hooks_seen = hooks_made()
        for own, theirs in zip(self.model.modules(), first.model.modules()):
            plain = (bool, int, float, str, type(None))
            vars(own).update({key: value for key, value in vars(theirs).items() if type(value) in plain})
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), first.model.parameters()):
                mine.requires_grad_(other.requires_grad)
                if mine.data_ptr() != other.data_ptr():
                    if mine.device == other.device:
                        mine.data = other.data  # one memory again, after p.data = ... in the loop
                    else:
                        mine.copy_(other, non_blocking=True)
            for name, buffer in first.model.named_buffers():
                if name in self._others and self._others[name].data_ptr() != buffer.data_ptr():
                    self._others[name].copy_(buffer, non_blocking=True)

    def require_own(self, loss: Tensor, first: nn.Module) -> None:
        """Looks, once, at what a loss was computed from.

        Raises:
            ConfigError: the loss reached for parameters of the user's model beside the output of this replica.
        """
        if self._is_known:
            return
        self._is_known = True
        names: dict[Tensor, str] = {each: name for name, each in first.named_parameters()}
        for variable in variables_of(loss):
            if variable in names:
                raise ConfigError(
                    f"The loss uses the parameter {names[variable]!r} of the model itself, but strategy 'dp' computes "
                    "each micro-batch on a replica. Return what the loss needs from the model's forward, or use "
                    "strategy 'ddp'."
                )


def copy_model(model: nn.Module, device: torch.device, declared: Sequence[str]) -> nn.Module:
    """Another replica: on a CPU its parameters, and buffers that do not run, are the memory of the model's own.

    Raises:
        ConfigError: the model cannot be copied.
    """
    running = RunningBuffers.names(model, declared)
    shared: dict[int, object] = {}
    if device.type == "cpu":
        for parameter in model.parameters():
            shared[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        shared |= {id(buffer): buffer for name, buffer in model.named_buffers() if name not in running}
    try:
        replica = copy.deepcopy(model, shared)
    except Exception as error:
        raise ConfigError(
            f"Strategy 'dp' copies the model for each device, but copy.deepcopy of {type(model).__name__} failed: "
            f"{error}. Make the model copyable, or use strategy 'ddp'."
        ) from error
    for parameter, twin in zip(model.parameters(), replica.parameters()):
        twin.__dict__ = parameter.__dict__  # what the user has set on a parameter, which copies do not have
    replica = replica.to(device)
    copy_hooks(model, replica)
    return replica


def copy_hooks(model: nn.Module, replica: nn.Module) -> None:
    """Gives a replica the model's hooks: the same objects, so that they act on what the user sees.

    Methods of the model's own modules become those of the replica's.
    """
    twin = dict(zip(model.modules(), replica.modules()))

    def own(hook: Any) -> Any:
        of = getattr(hook, "__self__", hook)
        if not isinstance(of, nn.Module) or of not in twin:
            return hook
        return twin[of] if of is hook else MethodType(hook.__func__, twin[of])

    for module, other in twin.items():
        theirs = (*forward_hooks(other), *backward_hooks(other))
        for hooks, copied in zip((*forward_hooks(module), *backward_hooks(module)), theirs):
            copied.clear()
            copied.update({number: own(hook) for number, hook in hooks.items()})
        for key in _ABOUT_HOOKS:
            vars(other)[key] = copy.copy(vars(module)[key])
    for parameter, copied_parameter in zip(model.parameters(), replica.parameters()):
        if parameter.requires_grad and copied_parameter is not parameter:
            share_hooks(copied_parameter)
            for hooks, copied in zip(gradient_hooks(parameter), gradient_hooks(copied_parameter)):
                for number in [number for number, hook in copied.items() if is_users(hook)]:
                    del copied[number]
                copied.update({number: own(hook) for number, hook in hooks.items() if is_users(hook)})
                put_users_first(copied)


def parts_of(model: nn.Module) -> dict[str, object]:
    """Modules, their parameters, and functions and tuples of torch's own, by name; others may set such in forward."""
    found: dict[str, object] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[path] = module
        parts: dict[str, object] = {**module._parameters}
        if type(module).__module__.startswith("torch.nn."):
            held = vars(module).items()
            parts |= {key: value for key, value in held if isinstance(value, tuple) or callable(value)}
        found |= {f"{path}.{key}".lstrip("."): value for key, value in parts.items()}
    return found


_ABOUT_HOOKS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_is_full_backward_hook",
)
"""The attributes in which a module notes things about its hooks, by their numbers."""


@dataclass(frozen=True)
class Computed:
    """The results of one micro-batch beside its gradients."""

    k: int
    loss: Tensor
    weight: Tensor
    running: Tensor | None
    advanced: Tensor


class DataParallel(Replicated):
    """Shares the micro-batches of a step over replicas, one on each device of this process.

    Args:
        devices: of the replicas; the first is the user's model's. One device may occur several times.
        threads: intra-op threads of each replica.
    """

    name = "dp"

    def __init__(self, devices: Sequence[torch.device], micro_batches: int, threads: int) -> None:
        if len(devices) > micro_batches:
            raise ConfigError(
                f"{len(devices)} replicas cannot share micro_batches={micro_batches}: each needs at least one. Use at "
                f"most {micro_batches} devices, or a recipe with more micro-batches."
            )
        super().__init__(devices[0], micro_batches)
        self.devices = tuple(devices)
        self._turn = threading.RLock()
        self._pool = ThreadPoolExecutor(
            len(devices), "lockstep-replica", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Makes the replicas; the user's model is the first."""
        self._alone = draws_in_forward(model) or any("forward" in vars(module) for module in model.modules())
        model = model.to(self.device)
        others = () if self._alone and self._is_one_device else self.devices[1:]
        copies = [copy_model(model, device, self.running_buffers) for device in others]
        placed = super().setup_model(model)
        self._replicas = [Replica(placed, self.device, self.running_buffers, self._buffers, self._sums.tree)]
        self._replicas += [Replica(each, device, self.running_buffers) for each, device in zip(copies, others)]
        self._hooks_seen = -1  # they are looked at in the first step
        self._copied = parts_of(placed)
        return placed

    @property
    def _is_one_device(self) -> bool:
        return len(set(self.devices)) == 1

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs the micro-batches on the replicas and adds their gradients. See ``Strategy.backward``."""
        if not self._alone and self._hooks_seen != hooks_made():
            self._alone = draws_in_forward(self._model) or has_held_nodes(self._model)
            self._hooks_seen = hooks_made()
        with compute.autocast():
            one_by_one = self._alone or self._has_thread_settings()
        if one_by_one and self._is_one_device:
            return super().backward(batch, compute, scale=scale, stop=stop)
        self._require_copied()
        leaves, count = batch.plan.leaves, len(self._replicas)
        shares = [share(leaves, count, number) for number in range(count)]
        self._sums.begin(shares[0], leaves)
        for replica, part in zip(self._replicas[1:], shares[1:]):
            replica.follow(self._replicas[0])
            replica.tree.begin(part.start, part.stop, leaves)
            replica.buffers.begin_step()
        work = [
            partial(self._run, replica, [batch.micro_batches[k] for k in part], compute, scale)
            for replica, part in zip(self._replicas, shares)
        ]
        if one_by_one:
            computed = [each for run in work for each in run()]
        else:
            futures = [self._pool.submit(run) for run in work]
            wait(futures)  # no thread may still be at work when the first error is raised
            computed = [each for future in futures for each in future.result()]
        self._collect(shares, leaves)
        for each in computed:
            if each.running is not None:
                self._sums.add_running(each.k, each.running.to(self.device), each.advanced.to(self.device))
        losses = [each.loss.to(self.device) for each in computed]
        return self._sums.reduce(losses, [each.weight.to(self.device) for each in computed], stop)

    def _require_copied(self) -> None:
        """Raises ``ConfigError`` where the model has other parts than those that were copied."""
        if len(self._replicas) == 1:
            return
        found = parts_of(self._model)
        for name in (*found, *self._copied):
            if found.get(name) is not self._copied.get(name):
                raise ConfigError(
                    f"The part {name!r} of the model was replaced, added or taken out after run.prepare, and strategy "
                    "'dp' has copied the model for each device. Change it before run.prepare, or use strategy 'ddp'."
                )

    def _has_thread_settings(self) -> bool:
        """Returns whether the caller's thread has settings that the threads of the replicas lack."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        is_cpu = torch.get_default_device().type == "cpu"
        return torch.is_autocast_enabled(self.device.type) or not is_cpu or hooks is not None or modes > 0

    def release(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False)

    def _run(
        self, replica: Replica, micro_batches: Sequence[MicroBatch], compute: Compute, scale: float
    ) -> list[Computed]:
        """One replica's part of a step."""
        with selected(replica.device):
            return [self._run_one(replica, each, compute, scale) for each in micro_batches]

    def _run_one(self, replica: Replica, micro_batch: MicroBatch, compute: Compute, scale: float) -> Computed:
        replica.buffers.begin_micro_batch()
        try:
            loss, weight = self._forward(replica, micro_batch, compute)
            replica.require_own(loss, self._model)
            running, advanced = replica.buffers.take() if replica.buffers.numel else (None, torch.zeros(0))
            run_backward(loss, scale)
        except Exception as error:
            number = self._replicas.index(replica)
            samples = shorten(micro_batch.indices.tolist(), 8)
            error.add_note(f"raised on replica {number}, in micro-batch {micro_batch.k} (samples {samples})")
            raise
        replica.tree.end_micro_batch()
        for call in self.events.micro_batch_end:
            call(micro_batch)
        return Computed(micro_batch.k, loss.detach(), weight, running, advanced)

    def _forward(self, replica: Replica, micro_batch: MicroBatch, compute: Compute) -> tuple[Tensor, Tensor]:
        """Forward pass and loss. What is keyed, inputs and loss, is one replica's at a time."""
        if len(self._replicas) == 1:
            return compute(micro_batch, replica.model)
        with self._turn:
            compute.begin(micro_batch)
            arguments, named, target = compute.inputs(micro_batch, replica.device)
        with compute.autocast():
            output = replica.model(*arguments, **named)
        with self._turn:
            compute.resume(micro_batch, "forward")
            return compute.loss(output, target, micro_batch)

    def _collect(self, shares: Sequence[range], leaves: int) -> None:
        """Adds all replicas' tree nodes of each parameter on device 0, for ``StepSums.reduce``."""
        nodes = [nodes_within(part.start, part.stop, leaves) for part in shares]
        for slots in zip(*(replica.tree.slots for replica in self._replicas)):
            stack = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
            for slot, own in zip(slots, nodes):
                for node, value in zip(own, slot.stack):
                    stack.push(node, value.to(self.device))
            slots[0].used = sum(slot.used for slot in slots)
            (total,) = stack.take().values()  # the replicas' shares tile the step
            slots[0].stack = [total]
            for slot in slots[1:]:
                slot.stack = []


def variables_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of the graph that a loss was computed from: parameters, and other tensors that require gradients."""
    seen: set[Any] = {None}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
