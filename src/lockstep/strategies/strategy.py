"""The interface of a way of training, which answers five questions.

1. How is the model placed?                                    ``setup_model``, ``share``
2. How do local micro-batches become reduced gradients?        ``backward``
3. How is the optimizer stepped?                               ``trainable``, ``squares``, ``all_reduce_max``,
                                                               ``after_step``
4. How is the full state taken and given?                      ``state``, ``load_state``, ``gather_full``,
                                                               ``local_shard``, ``own_rows``
5. Which level does it promise?                                ``level``

``IndependentStrategy`` adds what processes need that continue without a process group. The training loop never asks
for a strategy by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.state import copy_values, tensor_state
from lockstep.config.strategy_options import Level
from lockstep.core.plan import Share
from lockstep.core.summation_tree import sum_of_squares
from lockstep.core.world import World
from lockstep.data.batch import Batch, MicroBatch
from lockstep.distributed.collectives import all_reduce_max, drop_process_groups, gather_json
from lockstep.errors import ConfigError
from lockstep.numerics.initial_values import InitialValues
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.strategies.absent import Absence
from lockstep.strategies.loop_writes import LoopWrites
from lockstep.strategies.optimizer_trial import Unit
from lockstep.text import numbered

_CALLS_MODEL = ["a call of the model", "", None]
"""Of a rank whose loop calls the model, as ``gather_agreed`` exchanges calls."""
OUTSIDE, IN_STEP, ELSEWHERE = 0, 1, 2
"""Where a rank is: it calls the model outside of a step, is in a step, or does something else with all ranks."""


class Compute(Protocol):
    """The forward pass and the loss of micro-batches, whole or in parts."""

    @property
    def readers(self) -> Sequence[Callable[..., Any]]:
        """The functions of (output, target): the loss, then metrics that are computed beside it."""

    @property
    def disturbs(self) -> bool:
        """True in a rehearsal of what comes between the forward and the backward pass of a micro-batch."""

    def __call__(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Forward pass and loss; gives (sum of losses, weight), both 0-dim.

        Args:
            micro_batch: one of this process's, or padding, which counts for nothing.
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

    def pause(self, micro_batch: MicroBatch) -> Callable[[], None]:
        """Leaves a micro-batch anywhere in its forward or backward pass; what is returned continues exactly there.

        Random numbers continue where they were, and this rank is noted to be at it again.
        """

    def exchange(self) -> None:
        """Notes that this rank has computed its part of the step, and from here on waits for the others."""

    def inputs(
        self, micro_batch: MicroBatch, device: torch.device | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Positional and named arguments of the model, and the target, on the device.

        Raises:
            ConfigError: the user gave a ``forward`` of their own, which only whole models can be called by.
        """

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum of losses, weight) of an output of the whole model, both 0-dim."""


STOP_CODES = 256
"""More than any stop code. Ranks give each other the code plus this many for each step up to the current one."""


@dataclass(frozen=True)
class StepResult:
    """The result of the backward pass over one global batch; equal on every rank."""

    loss: Tensor
    """Mean loss over the global batch, float64, 0-dim."""
    losses: Tensor
    """Loss sum of each micro-batch, float64, shape (leaves,)."""
    weight: Tensor
    """The weight of the global batch, by which the sum of the losses is divided: float64, 0-dim."""
    stop: Tensor
    """The largest stop code that any process was given, 0-dim, on the device of ``finite``; 0 if none was."""
    finite: Tensor
    """True if no loss and no gradient is NaN or infinite, 0-dim bool."""


class Strategy(ABC):
    """One way to train."""

    name: str
    level: Level
    device: torch.device
    """The device of the model's inputs."""
    share: Share
    """The micro-batches that this process computes."""
    devices: tuple[torch.device, ...] = ()
    """All devices of this process that compute; empty where that is only ``device``."""
    interleaves: bool = False
    """True if forward passes of other micro-batches come between the forward and the backward pass of one."""
    replicated: bool = True
    """True if every process holds the whole model. Compiling the model, a moving average of its weights and a
    ``forward`` of the user's own need that."""
    computes_together: bool = False
    """True if several processes compute one forward pass, so that an error of one leaves the others waiting."""
    largest_unit: Unit = Unit.MODEL
    """The largest unit that an optimizer may need to see at once, for the bits that are promised."""
    cut_dimensions: int = 1
    """The dimensions along which a process may hold a part of a parameter: rows, or rows and columns."""
    replaces_parameters: bool = False
    """True if optimizers get parameters of the strategy's own in place of the user's."""
    keeps_whole: bool = False
    """True if a parameter can be kept whole for an optimizer that needs to see it whole: see ``whole_parameters``."""
    whole_parameters: frozenset[str] = frozenset()
    """Trained parameters that are not to be cut, by name; set before ``setup_model``."""
    fills_model: bool = False
    """True if ``setup_model`` itself gives ``initial_values`` to a model without values, as far as it is held here."""
    initial_values: InitialValues | None = None
    """The values of the model's tensors that have none yet; set before ``setup_model``."""
    draws_in_step: bool = False
    """True if an optimizer draws random numbers in its step, which not all processes take; set before the first one."""
    separates_units: bool = False
    """True if units of one model run in several processes, so that only what is drawn within a unit has a key."""
    evaluation_share: Share | None = None
    """The micro-batches of an evaluation that this process computes; None for ``share``, whose holders it has."""
    reference: nn.Module | None = None
    """A copy of the whole model, with which the first step compares the model as this strategy has changed it."""
    failed_call: str = ""
    """The collective call that raised on this rank, and how, while others may still be in it."""
    _joins_calls: bool = False
    """True within ``joined_calls``, and in a step of ``tensor``."""
    bytes_outside_steps: int = 0
    """Bytes that were given to others in rehearsals and evaluations, and the losses of a pipeline."""
    absences: Sequence[Absence] = ()
    """Why this process has no values of some tensors, which count what the loop asks them to change."""
    writes: LoopWrites | None = None
    """Notices what the loop writes to ``watched`` tensors; None where comparing the values of all ranks shows it."""
    all_ranks: dist.ProcessGroup | None = None
    """The process group of the run; None for a world of one, and where processes have left it."""
    model_group: dist.ProcessGroup | None = None
    """The ranks that share one model; None where each has all of it."""
    events: StepEvents = NO_EVENTS
    """The events of micro-batches, buckets and exchanges, of which callbacks are told; set before ``setup_model``."""
    running_buffers: Sequence[str] = ()
    """Name patterns of buffers, beside BatchNorm's, that the forward pass changes; set before ``setup_model``."""
    _model: nn.Module
    """The user's model, as it is trained; set by ``setup_model``."""

    @abstractmethod
    def setup_model(self, model: nn.Module) -> nn.Module:
        """Puts the model where it is trained and returns what the user calls. Collective.

        Parameters may be replaced, or be kept in part: see ``trainable``.
        """

    @abstractmethod
    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Sets the gradient of the mean loss over the global batch on ``trainable``. Collective.

        Args:
            batch: this process's micro-batches of the step, possibly none.
            compute: forward pass and loss of one micro-batch.
            scale: factor on every gradient, which the loss scaler takes out later; 1 for none.
            stop: why this process was asked to stop, as a code; 0 if it was not.
        """

    def watching_writes(self) -> AbstractContextManager[set[str]]:
        """Collects the names of parameters that user code writes to in ``backward``.

        It collects only those that are whole nowhere else: writes to the others stay, and can be seen later.
        """
        return nullcontext(set())

    def watched(self) -> Mapping[str, Tensor]:
        """The tensors that ``writes`` is told of, by name."""
        return {}

    @abstractmethod
    def gather(self, row: Tensor) -> Tensor:
        """The rows of all holders, shape (holders, n), from one float64 row of shape (n,). Collective.

        Where several ranks make up one holder, the row of the one that computes losses counts.
        """

    def gather_in_order(self, rows: Tensor, items: int, share: Share | None = None) -> Tensor:
        """A row for each of ``items`` micro-batches in order of ``k``, shape (items, ...). Collective.

        Args:
            rows: of this holder's, shape (longest share, ...).
            share: of the micro-batches; by default that of a step.
        """
        share = share or self.share
        gathered = self.gather(rows.view(-1)).view(share.holders, *rows.shape)
        return share.in_order(gathered, items)

    def release(self) -> None:
        """Drops process groups, at the end of the run."""
        drop_process_groups(self)

    @abstractmethod
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters that optimizers hold, whole or in part, by name in the whole model."""

    def before_step(self) -> None:  # noqa: B027  # most strategies have gradients where the user sees them
        """Called on every rank before gradients are clipped or stored, and before an optimizer is stepped."""

    def abandon(self) -> None:  # noqa: B027  # with several processes no program goes on after that
        """Puts gradients back to what they were before a ``backward`` that raised."""

    def fail(self, call: str, error: Exception) -> None:
        """Notes that a collective call, as of a step, raised on this rank, while other ranks may still be in it."""
        self.failed_call = f"{call} raised {type(error).__name__} ({error})"

    def require_no_failure(self) -> None:
        """Raises ``ConfigError`` where such an error was caught, so that other ranks may still wait for this one."""
        if self.failed_call:
            raise ConfigError(
                f"{self.failed_call}, which was caught. The other ranks wait for the rest of that call, so this rank "
                "cannot begin another one. Let the exception end the program; leave out samples that cannot be "
                "used in the data set (lockstep.data.SkipBroken), or in the loss by a weight of 0."
            )

    def gather_records(self, value: Any) -> list[Any]:
        """The values of all processes that are left; they must survive JSON. Collective."""
        return gather_json(value, self.all_ranks, self.device)

    def note_readers(self, readers: Sequence[Callable[..., Any]]) -> None:  # noqa: B027  # all is in this process
        """Takes the functions that are given the model's outputs in an evaluation, such as metrics."""

    def places_not_set(self) -> list[str]:
        """The places that forwards set which this strategy does not call as a whole, in the words of a ``Snapshot``."""
        return []

    def require_no_calls(self) -> None:  # noqa: B027  # most strategies compute a forward pass without other ranks
        """Raises ``ConfigError`` on every rank if some ranks call the model while others are here. Collective."""

    @contextmanager
    def joined_calls(self) -> Iterator[None]:
        """The context in which a rank calls the model without gradients as often as it likes, or never. Collective.

        Every rank enters and leaves it; none leaves before all have made their calls.
        """
        before, self._joins_calls = self._joins_calls, True
        try:
            yield
        finally:
            self._joins_calls = before

    def require_joint_call(self) -> None:
        """Raises ``ConfigError`` on every rank where some call the model, and others do not. Collective.

        A rank that compares another call with the other ranks' meanwhile, by ``gather_agreed``, raises it, too.
        """
        self.require_no_failure()
        if self._joins_calls:
            return
        places = [OUTSIDE if each == _CALLS_MODEL else ELSEWHERE for each in self.gather_records(_CALLS_MODEL)]
        if ELSEWHERE in places:
            raise apart(self.name, places)

    def after_step(self) -> None:  # noqa: B027  # in most strategies every rank has stepped what it holds
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

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The maximum of each entry over the ranks that share one model. Collective."""
        return flags if self.model_group is None else all_reduce_max(flags, self.model_group)

    def gradients(self) -> Iterable[Tensor]:
        """The gradients that this process clips; ``squares`` are of these."""
        return [p.grad for p in self.trainable().values() if p.grad is not None]

    def sum_counts(self, row: Tensor) -> Tensor:
        """The sum over the holders of counts for the log, a float64 row of shape (n,), on the main process. Collective.

        Where processes are independent it waits for nobody, and counts may come later.
        """
        return self.gather(row).sum(0)

    def metrics(self) -> dict[str, float]:
        """Measurements since the last call by name, for the log of the main process."""
        return {}

    def summary(self) -> dict[str, str]:
        """Facts about the whole run by name, on the main process, for its end."""
        return {}

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers by name, in the order of the model's ``state_dict``, tied ones under each name.

        A tensor is valid until the next one is asked for. Collective: every rank must go through all of them.
        """
        yield from ((name, value.detach()) for name, value in tensor_state(self._model).items())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Sets all parameters and buffers that are held here from whole ones. Collective."""
        copy_values(self._model, state)

    def own_rows(self) -> Mapping[str, Tensor] | None:
        """This process's part of a checkpoint that all processes write: tensors of the whole model by name.

        The rows (dim 0) of all ranks that give a tensor make it up, in the order of the ranks; what one alone gives is
        whole. None: a checkpoint is gathered by ``state`` and ``gather_full``, and written by the main process.
        """
        return None

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Gathers a tensor that is held as the parameter ``name`` is, such as its momentum. Collective.

        Args:
            name: of a parameter of the whole model.
            part: what is held here; None for nothing.

        Returns:
            The whole tensor, of the parameter's shape in the whole model, on every rank.
        """
        assert part is not None, f"nobody holds {name!r}"
        return part

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """The local part of a whole tensor that belongs to the parameter ``name``; None if there is none."""
        return whole

    @property
    def bytes_sent(self) -> int:
        """Bytes this process has given to others since the run began: gradients, and what else the strategy exchanges,
        such as parameters (fsdp, parameter_server) or activations (pipeline, tensor). Losses and flags do not count,
        nor do rehearsals and evaluations.
        """
        return self.all_bytes_sent - self.bytes_outside_steps

    @property
    def all_bytes_sent(self) -> int:
        """See ``bytes_sent``; with rehearsals and evaluations."""
        return 0


class IndependentStrategy(Strategy):
    """A way to train whose processes continue without a process group after ``prepare``, so that one may end alone."""

    replicated = False
    is_expendable: bool
    """True if the others continue when this process is killed."""
    save_every: int
    """Steps between checkpoints that the strategy itself asks for; 0: none."""

    @abstractmethod
    def leave_process_group(self, step: int, world: World) -> None:
        """Connects the processes in another way, and drops the process group. Collective; ends ``prepare``.

        Args:
            step: steps that the run has done.
        """

    @abstractmethod
    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ``ConfigError`` where optimizers cannot be stepped together."""

    @abstractmethod
    def synchronize(self) -> None:
        """Brings all processes to the same values, and shares samples out over those that are left. Collective."""


def apart(strategy: str, places: Sequence[int]) -> ConfigError:
    """The refusal where some ranks call the model outside of a step, or are in one, and others are not; by rank."""
    if OUTSIDE not in places:
        return ConfigError(
            "The ranks are not in the same step: some began one, or evaluate, while others are in another step. All "
            "ranks make the same calls in the same order: take run.backward, break and continue out of conditions on "
            "what a rank alone knows."
        )
    went = "run.backward" if IN_STEP in places else "the next collective call"
    by = {each: [rank for rank, place in enumerate(places) if (place == OUTSIDE) == each] for each in (True, False)}
    return ConfigError(
        f"The model was called outside of run.backward on {numbered('rank', by[True])}, while "
        f"{numbered('rank', by[False])} went on to {went}. Under {strategy!r} every rank holds a part of the model, so "
        "all ranks must call it, and as often: take the call out of `if run.is_main`, or use run.predict or "
        "run.evaluate."
    )
