"""What a run remembers of its gradients: one JSON record a line, in ``gradients.jsonl`` of the run folder.

{"step": 50, "loss": "0x1.2a8p+0", "norm": 0.81, "digest": "64 digits", "parameters": {"fc.bias": "12 digits"}}

With ``training.record_micro_batches`` each record also holds the digest of every micro-batch's own gradient.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.temporary import write_whole
from lockstep.fingerprint import combine, differing

FILE = "gradients.jsonl"
_SHORT = 12
"""Digits that are kept of each parameter's digest: enough to name what differs, while ``digest`` is the proof."""


@dataclass(frozen=True)
class GradientDigest:
    """The bits of a gradient; a parameter that has none is absent."""

    digest: str
    """Of all parameters together, see ``lockstep.fingerprint.combine``."""
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

    def differing(self, other: GradientDigest) -> list[str]:
        """Names of the parameters whose digests differ, in name order; none where all bits are equal."""
        return [] if self.digest == other.digest else differing(self.parameters, other.parameters)


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
        table = json.loads(line)
        if not isinstance(table, dict):
            raise TypeError(f"a record is a table, not {line[:20]!r}")
        parts = dict(table.get("micro_batches", {}))
        return cls(
            step=int(table["step"]),
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
        first_step: the step with which the run goes on. Records from there on, left by a run that was stopped after its
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
