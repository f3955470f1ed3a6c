"""Knows which optimizers hold reduced gradients, so that none is used that was not reduced, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ConfigError


class Pending:
    """The gradients between a backward pass and the step that uses them.

    Args:
        optimizers: the user's own; a step of one that does not go through ``step`` is refused.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self._optimizers = list(optimizers)
        self._holding: set[int] = set()
        self._reduced = self._stepping = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._refuse_direct_step)

    def __bool__(self) -> bool:
        """Whether some optimizer holds gradients that it has not used."""
        return any(has_gradients(o) for o in self._optimizers if id(o) in self._holding)

    def begin_batch(self) -> None:
        """Says that the next gradients must come from another backward pass."""
        self._reduced = False

    def take_reduced(self) -> None:
        """Says that the gradients have been reduced."""
        self._reduced = True
        self._holding |= {id(o) for o in self._optimizers if has_gradients(o)}

    def forget(self, optimizer: Optimizer) -> None:
        """Says that the optimizer's gradients were thrown away."""
        self._holding.discard(id(optimizer))

    def step(self, optimizer: Optimizer, take: Callable[[Optimizer], bool]) -> bool:
        """Lets ``take`` step the optimizer and returns its answer; refuses gradients that were not reduced."""
        if not self._reduced and id(optimizer) not in self._holding:
            raise ConfigError(
                "optimizer.step() without run.backward(batch, loss) before it: gradients from loss.backward() are this "
                "rank's own and were not summed over the ranks."
            )
        self._stepping = True
        try:
            return take(optimizer)
        finally:
            self._stepping = False
            self._holding.discard(id(optimizer))

    def _refuse_direct_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._stepping:
            raise ConfigError(
                f"step() was called on the {type(optimizer).__name__} that was given to run.prepare. Step the one it "
                "returned: model, optimizer = run.prepare(model, optimizer)."
            )


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter of the optimizer has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def require_own_parameters(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
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
