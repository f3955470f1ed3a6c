"""What a way of training is: five questions, and nothing else.

1. How is the model placed?                                    ``place``
2. How do local micro-batches become reduced gradients?        ``backward``
3. How is the optimizer stepped?                               ``step``
4. How is the full state taken and given?                      ``model_state``, ``trainable``
5. Which level does it promise?                                ``level``

The training loop never asks which strategy it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.data.batch import Batch, MicroBatch
from lockstep.levels import Level

Compute = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Runs the forward pass and the loss of one micro-batch; gives (sum of losses, weight), both 0-dim."""


@dataclass(frozen=True)
class StepResult:
    """What the backward pass over one global batch gave; equal on every rank."""

    loss: Tensor
    """Mean loss over the global batch, float64, 0-dim."""
    losses: Tensor
    """Loss sum of each micro-batch, float64, shape (leaves,)."""
    stop: Tensor
    """The largest stop code that any process was given, 0-dim; 0 if none was."""
    finite: Tensor
    """Whether no loss and no gradient is NaN or infinite, 0-dim bool."""


class Strategy(ABC):
    """One way to train. ``device`` is where the inputs of the model go."""

    name: str
    level: Level
    device: torch.device
    holder: int
    """This process's place among the data-parallel holders."""
    holders: int
    """How many share the micro-batches of a step."""

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """Puts the model where it is trained and returns what the user calls. Collective."""

    @abstractmethod
    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Sets the gradient of the mean loss over the global batch on the parameters. Collective.

        Args:
            batch: this process's micro-batches of the step, maybe none.
            compute: forward pass and loss of one micro-batch.
            scale: factor on every gradient, which the loss scaler takes out later; 1 for none.
            stop: why this process was asked to stop, as a code; 0 if it was not.
        """

    @abstractmethod
    def gather(self, row: Tensor) -> Tensor:
        """The rows of all holders, shape (holders, n), from one float64 row of shape (n,). Collective."""

    def release(self) -> None:  # noqa: B027  # most strategies hold nothing
        """Lets go of process groups, at the end of the run."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates the parameters from their gradients."""
        optimizer.step()

    @abstractmethod
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters that are trained, by name; as they are held here."""

    @abstractmethod
    def model_state(self) -> Mapping[str, Tensor]:
        """Whole parameters and buffers by name; tied ones under each of their names. Collective."""

    @abstractmethod
    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Sets parameters and buffers from whole ones. Collective."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients this process has given to others since the run began."""
        return 0
