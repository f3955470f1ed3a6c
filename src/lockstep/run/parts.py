"""Tells apart what ``run.prepare`` was given, and refuses what cannot be trained or saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lockstep.core.fingerprint import digest_tensors
from lockstep.errors import ConfigError
from lockstep.run.optimizer_step import hyperparameters


@dataclass(frozen=True)
class Parts:
    """The objects of a run, as the user made them."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    """Not trained by gradients but kept beside the model, such as a moving average of its weights."""
    frozen: tuple[tuple[str, nn.Parameter], ...] = ()
    """The model's parameters that required no gradient."""

    @classmethod
    def of(cls, model: Any, others: Sequence[Any]) -> Parts:
        """The parts in the order in which they were given; ``ConfigError`` names what is none."""
        _require_plain_model(model)
        optimizers = tuple(each for each in others if isinstance(each, Optimizer))
        modules = tuple(each for each in others if isinstance(each, nn.Module))
        schedulers = tuple(each for each in others if not isinstance(each, Optimizer | nn.Module))
        for each in schedulers:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise ConfigError(
                    f"run.prepare takes a model, optimizers, schedulers, and modules to keep beside the model; a "
                    f"{type(each).__name__} is none of them. Give data sets to run.batches and run.evaluate."
                )
        _require_own_parameters(optimizers, list(model.parameters()))
        frozen = tuple((name, p) for name, p in model.named_parameters() if not p.requires_grad)
        return cls(model, optimizers, schedulers, modules, frozen)

    def digests(self) -> dict[str, str]:
        """Digests of what replicas must agree on beside the model, each name in angle brackets."""
        found = {f"<{name}>": value for name, value in hyperparameters(self.optimizers).items()}
        for number, module in enumerate(self.modules):
            own = digest_tensors(module.state_dict())
            found |= {f"<module {number}> {name}": digest for name, digest in own.items()}
        return found

    def require_all_saved(self, wrapped: Iterable[Optimizer]) -> None:
        """Raises ``ConfigError`` where a scheduler steps an optimizer and no checkpoint would hold it.

        Args:
            wrapped: the optimizers that ``run.prepare`` returned, in order.
        """
        known = {id(optimizer) for each in self.schedulers for optimizer in _stepped_by(each)}
        for number, (optimizer, wrapper) in enumerate(zip(self.optimizers, wrapped)):
            scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in known
            if scheduled or hasattr(wrapper.step, "_wrapped_by_lr_sched"):
                raise ConfigError(
                    f"Optimizer {number} ({type(optimizer).__name__}) has a scheduler that run.prepare was not given, "
                    "so a checkpoint would not hold it. Make it first: run.prepare(model, optimizer, scheduler)."
                )


def _require_plain_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"run.prepare takes the model first, and was given a {type(model).__name__}.")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ConfigError(
            f"The model is wrapped in {type(model).__name__}, which would sum its gradients a second time. Give "
            "run.prepare the model itself: model.module."
        )


def _require_own_parameters(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
    """Raises ``ConfigError`` where an optimizer would change a parameter that is not the model's."""
    own = {id(parameter) for parameter in parameters}
    for number, optimizer in enumerate(optimizers):
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ConfigError(
                f"Optimizer {number} ({type(optimizer).__name__}) holds {len(foreign)} parameters that the model does "
                f"not have, the first of shape {tuple(foreign[0].shape)}; nobody would sum their gradients over the "
                "ranks. Give run.prepare the model they belong to; put several models into one nn.ModuleDict."
            )


def _stepped_by(scheduler: Any) -> list[Any]:
    """The optimizers whose learning rate a scheduler sets, its inner schedulers' included."""
    inner = [optimizer for each in getattr(scheduler, "_schedulers", []) for optimizer in _stepped_by(each)]
    return [getattr(scheduler, "optimizer", None), *inner]
