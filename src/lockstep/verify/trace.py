"""The record of a run, step by step, in a form in which two runs can be compared afterwards."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

from lockstep.config.checks import from_plain


@dataclass
class StepTrace:
    """One optimizer step; digests are hexadecimal SHA-256, and losses are exact (``float.hex``)."""

    step: int
    """Counted from 0 over all epochs, with steps that the loop has skipped."""
    loss: str
    """The mean over the global batch."""
    samples: dict[str, str] = field(default_factory=dict)
    """Digest of the sample indices of each micro-batch, by its number."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of the collated data of each micro-batch."""
    losses: list[str] = field(default_factory=list)
    """Loss sum of each micro-batch."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Digest of the model's output for each micro-batch."""
    kept: dict[str, dict[int, str]] = field(default_factory=dict)
    """The plain attributes and integer buffers of modules after the step, by name and rank, where one has changed
    since the beginning."""
    evaluating: dict[str, list[int]] = field(default_factory=dict)
    """Innermost modules in eval mode, and on which ranks."""
    gradients: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Digest and norm of each parameter's reduced gradient; one without a gradient is absent."""
    parameters: dict[str, str] = field(default_factory=dict)
    """After the update."""
    buffers: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    """Digests of the optimizer's state, by parameter and key."""
    settings: dict[str, str] = field(default_factory=dict)
    """Hyperparameters of the optimizer in this step."""
    apart: list[str] = field(default_factory=list)
    """Parameters and buffers whose bits differed between ranks after the step."""


FINAL = "final.safetensors"
"""Parameters and buffers at the end of a run, beside its trace."""
_REFUSAL = "refused-*.txt"


def keep_refusal(folder: Path, rank: int, sentence: str) -> None:
    """Writes the sentence with which Lockstep refused a program while it trained."""
    (folder / _REFUSAL.replace("*", f"{rank:03d}")).write_bytes(sentence.encode(errors="surrogatepass"))


def refusal(folder: Path) -> str:
    """The sentence of the first rank that kept one; empty where none did."""
    kept = (path.read_bytes().decode(errors="surrogatepass") for path in sorted(folder.glob(_REFUSAL)))
    return next(kept, "")


class JsonRecord:
    """Base of a dataclass that is written to a file as JSON, and read back."""

    def write(self, path: Path) -> None:
        """Writes the record."""
        path.write_text(json.dumps(asdict(cast(Any, self))))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a record."""
        record: Self = from_plain(cls, json.loads(path.read_text()))
        return record


@dataclass
class Trace(JsonRecord):
    """One run."""

    label: str
    """As in ``ddp on 4``."""
    strategy: str
    ranks: int
    level: str
    """The level that the strategy promises: A, B or C."""
    context: dict[str, str] = field(default_factory=dict)
    """The recipe, and other conditions that the bits depend on, as checkpoints have them."""
    first: int = 0
    """The number of the first step; more than 0 in a run that was resumed."""
    start: dict[str, str] = field(default_factory=dict)
    """Digests of parameters and buffers before the first step."""
    unit: float = 2.0**-23
    """The last place of the coarsest type that the run rounds to, relative: 2^-23 in fp32, 2^-7 in bf16."""
    draws: bool = False
    """True if the model may draw random numbers."""
    independent: bool = False
    """True if ranks step independently, so that only the end of the run can be compared."""
    steps: list[StepTrace] = field(default_factory=list)
    milliseconds: float = 0.0
    """Of a step, the median."""
    memory: list[int] = field(default_factory=list)
    """Peak memory of each rank's process, in bytes."""
    sent: float = 0.0
    """Bytes per step of the rank that sends most, see ``Strategy.bytes_sent``."""
    refused: str = ""
    """The reason why the job cannot run in this layout; empty if it did."""
    in_training: bool = False
    """True if it was refused while it trained, which is a finding about the program."""
    warnings: list[str] = field(default_factory=list)
    """The warnings of Lockstep on the main process."""
    further_runs: int = 0
    """Runs that the script has begun after this one, which are not observed."""

    def since(self, step: int) -> Trace:
        """The part of the trace from a step on."""
        if step == self.first:
            return self
        before = [each for each in self.steps if each.step < step]
        start = {**before[-1].parameters, **before[-1].buffers} if before else self.start
        return replace(self, start=start, first=step, steps=self.steps[len(before) :])
