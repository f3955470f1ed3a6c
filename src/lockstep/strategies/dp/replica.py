"""One of several copies of a model in a process: made from the user's model, and kept like it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.buffers import RunningBuffers
from lockstep.errors import ConfigError
from lockstep.strategies.gradients import GradientTree

_PLAIN = (bool, int, float, str, type(None))


class Replica:
    """The model on one device.

    Args:
        model: on its device.
        device: where.
        declared: name patterns of running buffers beside BatchNorm's.
        buffers: its running buffers, if they are known already.
        tree: the gradients of its micro-batches, if it is known already.
    """

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
        self._own = tree is not None

    def follow(self, first: Replica) -> None:
        """Takes over what may have changed in replica 0: values, modes, numbers set by hand, what is frozen."""
        self.buffers.take_over(first.buffers)
        for own, theirs in zip(self.model.modules(), first.model.modules()):
            plain = {key: value for key, value in vars(theirs).items() if type(value) in _PLAIN}
            vars(own).update(plain)
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), first.model.parameters()):
                mine.requires_grad_(other.requires_grad)
                if mine.data_ptr() != other.data_ptr():
                    mine.copy_(other, non_blocking=True)
            for name, buffer in first.model.named_buffers():
                if name in self._others and self._others[name].data_ptr() != buffer.data_ptr():
                    self._others[name].copy_(buffer, non_blocking=True)

    def require_own(self, loss: Tensor, first: nn.Module) -> None:
        """Looks, once, at what a loss was computed from.

        Args:
            loss: of one of this replica's micro-batches, before its backward pass.
            first: the user's model.

        Raises:
            ConfigError: the loss reached for parameters of the user's model beside the output of this replica.
        """
        if self._own:
            return
        self._own = True
        names = {parameter: name for name, parameter in first.named_parameters()}
        seen: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            if variable is not None and variable in names:
                raise ConfigError(
                    f"The loss uses the parameter {names[variable]!r} of the model itself, and strategy 'dp' computes "
                    "each micro-batch on a replica of its own. Give back what the loss needs from the model's forward, "
                    "or use strategy 'ddp'."
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
            f"Strategy 'dp' copies the model for each device, and a {type(model).__name__} cannot be copied: {error}. "
            "Make it fit copy.deepcopy, or use strategy 'ddp'."
        ) from error
    return replica.to(device)
