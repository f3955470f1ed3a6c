"""What a way of training is: five questions, and nothing else.

1. How is the model placed?                                    ``place``, ``share``
2. How do local micro-batches become reduced gradients?        ``backward``
3. How is the optimizer stepped?                               ``after_step``, ``squares``, ``any_rank``
4. How is the full state taken and given?                      ``state``, ``load_state``, ``whole``, ``part``,
                                                               ``own_rows``
5. Which level does it promise?                                ``level``

The training loop never asks which strategy it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.collectives import gather_json
from lockstep.data.batch import Batch, MicroBatch
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.sums import sum_of_squares


class Compute(Protocol):
    """The forward pass and the loss of micro-batches, whole or in parts."""

    def __call__(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Forward pass and loss; gives (sum of losses, weight), both 0-dim.

        Args:
            micro_batch: one of this process's, or a spare, whose result hangs together with the model's output and
                counts for nothing.
            model: a replica to be called instead of the prepared model.
        """

    def begin(self, micro_batch: MicroBatch) -> None:
        """Keys what is drawn from here on by the micro-batch, and notes that this rank is at it."""

    def resume(self, micro_batch: MicroBatch, phase: str) -> None:
        """Goes on with a micro-batch that was begun, after others: recomputed units find their keys again.

        Args:
            micro_batch: begun in this step.
            phase: what this rank is at: ``forward`` of further units, or ``backward``.
        """

    def exchange(self) -> None:
        """Notes that this rank has computed its part of the step, and from here on waits for the others."""

    def inputs(self, micro_batch: MicroBatch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Positional and named arguments of the model, and the target, on the device.

        Raises:
            ConfigError: the user gave a ``forward`` of their own, which only whole models can be called by.
        """

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum of losses, weight) of an output of the whole model, both 0-dim."""


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
    """One way to train."""

    name: str
    level: Level
    device: torch.device
    """Where the inputs of the model go."""
    share: Share
    """Which micro-batches this process computes."""
    devices: tuple[torch.device, ...] = ()
    """All devices of this process that compute; empty for ``device`` alone."""
    replicated: bool = True
    """Whether every process holds the whole model, as compiling it, a moving average of its weights and a ``forward``
    of the user's own need."""
    independent: bool = False
    """Whether processes go on without a process group after ``prepare``, so that one may end without the others."""
    is_spare: bool = False
    """Whether the others go on if this process is killed; only where processes are independent."""
    save_every: int = 0
    """Steps between checkpoints that the strategy itself asks for; 0: none."""

    @property
    def evaluation_share(self) -> Share:
        """Which micro-batches of an evaluation this process computes; shared by as many holders as ``share``."""
        return self.share

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """Puts the model where it is trained and returns what the user calls. Collective.

        Parameters may be replaced, or be kept in part: see ``trainable``.
        """

    @abstractmethod
    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Sets the gradient of the mean loss over the global batch on ``trainable``. Collective.

        Args:
            batch: this process's micro-batches of the step, maybe none.
            compute: forward pass and loss of one micro-batch.
            scale: factor on every gradient, which the loss scaler takes out later; 1 for none.
            stop: why this process was asked to stop, as a code; 0 if it was not.
        """

    @abstractmethod
    def gather(self, row: Tensor) -> Tensor:
        """The rows of all holders, shape (holders, n), from one float64 row of shape (n,). Collective.

        Where several ranks make up one holder, the row of the one that computes losses counts.
        """

    def tally(self, row: Tensor) -> Tensor:
        """The sum over the holders of counts for the log, a float64 row of shape (n,), on the main process. Collective.

        Where holders are independent it waits for nobody, and counts may come later.
        """
        return self.gather(row).sum(0)

    def gather_records(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """Every process's value, which must survive JSON. Collective.

        Args:
            value: this process's.
            group: all ranks; None for a world of one, and where there is none any more.
        """
        return gather_json(value, group, self.device) if group is not None else [value]

    def part_ways(self, step: int) -> None:  # noqa: B027  # most strategies keep the process group
        """Makes an independent strategy ready to go on without the process group. Collective; ends ``prepare``.

        Args:
            step: steps that the run has done.
        """

    def settle(self) -> None:  # noqa: B027  # most strategies are never apart
        """Brings processes that may be apart to the same values, and shares samples out over those left. Collective."""

    def release(self) -> None:  # noqa: B027  # most strategies hold nothing
        """Lets go of process groups, at the end of the run."""

    @abstractmethod
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """What optimizers hold of the parameters that are trained: whole or in part, by name in the whole model."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # whole parameters suit all
        """Raises ``ConfigError`` where an optimizer cannot be stepped on what this strategy holds."""

    def after_step(self) -> None:  # noqa: B027  # most strategies update where they compute
        """Called on every rank when an optimizer has been stepped, or its step was skipped. Collective."""

    def squares(self) -> Tensor:
        """The sum of squares of each trained parameter's whole gradient; zero where there is none. Collective.

        Returns:
            float64, shape (parameters of the whole model that are trained,), in name order, equal on every rank.
        """
        gradients = [parameter.grad for _, parameter in sorted(self.trainable().items())]
        sums = torch.zeros(max(1, len(gradients)), dtype=torch.float64, device=self.device)
        for place, gradient in zip(sums, gradients):
            if gradient is not None:
                place.copy_(sum_of_squares(gradient))
        return sums

    def gradients(self) -> Iterable[Tensor]:
        """The gradients that this process clips; ``squares`` are those of all processes that clip together."""
        return [parameter.grad for parameter in self.trainable().values() if parameter.grad is not None]

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks that share one model. Collective."""
        return flags

    @abstractmethod
    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers by name, in the order of the model's ``state_dict``, tied ones under each name.

        One at a time: a tensor holds until the next is asked for. Collective: every rank must go through all of them.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Sets all parameters and buffers that are held here from whole ones. Collective."""

    def own_rows(self) -> Mapping[str, Tensor] | None:
        """What this process writes of a checkpoint that all processes write: tensors of the whole model by name.

        The rows (dim 0) of all ranks that give a tensor make it up, in the order of the ranks; what one alone gives is
        whole. None: a checkpoint is gathered by ``state`` and ``whole``, and written by the main process.
        """
        return None

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Puts a tensor together that is held as the parameter ``name`` is, such as its momentum. Collective.

        Args:
            name: of a parameter of the whole model.
            part: what is held here; None for nothing.
            dtype: of the tensor.

        Returns:
            The whole tensor, of the parameter's shape in the whole model, on every rank.
        """
        assert part is not None, f"nobody holds {name!r}"
        return part

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """What is held here of a whole tensor that belongs to the parameter ``name``; None for nothing."""
        return whole

    def readings(self) -> dict[str, float]:
        """What the strategy has measured of itself since the last call, by name, for the log of the main process."""
        return {}

    def remarks(self) -> dict[str, str]:
        """What is to be said of the run at its end, by name, on the main process."""
        return {}

    @property
    def bytes_sent(self) -> int:
        """Bytes this process has given to others since the run began: gradients, and what else the strategy exchanges,
        such as parameters (fsdp, parameter_server) or activations (pipeline, tensor). Losses and flags do not count.
        """
        return 0
