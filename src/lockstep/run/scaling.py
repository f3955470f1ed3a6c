"""Takes the loss scale out of the gradients, and steps optimizers or skips them, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lockstep.errors import NonFiniteError
from lockstep.plan import StepPlan
from lockstep.precision import Precision
from lockstep.run.pending import has_gradients
from lockstep.strategies import Strategy

_SMALLEST_SCALE = 2.0**-24


class ScaledStep:
    """The loss scaler's part of a step; where the precision needs none, a plain step.

    torch's GradScaler does the work. It sees reduced gradients, which are equal on every rank, so every rank finds the
    same overflow and skips the same step.

    Args:
        precision: whose scaler is used.
        strategy: knows who else holds a part of the gradients.
    """

    def __init__(self, precision: Precision, strategy: Strategy) -> None:
        self._scaler, self._strategy = precision.scaler, strategy
        self._stepped = False
        self.skipped = 0

    @property
    def scale(self) -> float:
        """The factor on the loss; 1 without a scaler."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Divides the gradients by the scale, once all of them are reduced. Collective."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            if has_gradients(optimizer):
                self._scaler.unscale_(optimizer)
        if not self._strategy.replicated:
            self._share_overflows(self._scaler, optimizers)

    def _share_overflows(self, scaler: torch.amp.GradScaler, optimizers: Sequence[Optimizer]) -> None:
        """Makes ranks that hold parts of the gradients skip together.

        torch keeps what it found for each optimizer and device in ``_per_optimizer_states``, and its own scaler for
        sharded parameters reduces it there too; there is no public way.
        """
        device = self._strategy.device
        flags = torch.zeros(len(optimizers), 2, device=device)
        for row, optimizer in zip(flags, optimizers):
            found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            if found:
                row[0], row[1] = 1.0, torch.stack([each.to(device) for each in found]).max()
        for (used, overflow), optimizer in zip(self._strategy.any_rank(flags), optimizers):
            if used:
                state = scaler._per_optimizer_states[id(optimizer)]
                state["stage"] = OptState.UNSCALED
                state["found_inf_per_device"] = {device: overflow.reshape(1)}

    def step(self, optimizer: Optimizer) -> bool:
        """Steps, unless a gradient was not finite; returns whether it did."""
        if self._scaler is None:
            optimizer.step()
            self._strategy.after_step()
            return True
        taken: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: taken.append(True))
        self._scaler.step(optimizer)
        handle.remove()
        self._strategy.after_step()
        self._stepped = True
        self.skipped += not taken
        return bool(taken)

    def settle(self) -> None:
        """Adapts the scale to what the last steps found. Does nothing when there were none."""
        if self._scaler is None or not self._stepped:
            return
        self._stepped = False
        self._scaler.update()
        if self.scale < _SMALLEST_SCALE:
            raise NonFiniteError(
                f"The loss scale fell to {self.scale:g} after {self.skipped} skipped steps: gradients are NaN or "
                "infinite at any scale, so this is no overflow. Look for a division by zero or a logarithm of zero, or "
                "try precision bf16 or fp32."
            )


def raise_non_finite(losses: Tensor, plan: StepPlan, later_updates: int = 0) -> NoReturn:
    """Raises ``NonFiniteError`` naming step, micro-batch and samples.

    Args:
        losses: loss sum of each micro-batch, shape (leaves,).
        plan: the step.
        later_updates: steps that were taken before anybody looked; on a GPU results are read back now and then only.
    """
    update = (
        "No update was made with it."
        if later_updates == 0
        else f"It was read back {later_updates} steps later, so this run's weights are lost; its checkpoints are not."
    )
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if bad:
        k = bad[0]
        raise NonFiniteError(
            f"The loss of step {plan.step} is {float(losses[k])} in micro-batch {k} (samples "
            f"{_shorten(plan.indices[k].tolist())}). {update} Look at these samples, lower the learning rate, or "
            "clip gradients."
        )
    samples = [index for part in plan.indices for index in part.tolist()]
    raise NonFiniteError(
        f"The loss of step {plan.step} is finite, but a gradient is NaN or infinite (samples {_shorten(samples)}). "
        f"{update} Look for an operation whose derivative is infinite, such as a square root at zero, or clip "
        "gradients."
    )


def _shorten(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return shown if len(numbers) <= 16 else f"{shown}, ... {len(numbers) - 16} more"
