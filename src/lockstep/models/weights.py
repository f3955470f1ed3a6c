"""Loads published weights into a model, compares the tensors of two models by name, and freezes parameters by name."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.text import shorten

_UNREADABLE = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class Differences:
    """The names by which two sets of tensors differ; empty (and false) where they match."""

    missing: tuple[str, ...]
    """Names the model has and the file lacks."""
    unexpected: tuple[str, ...]
    """Names the file has and the model lacks."""
    reshaped: tuple[str, ...]
    """Names of both, with other shapes; each with the two shapes."""
    retyped: tuple[str, ...]
    """Names of both, with equal shapes and other dtypes; each with the two dtypes."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.retyped)

    def describe(self) -> str:
        """One line per kind of difference, with at most 20 names each and the number of the others."""
        kinds = ("missing", "unexpected", "other shape", "other dtype")
        found = zip(kinds, (self.missing, self.unexpected, self.reshaped, self.retyped), strict=True)
        return "\n".join(f"  {kind} ({len(names)}): {shorten(names, 20)}" for kind, names in found if names)


def compare(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, dtypes: bool = True) -> Differences:
    """Compares names, shapes and (unless ``dtypes`` is false) dtypes, never values."""
    shared = [name for name in wanted if name in given]
    reshaped = [name for name in shared if given[name].shape != wanted[name].shape]
    equal_shape = [name for name in shared if given[name].shape == wanted[name].shape]
    return Differences(
        missing=tuple(name for name in wanted if name not in given),
        unexpected=tuple(name for name in given if name not in wanted),
        reshaped=tuple(f"{name} {list(given[name].shape)} instead of {list(wanted[name].shape)}" for name in reshaped),
        retyped=tuple(
            f"{name} {given[name].dtype} instead of {wanted[name].dtype}"
            for name in equal_shape
            if dtypes and given[name].dtype != wanted[name].dtype
        ),
    )


def freeze(model: nn.Module, patterns: Sequence[str], *, freeze_statistics: bool = False) -> list[str]:
    """Freezes and thaws parameters by patterns in order, later ones win; returns the names still trained.

    ``["*", "!fc"]`` trains only the head. A pattern is compared with the name of each parameter and of the
    modules that hold it, so ``layer1`` means everything in it; ``*`` stands for dots as well, ``!`` thaws.

    Args:
        model: an unwrapped model; a tied parameter is reached by each of its names.
        patterns: in the order in which they are applied.
        freeze_statistics: also keep every BatchNorm whose own parameters are all frozen in evaluation mode,
            and so its statistics. Off by default, as torch's users expect: a frozen BatchNorm still
            normalises by the batch and updates its statistics.
    """
    parameters = list(nn.Module.named_parameters(model, remove_duplicate=False))
    for pattern in patterns:
        thaw = pattern.startswith("!")
        matched = [p for name, p in parameters if _matches(name, pattern.removeprefix("!"))]
        if not matched:
            raise ConfigError(_nothing_matched(model, pattern))
        for parameter in matched:
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(thaw)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(f"freeze={list(patterns)} leaves nothing to train. Thaw a part, for example with '!fc'.")
    if freeze_statistics:
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, _BatchNorm) and own and not any(p.requires_grad for p in own):
                module.register_forward_pre_hook(_stay_in_evaluation)
    return trained


def describe_frozen(model: nn.Module, trained: Sequence[str]) -> str:
    """One sentence for the log about what ``freeze`` has left to train, and one about statistics that still change."""
    count = sum(1 for _ in model.parameters())
    text = f"{len(trained)} of {count} parameters are trained: {shorten(trained, 6)}."
    frozen = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and module.track_running_stats
        and not any(p.requires_grad for p in module.parameters())
        and not any(hook is _stay_in_evaluation for hook in module._forward_pre_hooks.values())
    ]
    if frozen:
        text += (
            f" The running statistics of {len(frozen)} frozen BatchNorm layers still change; "
            "weights.freeze_statistics=true keeps them."
        )
    return text


def selected(name: str, patterns: Sequence[str]) -> bool:
    """True if the last pattern that matches a name, or what holds it, does not begin with ``!``."""
    matching = [each for each in patterns if _matches(name, each.removeprefix("!"))]
    return bool(matching) and not matching[-1].startswith("!")


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _stay_in_evaluation(module: nn.Module, _inputs: tuple[Tensor | Any, ...]) -> None:
    """Runs before each forward, since ``model.train()`` switches every module over."""
    module.training = False


def _nothing_matched(model: nn.Module, pattern: str) -> str:
    names = {name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)}
    names |= {name for name, module in model.named_modules() if name and [*module.parameters()]}
    close = difflib.get_close_matches(pattern.removeprefix("!"), sorted(names), n=1, cutoff=0.5)
    hint = f" Did you mean {'!' * pattern.startswith('!') + close[0]!r}?" if close else ""
    top = shorten(f"{name} ({type(module).__name__})" for name, module in model.named_children() if name in names)
    found = f"freeze: the pattern {pattern!r} matches no parameter or module."
    return f"{found}{hint} The model's parameters are in: {top}."


_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts often store the weights beside other things."""
_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to every name."""


@dataclass(frozen=True)
class WeightsReport:
    """The result of ``load_weights``: tensors that were loaded, and those that were not."""

    path: Path
    loaded: int
    """Number of tensors that were loaded."""
    skipped: tuple[str, ...]
    """Names of the head's tensors, which keep their initial values."""
    classes: tuple[int, int] | None
    """Classes of the file and of the model, where they differ."""

    def describe(self) -> str:
        """One sentence for the log."""
        text = f"{self.loaded} tensors loaded from {self.path.name}"
        if self.classes is None:
            return text + "; nothing was skipped."
        there, here = self.classes
        return (
            f"{text}; skipped: {', '.join(self.skipped)} (made for {there} classes, the model has {here}), "
            "which keep their initial values."
        )


def load_weights(model: nn.Module, path: Path | str, *, strict_head: bool = False) -> WeightsReport:
    """Loads a ``.safetensors`` or ``.pth`` file into an unwrapped model, on every rank; no code in the file is run.

    Args:
        model: takes the weights in place; other dtypes are converted.
        path: the file. Names with ``module.`` before them are understood.
        strict_head: refuse weights made for another number of classes, instead of leaving out the head.

    Raises:
        CheckpointMismatch: lists all other names that are missing, unexpected, or of another shape; nothing is loaded.
        CheckpointError: the file is missing or broken.
    """
    path = Path(path)
    given = _strip(_read(path))
    wanted = {n: v for n, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    # Old files have no batch counters, and a tied tensor may stand under one of its names only.
    present = {id(value) for name, value in wanted.items() if name in given}
    optional = [n for n, v in wanted.items() if n.endswith("num_batches_tracked") or id(v) in present]
    wanted = {name: value for name, value in wanted.items() if name in given or name not in optional}
    head = {} if strict_head else _other_head(model, given, wanted)
    body = {name: value for name, value in given.items() if name not in head}
    differences = compare(body, {n: v for n, v in wanted.items() if n not in head}, dtypes=False)
    if differences:
        raise CheckpointMismatch(
            f"{path} holds the weights of another model:\n{differences.describe()}\n"
            "Build the model that these weights were made for; only a head for other classes can be left out."
        )
    model.load_state_dict(body, strict=False)
    classes = next(((given[n].shape[0], wanted[n].shape[0]) for n in head), None)
    return WeightsReport(path, len(body), tuple(head), classes)


def _other_head(model: nn.Module, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that differ in the number of classes only; empty where other shapes differ as well.

    A layer in the middle cannot look like a head: the next one would differ too, in its number of inputs.
    """
    differing = {n: v for n, v in wanted.items() if n in given and given[n].shape != v.shape}
    classes = set()
    for name, own in differing.items():
        other = given[name]
        embedding = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        if embedding or own.dim() != other.dim() or own.dim() == 0 or own.shape[1:] != other.shape[1:]:
            return {}
        classes.add((other.shape[0], own.shape[0]))
    return differing if len(classes) == 1 else {}


def metadata_of(path: Path | str) -> dict[str, str]:
    """The texts in the header of a ``.safetensors`` file, by name; ``CheckpointError`` where it cannot be read.

    A job of Lockstep writes ``step``, the steps that the weights have been trained, and ``classes``, the names of the
    classes as a list in JSON, where its data set shows them.
    """
    try:
        with Path(path).open("rb"), safetensors.safe_open(str(path), "pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as weights: {error}") from error


def _strip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if weights and all(name.startswith(prefix) for name in weights):
            return _strip({name.removeprefix(prefix): value for name, value in weights.items()})
    return weights


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"There is no file of weights at {path}. Give a .safetensors or .pth file.")
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # torch advises to load it all the same
            found = "it holds objects other than tensors, such as a whole model, or is damaged."
        raise CheckpointError(
            f"{path} cannot be read as weights: {found} Nothing in it was run. "
            "Give a file of tensors only, saved as .safetensors or with torch.save(model.state_dict(), path)."
        ) from error
    return _tensors(path, content)


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} instead of a dict of tensors. Save model.state_dict()."
        )
    odd = [f"{name} ({type(value).__name__})" for name, value in content.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(f"{path} holds more than weights: {shorten(odd)}. Save model.state_dict() alone.")
    return {str(name): value for name, value in content.items()}
