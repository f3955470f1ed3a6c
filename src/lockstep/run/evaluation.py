"""Evaluates and predicts: runs the model on every sample exactly once, in fixed micro-batches, for metrics and outputs.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import DeviceTransform, MicroBatch
from lockstep.data.loader import EvaluationLoader
from lockstep.errors import ConfigError, RankError
from lockstep.numerics.compilation import fix_graphs
from lockstep.numerics.hidden_state import evaluating
from lockstep.numerics.precision import dtype_named
from lockstep.run.checks.agreement import require_equal_models
from lockstep.run.checks.calls import require_same_names
from lockstep.run.checks.means import UNTOLD, Changes, Deviation, RowSample, held_by, judge_metrics, reasons_with_model
from lockstep.run.checks.rows import has_rows
from lockstep.run.checks.short_step import Watched, with_own_data
from lockstep.run.metrics import Metric, SetMetric, SumsAndWeights, metric_values
from lockstep.run.save import save_and_stop
from lockstep.run.step import require_function, sum_and_weight, with_exact_mean
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


def evaluate(
    run: Run, metric: Metric | SetMetric | Mapping[str, Metric | SetMetric], data: Any, *how: Any
) -> float | dict[str, float]:
    """The values of metrics over all samples: means, and those of a whole set; see ``evaluation``. Collective."""
    own = str(getattr(metric, "__name__", "metric"))
    metrics = metric if isinstance(metric, Mapping) else {own if own.isidentifier() else "metric": metric}
    for name, each in metrics.items():
        if not (callable(each) or isinstance(each, SetMetric)):
            raise ConfigError(
                f"The metric {name!r} of run.evaluate is a {type(each).__name__}. Give a function of (output, target), "
                "an object with update, compute and reset, or a dict of these, such as {'accuracy': accuracy}."
                + (" The data come first: run.evaluate(data, metric)." if callable(data) else "")
            )
    of_sets = {name: each for name, each in metrics.items() if isinstance(each, SetMetric)}
    means = {name: each for name, each in metrics.items() if not isinstance(each, SetMetric)}
    unchecked = run.rehearsals.new_metrics(means, evaluated=True) & run.rehearsals.new_metrics(means)
    run.strategy.require_no_failure()
    run.strategy.require_no_calls()
    require_same_names("The metrics of run.evaluate", metrics, run.strategy)
    found: dict[str, dict[str, float]] = {}
    if means:
        with evaluation(run, data, *how) as opened:
            values = _evaluate_means(opened, means, unchecked)
            run.rehearsals.note_checked(means.values(), evaluated=True)
            found |= {name: {name: value} for name, value in values.items()}
    if of_sets:
        with evaluation(run, data, *how) as opened:
            found |= _evaluate_set_metrics(opened, of_sets)
    if isinstance(metric, Mapping):
        keys = Counter(key for values in found.values() for key in values)
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ConfigError(f"Two metrics of run.evaluate give a number called {twice[0]!r}. Rename one.")
        return {key: value for name in metrics for key, value in found[name].items()}
    ((name, values),) = found.items()
    return values.get(name, {key.removeprefix(f"{name}_"): value for key, value in values.items()})


def _evaluate_means(opened: OpenEvaluation, metrics: Mapping[str, Metric], unchecked: set[str]) -> dict[str, float]:
    """The mean of each metric over all samples, equal on every rank. Collective.

    Unless checks are off, looks for metrics that are not means: among the new ones, and among those that give one
    number (see ``means``).

    Args:
        metrics: functions of (output, target); see ``step.sum_and_weight`` for what they may return.
        unchecked: names of the metrics that are new; the same on every rank.

    Raises:
        ConfigError: a metric is not a mean over samples.
        EvaluationStopped: they have stopped, all after the same number of micro-batches.
    """
    means = _MetricMeans(opened, metrics, unchecked)
    opened.run.strategy.note_readers([*metrics.values()])
    for place, micro_batch in opened.rounds():
        with means.calls(), opened.noting_failure():
            if micro_batch is not None:
                means.add(place, micro_batch)
    means.judge()
    return means.by_name()


class _MetricMeans:
    """The sums and weights of metrics over an evaluation, and the signs that one of them is not a mean."""

    def __init__(self, opened: OpenEvaluation, metrics: Mapping[str, Metric], unchecked: set[str]) -> None:
        self._opened, self._metrics, self._unchecked = opened, metrics, unchecked
        self._loader, self._strategy = opened.loader, opened.run.strategy
        self._forward_pass = opened.run.require_prepared().forward_pass
        self._functions = {name: with_exact_mean(metric) for name, metric in metrics.items()}
        self._sums = SumsAndWeights(metrics, self._strategy, self._loader.share, self._loader.count)
        self._checks = opened.run.options.checks != "off"
        self._checked, self._reasons = set(unchecked), dict[str, str]()
        """Metrics that are checked, and by name why one is not a mean."""
        self._kept: Changes = {}
        self._sample = RowSample(len(self._loader), self._loader.micro_batch_size)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Surrounds calls of the metrics, which may call the model. Collective."""
        with self._strategy.joined_calls(), self._forward_pass.autocast():
            yield

    def add(self, place: int, micro_batch: MicroBatch) -> None:
        """Runs the model and the metrics on a micro-batch, this holder's number ``place``."""
        is_padding = micro_batch.k >= self._loader.count  # run because the forward pass is collective
        unchecked = self._unchecked if place == 0 else set[str]()
        if unchecked and self._strategy.replicated and not is_padding:
            self._compare_parts(micro_batch)
        output, target = self._opened.forward(micro_batch)
        if is_padding:
            return
        samples = len(micro_batch)
        if self._checks:
            self._sample.take(place, (output, target), samples)
        before = held_by(self._metrics, unchecked)
        for name, value in metric_values(self._functions, "run.evaluate", output, target, unchecked):
            if isinstance(value, Tensor) and value.dim() == 0:
                self._checked.add(name)
                if name in unchecked and not (self._strategy.replicated or has_rows((output, target), samples)):
                    self._reasons[name] = Deviation.WITHOUT_ROWS.reason
                self._forward_pass.left_out.look(self._functions[name], value, output, target, micro_batch)
            self._sums.put(place, name, sum_and_weight(value, samples))
        self._kept.update(before.changed(held_by(self._metrics, unchecked)))

    def _compare_parts(self, micro_batch: MicroBatch) -> None:
        """Compares the values of new metrics with those over parts of a micro-batch."""

        def forward(data: Any, k: int) -> tuple[Any, Any]:
            return self._opened.forward(replace(micro_batch, k=k, data=data))

        model, own_forward = self._opened.model, self._opened.own_forward
        with Watched({"": model, "forward=": own_forward}, (model,)).restored():
            named = self._named(self._unchecked)
            self._reasons |= reasons_with_model(named, forward, (micro_batch,), self._strategy.device)

    def _named(self, names: Iterable[str]) -> dict[str, Metric]:
        return {name: self._metrics[name] for name in sorted(names, key=repr)}

    def judge(self) -> None:
        """Raises ``ConfigError`` on every rank if a metric is no mean, unless checks are off. Collective."""
        if not self._checks:
            return
        everyone = self._strategy.gather_records(self._sample.some())
        with self.calls():
            found = self._sample.reasons(self._named(self._checked), everyone)
        # What may be a mean or not is said once.
        unchecked = self._unchecked
        self._reasons |= {name: why for name, why in found.items() if name in unchecked or why not in UNTOLD}
        told = [self._reasons, self._kept, self._forward_pass.left_out.warning]
        records, warns = self._strategy.gather_records(told), self._opened.run.is_main
        self._forward_pass.left_out.receive((each[2] for each in records), warns=warns)
        judge_metrics([(each[0], each[1]) for each in records], warns=warns)

    def by_name(self) -> dict[str, float]:
        """The means over all samples, equal on every rank. Collective."""
        rows = self._sums.of_all()
        return {name: _mean(name, rows[name].cpu()) for name in self._metrics}


def _evaluate_set_metrics(opened: OpenEvaluation, metrics: Mapping[str, SetMetric]) -> dict[str, dict[str, float]]:
    """The values of each metric over the outputs and targets of the whole set, equal on every rank. Collective.

    The main process updates the metrics, with one micro-batch after the other in the order of the data set.

    Raises:
        ConfigError: outputs or targets are not tensors with a row for each sample, or a value is not a number.
        EvaluationStopped: the ranks have stopped, all after the same number of micro-batches.
    """
    columns, strategy = list[list[Any]](), opened.run.strategy
    words = f"The metric {next(iter(metrics))!r}", "Compute it from run._gathered_rows(data, keep=...) instead."

    def joined(micro_batch: MicroBatch) -> Tensor:
        pair = [_require_rows(each, len(micro_batch), *words) for each in opened.forward(micro_batch)]
        columns[:] = [[str(each.dtype), list(each.shape[1:])] for each in pair]
        return torch.cat([each.reshape(len(each), -1).double() for each in pair], 1)

    rows = _gathered_rows(opened, joined)
    (dtype, shape), (target_dtype, target_shape) = next(filter(None, strategy.gather_records(columns)))
    values = {}
    if rows is not None:
        border = math.prod(shape)
        outputs = rows[:, :border].to(dtype_named(dtype)).view(-1, *shape)
        targets = rows[:, border:].to(dtype_named(target_dtype)).view(-1, *target_shape)
        size = opened.loader.micro_batch_size
        parts = [*zip(torch.split(outputs, size), torch.split(targets, size))]
        for name, metric in metrics.items():
            for each in metric.modules() if isinstance(metric, nn.Module) else (metric,):
                # torchmetrics, also in a collection, would wait for the other ranks, which have no part.
                for key in ("sync_on_compute", "_to_sync"):  # the second, a copy of it, decides
                    if hasattr(each, key):
                        vars(each)[key] = False
            with opened.noting_failure():
                metric.reset()
                for output, target in parts:
                    metric.update(output.clone(), target.clone())
                values[name] = _numbers(name, metric.compute())
    shared: dict[str, dict[str, float]] = next(filter(None, strategy.gather_records(values)))
    return shared


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The result of ``compute()``: a number under the metric's name, or several under ``name_key`` or ``name_0``."""
    with suppress(TypeError, ValueError, RuntimeError):
        return {name: float(value)}
    numbers, part = dict[str, float](), value
    is_no = ", which is neither a number nor a dict or list of numbers"
    try:
        parts = value if isinstance(value, Mapping) else dict(enumerate(map(float, value)))
        for key, part in parts.items():
            is_no = f" as {key!r}, where one number is taken"
            numbers[f"{name}_{key}"] = float(part)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"a tensor of shape {list(part.shape)}" if isinstance(part, Tensor) else f"{part!r:.60}"
        raise ConfigError(
            f"compute() of the metric {name!r} gave {what}{is_no}. Compute it from run.predict instead."
        ) from error
    return numbers


def _mean(name: str, rows: Tensor) -> float:
    total, weight = fold_rows(rows).tolist()
    if weight == 0:
        raise ConfigError(f"The metric {name!r} has a total weight of zero, so it has no mean.")
    return float(total / weight)


def predict(opened: OpenEvaluation, *, everywhere: bool) -> Tensor | None:
    """The outputs of all samples in the order of their numbers; see ``Run.predict``. Collective.

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
    rows = _gathered_rows(opened, partial(_kept, opened), everywhere=everywhere)
    return rows if rows is None or torch.equal(order, places) else rows[order]


def _gathered_rows(
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
    return _require_rows(
        output if opened.keep is None else opened.keep(output),
        len(micro_batch),
        "run.predict",
        "Take the part to keep with keep=, for example keep=lambda output: output['logits'].",
    )


def _require_rows(value: Any, samples: int, caller: str, remedy: str) -> Tensor:
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
