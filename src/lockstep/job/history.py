"""What a run folder says of how it came about: ``job.json``, with one entry for every start of the run.

    {"starts": [{"step": 0, "strategy": "ddp", "shares": [...], "job": {...}}, {"step": 450, ...}]}

A run that is resumed may have another layout, or other settings, than before; steps belong to the last start at or
before them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig
from lockstep.plan import Share
from lockstep.strategy_options import STRATEGIES

FILE = "job.json"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run."""

    step: int
    """The step with which it went on; 0 for a new run."""
    strategy: str
    """The layout's name, as in ``hybrid data=2,pipeline=2``."""
    shares: Sequence[Share]
    """Which micro-batches of a step each rank computes, by rank."""
    level: str
    """What the strategy promises: A, B or C."""
    device: str
    """Type of the device: cpu or cuda."""
    context: Mapping[str, Any]
    """What the bits depend on, see ``lockstep.fingerprint.Context``."""
    job: JobConfig

    @property
    def ranks(self) -> int:
        """How many processes there were."""
        return len(self.shares)

    def holders(self, micro_batch: int, leaves: int) -> list[int]:
        """The ranks that computed a micro-batch, or stages of it, in a step of ``leaves`` micro-batches."""
        return [rank for rank, share in enumerate(self.shares) if micro_batch in share.of(leaves)]

    def as_table(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        own = {name: getattr(self, name) for name in ("step", "strategy", "level", "device")}
        shares = [asdict(share) for share in self.shares]
        return {
            **own,
            "shares": shares,
            "context": dict(self.context),
            "job": json.loads(self.job.to_json()),
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Start:
        """Reads what ``as_table`` gave; ``ConfigError`` for a job of other settings than are known here."""
        own = {name: table[name] for name in ("step", "strategy", "level", "device", "context")}
        shares = [Share(**share) for share in table["shares"]]
        return cls(**own, shares=shares, job=JobConfig.from_json(json.dumps(table["job"])))


def read_starts(folder: Path) -> list[Start]:
    """The starts of a run, oldest first; ``ConfigError`` where the folder does not tell."""
    path = folder / FILE
    if not folder.is_dir():
        raise ConfigError(f"There is no run folder '{folder}'. Give one, such as runs/digits-001.")
    if not path.is_file():
        raise ConfigError(
            f"'{folder}' holds no {FILE}, in which 'lockstep train' writes down what it runs. Give the folder of a run "
            "that this version of Lockstep has trained."
        )
    try:
        starts = [Start.from_table(entry) for entry in json.loads(path.read_bytes())["starts"]]
        if not starts:
            raise ValueError("it names no start")
        return starts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"'{path}' is not what 'lockstep train' wrote: {error!r}.") from error


def with_start(earlier: Sequence[Start], new: Start) -> str:
    """The file's text with one more start; those that it goes back behind are left out."""
    kept = [start for start in earlier if start.step < new.step]
    return json.dumps({"starts": [start.as_table() for start in (*kept, new)]}, indent=1) + "\n"


def one_recipe(starts: Sequence[Start]) -> bool:
    """Whether a run began anew and had the same settings ever since, but for where and how it ran."""
    return starts[0].step == 0 and len({_recipe(start.job) for start in starts}) == 1


def _recipe(job: JobConfig) -> str:
    """The settings that the result depends on."""
    table = json.loads(job.to_json())
    table["threads"] = job.run.threads
    for section in ("run", "checkpoint", "log", *STRATEGIES):
        table.pop(section, None)
    for key in ("strategy", "mesh", "fingerprint_every", "gradients_every", "record_micro_batches"):
        table.get("training", {}).pop(key, None)
    return json.dumps(table, sort_keys=True)
