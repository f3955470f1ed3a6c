"""Finds random numbers that a forward pass draws without a key for each micro-batch, and says in which line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import ConfigError
from lockstep.strategies.one_forward.dropout import MicroBatchKeys

_OFF = {"p": 0.0, "dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
"""Arguments of operators that may draw, with the values at which they do not."""
_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[2])


class RefuseDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """While entered, an operator that draws anything but the masks of ``keys`` raises ``ConfigError``.

    torch marks such operators itself, so unknown modules, ``F.dropout`` and ``torch.rand`` are all found, as far as
    they run.
    """

    def __init__(self, keys: MicroBatchKeys) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._keys = keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, or refuses it."""
        kwargs = kwargs or {}
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded and not self._keys.is_drawing and _draws(func, args, kwargs):
            raise ConfigError(
                f"With sync_batch_norm a process runs its whole share of a step in one forward pass, and "
                f"{func.overloadpacket} in {_line()} would draw random numbers that depend on what shares it. Use "
                "nn.Dropout modules, which get a mask for each micro-batch, or leave sync_batch_norm out."
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= {**{each.name: value for each, value in zip(arguments, args)}, **kwargs}
    return not any(
        name in given and not isinstance(given[name], torch.Tensor) and given[name] == off
        for name, off in _OFF.items()
    )


def _line() -> str:
    """The innermost line of code that is neither torch's nor ours: ``model.py:31``."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS):
            return f"{path.name}:{frame.lineno}"
    return "the model"
