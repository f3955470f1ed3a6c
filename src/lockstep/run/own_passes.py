"""The micro-batches of a step for a loop that runs the model itself, as scripts written for other libraries do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.run.loop_rehearsal import LoopRehearsal
from lockstep.run.step import sum_and_weight
from lockstep.strategies.ddp import DistributedDataParallel, Replicated, Single

if TYPE_CHECKING:
    from lockstep.run.run import Run


def _given_by_the_loop(*_: object) -> Tensor:
    raise AssertionError("the loop computes the loss")


class OwnPasses:
    """The micro-batches of one step, for a loop that computes each of them and its loss by itself.

    Iterating gives this process's micro-batches; random numbers that are drawn until the next one are keyed by it. For
    each, ``backward`` must be called once. With the last one, the gradients are summed over all processes. The first
    steps are rehearsed: see ``LoopRehearsal``.

    Args:
        run: a prepared run, of strategy ``ddp`` or ``single``.
        batch: from ``run.batches``.
        spare: an earlier micro-batch, which is given where this process has none, so that the loop's body runs as
            often as on the others; its loss counts for nothing.

    Raises:
        ConfigError: another strategy; neither a micro-batch nor a spare one; ``backward`` was not called, or twice.
    """

    def __init__(self, run: Run, batch: Batch, spare: MicroBatch | None = None) -> None:
        strategy = run.strategy
        if type(strategy) not in (Single, DistributedDataParallel):
            raise ConfigError(
                f"A loop that runs the model itself needs strategy 'ddp' or 'single'; the strategy is "
                f"{strategy.name!r}. Use run.backward(batch, loss)."
            )
        assert isinstance(strategy, Replicated)
        if batch.plan.leaves < strategy.share.holders and batch.plan.position == 0:
            raise ConfigError(
                f"The first step of an epoch has {batch.plan.samples} samples, so {batch.plan.leaves} micro-batches, "
                f"for {strategy.share.holders} processes. Use fewer processes, or more micro_batches."
            )
        self._given = batch.micro_batches or ((spare,) if spare is not None else ())
        self._counts = bool(batch.micro_batches)
        self._run, self._batch, self._strategy = run, batch, strategy
        self._stack = ExitStack()
        self._waiting: MicroBatch | None = None
        self._rehearsal: LoopRehearsal | None = None
        self.is_last = False
        """True from the last of this process's micro-batches on: its ``backward`` sums over all processes."""
        self.loss: Tensor | None = None
        """The mean loss over the global batch, float64, 0-dim, equal on every rank; None before the last one."""

    def __iter__(self) -> Iterator[MicroBatch]:
        self._pass = self._stack.enter_context(
            self._run.backward_pass(self._batch, _given_by_the_loop, rehearse=False)
        )
        self._pass.compute.randomness.key_global_generators()
        if LoopRehearsal.is_due(self._run, self._batch):
            self._rehearsal = LoopRehearsal(self._run, self._strategy, self._batch, self._pass)
            yield from self._rehearsal
            self._rehearsal = None
        self._strategy.begin_backward(self._batch)
        for number, micro_batch in enumerate(self._given, 1):
            self.is_last = number == len(self._given)
            self._strategy.begin_forward()
            self._pass.compute.begin(micro_batch)
            self._waiting = micro_batch
            with self._pass.compute.autocast():
                yield micro_batch
            if self._waiting is not None:
                raise ConfigError(
                    f"The loop's body ended without backward(loss) for micro-batch {micro_batch.k} of step "
                    f"{self._batch.plan.step}. Call it once for each; to evaluate, call model.eval() before the loop."
                )

    def backward(self, loss: Any) -> None:
        """Runs the backward pass of the current micro-batch. Collective with the last one.

        Args:
            loss: what a loss function may return: the mean over the micro-batch's samples (0-dim), one value for each,
                or the pair (sum, weight).
        """
        if self._rehearsal is not None:
            self._rehearsal.backward(loss)
            return
        micro_batch, self._waiting = self._waiting, None
        if micro_batch is None:
            raise ConfigError(
                f"backward(loss) was called twice for one micro-batch of step {self._batch.plan.step}. Add the losses "
                "up and call it once."
            )
        total, weight = sum_and_weight(loss, len(micro_batch))
        if not total.requires_grad:
            raise ConfigError("The loss has no gradient. Was it computed under torch.no_grad()?")
        if self._counts:
            with torch.autocast(total.device.type, enabled=False):
                self._strategy.end_forward(micro_batch, total, weight, self._pass.scale)
        if self.is_last:
            self._pass.result = self._strategy.reduce(self._pass.compute, self._pass.stop)
            self.loss = self._pass.result.loss
            self._stack.close()
