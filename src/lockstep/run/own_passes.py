"""The micro-batches of a step for a loop that runs the model itself, as scripts written for other libraries do.

The first steps are rehearsed, by giving the body of the loop micro-batches that do not count:

    [first micro-batch of each process] -> loss, gradients, settings     twice: what differs, the body has kept
    [that of rank 0, on every process]  -> losses, which must be equal
    [some rows], [the same], [two halves], without dropout -> is the loss a mean over samples?
    [first micro-batch], [the same] with twice the loss    if there are hooks: what they make of the size of gradients

The body is the caller, so it runs once for each of them, and what it counts or adds up, it does then too: a sum in one
of its variables is refused. Nothing is updated, and the model is restored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.strategy_options import Level
from lockstep.core.users_code import owners_of, users_frames
from lockstep.core.values import attributes_of, is_users_object
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Kind, evaluating
from lockstep.numerics.hooks import hooks_gradients
from lockstep.numerics.running_buffers import normalises_by_batch, warn_of_few_samples
from lockstep.run.checks.calls import warn_of_settings, watching_calls
from lockstep.run.checks.findings import Findings
from lockstep.run.checks.means import Deviation, Sums, are_apart, deviation_of_parts, gradients_of
from lockstep.run.checks.other_samples import expected
from lockstep.run.checks.rows import has_rows, leaves_of, own_rows, together
from lockstep.run.checks.short_step import (
    RehearsalCompute,
    Watched,
    noting_mistakes,
    on_all_ranks,
    put_back,
    shortened,
    taken_gradients,
    with_own_data,
)
from lockstep.run.checks.sums import SCALES, GradientSizes
from lockstep.run.run import Run
from lockstep.run.step import BackwardPass, sum_and_weight
from lockstep.run.step_errors import other_on_ranks
from lockstep.strategies.ddp import DistributedDataParallel, Replicated, Single

_LEAST_ROWS = 4
_OFF = "checks='off' lets it run, with results that depend on the number of processes."
_NAME = "of the loop"
_MOST_ENTRIES = 1_000
"""Of a list or dict of the loop in which sums are looked for."""


def _given_by_the_loop(*_: object) -> Tensor:
    raise AssertionError("the loop computes the loss")


class OwnPasses:
    """The micro-batches of one step, for a loop that computes each of them and its loss by itself.

    Iterating gives this process's micro-batches; random numbers that are drawn until the next one are keyed by it. For
    each, ``backward`` must be called once. With the last one, the gradients are summed over all processes. The first
    steps are rehearsed: see ``LoopRehearsal``.

    Args:
        run: a prepared run, of strategy ``ddp`` or ``single``.
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
        if batch.plan.leaves < strategy.share.holders and spare is None:
            step = "The first step of an epoch" if batch.plan.position == 0 else "The step at which the run resumes"
            raise ConfigError(
                f"{step} has {batch.plan.samples} samples, so {batch.plan.leaves} micro-batches, for "
                f"{strategy.share.holders} processes. Use fewer processes, or more micro_batches from the start."
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
        self._pass = self._stack.enter_context(self._run.backward_pass(self._batch, _given_by_the_loop, rehearse=False))
        gradients = self._run.require_prepared().gradients
        gradients.is_divided = True
        self._stack.callback(setattr, gradients, "is_divided", False)
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
                raise _without_backward(f"micro-batch {micro_batch.k}", self._batch)

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


def settings_of(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """The settings of all parameter groups, such as learning rates, by the words for them."""
    return {
        f"the setting {name!r} of group {number} of {type(optimizer).__name__}": repr(value)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor)
    }


class LoopRehearsal:
    """The rehearsal of one step. Iterating gives micro-batches; for each, ``backward`` must be called once."""

    def __init__(self, run: Run, strategy: Replicated, batch: Batch, opened: BackwardPass) -> None:
        self._run, self._strategy, self._batch, self._opened = run, strategy, batch, opened
        self._compute: RehearsalCompute
        self._waiting: MicroBatch | None = None
        self._is_judged = False
        self._asked: list[str] | None = None
        """Places where the pass that is watched asks for the number of processes; None in the others."""
        self._losses: list[int] = []
        self._value = (0.0, 0.0)
        self._trained: list[nn.Parameter] = []
        """Those of which gradients are compared, too, where the loss is judged."""
        self._slopes: list[Tensor] = []
        self._times = 1.0
        """The factor of the loss."""

    @staticmethod
    def is_due(run: Run, batch: Batch) -> bool:
        """True if this step is to be rehearsed; alike on all ranks."""
        rehearsals, strategy = run.rehearsals, run.strategy
        done = rehearsals.done.get(LoopRehearsal, 0)
        if not rehearsals.is_on or done >= rehearsals.times or strategy.level is Level.STATISTICAL:
            return False
        return batch.plan.leaves >= strategy.share.holders

    def __iter__(self) -> Iterator[MicroBatch]:
        run, strategy, prepared = self._run, self._strategy, self._run.require_prepared()
        model, randomness = prepared.state.parts.model, self._opened.compute.randomness
        run.rehearsals.require_equal_draws()
        done = run.rehearsals.done
        done[LoopRehearsal] = done.get(LoopRehearsal, 0) + 1
        is_first = done[LoopRehearsal] == 1
        if is_first and run.is_main:
            warn_of_settings(is_alone=run.world.world_size == 1, device=run.device)
            if not run.options.sync_batch_norm:
                warn_of_few_samples(model, len(self._batch.plan.indices[0]), self._batch.plan.samples)
        watched = Watched({"": model}, (model, prepared.forward_pass.model))
        findings, look = Findings(), _sums if is_first else dict[str, float]
        short, self._compute = shortened(self._batch, self._opened.compute, strategy.share, 1)
        try:
            with put_back(strategy, watched, run._events):
                self._asked = findings.asked
                before = look()
                with noting_mistakes(prepared, watched, strategy, findings):
                    first = yield from self._pass(short)
                self._asked = None
                between = look()
                after = watched.now()
                watched.buffers.restore()
                second = yield from self._pass(short)
                findings.added = _growing(before, between, look())
                changed = after.changed(later := watched.now())
                watched.buffers.restore()
                if is_first and strategy.share.holders > 1:
                    findings.ranks_differ = yield from self._pass_of_all(short)
                if is_first:
                    findings.deviation = yield from self._deviation(model)
                    self._is_judged = False
            # A rank alone may have hooks, such as the one that logs.
            if is_first and self._opened.scale == 1.0 and any(strategy.gather_records(hooks_gradients(model))):
                yield from self._warn_of_sums(short, watched)
        finally:
            self._is_judged = False
            randomness.leave()
        findings.drew = [name for name in changed if later.kinds.get(name) is Kind.GENERATOR]
        for kept in second:
            if second[kept] != first[kept]:
                raise _keeps(kept, first[kept], second[kept])
        run.rehearsals.judge(findings.of_all_ranks(strategy), _NAME)
        if findings.ranks_differ:
            raise other_on_ranks(strategy.gather_records({}), _OFF)

    def backward(self, loss: Any) -> None:
        """Takes the loss of the micro-batch that was given last, as ``OwnPasses.backward`` does. Collective."""
        micro_batch, self._waiting = self._waiting, None
        if micro_batch is None:
            raise ConfigError("backward(loss) was called twice for one micro-batch. Add the losses up.")
        total, weight = sum_and_weight(loss, len(micro_batch))
        if self._is_judged:
            self._value, self._slopes = (float(total.detach()), float(weight)), []
            with suppress(Exception):  # a loss without a gradient is told of in the step itself
                self._slopes = gradients_of(total, self._trained)
            return
        with torch.autocast(total.device.type, enabled=False):
            self._strategy.end_forward(micro_batch, total, weight, self._opened.scale * self._times)
        self._losses = self._strategy.reduce(self._compute, 0).losses.view(torch.int64).tolist()

    def _given(self, micro_batch: MicroBatch) -> Generator[MicroBatch, None, None]:
        """Gives one micro-batch to the loop's body, on data of its own: the body may write into them."""
        self._waiting = with_own_data(micro_batch)
        asked = self._asked
        watching = nullcontext() if asked is None else watching_calls(asked, "the loop's body")
        with self._compute.autocast(), watching:
            yield self._waiting
        if self._waiting is not None:
            raise _without_backward("the first micro-batch", self._batch)

    def _computed(self, batch: Batch) -> Generator[MicroBatch, None, None]:
        """Gives the micro-batch of a short step."""
        strategy, (micro_batch,) = self._strategy, batch.micro_batches
        strategy.begin_backward(batch)
        strategy.begin_forward()
        self._compute.begin(micro_batch)
        yield from self._given(micro_batch)
        self._compute.randomness.leave()

    def _pass(self, batch: Batch) -> Generator[MicroBatch, None, dict[str, Any]]:
        """Gives the micro-batch of a short step; returns what came of it, by the words for it."""
        strategy = self._strategy
        yield from self._computed(batch)
        gradients = {f"the gradient of {name!r}": each for name, each in taken_gradients(strategy).items()}
        settings = settings_of(self._run.require_prepared().state.parts.optimizers)
        return {"the loss": self._losses, **gradients, **settings}

    def _pass_of_all(self, batch: Batch) -> Generator[MicroBatch, None, bool]:
        """Gives rank 0's micro-batch on every rank; returns whether the losses have other bits."""
        common = on_all_ranks(batch, self._compute, self._strategy)
        if common is None:
            return False
        own, (batch, self._compute) = self._compute, common
        yield from self._pass(batch)
        self._compute = own
        return any(loss != self._losses[0] for loss in self._losses)

    def _warn_of_sums(self, short: Batch, watched: Watched) -> Generator[MicroBatch, None, None]:
        """Gives the micro-batch of a short step, and counts its loss twice; see ``GradientSizes``."""
        run, strategy = self._run, self._strategy
        sizes = GradientSizes(strategy, run.require_prepared().state.parts.model)
        for self._times in SCALES:
            if not sizes.is_done():
                with put_back(strategy, watched, run._events):
                    yield from self._computed(short)
                    found = {n: p.grad for n, p in strategy.trainable().items() if p.grad is not None}
                    sizes.add(self._times, found, watched.now())
        run.rehearsals.tell_sums(sizes.warnings([]), len(self._batch.plan.indices[0]))

    def _deviation(self, model: nn.Module) -> Generator[MicroBatch, None, str]:
        """Gives some rows, the same again, and two parts of them; returns why the loss is not a mean, or nothing."""
        given = self._batch.micro_batches
        try:
            data, samples = together(given, _LEAST_ROWS)
        except Exception:  # micro-batches may have several lengths
            return ""
        leaves = leaves_of(data)
        if samples < _LEAST_ROWS or not leaves or not has_rows(leaves, samples):
            return ""
        numbers = np.concatenate([each.indices for each in given])[:samples]
        self._is_judged = True
        self._trained = [] if hooks_gradients(model) else [each for each in model.parameters() if each.requires_grad]

        def passes(*parts: slice) -> Generator[MicroBatch, None, list[tuple[Sums, list[Tensor]]]]:
            found = []
            for rows in parts:
                # Other keys in every pass, so that a loop which draws is not judged.
                self._compute.randomness.begin_micro_batch(self._batch.plan.step, next(places))
                yield from self._given(replace(given[0], data=own_rows(data, rows), indices=numbers[rows]))
                found.append((self._value, self._slopes))
            return found

        places, half = itertools.count(), samples // 2
        for mode in (expected, evaluating):
            with mode(model), torch.enable_grad():
                (whole, slope), (again, other) = yield from passes(slice(None), slice(None))
                if whole != again or any(map(normalises_by_batch, model.modules())):  # the body may call model.train()
                    continue
                (first, one), (second, two) = yield from passes(slice(half), slice(half, None))
                in_16_bits = torch.is_autocast_enabled(self._strategy.device.type)
                found = deviation_of_parts(whole, first, second, 0.1 if in_16_bits else 1e-4)
                most = 0.03 if in_16_bits else 0.01
                if found.reason or not len(slope) == len(other) == len(one) == len(two):
                    return found.reason  # there may be no room for so many gradients
                joint = [left + right for left, right in zip(one, two, strict=True)]
                is_other = not are_apart(slope, other, most) and are_apart(slope, joint, most)
                return Deviation.GRADIENT.reason if is_other else ""
        return ""


def _sums() -> dict[str, float]:
    """The numbers in variables of the user's running functions, and in what these hold, by name; of a list, its sum."""
    sums = dict[str, float]()
    for owner, frame in zip(owners_of(frames := users_frames()), frames):
        for name, value in dict(frame.f_locals).items():
            sums.update(_numbers(f"{owner}{name}", value))
    return sums


def _numbers(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, float]]:
    if (number := _number(value)) is not None:
        yield name, number
    elif isinstance(value, list) and len(value) <= _MOST_ENTRIES:
        numbers = [each for each in map(_number, value) if each is not None]
        if len(numbers) == len(value):
            yield name, sum(numbers)
    elif depth and isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        for key, each in list(value.items()):
            yield from _numbers(f"{name}[{key!r}]", each, depth - 1)
    elif depth and is_users_object(value) and not isinstance(value, nn.Module):
        for key, each in list(attributes_of(value).items()):
            yield from _numbers(f"{name}.{key}", each, depth - 1)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not (value.is_complex() or value.is_meta)
        return float(value.detach()) if is_one else None
    if isinstance(value, int | np.integer):
        return float(value) if abs(int(value)) < 2**63 else None
    return float(value) if isinstance(value, float | np.floating) else None


def _growing(before: dict[str, float], between: dict[str, float], after: dict[str, float]) -> list[str]:
    """The sums that grew by one amount in each of two equal passes; not by 1, as the number of passes does."""
    steps = {n: (between[n] - before.get(n, 0.0), after[n] - between[n]) for n in between if n in after}
    return [name for name, (one, two) in steps.items() if math.isclose(one, two, rel_tol=1e-5) and one not in (0, 1)]


def _without_backward(micro_batch: str, batch: Batch) -> ConfigError:
    return ConfigError(
        f"The loop's body ended without backward(loss) for {micro_batch} of step {batch.plan.step}. Call it once for "
        "each; to evaluate, call model.eval() before the loop."
    )


def _keeps(what: str, first: Any, second: Any) -> ConfigError:
    values = "" if isinstance(first, int | list | None) else f" ({first}, then {second})"
    return ConfigError(
        f"The loop's body was given one micro-batch twice, and {what} is not the same the second time{values}: it "
        "keeps something from one pass to the next, such as a hidden state, a count of its passes or a generator of "
        "its own. Each process makes as many passes in a step as it has micro-batches, so each number of processes "
        "would give another result. Begin with a fresh state in every pass; take counts from "
        "accelerator.run.position.step, and a learning rate from a scheduler that accelerator.prepare was given. "
        f"{_OFF}"
    )
