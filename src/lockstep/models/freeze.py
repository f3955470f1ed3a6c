"""Chooses by name which parameters are trained."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError
from lockstep.models.differences import shorten


def freeze(model: nn.Module, patterns: Sequence[str], *, freeze_statistics: bool = False) -> list[str]:
    """Freezes and thaws parameters by patterns in order, later ones win; returns the names still trained.

    ``["*", "!fc"]`` trains the head alone. A pattern is compared with the name of each parameter and of the
    modules that hold it, so ``layer1`` means everything in it; ``*`` stands for dots as well, ``!`` thaws.

    Args:
        model: an unwrapped model; a tied parameter is reached by each of its names.
        patterns: in the order in which they are applied.
        freeze_statistics: also keep every BatchNorm whose own parameters are all frozen in evaluation mode,
            and so its statistics. Off by default, as torch's users expect: a frozen BatchNorm still
            normalises by the batch and updates its statistics.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
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
        raise ConfigError(
            f"freeze={list(patterns)} leaves nothing to train. Thaw a part, for example with '!fc'."
        )
    if freeze_statistics:
        for module in _frozen_norms(model):
            module.register_forward_pre_hook(_stay_in_evaluation)
    return trained


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _frozen_norms(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and not any(p.requires_grad for p in own):
            yield module


def _stay_in_evaluation(module: nn.Module, _inputs: tuple[Tensor | Any, ...]) -> None:
    """Runs before each forward, since ``model.train()`` switches every module over."""
    module.training = False


def _nothing_matched(model: nn.Module, pattern: str) -> str:
    names = {name for name, _ in model.named_modules() if name}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    close = difflib.get_close_matches(pattern.removeprefix("!"), sorted(names), n=1, cutoff=0.5)
    hint = f" Did you mean {'!' * pattern.startswith('!') + close[0]!r}?" if close else ""
    top = shorten(name for name, _ in model.named_children())
    return (
        f"freeze: the pattern {pattern!r} matches no parameter or module.{hint} The model consists of: {top}."
    )
