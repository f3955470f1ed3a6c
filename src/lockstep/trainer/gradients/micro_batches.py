"""Digests of each micro-batch's own gradient, taken as autograd finishes it, before it goes into the tree.

The run is not changed: the watch stands between the handle and its strategy for one step, and every parameter has a
hook for as long. FSDP2 makes the whole parameters in the forward pass, so modules are asked for theirs then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.collectives import gather_json
from lockstep.data.batch import Batch, MicroBatch
from lockstep.fingerprint import digest_tensor
from lockstep.run import Run
from lockstep.strategies import StepResult


class MicroBatchWatch:
    """Watches single steps of a prepared run. Every rank must make one, and the same calls.

    Args:
        run: prepared.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._saved = run, run.require_prepared()
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self._found: dict[int, dict[str, str]] = {}
        self._k = self._leaves = -1
        self._scale = 1.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the backward pass inside. Not collective."""
        strategy = self._run.strategy
        original = strategy.backward

        def backward(batch: Batch, compute: Any, *, scale: float, stop: int) -> StepResult:
            self._found, self._scale, self._leaves = {}, scale, batch.plan.leaves
            return original(batch, _Noting(compute, self), scale=scale, stop=stop)

        with ExitStack() as stack:
            stack.callback(self._remove_hooks)
            self._add_hooks()
            strategy.backward = backward  # type: ignore[method-assign]  # that is the place to stand
            stack.callback(setattr, strategy, "backward", original)
            yield

    def take(self) -> dict[int, dict[str, str]]:
        """The digests by micro-batch and parameter of what was watched last, on every rank. Collective.

        Each is of the gradient of the sum of the micro-batch's losses, without the loss scale.
        """
        group, mine = self._saved.group, {str(k): digests for k, digests in self._found.items()}
        everyone = gather_json(mine, group, self._run.device) if group is not None else [mine]
        merged: dict[int, dict[str, str]] = {}
        for each in everyone:
            for k, digests in each.items():
                merged.setdefault(int(k), {}).update(digests)
        return dict(sorted(merged.items()))

    def come_to(self, micro_batch: MicroBatch) -> None:
        """Says whose gradients come next."""
        self._k = micro_batch.k

    def _add_hooks(self) -> None:
        model = self._saved.parts.model
        self._hook_parameters("", model)
        if self._run.strategy.replicated:
            return
        for name, module in model.named_modules():

            def hook(unit: nn.Module, _: object, name: str = name) -> None:
                self._hook_parameters(name, unit)

            self._handles.append(module.register_forward_pre_hook(hook))

    def _hook_parameters(self, prefix: str, unit: nn.Module) -> None:
        aliases = self._saved.placed.aliases
        for name, parameter in unit.named_parameters(prefix):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))

                def take(gradient: Tensor, name: str = aliases.get(name, name)) -> None:
                    self._note(name, gradient)

                self._handles.append(parameter.register_hook(take))  # type: ignore[no-untyped-call]  # torch's stub

    def _note(self, name: str, gradient: Tensor) -> None:
        if self._k < self._leaves:  # what comes after is of spares
            values = gradient.detach()
            values = values if self._scale == 1.0 else values * (1.0 / self._scale)
            self._found.setdefault(self._k, {})[name] = digest_tensor(values)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()


class _Noting:
    """A ``Compute`` that says which micro-batch is at work."""

    def __init__(self, compute: Any, watch: MicroBatchWatch) -> None:
        self._compute, self._watch = compute, watch

    def __call__(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        self._watch.come_to(micro_batch)
        result: tuple[Tensor, Tensor] = self._compute(micro_batch, model)
        return result

    def begin(self, micro_batch: MicroBatch) -> None:
        self._watch.come_to(micro_batch)
        self._compute.begin(micro_batch)

    def resume(self, micro_batch: MicroBatch, phase: str) -> None:
        self._watch.come_to(micro_batch)
        self._compute.resume(micro_batch, phase)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)
