"""Tells apart what ``run.prepare`` was given, and refuses what cannot be trained or saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.fingerprint import digest_tensors
from lockstep.run.optimizer import hyperparameters
from lockstep.run.pending import require_own_parameters


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
        require_own_parameters(optimizers, list(model.parameters()))
        frozen = tuple((name, p) for name, p in model.named_parameters() if not p.requires_grad)
        return cls(model, optimizers, schedulers, modules, frozen)

    def digests(self) -> dict[str, str]:
        """What replicas must agree on beside the model, each name in angle brackets."""
        found = {f"<{name}>": value for name, value in hyperparameters(self.optimizers).items()}
        for number, module in enumerate(self.modules):
            own = digest_tensors(module.state_dict())
            found |= {f"<module {number}> {name}": digest for name, digest in own.items()}
        return found

    def require_frozen(self) -> None:
        """Raises ``ConfigError`` where a parameter wants a gradient that nobody sums over the ranks."""
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name!r} was frozen at run.prepare and requires a gradient now. Let everything that will be "
                    "trained require one before run.prepare, and freeze it afterwards until its time has come."
                )

    def require_all_saved(self, prepared: Iterable[Optimizer]) -> None:
        """Raises ``ConfigError`` where a scheduler steps an optimizer and no checkpoint would hold it.

        Args:
            prepared: what stands for each optimizer, in order.
        """
        known = {id(optimizer) for each in self.schedulers for optimizer in _stepped_by(each)}
        for number, (optimizer, stand_in) in enumerate(zip(self.optimizers, prepared)):
            scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in known
            if scheduled or hasattr(stand_in.step, "_wrapped_by_lr_sched"):
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


def _stepped_by(scheduler: Any) -> list[Any]:
    """The optimizers whose learning rate a scheduler sets, its inner schedulers' included."""
    inner = [optimizer for each in getattr(scheduler, "_schedulers", []) for optimizer in _stepped_by(each)]
    return [getattr(scheduler, "optimizer", None), *inner]
