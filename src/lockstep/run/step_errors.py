"""Says what is wrong where a forward pass or loss raises, is not finite, is no loss, or depends on the rank.

torch's own errors name neither the micro-batch nor the line to change. Where the cause is known, a ``ConfigError``
says it, with torch's as its cause; to any other error a note is added that shows what the function was given. Nothing
here is called in a step that succeeds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.plan import StepPlan
from lockstep.data.batch import Batch, MicroBatch, tensors_in
from lockstep.errors import ConfigError, LockstepError, NonFiniteError
from lockstep.numerics.compilation import explain_compiler
from lockstep.runtime.torch_internals import NOT_DETERMINISTIC, OTHER_TYPE, USED_UP
from lockstep.strategies import StepResult
from lockstep.text import shorten

_MOST_VALUES = 6
_NOT_BOUND = re.compile(r"forward\(\) (got an unexpected|missing|takes) ")
"""Texts of Python where a call gives other arguments than a function takes."""
_OF_CLASSES = (F.cross_entropy.__code__, F.nll_loss.__code__)
_OF_PROBABILITIES = (F.binary_cross_entropy_with_logits.__code__, F.binary_cross_entropy.__code__)


def shown(data: Any) -> str:
    """The types and shapes of a micro-batch's data, an output or a target, as text."""
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
    if isinstance(data, Mapping):
        inner = [f"{key!r}: {shown(value)}" for key, value in list(data.items())[:_MOST_VALUES]]
        return "{" + ", ".join(inner) + "}"
    if isinstance(data, tuple | list):
        kinds = {type(value) for value in data}
        if len(data) > 1 and len(kinds) == 1 and not isinstance(data[0], Tensor | tuple | list | Mapping):
            return f"{type(data).__name__} of {len(data)} {kinds.pop().__name__}"
        return "(" + ", ".join(map(shown, data[:_MOST_VALUES])) + ")"
    return type(data).__name__


_UNORDERED: dict[str, tuple[tuple[type[nn.Module], ...], str]] = {
    "adaptive_avg_pool": (
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        "an output size of 1, or nn.AvgPool2d with a fixed size",
    ),
    "adaptive_max_pool": ((nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), "nn.MaxPool2d with a fixed size"),
    "upsample": ((nn.Upsample,), "mode='nearest', or nn.ConvTranspose2d"),
    "reflection_pad": (
        (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
        "nn.ZeroPad2d, or padding_mode='zeros'",
    ),
    "replication_pad": ((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), "nn.ZeroPad2d"),
    "ctc_loss": ((nn.CTCLoss,), "the loss of output.cpu() and target.cpu()"),
    "grid_sampler": ((), "another way of resampling, or resample in the data set"),
    "nll_loss2d": (
        (nn.NLLLoss, nn.CrossEntropyLoss),
        "the loss of output.movedim(1, -1).flatten(0, -2) and target.flatten()",
    ),
    "max_pool3d": ((nn.MaxPool3d,), "nn.AvgPool3d, or a stride in nn.Conv3d"),
    "cumsum": ((), "torch.cumsum of integers, or on the CPU"),
    "histc": ((), "torch.bincount of integers, or torch.histc on the CPU"),
}
"""By a part of the operator's name in CUDA's sources: layers that call it, and what to use instead."""


def explain_container(error: Exception, model: nn.Module) -> None:
    """Raises ``ConfigError`` for a container of models, which torch cannot call."""
    if isinstance(model, (nn.ModuleDict, nn.ModuleList)) and type(model).forward is nn.Module.forward:
        key = 0 if isinstance(model, nn.ModuleList) else "name"
        raise ConfigError(
            f"The model is a {type(model).__name__}, which has no forward() of its own. Give run.backward, "
            f"run.evaluate and run.predict one: forward=lambda data: model[{key!r}](data[0])."
        ) from error


def explain_operator(error: Exception, model: nn.Module) -> None:
    """Raises ``ConfigError`` in place of an error about an operator that adds in no fixed order; else nothing."""
    before, found, _ = str(error).partition(NOT_DETERMINISTIC.texts[0])
    if not found:
        return
    operator = before.split()[-1] if before.split() else "an operator"
    classes, instead = next(
        (each for part, each in _UNORDERED.items() if part in operator), ((), "another operator there")
    )
    found_in = [(name, type(module)) for name, module in model.named_modules() if isinstance(module, classes)]
    layers = [f"{name!r} ({kind.__name__})" for name, kind in found_in]
    where = f", which {shorten(layers, 4)} may have called," if layers else ""
    raise ConfigError(
        f"{operator}{where} adds in no fixed order on CUDA, so its bits differ from run to run. Use {instead}; or set "
        "deterministic=False (training.deterministic = false in a job file), which lets it run at level C."
    ) from error


def note_data(error: Exception, batch: Batch, model: nn.Module) -> None:
    """Adds what the micro-batches of a step hold to an error of the user's code.

    Raises:
        ConfigError: instead, for an operator that adds in no fixed order, for too many compiled graphs, for a graph
            that was used up, and for inputs of another type than the model.
    """
    explain_operator(error, model)
    explain_compiler(error)
    if USED_UP.is_in(str(error)):
        used_up = ConfigError(
            "The backward pass of a micro-batch reached the graph of an earlier one, which is used up. The forward "
            "pass or the loss keeps a tensor from one micro-batch to the next, such as a hidden state or the potential "
            "of a spiking neuron: reset it at the beginning of forward=. Or it reads a tensor that the loop has "
            "computed from parameters: compute it in the loss."
        )
        for said in getattr(error, "__notes__", ()):  # of micro-batches that are computed at one time
            used_up.add_note(said)
        raise used_up from error
    if isinstance(error, LockstepError) or not batch.micro_batches:
        return
    values = [value for frame in _frames(error) for value in frame.f_locals.values()]
    called = [value for value in values if isinstance(value, MicroBatch)]
    data = (called[-1:] or batch.micro_batches)[0].data
    inputs = data[:-1] if isinstance(data, tuple | list) else data
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    given = {each.dtype for each in tensors_in(inputs) if each.is_floating_point()}
    said = f"The data of a micro-batch: {shown(data)}."
    if own and given and not given & own:
        wrong = f"The input is {_names(given)} and the model {_names(own)}"
        said = f"{wrong}: convert the samples in the data set, for example with .float(). {said}"
        if OTHER_TYPE.is_in(str(error)):
            raise ConfigError(said) from error
    error.add_note(said)


def note_arguments(error: Exception, data: Any, model: nn.Module) -> None:
    """Adds to an error of a model that takes other arguments than it was given how to pass it those of ``data``."""
    if not isinstance(error, TypeError) or not _NOT_BOUND.search(str(error)):
        return
    given, taken = "all but the last entry of a micro-batch, the target", ["data[0]"]
    if isinstance(data, Mapping):
        given = "the entries of a micro-batch as keyword arguments"
        names = [name for name in inspect.signature(model.forward).parameters if name in data]
        taken = [f"{name}=data[{name!r}]" for name in names] or ["data[...]"]
    error.add_note(
        f"The model is called with {given}. If it takes others, say which: forward=lambda data: "
        f"model({', '.join(taken)}); the loss is then called as loss(output, data)."
    )


def computes_gradients(error: Exception) -> bool:
    """Returns whether an error came up where a function computes gradients itself."""
    codes = torch.autograd.grad.__code__, torch.autograd.backward.__code__
    return any(frame.f_code in codes for frame in _frames(error))


def note_gradients_off(error: Exception) -> None:
    """Adds to an error of a forward pass that computes gradients, where these are off, how to switch them on."""
    if not torch.is_grad_enabled() and computes_gradients(error):
        error.add_note(
            "Gradients are off in evaluations, and where whole_batch=True computes the outputs of all samples first. "
            "A forward pass that computes gradients itself needs forward=torch.enable_grad()(...)."
        )


def explain_loss(
    error: Exception, output: Any, target: Any, name: str = "The loss", call: str = "run.backward"
) -> None:
    """Adds what a loss or metric was given to its error; raises ``ConfigError`` instead where the mistake is known."""
    if isinstance(error, LockstepError):
        return
    for codes, fault_of in ((_OF_CLASSES, _wrong_classes), (_OF_PROBABILITIES, _wrong_probabilities)):
        given = next((frame.f_locals for frame in reversed(_frames(error)) if frame.f_code in codes), None)
        if given is not None and (fault := fault_of(given.get("input"), given.get("target"))):
            raise ConfigError(f"{name} cannot be computed. {fault}") from error
    error.add_note(
        f"{call} called {name[:1].lower()}{name[1:]} as {name.split()[1]}(output, target), with the output "
        f"{shown(output)} and the target {shown(target)}. {_no_target(target)}".rstrip()
    )


def no_gradient(output: Any) -> ConfigError:
    """The error of a loss without a gradient, computed from an output."""
    tensors = tensors_in(output)
    if any(value.requires_grad for value in tensors):
        return ConfigError(
            "The loss has no gradient, though the output of the model has one. Return the loss tensor itself, "
            "without detach(), item() or torch.no_grad(), and use no argmax, round or comparison in it. Where nothing "
            "counts in a micro-batch, return the pair (0 * output.sum(), 0)."
        )
    return ConfigError(
        "The loss has no gradient, and neither has the output of the model: its parameters are all frozen, or its "
        "forward pass detaches the output, for example with detach(), numpy() or torch.no_grad(). Where a micro-batch "
        "has nothing to predict, let the output depend on the model all the same, as 0 * features.sum() does."
    )


def no_value(value: Any) -> ConfigError:
    """The error of a loss or metric function that returns neither a tensor nor a pair."""
    remedy = f"Return a tensor or the pair (sum, weight), not {type(value).__name__}."
    if isinstance(value, float | int):
        remedy = (
            "Return the tensor itself, without item() or float(); for a number of NumPy, torch.tensor(number); or a "
            "pair."
        )
    elif value is None:
        remedy = "It returned None: is there a line with return?"
    elif isinstance(value, Mapping) and "loss" in value:
        others = [key for key in list(value)[: _MOST_VALUES + 1] if key != "loss"]
        remedy = (
            f"It returned a dict. If f is that function, loss, numbers = run.backward(batch, f, also={others!r}) gives "
            "its 'loss' and the means of its other entries. For run.evaluate give a function for each: {'loss': lambda "
            "output, target: f(output, target)['loss'], ...}."
        )
    elif isinstance(value, Mapping):
        first = repr(next(iter(value), "loss"))
        remedy = (
            "It returned a dict without 'loss'. Give this name to the entry that is trained, or return it alone. If "
            f"f is that function: run.backward(batch, lambda output, target: f(output, target)[{first}])."
        )
    return ConfigError(f"A loss or metric function should return a tensor or the pair (sum, weight). {remedy}")


def other_on_ranks(
    everyone: Sequence[Mapping[str, str]], remedy: str, *, what: str = "The loss of one micro-batch"
) -> ConfigError:
    """The error of a loss that depends on the process. ``everyone``: by rank, what the loss and the model use."""
    names = [name for name, text in everyone[0].items() if any(each.get(name, text) != text for each in everyone)]
    cause = ", so the forward pass or the loss depends on the process: its rank, environment, id or machine"
    if names:
        cause = f": {shorten(names, 3)} {'is' if len(names) == 1 else 'are'} not the same on all of them"
    return ConfigError(
        f"{what} has other bits on other ranks, with the same parameters, samples and keys"
        f"{cause}. Draw random numbers after lockstep.init(seed=...), which seeds all ranks alike, go through sets in "
        f"sorted order, and let nothing that is computed depend on the rank, or on what a step has left there. {remedy}"
    )


def trained_weight() -> ConfigError:
    """The error for a pair (sum, weight) whose weight has a gradient, which division by a count does not give it."""
    return ConfigError(
        "The loss returned a pair, which stands for (sum, weight), and its second number depends on parameters: their "
        "gradient through it would be lost. Add up parts of a loss, and return numbers beside it in a dict, as "
        "also= of run.backward has them. For a mean with learned weights use whole_batch=True; return "
        "weight.detach() if they are meant to be constants."
    )


def no_instance(function: type) -> ConfigError:
    """The error of a class that was given in place of one of its instances."""
    name = function.__name__
    return ConfigError(f"The loss is the class {name}. Create an instance: run.backward(batch, {name}()).")


def _frames(error: BaseException) -> list[FrameType]:
    """The frames of the traceback; the one that raised the error is the last."""
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def _wrong_classes(output: Any, target: Any) -> str:
    """The fault in the arguments of a loss of classes; empty where it is not known."""
    if not isinstance(output, Tensor):
        return _no_output(output, "cross_entropy")
    if not isinstance(target, Tensor):
        remedy = _no_target(target) or "Let the data set return the number of the class, an int."
        return f"Its target is {shown(target)}. {remedy}"
    if output.dim() < 2:
        return ""
    classes, given = output.shape[1], shown(target)
    whole = not target.is_floating_point()
    if not output.is_floating_point() and target.is_floating_point():
        return f"Output ({shown(output)}) and target ({given}) seem to be swapped: it is loss(output, target)."
    if target.dim() == output.dim() - 1:
        if not whole or target.dtype not in (torch.int64, torch.uint8):
            return f"The target is {given}, and class numbers have to be int64: target.long(), best in the data set."
        if target.device.type == "cpu" and target.numel() and target.shape[0] == output.shape[0]:
            low, high = int(target.min()), int(target.max())
            if low < 0 or high >= classes:
                return (
                    f"The output has {classes} classes, numbered 0 to {classes - 1}, and the targets are {low} to "
                    f"{high}. Correct the labels, or give the model more outputs."
                )
    if whole and target.dim() == output.dim() and target.shape[1] == 1:
        return f"The target is {given}, with a column too many: target.squeeze(1)."
    if whole and target.shape == output.shape:
        return f"The target is {given}: one-hot rows have to be floating-point: target.float(), or target.argmax(1)."
    if target.shape[0] != output.shape[0]:
        return f"The output is {shown(output)} and the target {given}: they differ in the number of rows."
    return ""


def _wrong_probabilities(output: Any, target: Any) -> str:
    """The fault in the arguments of a binary loss; empty where it is not known."""
    if not isinstance(output, Tensor):
        return _no_output(output, "binary_cross_entropy_with_logits")
    if not isinstance(target, Tensor):
        remedy = _no_target(target) or "Let the data set return 0.0 or 1.0."
        return f"Its target is {shown(target)}. {remedy}"
    if output.dim() == target.dim() + 1 and output.shape[1:] == (1,):
        return f"The output is {shown(output)} and the target {shown(target)}: output.squeeze(1), target.float()."
    if not target.is_floating_point():
        return f"The target is {shown(target)}, and has to be floating-point: target.float()."
    return ""


def _no_target(target: Any) -> str:
    """The advice for a loss whose target holds tensors and is none; else empty."""
    if isinstance(target, Tensor) or not tensors_in(target):
        return ""
    part = f"data[{list(target)[-1]!r}]" if isinstance(target, Mapping) else "data[1]"
    return (
        "With forward=, and for a dict, that is all the data: take a part of it, as by lambda output, data: "
        f"loss(output, {part})."
    )


def _no_output(output: Any, function: str) -> str:
    """The message for a model that returned something other than a tensor."""
    how = "output[0]" if isinstance(output, tuple | list) else "output.logits"
    if isinstance(output, Mapping) and output:
        how = f"output[{next(iter(output))!r}]"
    return (
        f"The model returned {shown(output)}, and the loss needs a tensor: "
        f"run.backward(batch, lambda output, target: {function}({how}, target))."
    )


def _names(types: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(each).removeprefix("torch.") for each in types))


def raise_non_finite(result: StepResult, plan: StepPlan, later_updates: int = 0) -> NoReturn:
    """Raises ``NonFiniteError`` naming step, micro-batch and samples.

    ``later_updates`` is the number of updates that were made before the result was read, as happens on a GPU.
    """
    update = (
        "No update was made with it."
        if later_updates == 0
        else f"It was read back {later_updates} steps later, so this run's weights are lost; its checkpoints are not."
    )
    if bad := (~result.losses.isfinite()).nonzero().flatten().tolist():
        k = bad[0]
        raise NonFiniteError(
            f"The loss of step {plan.step} is {float(result.losses[k])} in micro-batch {k} (samples "
            f"{shorten(plan.numbers(k))}). {update} Look at these samples, lower the learning rate, or clip gradients. "
            "A mean over masked tokens that none of them has is nan: return the pair (sum, how many were counted)."
        )
    samples = [number for k in range(plan.leaves) for number in plan.numbers(k)]
    if not result.weight:
        raise NonFiniteError(
            f"The loss of step {plan.step} has no mean, since its weights add up to 0 (samples {shorten(samples)}), as "
            f"where all targets are masked or ignored. {update} Leave samples without a target out of the data set, "
            "take a larger global_batch, or divide by max(count, 1) in the loss, with whole_batch=True."
        )
    raise NonFiniteError(
        f"The loss of step {plan.step} is finite, but a gradient is NaN or infinite (samples {shorten(samples)}). "
        f"{update} Look for an operation whose derivative is infinite, such as a square root at zero, or clip "
        "gradients."
    )
