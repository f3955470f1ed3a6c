"""Records a run in ``audit.jsonl`` of the run folder, as a chain of hashes that ``lockstep audit`` checks.

    {"kind": "start", "step": 0, "recipe": "64 digits", "chain": "64 digits"}
    {"kind": "step", "step": 0, "data": ["64 digits", ...], "loss": "0x1.2a8p+0", "gradient": {...}, "chain": ...}
    {"kind": "checkpoint", "step": 12, "name": "step-00000012", "manifest": "64 digits", "chain": ...}
    {"kind": "end", "step": 36, "fingerprint": "64 digits", "weights": ..., "chain": ...}

``chain`` is the SHA-256 of the line's other entries and of the line before it, so that the last one, the head, stands
for all lines. Lines are only appended. Where a run goes back to a checkpoint, those of the abandoned steps stay, and
do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.folder import step_of
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.record import canonical
from lockstep.core.fingerprint import digest_tensor
from lockstep.data.batch import Batch, map_leaves
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError, ReplicaError
from lockstep.run import Run
from lockstep.runtime import Callback
from lockstep.runtime.stop_signals import wait_for_critical_threads
from lockstep.trainer.gradient_record import GradientDigest, digest_gradients
from lockstep.trainer.trainer import AVERAGE

FILE = "audit.jsonl"
_BEGINNING = "0" * 64
"""Stands for the line before the first."""


def link(previous: str, entry: Mapping[str, Any]) -> str:
    """The hash of a line: SHA-256 of the line before it and of the line's own entries, in hexadecimal."""
    return hashlib.sha256(previous.encode() + b"\n" + canonical(dict(entry))).hexdigest()


@dataclass(frozen=True)
class Chain:
    """The lines of a run's ``audit.jsonl``, whose hashes fit."""

    entries: tuple[Mapping[str, Any], ...]
    hashes: tuple[str, ...]

    @property
    def head(self) -> str:
        """The last hash, which stands for all lines."""
        return self.hashes[-1]

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The entry of the run's end; None where it was not trained to its end, or was resumed after it."""
        return self.entries[-1] if self.entries[-1]["kind"] == "end" else None

    def last(self, kind: str) -> dict[int, Mapping[str, Any]]:
        """By step, the last entry of a kind, without those after the step at which a later start resumed."""
        found: dict[int, Mapping[str, Any]] = {}
        for entry in self.entries:
            if entry["kind"] == "start":
                kept = entry["step"] + (kind == "checkpoint")  # the one that it resumed from
                found = {step: held for step, held in found.items() if step < kept}
            if entry["kind"] == kind:
                found[entry["step"]] = entry
        return found


def read_chain(folder: Path) -> Chain:
    """Reads the chain of a run folder.

    Raises:
        ConfigError: there is none, or a line is not what the line before it, and its hash, say.
    """
    path = folder / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"'{folder}' has no {FILE}, so it cannot be audited ({error.strerror}). Train with "
            "--set training.audit=true."
        ) from error
    found = Chain(*zip(*_lines(text, path), strict=True)) if text.strip() else Chain((), ())
    if not found.entries:
        raise ConfigError(f"'{path}' is empty. Train with --set training.audit=true.")
    return found


def _lines(text: bytes, path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    previous = _BEGINNING
    lines = text.split(b"\n")
    if lines.pop():
        raise ConfigError(f"The last line of '{path}' is cut off. Resume the run, which removes it.")
    for number, line in enumerate(lines, 1):
        try:
            entry = dict(json.loads(line))
            stated = entry.pop("chain")
            sound = isinstance(entry["kind"], str) and isinstance(entry["step"], int)
            sound = sound and stated == link(previous, entry)
        except (ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise ConfigError(
                f"The chain is broken at line {number} of '{path}': this line, or the one before it, was changed, "
                "removed or added after the run had written it."
            )
        previous = stated
        yield entry, stated


class ChainWriter:
    """Appends lines to the chain of a run folder. Only the main process has one.

    Args:
        folder: of the run. A last line that was cut off, because the run was killed while writing it, is removed.
        first_step: the step at which the run resumes. Checkpoints after it, which a run that was stopped may have
            left, count only when they are written again.

    Raises:
        ConfigError: the lines that are there do not fit, or the folder cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder, self._path, self._head = folder, folder / FILE, _BEGINNING
        # Names of those that are in the chain and will not be written again
        self._checkpoints: set[str] = set()
        if self._path.exists():
            text = self._path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            for entry, digest in _lines(whole, self._path):
                self._head = digest
                if entry["kind"] == "checkpoint" and entry["step"] <= first_step:
                    self._checkpoints.add(str(entry["name"]))
            if whole != text:
                with self._path.open("rb+") as file:
                    file.truncate(len(whole))

    def append(self, kind: str, step: int, **entry: Any) -> None:
        """Adds a line and hands it to the operating system at once."""
        line = {"kind": kind, "step": step, **entry}
        self._head = link(self._head, line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "chain": self._head}) + "\n")

    def add_checkpoints(self) -> None:
        """Adds the checkpoints of the folder that are complete and not in the chain yet."""
        for path in checkpoint.committed(self._folder):
            found = step_of(path)
            if path.name not in self._checkpoints and found is not None:
                self.append("checkpoint", found[0], name=path.name, manifest=digest_file(path / MANIFEST))
                self._checkpoints.add(path.name)


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_data(data: Any) -> str:
    """SHA-256 of the tensors, numbers and texts of a micro-batch, in hexadecimal; other objects count by their type."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, tuple):  # a PackedSequence
            for each in value:
                add(each)
            return
        if isinstance(value, Tensor):
            text = digest_tensor(value if value.layout is torch.strided else value.to_dense())
        elif isinstance(value, str | bytes | int | float | None):
            text = repr(value)
        else:
            text = type(value).__name__
        digest.update(f"{len(text)} {text}\n".encode())

    map_leaves(data, add)
    return digest.hexdigest()


def digest_batch(run: Run, batch: Batch) -> list[str]:
    """The digests of all micro-batches of a step, in their order, on every process. Collective.

    Raises:
        ReplicaError: two processes have read other data for one micro-batch.
    """
    mine = {str(part.k): digest_data(part.data) for part in batch.micro_batches if part.k < batch.plan.leaves}
    found: dict[str, str] = {}
    for each in gather_json(mine, run.strategy.all_ranks, run.device):
        for k, digest in each.items():
            if found.setdefault(k, digest) != digest:
                raise ReplicaError(
                    f"Step {batch.plan.step}: processes that share micro-batch {k} have read other data for it. The "
                    "data set depends on the process; make each sample depend on its index alone."
                )
    return [found[str(k)] for k in range(batch.plan.leaves)]


class AuditRecorder(Callback):
    """Writes each step into the chain, as a callback of a run. Every rank must add one.

    Args:
        run: prepared.
        folder: of the run; written by the main process only.
        recipe: digest of the settings that the result depends on.
    """

    def __init__(self, run: Run, folder: Path, recipe: str) -> None:
        self._run, self._data, self._writer = run, [""], None
        if run.is_main:
            self._writer = ChainWriter(folder, run.position.step)
            self._writer.add_checkpoints()
            self._writer.append("start", run.position.step, recipe=recipe)

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Takes the digests of the step's data, before the model can change them. Collective."""
        with self._run.span("record"):
            self._data = digest_batch(self._run, batch)

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Writes the step. Collective."""
        with self._run.span("record"):
            gradient = GradientDigest.of(digest_gradients(self._run)[0]).as_table()
            if self._writer is not None:
                step = batch.plan.step
                self._writer.append("step", step, data=self._data, loss=float(loss).hex(), gradient=gradient)

    def on_save_begin(self, step: int) -> None:
        """Adds the checkpoints before this one, which are complete by now."""
        self._add_checkpoints()

    def on_close(self, run: Run) -> None:
        """Adds the last checkpoints."""
        self._add_checkpoints()

    def end(self, step: int, fingerprint: str, weights: Path | None) -> None:
        """Writes the last line of a run that was trained to its end, with the file of its weights."""
        if self._writer is not None:
            digests = {"weights": "" if weights is None else digest_file(weights)}
            if weights is not None and (average := weights.with_name(AVERAGE)).is_file():
                digests["average"] = digest_file(average)
            self._writer.append("end", step, fingerprint=fingerprint, **digests)

    def _add_checkpoints(self) -> None:
        if self._writer is not None:
            wait_for_critical_threads()
            self._writer.add_checkpoints()
