"""Runs the model on every sample of an evaluation exactly once, in fixed micro-batches; gathers outputs in order.

``EvaluationStop`` lets all ranks leave an evaluation at the same micro-batch when any of them is asked to stop:

    round      0 | 1          9          17 ...                      a rank's first, second, ... micro-batch
    agreement    ^ after the first, then about once a second: the slowest rank's rounds say how many that is

Every rank takes part in every agreement, even one that has fewer micro-batches or none, because the forward pass may be
collective. An evaluation with a single round has no agreement.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.data.batch import DeviceTransform, MicroBatch
from lockstep.data.loader import EvaluationLoader
from lockstep.errors import ConfigError, RankError
from lockstep.numerics.compilation import fix_graphs
from lockstep.numerics.hidden_state import evaluating
from lockstep.numerics.precision import dtype_named
from lockstep.run.checks.agreement import require_equal_models
from lockstep.run.checks.short_step import with_own_data
from lockstep.run.save import save_and_stop
from lockstep.run.step import require_function
from lockstep.runtime.control import StopReason
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.strategies import Strategy
from lockstep.text import plural

if TYPE_CHECKING:
    from lockstep.run.run import Run

logger = logging.getLogger(__name__)
AGREE_EVERY = 1.0
"""Seconds, about."""


class EvaluationStopped(Exception):
    """All ranks have left an evaluation, because one was asked to stop."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"left because of {reason.name}")
        self.reason = reason


class EvaluationStop:
    """The agreements of one evaluation; the heartbeat says whether this rank has been asked to stop."""

    def __init__(self, strategy: Strategy, heartbeat: Heartbeat) -> None:
        self._strategy, self._heartbeat = strategy, heartbeat
        self._last, self._next, self._since = 0, 1, time.monotonic()

    def agree(self, round_number: int) -> None:
        """Called before each round from 0 on, on every rank. Collective where an agreement is due.

        ``EvaluationStopped`` is raised on every rank where some rank has been asked to stop.
        """
        if round_number < self._next:
            return
        torch.zeros(1, device=self._strategy.device).item()  # the device may be behind, and its time counts
        seconds = (time.monotonic() - self._since) / (round_number - self._last)
        said = [float(self._heartbeat.stop_reason), seconds]
        row = self._strategy.all_reduce_max(torch.tensor(said, dtype=torch.float64, device=self._strategy.device))
        reason, slowest = self._strategy.gather(row).amax(0).tolist()
        if reason:
            raise EvaluationStopped(StopReason(int(reason)))
        self._last, self._since = round_number, time.monotonic()
        self._next = round_number + max(1, int(AGREE_EVERY / max(slowest, 1e-6)))


@dataclass(frozen=True)
class OpenEvaluation:
    """An evaluation that is going on, on one rank."""

    run: Run
    loader: EvaluationLoader
    """This process's micro-batches of the set."""
    model: nn.Module
    own_forward: Callable[[Any], Any] | None
    """A function of the user's that gives outputs, from the data of a micro-batch as they are."""
    device_transform: DeviceTransform | None
    """The data set's change of inputs on the device."""
    stop: EvaluationStop | None
    """How the ranks agree to stop early; None: they stay to the end."""
    is_new: bool
    """True if what the model keeps is looked for, on all ranks, with the first micro-batch of each."""
    keep: Callable[[Any], Any] | None
    """See ``Run.predict``."""

    def forward(self, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Runs the model on one micro-batch; gives (output, target)."""
        run, prepared, position = self.run, self.run.require_prepared(), self.run.position
        heartbeat = run._session.heartbeat
        heartbeat.mark("evaluate", epoch=position.epoch, step=position.step, micro_batch=micro_batch.k)
        heartbeat.samples(micro_batch.indices)
        prepared.state.model.randomness.begin_micro_batch(-1 - position.step, micro_batch.k)
        return prepared.forward_pass.output_and_target(
            micro_batch.data, self.own_forward, self.model, self.device_transform
        )

    def output(self, micro_batch: MicroBatch) -> Any:
        """Runs the model on one micro-batch, which need not have a target."""
        if isinstance(micro_batch.data, Tensor) and self.own_forward is None:
            micro_batch = replace(micro_batch, data=(micro_batch.data, None))
        return self.forward(micro_batch)[0]

    def rounds(self) -> Iterator[tuple[int, MicroBatch | None]]:
        """Numbers the rounds, as many for every holder, with this one's micro-batch in each. See ``EvaluationStop``."""
        spare = self.loader.share.longest(self.loader.count) - len(self.loader)
        with self.noting_failure():
            for number, micro_batch in enumerate(chain(self.loader, repeat(None, spare))):
                if self.stop is not None:
                    self.stop.agree(number)
                if number == 0 and self.is_new:
                    self._rehearse(micro_batch)
                yield number, micro_batch

    def _rehearse(self, micro_batch: MicroBatch | None) -> None:
        def output_of(given: MicroBatch) -> Any:
            output = self.output(with_own_data(given))
            self.run.require_prepared().state.model.randomness.leave()
            if self.keep is not None:
                self.keep(output)
            return output

        given = None if micro_batch is None else partial(output_of, micro_batch)
        self.run.rehearsals.rehearse_evaluation(self.model, {"forward=": self.own_forward, "keep=": self.keep}, given)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Surrounds what may fail only on this rank, while the others wait for it."""
        try:
            yield
        except EvaluationStopped:
            raise
        except Exception as error:
            if self.run._session.group is not None:
                self.run.strategy.fail("An evaluation", error)
            raise


@contextmanager
def evaluation(
    run: Run,
    data: Any,
    model: nn.Module | None,
    forward: Callable[[Any], Any] | None,
    workers: int | None,
    repeatable: bool,
    keep: Callable[[Any], Any] | None = None,
) -> Iterator[OpenEvaluation]:
    """Opens an evaluation under the keys and the precision of a run; see ``Run.evaluate``. Collective."""
    prepared, heartbeat = run.require_prepared(), run._session.heartbeat
    run.strategy.require_no_failure()
    fix_graphs()
    own_model = prepared.forward_pass.model
    evaluated = own_model if model is None else model
    require_function("forward", forward)
    require_function("keep", keep)
    if not isinstance(evaluated, nn.Module):
        raise ConfigError(f"model={model!r:.60} was given, a {type(model).__name__}. Give a torch.nn.Module.")
    epoch, step = run.position.epoch, run.position.step
    has_changed = run._loaders.refresh(data, "evaluation")
    transform = run._loaders.source(data).device_transform
    if run._loop.is_resumed and (run.position.done if run._loop.in_epochs else run._loop.has_passed) and run.is_main:
        logger.warning(
            "This evaluation is of the parameters after %s of epoch %d, from where the run goes on. Do it under "
            "'if not run.position.done:', or what is between two loops over run.epochs at the start of the second.",
            *(plural(run.position.done, "step"), epoch + 1),
        )
    run.synchronize()
    run.strategy.note_readers(())
    run.strategy.require_no_calls()
    heartbeat.mark("evaluate", epoch=epoch, step=step)
    stop = EvaluationStop(run.strategy, heartbeat) if repeatable and _can_repeat(run) else None
    loader, sent = run._loaders.evaluation(data, workers), run.strategy.bytes_sent
    try:
        if loader.count == 0:
            raise ConfigError("The evaluation was given an empty data set. Look at how it was split.")
        compared = run._loaders.compared(data, workers)
        run._agreed_data.require_evaluated(loader.samples, *compared, has_changed=has_changed)
        run._agreed_data.require_equal_changes(prepared.state.loop)
        if evaluated is not own_model:
            require_equal_models(evaluated, own_model, run.strategy)
        run.compare_replicas()
        resumed = bool(prepared.state.resumed_context)
        is_new = run.rehearsals.is_new_evaluation(evaluated, forward, keep, resumed=resumed)
        with evaluating(evaluated):
            yield OpenEvaluation(run, loader, evaluated, forward, transform, stop, is_new, keep)
        heartbeat.mark("script", epoch=epoch, step=step)
    except EvaluationStopped as stopped:
        if run.options.directory is not None:
            run._loop.go_back()
        save_and_stop(run, stopped.reason)
    except Exception:
        prepared.state.model.randomness.interrupt()
        raise
    finally:
        prepared.state.model.randomness.end_step(-1 - step)
        run.strategy.bytes_outside_steps += run.strategy.bytes_sent - sent


def _can_repeat(run: Run) -> bool:
    """True if a run that stops in an evaluation can do it again when it is resumed."""
    if run._loop.stops_at_end:
        return False
    if run.options.directory is None:
        return True
    return run._loop.can_go_back and run._resumption.is_as_at_end() and not run.require_prepared().gradients.anywhere()


def predict_in_order(opened: OpenEvaluation, *, everywhere: bool) -> Tensor | None:
    """As ``predict``, with the rows in the order of the samples' numbers. Collective.

    Raises:
        ConfigError: samples are drawn, so that there is no row for each.
    """
    numbers, places = torch.from_numpy(opened.loader.sample_numbers()), torch.arange(opened.loader.samples)
    order = numbers.argsort()
    if not torch.equal(numbers[order], places):
        raise ConfigError(
            "run.predict gives a row for each sample, in the order of the data set, and was given one that draws "
            "samples (Weighted, WeightedRandomSampler). Give it the data set itself."
        )
    opened.run.strategy.note_readers(() if opened.keep is None else (opened.keep,))
    rows = predict(opened, partial(_kept, opened), everywhere=everywhere)
    return rows if rows is None or torch.equal(order, places) else rows[order]


def predict(
    opened: OpenEvaluation, rows_of: Callable[[MicroBatch], Tensor], *, everywhere: bool = False
) -> Tensor | None:
    """The outputs of all samples, in order, on the CPU of the main process, or of every one. Collective.

    Each round, every holder gives the outputs of one micro-batch as float64, which holds every value of the dtypes that
    are taken. Only what belongs to one round is in the memory of all. ``rows_of`` runs the model and gives a row for
    each sample.

    Raises:
        ConfigError: the outputs are not tensors of one row for each sample, or rows have several shapes or dtypes.
        RankError: a process was lost, and its outputs with it.
        EvaluationStopped: the ranks have stopped, all after the same number of micro-batches.
    """
    loader, share, strategy = opened.loader, opened.loader.share, opened.run.strategy
    has_all = everywhere or opened.run.is_main
    found, dtype, shape = [torch.empty(0)] * loader.count, "", list[int]()
    row = torch.zeros(1, dtype=torch.float64, device=strategy.device)
    for place, micro_batch in opened.rounds():
        with strategy.joined_calls(), opened.noting_failure():
            output = None if micro_batch is None else rows_of(micro_batch)
        form = None if output is None else [str(output.dtype), list(output.shape[1:])]
        if place == 0:  # a process without a micro-batch learns here what a row is
            forms = filter(None, strategy.gather_records(form))
            dtype, shape = next(forms, None) or _lost("the first micro-batch")
            row = row.new_zeros(1 + loader.micro_batch_size * math.prod(shape))
        if form not in (None, [dtype, shape]):
            raise ConfigError(
                f"Some outputs have rows of {form[0]} and shape {form[1]}, others {dtype} and shape {shape}. Give "
                "run.predict a keep= that makes rows of one kind of them."
            )
        row.zero_()
        if output is not None:
            row[0] = len(output)
            row[1 : 1 + output.numel()] = output.reshape(-1)
        gathered = strategy.gather(row)
        for holder, values in enumerate(gathered.cpu() if has_all else ()):
            held = share.of(loader.count, holder)[place : place + 1]
            if held and held[0] < loader.count:
                rows = int(values[0]) or _lost(f"micro-batch {held[0]}")
                numbers = values[1 : 1 + rows * math.prod(shape)].view(rows, *shape)
                found[held[0]] = numbers.to(dtype_named(dtype), copy=True)
    return torch.cat(found) if has_all else None


def _lost(what: str) -> NoReturn:
    raise RankError(f"The outputs of {what} are lost with the process that had them.")


def _kept(opened: OpenEvaluation, micro_batch: MicroBatch) -> Tensor:
    """Returns the part of an output that is kept: a row of real numbers for each sample."""
    output = opened.output(micro_batch)
    return require_rows(
        output if opened.keep is None else opened.keep(output),
        len(micro_batch),
        "run.predict",
        "Take the part to keep with keep=, for example keep=lambda output: output['logits'].",
    )


def require_rows(value: Any, samples: int, caller: str, remedy: str) -> Tensor:
    """The value, if it is a tensor with a row of real numbers for each sample; ``ConfigError`` otherwise."""
    if not isinstance(value, Tensor):
        found = type(value).__name__
    elif value.is_nested or value.is_quantized or value.layout != torch.strided:
        found = "a sparse, nested or quantized one"
    elif value.dim() and len(value) == samples:
        require_exact(value, caller)
        return value
    else:
        found = f"a tensor of shape {list(value.shape)}"
    raise ConfigError(
        f"{caller} needs a tensor with one row for each of the {samples} samples of a micro-batch, and was given "
        f"{found}. {remedy}"
    )


def require_exact(value: Tensor, caller: str) -> None:
    """Raises ``ConfigError`` for numbers that float64, in which values are gathered, would change."""
    whole = not value.is_floating_point() and not value.is_complex()
    if value.is_complex() or (whole and not torch.equal(value.double().to(value.dtype), value)):
        raise ConfigError(
            f"{caller} takes real numbers, whole ones up to 2**53, and was given others, of {value.dtype}. Convert "
            "them first."
        )
