"""Watches a prepared run from inside its ranks and writes down what each step did.

The run is not changed: the observer stands between the handle and its strategy, and reads what passes.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.fingerprint import digest_tensor
from lockstep.randomness import draws_in_forward
from lockstep.run import Run
from lockstep.run.optimizer import hyperparameters
from lockstep.strategies import StepResult
from lockstep.verify.trace import StepTrace, Trace


class Observer:
    """Writes down the steps of one run. Collective: every rank must make one, and the same calls.

    Args:
        run: prepared.
        label: names the layout.
    """

    def __init__(self, run: Run, label: str) -> None:
        self._run, self._saved = run, run.require_prepared()
        self._group = self._saved.group
        self._seconds: list[float] = []
        self._observing = 0.0
        self._noted: dict[str, Any] = {}
        strategy = run.strategy
        self.trace = Trace(
            label=label,
            strategy=strategy.name,
            ranks=run.world.world_size,
            level=strategy.level.value,
            independent=strategy.independent,
            context=_dependencies(self._saved.context.as_dict()),
            start=self._state()[0],
            draws=draws_in_forward(self._saved.parts.model),
        )
        self._names = [name for each in self._saved.placed.members for group in each for name in group]
        self._original = strategy.backward
        strategy.backward = self._backward  # type: ignore[method-assign]  # that is the place to stand

    def begin_step(self) -> None:
        """Starts the clock of a step."""
        self._began, self._observing = time.perf_counter(), 0.0

    def end_step(self, loss: Tensor) -> None:
        """Writes down the step; the optimizer has been stepped. Collective."""
        self._seconds.append(time.perf_counter() - self._began - self._observing)
        model, apart = self._state()
        captured = self._saved.capture("", keep=self._run.is_main)
        optimizer = {name: digest_tensor(tensor) for name, tensor in captured.optimizer.items()}
        trained = set(self._names)
        self.trace.steps.append(
            StepTrace(
                step=len(self.trace.steps),
                loss=float(loss).hex(),
                parameters={name: digest for name, digest in model.items() if name in trained},
                buffers={name: digest for name, digest in model.items() if name not in trained},
                optimizer=optimizer,
                apart=apart,
                **self._noted,
            )
        )

    def finish(self, final: Path | None) -> Trace:
        """Ends the observation; ``final`` takes the parameters. Collective."""
        run = self._run
        self.trace.milliseconds = 1000 * statistics.median(self._seconds)
        own = {
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "sent": run.strategy.bytes_sent,
        }
        everyone = self._gather(own)
        self.trace.memory = [int(each["memory"]) for each in everyone]
        self.trace.sent = max(each["sent"] for each in everyone) / len(self._seconds)
        state = run.state_dict()
        if final is not None and run.is_main:
            save_file(
                {n: t.detach().clone().contiguous() for n, t in state.items() if t.is_floating_point()}, final
            )
        return self.trace

    def _backward(self, batch: Batch, compute: Any, *, scale: float, stop: int) -> StepResult:
        settings = hyperparameters(self._saved.parts.optimizers)
        result = self._original(batch, compute, scale=scale, stop=stop)
        if self.trace.independent:  # a meeting would come between a gradient and its push
            self._noted = {"settings": settings}
            return result
        began = time.perf_counter()
        own: dict[str, dict[str, str]] = {"samples": {}, "inputs": {}}
        for part in batch.micro_batches:
            if part.k < batch.plan.leaves:
                own["samples"][str(part.k)] = digest_tensor(torch.as_tensor(part.indices))
                own["inputs"][str(part.k)] = _digest(part.data)
        everyone = self._gather(own)
        merged = {kind: _by_number(each[kind] for each in everyone) for kind in ("samples", "inputs")}
        self._noted = {
            **merged,
            "losses": [float(value).hex() for value in result.losses.tolist()],
            "gradients": self._gradients(),
            "settings": settings,
        }
        self._observing += time.perf_counter() - began
        return result

    def _gradients(self) -> dict[str, tuple[str, float]]:
        strategy, held = self._run.strategy, self._run.strategy.trainable()
        own = [name for name, parameter in held.items() if parameter.grad is not None]
        used = {name for names in self._gather(own) for name in names}
        found = {}
        for name in self._names:
            if name in used:
                gradient = held[name].grad if name in own else None
                whole = strategy.whole(name, gradient, self._saved.placed.tensors[name].dtype)
                found[name] = digest_tensor(whole), float(whole.double().norm())
        return found

    def _state(self) -> tuple[dict[str, str], list[str]]:
        """Digests of the whole model, and the names of which the ranks hold different bits. Collective."""
        digests = {name: digest_tensor(tensor) for name, tensor in self._run.strategy.state()}
        everyone = self._gather(digests)
        return digests, [name for name in digests if any(each[name] != digests[name] for each in everyone)]

    def _gather(self, value: Any) -> list[Any]:
        return self._run.strategy.gather_records(value, self._group)


def _dependencies(context: dict[str, Any]) -> dict[str, str]:
    """The part of the context that layouts may differ in."""
    return {key: str(context[key]) for key in ("threads", "device", "torch", "optimizers") if key in context}


def _digest(data: Any) -> str:
    """One digest of all tensors in a micro-batch's data."""
    from torch.utils._pytree import tree_leaves

    return " ".join(digest_tensor(leaf)[:16] for leaf in tree_leaves(data) if isinstance(leaf, Tensor))


def _by_number(parts: Any) -> dict[str, str]:
    merged = {k: digest for part in parts for k, digest in part.items()}
    return {k: merged[k] for k in sorted(merged, key=int)}
