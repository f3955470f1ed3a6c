"""The records of an ordinary loop: a file for each rank, with a header line of JSON and a line for each step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.checks import from_plain
from lockstep.errors import ConfigError

Sample = int | str
"""An index into the data set, or the digest of the input where the loop does not know indices."""

LOSS = "loss"
"""Stands before the names of what the loss keeps."""


@dataclass(frozen=True)
class Measure:
    """A tensor reduced to its digest, norm and direction."""

    digest: str
    """SHA-256 in hexadecimal; empty where bits are not compared."""
    norm: float
    sketch: tuple[float, ...]
    """Sums of entries with fixed random signs: linear, so the sketch of a sum is the sum of the sketches."""


@dataclass
class BatchRecord:
    """One forward and backward pass of one rank."""

    samples: list[Sample] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    """Digest of the input of each sample."""
    losses: list[float] = field(default_factory=list)
    """Loss of each sample."""
    loss: float | None = None
    """The loss as the loop reports it."""
    generators: tuple[str, str] = ("", "")
    """Digests of the state of torch's random generators before and after the forward pass."""
    gradients: dict[str, Measure] = field(default_factory=dict)
    """The gradients of this rank alone, before any reduction."""
    targets: list[Sample] = field(default_factory=list)
    """Class, or digest of the target, of each sample."""
    outputs: list[list[float]] = field(default_factory=list)
    """Sketch of the model's output for each sample."""
    states: dict[str, str] = field(default_factory=dict)
    """Digests of the global random generators before the forward pass, by name."""
    drawn: list[str] = field(default_factory=list)
    """Global generators that the forward pass drew from, other than torch's."""


@dataclass
class StepRecord:
    """One optimizer step of one rank."""

    step: int
    batches: list[BatchRecord] = field(default_factory=list)
    begin: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter before the first forward pass."""
    buffers: dict[str, Measure] = field(default_factory=dict)
    """Floating-point buffers before the first forward pass."""
    used: dict[str, Measure] = field(default_factory=dict)
    """The gradients that the optimizer was given."""
    settings: dict[str, str] = field(default_factory=dict)
    """Hyperparameters of the optimizers."""
    updates: int = 0
    """Number of optimizer steps."""
    values: dict[str, Measure] = field(default_factory=dict)
    """Parameters after the step."""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, digest of input and of output of each innermost module that was called; of the first step only."""
    trained: list[str] = field(default_factory=list)
    """Parameters that required a gradient."""
    batch_norms: list[str] = field(default_factory=list)
    """Modules that normalised with the statistics of this rank's batch."""
    coarse: dict[str, str] = field(default_factory=dict)
    """Gradients in ``used`` whose entries, or their multiples by the world size, fit into a coarser type: its name."""
    state: dict[str, Measure] = field(default_factory=dict)
    """The optimizers' state before the update, by parameter and key."""
    unheld: list[str] = field(default_factory=list)
    """Parameters that required a gradient and were in none of the optimizers."""
    evaluating: list[str] = field(default_factory=list)
    """Innermost modules that were in eval mode in the first forward pass."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Plain attributes and integer buffers of the modules of the model and of the loss that have changed since the
    beginning, as text."""
    seconds: float = 0.0
    memory: int = 0
    """Peak memory of the process, in bytes."""


@dataclass
class RankRecord:
    """All steps of one rank."""

    rank: int
    world_size: int
    seed: int
    """The last seed of torch's generator."""
    context: dict[str, str] = field(default_factory=dict)
    """Threads, device, torch, optimizers, precision."""
    start: dict[str, Measure] = field(default_factory=dict)
    """Parameters before the first step."""
    tied: dict[str, list[str]] = field(default_factory=dict)
    """Further names of parameters that are used in several places."""
    modules: list[str] = field(default_factory=list)
    """Names of the innermost modules."""
    steps: list[StepRecord] = field(default_factory=list)

    def header(self) -> str:
        """The first line of the file."""
        return json.dumps({**vars(self), "steps": []}, default=vars)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Reads a rank's file; an incomplete last line is ignored."""
        head, *lines = path.read_text().splitlines()
        record: RankRecord = from_plain(cls, json.loads(head))
        record.steps = [from_plain(StepRecord, json.loads(line)) for line in lines if line.endswith("}")]
        return record


@dataclass(frozen=True)
class Recording:
    """All ranks of one run."""

    ranks: Sequence[RankRecord]

    @property
    def length(self) -> int:
        """Steps that every rank has recorded."""
        return min(len(rank.steps) for rank in self.ranks)

    def at(self, step: int) -> list[StepRecord]:
        """The step on every rank."""
        return [rank.steps[step] for rank in self.ranks]

    def samples(self, step: int) -> list[list[Sample]]:
        """The samples of each rank; only of those that computed losses, if any did, since other stages pass data on."""
        batches = [each.batches for each in self.at(step)]
        computing = [each for each in batches if any(batch.losses for batch in each)] or batches
        return [[sample for batch in each for sample in batch.samples] for each in computing]

    def batches(self, step: int) -> Iterator[tuple[int, BatchRecord]]:
        """Rank and batch."""
        return ((rank, each) for rank, record in enumerate(self.at(step)) for each in record.batches)

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Reads the files of a folder; ``ConfigError`` where some are missing, or are of several runs."""
        ranks = [RankRecord.read(path) for path in sorted(folder.glob("rank-*.jsonl"))]
        if not ranks or any(each.world_size != len(ranks) for each in ranks):
            found = ", ".join(f"rank {each.rank} of {each.world_size}" for each in ranks) or "no records"
            raise ConfigError(
                f"{folder} should hold the records of all ranks of one run and holds {found}. Create a Recorder on "
                "every rank, with an empty folder or one that as many ranks have written."
            )
        if not all(each.steps for each in ranks):
            raise ConfigError(f"{folder} holds no steps. Call recorder.step() after each optimizer.step().")
        return cls(ranks)
