"""The modules that a forward pass or a loss calls beside those of the prepared model; which of them are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.numerics.hidden_state import Snapshot

if TYPE_CHECKING:
    from lockstep.run.state import PreparedRun


class CalledModules:
    """Notes the modules that are called and do not belong to the prepared model.

    Args:
        prepared: the run.
        before: the state of ``roots``, to which what is called is added.
        roots: what user code is looked at, by name.
    """

    def __init__(self, prepared: PreparedRun, before: Snapshot, roots: dict[str, Any]) -> None:
        parts = prepared.state.parts
        own = (parts.model, prepared.compute.model)
        self._own = {id(module) for each in own for module in each.modules()}
        self._parameters = {id(parameter) for each in own for parameter in each.parameters()}
        self._kept = {id(module) for each in parts.modules for module in each.modules()}
        self._before, self._roots = before, roots
        self._is_compiled = any("forward" in vars(module) for each in own for module in each.modules())
        self._seen: dict[int, nn.Module] = {}
        self.wrong: dict[str, str] = {}
        """Those that cannot be right, by name, with the reason."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes them inside; not where modules are compiled, as torch's compiler reads such hooks too."""
        if self._is_compiled:
            yield
            return
        handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, _: object) -> None:
        if id(module) in self._own or id(module) in self._seen:
            return
        self._seen[id(module)] = module
        name = self._before.name_of(module)
        if not name:
            name = f"a {type(module).__qualname__}"
            self._before.add(name, module)
            self._roots[name] = module
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            self.wrong[name] = (
                f"changes its running statistics (a {type(module).__qualname__} in training mode)"
            )
        trained = [
            key
            for key, each in module.named_parameters(recurse=False)
            if each.requires_grad
            and id(each) not in self._parameters  # a copy.copy of a module has the model's
        ]
        if trained and torch.is_grad_enabled() and id(module) not in self._kept:
            self.wrong[name] = (
                f"has parameters that require gradients ({trained[0]}), which nobody sums or updates"
            )
