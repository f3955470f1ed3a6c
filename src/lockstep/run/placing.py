"""Puts a model where its strategy trains it, and points the user's optimizers at what is held there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint import model_state, parameter_names
from lockstep.errors import ConfigError
from lockstep.precision import Precision
from lockstep.randomness import KeyedRandomness
from lockstep.run.compiling import compile_blocks
from lockstep.run.feeding import smallest_micro_batch
from lockstep.run.options import RunOptions
from lockstep.run.parts import Parts
from lockstep.strategies import Strategy


@dataclass(frozen=True)
class Placed:
    """A model in its place, and what was known of the whole one before it was put there."""

    model: nn.Module
    """What the user calls."""
    randomness: KeyedRandomness
    smallest_micro_batch: int
    """The fewest rows that the model can be trained on at once."""
    tensors: dict[str, Tensor]
    """Shape and type of each whole parameter and buffer, as tensors without values."""
    aliases: dict[str, str]
    """Further names of tied tensors."""
    members: list[list[list[str]]]
    """Names of the whole model's parameters in each group of each optimizer."""


def place(
    parts: Parts, options: RunOptions, strategy: Strategy, precision: Precision, device: torch.device
) -> Placed:
    """Puts the parts of a run in their places. Collective.

    Raises:
        ConfigError: the strategy cannot train these parts, or not in the way that was asked for.
    """
    model = parts.model
    _refuse_what_needs_whole_models(parts, options, strategy)
    for optimizer in parts.optimizers:
        strategy.check_optimizer(optimizer)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub
    smallest = smallest_micro_batch(model)
    whole, aliases = model_state(model)
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in whole.items()}
    names = parameter_names(model)
    members = [
        [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in parts.optimizers
    ]
    precision.prepare(model)
    units = compile_blocks(model) if options.compile else None
    randomness = KeyedRandomness(model, options.seed, device, units, strategy.devices)
    placed = strategy.place(model)
    for module in parts.modules:
        module.to(device)
    for optimizer, own in zip(parts.optimizers, members):
        _point(optimizer, own, strategy)
    return Placed(placed, randomness, smallest, tensors, aliases, members)


def _point(optimizer: Optimizer, members: list[list[str]], strategy: Strategy) -> None:
    """Gives each group of an optimizer what the strategy holds of its parameters."""
    held = strategy.trainable()
    for group, group_names in zip(optimizer.param_groups, members):
        if (
            all(held.get(name, p) is p for name, p in zip(group_names, group["params"]))
            and strategy.replicated
        ):
            continue
        for name, parameter in zip(group_names, group["params"]):
            state = optimizer.state.pop(parameter, {})
            if state and name in held:
                optimizer.state[held[name]] = {
                    key: _part(name, value, held[name], parameter, strategy) for key, value in state.items()
                }
        group["params"] = [held[name] for name in group_names if name in held]


def _part(name: str, value: Any, held: Tensor, parameter: Tensor, strategy: Strategy) -> Any:
    """What is held here of an optimizer's state from before ``prepare``; some optimizers begin with one."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    part = strategy.part(name, value)
    return value if part is None else part.detach().to(held.device, copy=True).contiguous()


def _refuse_what_needs_whole_models(parts: Parts, options: RunOptions, strategy: Strategy) -> None:
    if strategy.replicated:
        return
    why = f"strategy {strategy.name!r} holds no whole model in one process"
    if options.compile:
        raise ConfigError(
            f"compile=True compiles whole models, and {why}. Use strategy 'ddp', or do not compile."
        )
    if parts.modules:
        raise ConfigError(
            f"run.prepare was given a {type(parts.modules[0]).__name__} beside the model, such as a moving average "
            f"of its weights, and {why}. Use strategy 'ddp', or leave it out."
        )
