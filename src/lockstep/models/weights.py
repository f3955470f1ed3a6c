"""Loads published weights into a model, except a head for other classes, and says what it left out."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lockstep.errors import CheckpointError, CheckpointMismatch
from lockstep.models.differences import compare, shorten

_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts often store the weights beside other things."""
_PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded from a file of weights, and what was not."""

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
    """Loads a ``.safetensors`` or ``.pth`` file into an unwrapped model; no code in the file is run.

    Args:
        model: takes the weights in place; other dtypes are converted.
        path: the file. Names with ``module.`` before them are understood.
        strict_head: refuse weights made for another number of classes, instead of leaving out the head.

    ``CheckpointMismatch`` lists every other name that is missing, unexpected, or of another shape; nothing
    has been loaded then.
    """
    path = Path(path)
    given = _strip(_read(path))
    wanted = model.state_dict(keep_vars=True)
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


def _other_head(
    model: nn.Module, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
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
    except (
        SafetensorError,
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
    ) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as weights: {first_line} Nothing in it was run. "
            "Give a file of tensors only, saved as .safetensors or with torch.save(model.state_dict(), path)."
        ) from error
    return _tensors(path, content)


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not weights by name.")
    odd = [
        f"{name} ({type(value).__name__})" for name, value in content.items() if not isinstance(value, Tensor)
    ]
    if odd:
        raise CheckpointError(
            f"{path} holds more than weights: {shorten(odd)}. Save model.state_dict() alone."
        )
    return {str(name): value for name, value in content.items()}
