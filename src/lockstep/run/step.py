"""Computes one step: micro-batches go to the device, through the model and the loss, and results are read back later.

    host            | give k0 | give k1 | give k2 | ...          kernels are queued, not waited for
    compute stream  | forward, backward of k0 | of k1            waits for a copy just before what needs it
    copy stream     | k0 || k1 |                                 out of page-locked memory, while k0 is computed

``DeviceTransfer`` copies, ``ForwardPass`` runs the model in training and evaluation, ``StepCompute`` adds the keys of
random numbers and the loss, and ``DeferredResults`` keeps the losses until reading them costs little. The first copy of
a step runs while the device still computes the step before it, unless the loop reads a loss in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.plan import StepPlan
from lockstep.data.batch import Batch, DeviceTransform, MicroBatch, map_leaves, tensors_in
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import explain_compiler
from lockstep.numerics.precision import Precision
from lockstep.numerics.randomness import KeyedRandomness, in_backward
from lockstep.run.step_errors import (
    explain_container,
    explain_loss,
    no_gradient,
    no_instance,
    no_value,
    note_arguments,
    note_gradients_off,
    raise_non_finite,
    trained_weight,
)
from lockstep.runtime.control import StopReason
from lockstep.runtime.devices import current_stream, is_gpu, new_stream, on_stream
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.runtime.heartbeat import BACKWARD, FORWARD, PHASES, REDUCE, UPDATE, Heartbeat
from lockstep.strategies import STOP_CODES, StepResult
from lockstep.text import plural, shorten

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lockstep.run.metrics import StepMetrics


class DeviceTransfer:
    """Copies to one device; on CUDA over a stream of its own, so that no copy waits for kernels queued before it.

    Callbacks are told of copies.
    """

    def __init__(self, device: torch.device, events: StepEvents = NO_EVENTS) -> None:
        self._device, self._events = device, events
        self._stream = new_stream(device)

    def __call__(self, data: Any) -> Any:
        """The same data with its tensors on the device, and whatever else has a method ``to``.

        On CUDA the current stream waits for the copies; the process does not, if they come from page-locked memory.
        """
        if self._device.type == "cpu":
            return data
        for call in self._events.copy_begin:
            call()
        delivered = map_leaves(data, self._moved if self._stream is None else self._copied)
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)
        for call in self._events.copy_end:
            call()
        return delivered

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        return value.to(self._device) if hasattr(value, "to") else value

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return self._moved(value)  # over the current stream: nothing can record an object's tensors
        with on_stream(self._stream):
            copied = value.to(self._device, non_blocking=True)
        copied.record_stream(current_stream(self._device))
        return copied


def split_batch(data: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Splits a micro-batch into the model's arguments (positional, by keyword) and the loss's target.

    A pair is ``(input, target)``; a longer tuple has several inputs; a dict, or any other mapping, goes to the model by
    keyword and to the loss whole.
    """
    if isinstance(data, Mapping):
        return (), dict(data), data
    if isinstance(data, tuple | list) and len(data) >= 2:
        return tuple(data[:-1]), {}, data[-1]
    raise ConfigError(
        f"A batch should be a pair (input, target), a longer tuple, or a dict; it is a {type(data).__name__}. "
        "Let the data set's samples be pairs, or pass forward= and take it apart there."
    )


_BACKWARD = (
    "run.backward runs the model itself, on one micro-batch after the other. Give it a batch of run.batches and a "
    "function of (output, target): run.backward(batch, torch.nn.functional.cross_entropy). For a model that returns "
    "its loss: run.backward(batch, lambda output, target: output.loss)."
)


def required_loss(
    batch: object, loss: Callable[..., Any] | None, forward: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The loss, after a check of what ``run.backward`` was given.

    Raises:
        ConfigError: ``batch`` is not from ``run.batches``, ``loss`` or ``forward`` is not a function, or gradients are
            switched off.
    """
    require_function("forward", forward)
    if not isinstance(batch, Batch):
        raise ConfigError(f"The first argument of run.backward is a {type(batch).__name__}. {_BACKWARD}")
    if not callable(loss):
        given = "is missing" if loss is None else f"is a {type(loss).__name__}"
        raise ConfigError(f"The second argument of run.backward, the loss, {given}. {_BACKWARD}")
    if not torch.is_grad_enabled():
        raise ConfigError(
            "run.backward was called where gradients are switched off. Call it outside of torch.no_grad() and "
            "torch.inference_mode(), or use run.evaluate."
        )
    return loss


def require_function(name: str, given: object) -> None:
    """Raises ``ConfigError`` where an argument that may be left out is not a function."""
    if given is not None and not callable(given):
        raise ConfigError(
            f"{name}={given!r:.60} was given, a {type(given).__name__}. Give a function, or leave it out."
        )


def with_exact_mean(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function that returns (sum, weight) where ``function`` returns a mean over something other than samples.

    torch's ``CrossEntropyLoss`` and ``NLLLoss`` divide by the sum of the targets' class weights, and leave out targets
    equal to ``ignore_index``: the mean over several micro-batches is then not the mean of their means. Any other
    function is returned as it is, also a subclass with its own ``forward``.

    Raises:
        ConfigError: ``function`` is one of torch's losses with ``reduction='sum'``, or a class.
    """
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise no_instance(function)
    if isinstance(function, nn.Module) and getattr(function, "reduction", "") == "sum":
        raise ConfigError(
            f"{type(function).__name__}(reduction='sum') returns one number, which would be taken for the mean over a "
            "micro-batch. Use reduction='mean', or a function that returns the pair (sum, count)."
        )
    if not isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss) or function.reduction != "mean":
        return function
    if type(function).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
        return function  # it may add what is not a sum over samples, or keep state
    summing = object.__new__(type(function))  # in a fraction of the time of copy.copy
    vars(summing).update(vars(function), reduction="sum")

    def sum_and_weight_of(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return summing(output, target), _weight(function, target)

    return sum_and_weight_of


def code_of(function: Any) -> CodeType | type:
    """The code of a function, by which the functions that one line makes in a loop, such as lambdas, are the same."""
    function = getattr(function, "func", function)
    return getattr(function, "__code__", type(function))


_IGNORED = -100
"""The ``ignore_index`` of torch's losses, if no other is given."""


@cache
def _leaves_out(code: CodeType | type) -> bool:
    """True if code seems, by its names, to take torch's own mean over the targets that are not ignored."""
    names, constants = getattr(code, "co_names", ()), getattr(code, "co_consts", ())
    own = code in (F.cross_entropy.__code__, F.nll_loss.__code__)
    is_named = "cross_entropy" in names or "nll_loss" in names
    return own or (is_named and "reduction" not in str(constants))


def _weight(function: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> Tensor:
    if target.is_floating_point():  # class probabilities: torch divides by all samples, pixels or tokens
        return torch.full((), float(target[:, 0].numel()), device=target.device)
    counted = target != function.ignore_index
    if function.weight is None:
        return counted.sum()
    return wide(function.weight[target.where(counted, 0)]).mul(counted).sum()


def sum_and_weight(value: Any, samples: int) -> tuple[Tensor, Tensor]:
    """The sum and the weight that a returned value stands for, both 0-dim.

    Args:
        value: a 0-dim tensor, taken as the mean over the samples; a tensor of one entry per sample or token; or the
            pair ``(sum, weight)``.
    """
    if isinstance(value, tuple) and len(value) == 2:
        total, weight = map(_plain, value)
        total = wide(total) if isinstance(total, Tensor) else torch.tensor(float(total), dtype=torch.float64)
        # torch.tensor would copy to the device, which waits for it.
        weight = wide(weight) if isinstance(weight, Tensor) else torch.full((), float(weight), device=total.device)
        if weight.requires_grad:
            raise trained_weight()
        # A copy of a single number: the function may write its next one into the same tensor
        return total.sum() if total.dim() else total.clone(), weight.sum() if weight.dim() else weight.clone()
    if not isinstance(value, Tensor):
        raise no_value(value)
    value = wide(_plain(value))
    numbers = value if value.is_floating_point() else value.to(torch.float64)
    total, count = (numbers.sum(), value.numel()) if value.dim() else (numbers * samples, samples)
    return total, torch.full((), float(count), device=value.device)


def _plain(value: Any) -> Any:
    """A tensor of a subclass that only adds metadata, such as MONAI's, as a plain one; anything else as it is."""
    cls: Any = type(value)
    is_noted = isinstance(value, Tensor) and cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    return value.as_subclass(Tensor) if is_noted and cls not in (Tensor, nn.Parameter) else value


def wide(value: Tensor) -> Tensor:
    """The same numbers, 16-bit ones as float32, since a sum in 16 bits keeps only two or three digits.

    Raises:
        ConfigError: the numbers are complex.
    """
    if value.is_complex():
        raise ConfigError("A loss or metric function returned a complex number. Return a real one, such as its abs().")
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class LeftOutSamples:
    """Warns once of means over fewer values than samples: a collate function, or ``cross_entropy``, leaves some out."""

    warning = ""
    """The text, once this process or another has given it."""

    def look(self, function: Any, value: Any, output: Any, target: Any, micro_batch: MicroBatch) -> None:
        """Warns of a value that is a mean over fewer values than samples were read, in whichever step that is first."""
        if self.warning or not (isinstance(value, Tensor) and value.dim() == 0):
            return
        samples, what, values = len(micro_batch.indices), "", ""
        if isinstance(target, Tensor) and target.dim() and len(target) >= samples:
            is_looked_at = target.dtype is torch.int64 and target.is_cpu and _leaves_out(code_of(function))
            if is_looked_at and bool((target == _IGNORED).any()):
                what = "targets of -100, which are left out"
        else:
            tensors = [tensor for tensor in tensors_in((output, target)) if tensor.dim()]
            rows = {len(tensor) for tensor in tensors}
            if len(rows) == 1 and len(tensors) > 1 and 0 < (count := rows.pop()) < samples:
                what = f"{plural(count, 'row')}, as where a collate function leaves samples out"
                values = "one value for each, as reduction='none' does, or "
        if what:
            named, whole = shorten(micro_batch.indices.tolist(), 4), plural(samples, "sample")
            self.warning = (
                f"The micro-batch of the samples {named} has {what}; the one mean that a function returned counts as "
                f"that of {whole}. For the mean over what is left give the object torch.nn.CrossEntropyLoss(), or "
                f"return {values}the pair (sum, how many were counted)."
            )
            logger.warning("%s", self.warning)

    def receive(self, warnings: Iterable[str], *, warns: bool) -> None:
        """Logs a warning that another process has found and this one has not; empty for a process without any."""
        heard = next(filter(None, warnings), "")
        if warns and heard and not self.warning:
            logger.warning("%s", heard)
        self.warning = self.warning or heard


class ForwardPass:
    """The forward pass of a prepared model, the same in training and evaluation.

    Inputs go to the device, and image batches into channels-last order if asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        channels_last: bool,
        events: StepEvents = NO_EVENTS,
    ) -> None:
        self.model, self.device, self._events = model, device, events
        self.autocast = precision.forward
        """Gives the context of the forward pass and the loss."""
        self._transfers = {device: DeviceTransfer(device, events)}
        self._layout = torch.channels_last if channels_last else torch.preserve_format
        self.device_transform: DeviceTransform | None = None
        """Applied to the input on the device, such as a normalisation of uint8 images."""
        self.left_out = LeftOutSamples()
        self._needs_two_samples = _instance_norm_in_channels_last(model, device, channels_last)

    def require_samples(self, plan: StepPlan) -> None:
        """Raises ConfigError if torch computes wrong gradients of a micro-batch of the step that has one sample."""
        if self._needs_two_samples and any(len(numbers) == 1 for numbers in plan.indices):
            raise ConfigError(
                f"A micro-batch of step {plan.step} has one sample, and torch {torch.__version__} computes wrong "
                f"gradients of InstanceNorm {self._needs_two_samples!r} for one sample in channels-last order on "
                f"{self.device.type}. Keep the model in torch's own order, in which InstanceNorm computes in any case "
                "(no channels_last=True, no .to(memory_format=torch.channels_last)), or take fewer micro_batches, and "
                "a number of samples that leaves no micro-batch of one."
            )

    def output_and_target(
        self,
        data: Any,
        forward: Callable[..., Any] | None,
        model: nn.Module,
        device_transform: DeviceTransform | None,
    ) -> tuple[Any, Any]:
        """The output of ``model``, or of ``forward``, on a micro-batch's data, and its target."""
        with self.autocast():
            if forward is not None:
                data = self._transfers[self.device](data)
            else:
                inputs, named, target = self.inputs(data, device_transform)
            try:
                return (model(*inputs, **named), target) if forward is None else (forward(data), data)
            except Exception as error:
                note_gradients_off(error)
                if forward is None:
                    explain_container(error, model)
                    explain_compiler(error)
                    note_arguments(error, data, model)
                raise

    def inputs(
        self, data: Any, device_transform: DeviceTransform | None, device: torch.device | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Positional and named arguments of the model and the target, on the device, from a micro-batch's data."""
        device = self.device if device is None else device
        if device not in self._transfers:
            self._transfers[device] = DeviceTransfer(device, self._events)
        inputs, named, target = split_batch(self._transfers[device](data))
        if device_transform is not None and inputs:
            inputs = (device_transform(inputs[0]), *inputs[1:])
        return tuple(self._laid_out(value) for value in inputs), named, target

    def _laid_out(self, value: Any) -> Any:
        if self._layout is torch.channels_last and isinstance(value, Tensor) and value.dim() == 4:
            return value.to(memory_format=torch.channels_last)
        return value


def _instance_norm_in_channels_last(model: nn.Module, device: torch.device, channels_last: bool) -> str:
    """The first InstanceNorm whose gradients torch may compute wrongly, for one sample; empty for none.

    On CPUs the backward pass takes a gradient in channels-last order for one in the order of the input, which is always
    contiguous, where the batch has one sample (torch 2.13); the device is asked.
    """
    layers = [name for name, m in model.named_modules() if isinstance(m, (nn.InstanceNorm2d, nn.InstanceNorm3d))]
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    weights = (each for each in model.parameters() if each.dim() in orders and not each.is_contiguous())
    if not layers or not (channels_last or any(w.is_contiguous(memory_format=orders[w.dim()]) for w in weights)):
        return ""
    sample = torch.arange(24.0, device=device).sin().view(1, 2, 3, 4)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        given = sample.clone().requires_grad_()
        output = F.instance_norm(given)
        slope = sample.cos()
        (right,) = torch.autograd.grad(output, given, slope, retain_graph=True)
        (other,) = torch.autograd.grad(output, given, slope.to(memory_format=torch.channels_last))
    return "" if torch.allclose(right, other, atol=1e-4) else layers[0]


@dataclass(frozen=True)
class StepCompute:
    """The forward pass and the loss of one step's micro-batches; see ``lockstep.strategies.Compute``."""

    forward_pass: ForwardPass
    randomness: KeyedRandomness
    heartbeat: Heartbeat
    events: StepEvents
    plan: StepPlan
    function: Callable[..., Any]
    """The loss, of (output, target)."""
    forward: Callable[..., Any] | None
    """The user's own way from a micro-batch's data to the output."""
    first_key: int
    """Added to the numbers of micro-batches in their keys: a second backward pass of a step draws other numbers."""
    metrics: StepMetrics | None = None
    """Numbers that are computed beside the loss."""
    disturbs: bool = False
    """See ``lockstep.strategies.Compute``."""

    @property
    def readers(self) -> Sequence[Callable[..., Any]]:
        """See ``lockstep.strategies.Compute``."""
        return self.function, *(() if self.metrics is None else self.metrics.functions)

    @classmethod
    def taking(cls, compute: StepCompute, **others: Any) -> Self:
        """An instance of this class with the fields of ``compute``, except those in ``others``."""
        return cls(**{each.name: getattr(compute, each.name) for each in fields(StepCompute)} | others)

    def __call__(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Forward pass and loss of a whole model."""
        self.begin(micro_batch)
        output, target = self.output_and_target(micro_batch.data, model)
        result = self.loss(output, target, micro_batch)
        self.heartbeat.enter(BACKWARD, micro_batch.k)
        return result

    def output_and_target(self, data: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
        """The output of the model, or of the user's own ``forward``, on a micro-batch's data, and its target."""
        given = self.forward, model or self.forward_pass.model, self.forward_pass.device_transform
        return self.forward_pass.output_and_target(data, *given)

    def numbered(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch under the number by which its random numbers are keyed; a rehearsal changes it."""
        return micro_batch

    def begin(self, micro_batch: MicroBatch) -> None:
        """Keys what is drawn, and notes where this rank is."""
        micro_batch = self.numbered(micro_batch)
        for call in self.events.micro_batch_begin:
            call(micro_batch)
        self.heartbeat.enter(FORWARD, micro_batch.k, micro_batch.indices)
        self.randomness.begin_micro_batch(self.plan.step, micro_batch.k + self.first_key)

    def resume(self, micro_batch: MicroBatch, phase: str) -> None:
        """Keys what is drawn in a micro-batch that goes on, and notes where this rank is."""
        micro_batch = self.numbered(micro_batch)
        self._enter_again(micro_batch, PHASES.index(phase))
        self.randomness.resume_micro_batch(self.plan.step, micro_batch.k + self.first_key, phase)

    def pause(self, micro_batch: MicroBatch) -> Callable[[], None]:
        """Leaves a micro-batch anywhere in its forward or backward pass; the returned function resumes it there."""
        micro_batch, phase = self.numbered(micro_batch), BACKWARD if in_backward() else FORWARD
        restore = self.randomness.pause()

        def resume() -> None:
            self._enter_again(micro_batch, phase)
            restore()

        return resume

    def _enter_again(self, micro_batch: MicroBatch, phase: int) -> None:
        for call in self.events.micro_batch_resume:
            call(micro_batch, PHASES[phase])
        self.heartbeat.enter(phase, micro_batch.k, micro_batch.indices)

    def exchange(self) -> None:
        """Notes that this rank has computed its part, and waits for the others."""
        self.heartbeat.enter(REDUCE)

    def end(self) -> None:
        """Notes that the gradients are complete."""
        self.heartbeat.enter(UPDATE)

    def inputs(
        self, micro_batch: MicroBatch, device: torch.device | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The model's arguments and the target, on ``device``, by default that of the run."""
        if self.forward is not None:
            raise ConfigError(
                "run.backward was given a forward of your own, which calls the whole model for one micro-batch; here "
                "the model is run in parts, or in several copies. Give the model a forward(input), or use strategy "
                "'ddp'."
            )
        found = self.forward_pass.inputs(micro_batch.data, self.forward_pass.device_transform, device)
        self.randomness.end_inputs()
        return found

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        return self.forward_pass.autocast()

    def value(self, output: Any, target: Any) -> Any:
        """Returns what the user's loss gives; its errors are explained."""
        try:
            return self.function(output, target)
        except Exception as error:
            explain_loss(error, output, target)
            raise

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Sum and weight of the user's loss, called for padding too: it may take what the forward pass left for it."""
        with self.autocast():
            if micro_batch.k < self.plan.leaves:
                for call in self.events.output:
                    call(micro_batch, output, target)
            self.randomness.begin_loss()
            value = self.value(output, target)
            self.forward_pass.left_out.look(self.function, value, output, target, micro_batch)
            total, weight = sum_and_weight(value, len(micro_batch.indices))
            if not total.requires_grad:
                trained = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                if weight or not trained:
                    raise no_gradient(output)
                # Nothing counts in this micro-batch, as when no token is unmasked: all its gradients are zero.
                zeros = [each.flatten()[:0].sum().to(total.dtype) for each in trained]
                total = total + torch.stack(zeros).sum()
            if self.metrics is not None and micro_batch.k < self.plan.leaves:
                self.metrics.note(output, target, micro_batch)
            return total, weight


@dataclass
class BackwardPass:
    """A backward pass over one batch that is in progress."""

    compute: StepCompute
    scale: float
    stop: int
    """Why this process was asked to stop, as a code; with several processes, one of ``with_step``."""
    result: StepResult = field(init=False)
    """Set by the caller that computes the gradients."""


def with_step(stop: int, step: int, *, is_alone: bool) -> int:
    """A stop code combined with the number of the step, of which the ranks exchange the largest."""
    return stop if is_alone else stop + STOP_CODES * (step + 1)


class _SentFlags:
    """Results of steps whose flags are on their way to the host, which does not wait for them."""

    def __init__(self, results: list[tuple[StepResult, StepPlan]]) -> None:
        self.results = results
        finite, stop = torch.stack([each.finite for each, _ in results]), results[-1][0].stop
        losses = torch.stack([each.loss for each, _ in results])
        flags = torch.cat([finite.double(), losses.double(), stop.double().view(1)])
        self._host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._host.copy_(flags, non_blocking=True)
        self._copied = current_stream(flags.device).record_event()

    def read(self) -> tuple[list[float], list[float], float]:
        """The flags of being finite, the losses, and the last stop code; waits if a device lags far behind."""
        if not self._copied.query():
            self._copied.synchronize()
        *found, stop = self._host.tolist()
        return found[: len(self.results)], found[len(self.results) :], stop


_LOOK_EVERY = 8
_MOST_ZEROS = 8
_ONLY_ZEROS = (
    "The loss of the first %d steps is exactly 0, so nothing is trained, unless it has a gradient nevertheless. A loss "
    "that compares samples, such as one of triplets, is given one micro-batch of %s at a time, in which there may be "
    "nothing to compare: give run.backward whole_batch=True, or take a smaller micro_batches."
)


class DeferredResults:
    """Keeps the results of steps for a while, since reading a value makes the host wait for a GPU.

        step       | 0 ... 7         | 8 ... 15        | 16 ... 23
        flags      |        copied ->|    0 to 7 read  |    8 to 15 read         the device has passed those long ago

    Args:
        device: of the run. On a GPU, flags are copied every few steps, and read after as many steps again.
        overflow_expected: whether a loss scaler handles values that are not finite.
        warns: whether this process tells of losses of 0.
    """

    def __init__(self, device: torch.device, overflow_expected: bool, warns: bool = False) -> None:
        self._zeros = 0 if warns else _MOST_ZEROS
        """The first steps with a loss of exactly 0; ``_MOST_ZEROS`` where nobody counts them any more."""
        self._every, self._overflow_expected = 1 if device.type == "cpu" else _LOOK_EVERY, overflow_expected
        self._results: list[tuple[StepResult, StepPlan]] = []
        self._sent: _SentFlags | None = None
        self.stop = StopReason.NONE
        """Why all ranks agreed to stop, as far as has been read."""

    def add(self, result: StepResult, plan: StepPlan) -> None:
        """Takes the result of a step, and reads the results that are due. Raises as ``read`` does."""
        self._results.append((result, plan))
        if len(self._results) < self._every:
            return
        if self._every == 1 or not is_gpu(result.finite.device):
            self.read()
            return
        before, self._sent = self._sent, _SentFlags(self._results)
        self._results = []
        if before is not None:
            self._look(before.results, *before.read(), later=self._every)

    def read(self) -> None:
        """Reads all results; ``NonFiniteError`` names the first step that was not finite."""
        results = [*(self._sent.results if self._sent is not None else ()), *self._results]
        self._sent, self._results = None, []
        if results:
            finite, losses = zip(*((each.finite, each.loss) for each, _ in results))
            self._look(results, finite, losses, results[-1][0].stop, later=0)

    def _look(
        self,
        results: list[tuple[StepResult, StepPlan]],
        finite: Iterable[float | Tensor],
        losses: Iterable[float | Tensor],
        stop: float | Tensor,
        later: int,
    ) -> None:
        """Looks at the flags of steps; ``later`` is the number of steps that came after them."""
        latest, reason = divmod(int(stop), STOP_CODES)
        own = results[-1][1].step
        if latest not in (0, own + 1):
            raise ConfigError(
                f"This rank computes step {own} where another rank computes step {latest - 1}: one of them has called "
                "run.backward more often, or has left a call out, as a condition on the rank or on its samples makes "
                "it do. All ranks must make the same calls. What the ranks have added since then is wrong; the "
                "checkpoints are not."
            )
        for number, ((result, plan), good) in enumerate(zip(results, finite)):
            if not self._overflow_expected and not good:  # in this order: a tensor is read
                raise_non_finite(result, plan, later_updates=later + len(results) - 1 - number)
        self.stop = StopReason(reason) or self.stop
        for loss in losses if self._zeros < _MOST_ZEROS else ():
            self._zeros = _MOST_ZEROS + 1 if loss else self._zeros + 1
            if self._zeros == _MOST_ZEROS:
                samples = plural(len(results[-1][1].indices[0]), "sample")
                logger.warning(_ONLY_ZEROS, _MOST_ZEROS, samples)
