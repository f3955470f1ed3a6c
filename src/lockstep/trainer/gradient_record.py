"""Records digests of gradients in ``gradients.jsonl`` of the run folder; ``lockstep replay`` compares with them.

    {"step": 50, "loss": "0x1.2a8p+0", "norm": 0.81, "digest": "64 digits", "parameters": {"fc.bias": "12 digits"}}

``GradientRecorder`` is a callback of the run. After some steps it takes the digest of each whole gradient, however the
parameters are held, and appends a ``GradientRecord`` to the ``GradientLog``. With ``training.record_micro_batches`` a
``MicroBatchWatch`` also takes the digest of every micro-batch's own gradient as autograd finishes it, before it is
added to the tree: each parameter has a hook for that step. Under fsdp parameters are whole in the forward pass of
their module, so modules are asked for theirs then.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.core.atomic import write_whole
from lockstep.core.fingerprint import combine, digest_tensor
from lockstep.core.summation_tree import sum_of_squares
from lockstep.core.values import differing
from lockstep.data.batch import Batch, MicroBatch
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.run import Run
from lockstep.runtime import Callback
from lockstep.runtime.events import CallbackHandle
from lockstep.strategies.absent import AbsentParameter
from lockstep.text import shorten


def digest_gradients(run: Run) -> tuple[dict[str, str], float]:
    """The digest of each parameter's whole gradient and the norm of all, on the main process. Collective.

    Returns:
        Digests by parameter name, without those that have no gradient, and the norm, summed in float64; nothing and
        NaN on the other processes.
    """
    if run.strategy.replicated and not run.is_main:
        return {}, math.nan
    digests, squares = {}, 0.0
    for name, whole in whole_gradients(run):
        if run.is_main:
            digests[name] = digest_tensor(whole)
            squares += float(sum_of_squares(whole))
    return digests, math.sqrt(squares) if run.is_main else math.nan


def whole_gradients(run: Run) -> Iterator[tuple[str, Tensor]]:
    """The name and the whole gradient of each parameter that has one, in name order.

    Collective where no process holds the whole model: every rank must go through all of them.
    """
    strategy, tensors = run.strategy, run.require_prepared().state.model.tensors
    held = strategy.trainable()
    mine = [name for name, parameter in held.items() if parameter.grad is not None]
    group = None if strategy.replicated else strategy.all_ranks
    used = {name for names in gather_json(mine, group, run.device) for name in names}
    for name in sorted(used):
        part = held[name].grad if name in held else None
        yield name, strategy.gather_full(name, part, tensors[name].dtype)


class MicroBatchWatch(Callback):
    """Watches single steps of a prepared run. Every rank must make one, and the same calls."""

    def __init__(self, run: Run) -> None:
        self._run, self._saved = run, run.require_prepared().state
        self._callback: CallbackHandle | None = None
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self._found: dict[int, dict[str, str]] = {}
        self._k = self._leaves = -1
        self._scale = 1.0

    def start(self, batch: Batch, scale: float) -> None:
        """Watches the backward pass of a batch that is about to begin, up to ``stop``. Not collective.

        ``scale`` is the factor on its gradients.
        """
        self.stop()
        self._found, self._scale, self._leaves = {}, scale, batch.plan.leaves
        self._callback = self._run.add_callback(self)
        self._add_hooks()

    def stop(self) -> None:
        """Ends it; the digests are kept for ``take``."""
        if self._callback is not None:
            self._callback.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def take(self) -> dict[int, dict[str, str]]:
        """The digests by micro-batch and parameter of what was watched last, on every rank. Collective.

        Each is of the gradient of the sum of the micro-batch's losses, without the loss scale.
        """
        mine = {str(k): digests for k, digests in self._found.items()}
        merged: dict[int, dict[str, str]] = {}
        for each in gather_json(mine, self._run.strategy.all_ranks, self._run.device):
            for k, digests in each.items():
                merged.setdefault(int(k), {}).update(digests)
        return dict(sorted(merged.items()))

    def on_micro_batch_begin(self, micro_batch: MicroBatch) -> None:
        """Notes whose gradients come next."""
        self._k = micro_batch.k

    def on_micro_batch_resume(self, micro_batch: MicroBatch, phase: str) -> None:
        """Notes whose gradients come next."""
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
        aliases = self._saved.model.aliases
        for name, parameter in unit.named_parameters(prefix):
            if isinstance(parameter, AbsentParameter) or not parameter.requires_grad:
                continue
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))

                def take(gradient: Tensor, name: str = aliases.get(name, name)) -> None:
                    self._note(name, gradient)

                self._handles.append(parameter.register_hook(take))  # type: ignore[no-untyped-call]  # torch's stub

    def _note(self, name: str, gradient: Tensor) -> None:
        if self._k < self._leaves:  # what comes after is of spares
            values = gradient.detach()
            values = values if self._scale == 1.0 else values * (1.0 / self._scale)
            self._found.setdefault(self._k, {})[name] = digest_tensor(values)


FILE = "gradients.jsonl"
_SHORT = 12
"""Digits that are kept of each parameter's digest: enough to name what differs, while ``digest`` is the proof."""


@dataclass(frozen=True)
class GradientDigest:
    """The bits of a gradient; a parameter that has none is absent."""

    digest: str
    """Of all parameters together, see ``lockstep.core.fingerprint.combine``."""
    parameters: Mapping[str, str]
    """The first digits of each parameter's own."""

    @classmethod
    def of(cls, digests: Mapping[str, str]) -> GradientDigest:
        """From the whole digest of each parameter."""
        return cls(combine(digests), {name: digests[name][:_SHORT] for name in sorted(digests)})

    @classmethod
    def from_table(cls, table: Any) -> GradientDigest:
        """Reads what ``as_table`` gave; ``ValueError``, ``KeyError`` or ``TypeError`` where it is something else."""
        parameters = {str(name): str(digest) for name, digest in dict(table["parameters"]).items()}
        return cls(str(table["digest"]), parameters)

    def as_table(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        return {"digest": self.digest, "parameters": dict(self.parameters)}

    def difference(self, other: GradientDigest, most: int) -> str:
        """The names of at most ``most`` parameters that differ, and their number, as text; empty if none differs."""
        mine, theirs = self.parameters, other.parameters
        names, every = sorted(differing(mine, theirs)), len(mine.keys() | theirs.keys())
        return f"{shorten(names, most)} ({len(names)} of {every} parameters)" if names else ""


@dataclass(frozen=True, kw_only=True)
class GradientRecord:
    """One step: the reduced gradient, without the loss scale and before clipping."""

    step: int
    loss: str
    """Mean loss over the global batch, as ``float.hex``."""
    norm: float
    """Of the whole gradient."""
    gradient: GradientDigest
    micro_batches: Mapping[int, GradientDigest] = field(default_factory=dict)
    """By micro-batch, the gradient of the sum of its losses; empty where that was not recorded."""

    @classmethod
    def from_json(cls, line: str) -> GradientRecord:
        """Reads one line; ``ValueError``, ``KeyError`` or ``TypeError`` where it is something else."""
        try:
            table = json.loads(line)
        except RecursionError:
            raise ValueError("a record is nested too deeply") from None
        if not isinstance(table, dict):
            raise TypeError(f"a record is a table, not {line[:20]!r}")
        parts = dict(table.get("micro_batches", {}))
        return cls(
            step=operator.index(table["step"]),
            loss=str(table["loss"]),
            norm=float("nan") if table["norm"] is None else float(table["norm"]),
            gradient=GradientDigest.from_table(table),
            micro_batches={int(k): GradientDigest.from_table(part) for k, part in parts.items()},
        )

    def to_json(self) -> str:
        """One line."""
        norm = self.norm if abs(self.norm) < float("inf") else None
        table = {"step": self.step, "loss": self.loss, "norm": norm, **self.gradient.as_table()}
        if self.micro_batches:
            table["micro_batches"] = {str(k): part.as_table() for k, part in self.micro_batches.items()}
        return json.dumps(table)


def read_records(folder: Path) -> dict[int, GradientRecord]:
    """The records of a run folder by step, the last of each; torn lines are left out."""
    return {record.step: record for record, _ in _records(folder / FILE)}


class GradientLog:
    """Appends records to the file of a run folder, and hands each to the operating system at once.

    Args:
        folder: of the run.
        first_step: the step at which the run resumes. Records from there on, left by a run that was stopped after its
            last checkpoint, are removed: they are about to be written again.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path = folder / FILE
        if self._path.is_file():
            kept = "".join(line for record, line in _records(self._path) if record.step < first_step)
            write_whole(self._path, kept.encode())

    def append(self, record: GradientRecord) -> None:
        """Adds a record; makes the folder at the first."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")


def _records(path: Path) -> Iterator[tuple[GradientRecord, str]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield GradientRecord.from_json(line), line
            except (ValueError, KeyError, TypeError):
                continue


_IN_REPLICAS = ("dp", "tensor")
"""Strategies that compute a micro-batch with other parameters than those of the prepared model."""


class GradientRecorder(Callback):
    """Records gradients as a callback of a run. Every rank must add one.

    Args:
        run: prepared.
        folder: of the run; written by the main process only.
        every: steps between two records; the step after each checkpoint has one too.
        micro_batches: also record each micro-batch's own gradient.
    """

    def __init__(self, run: Run, folder: Path, every: int, *, micro_batches: bool = False) -> None:
        self._run, self._every, self._is_due = run, every, False
        self._saved_step = run.position.step or -1
        if micro_batches:
            require_separate_micro_batches(run)
        self._watch = MicroBatchWatch(run) if micro_batches else None
        self._log = GradientLog(folder, run.position.step) if run.is_main else None

    def on_save(self, step: int, folder: Path | None) -> None:
        """Notes that a checkpoint holds the state which the next step begins with."""
        self._saved_step = step

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Decides whether the step is recorded."""
        self._is_due = batch.plan.step % self._every == 0 or batch.plan.step == self._saved_step
        if self._is_due and self._watch is not None:
            self._watch.start(batch, scale)

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Writes the record, if one is due. Collective."""
        if self._is_due:
            if self._watch is not None:
                self._watch.stop()
            with self._run.span("record"):
                self._record(batch.plan.step, loss)

    def _record(self, step: int, loss: Tensor) -> None:
        digests, norm = digest_gradients(self._run)
        parts = self._watch.take() if self._watch is not None else {}
        if self._log is not None:
            self._log.append(
                GradientRecord(
                    step=step,
                    loss=float(loss).hex(),
                    norm=norm,
                    gradient=GradientDigest.of(digests),
                    micro_batches={k: GradientDigest.of(part) for k, part in parts.items()},
                )
            )


def require_separate_micro_batches(run: Run) -> None:
    """Raises ``ConfigError`` where no single micro-batch's gradient is to be had from a run."""
    if run.strategy.name in _IN_REPLICAS:
        raise ConfigError(
            f"Strategy {run.strategy.name!r} computes micro-batches with parts or copies of the model, whose gradients "
            "training.record_micro_batches cannot tell apart. Leave it out, or use strategy 'ddp'."
        )
