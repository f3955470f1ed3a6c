"""What is written down of a run, step by step, so that two runs can be compared without being there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class StepTrace:
    """One optimizer step; digests are SHA-256 in hexadecimal, numbers of floats are exact (``float.hex``)."""

    step: int
    loss: str
    """The mean over the global batch."""
    samples: dict[str, str] = field(default_factory=dict)
    """Digest of the sample indices of each micro-batch, by its number."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of what each micro-batch was collated to."""
    losses: list[str] = field(default_factory=list)
    """Loss sum of each micro-batch."""
    gradients: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Digest and norm of each parameter's reduced gradient; one without a gradient is absent."""
    parameters: dict[str, str] = field(default_factory=dict)
    """After the update."""
    buffers: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    """Digests of the optimizer's state, by parameter and key."""
    settings: dict[str, str] = field(default_factory=dict)
    """Hyperparameters of the optimizer as they were in this step."""
    apart: list[str] = field(default_factory=list)
    """Parameters and buffers of which the ranks held different bits after the step."""


@dataclass
class Trace:
    """One run."""

    label: str
    """As in ``ddp on 4``."""
    strategy: str
    ranks: int
    level: str
    """What the strategy promises: A, B or C."""
    context: dict[str, str] = field(default_factory=dict)
    """What the bits depend on beside the recipe: threads, device, torch, optimizer implementation."""
    start: dict[str, str] = field(default_factory=dict)
    """Digests of parameters and buffers before the first step."""
    draws: bool = False
    """Whether the model may draw random numbers."""
    independent: bool = False
    """Whether ranks need not keep step, so that only the end of the run can be compared."""
    steps: list[StepTrace] = field(default_factory=list)
    milliseconds: float = 0.0
    """Of a step, the median."""
    memory: list[int] = field(default_factory=list)
    """Most bytes that each rank's process held."""
    sent: float = 0.0
    """Bytes per step that the rank sends which sends most, see ``Strategy.bytes_sent``."""
    refused: str = ""
    """Why the job cannot run in this layout; empty if it did."""

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Reads what ``write`` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        steps = [
            StepTrace(**{**each, "gradients": {n: (d, x) for n, (d, x) in each["gradients"].items()}})
            for each in fields.pop("steps")
        ]
        return cls(steps=steps, **fields)
