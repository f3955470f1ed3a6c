"""Decides which folder a run writes to and what it resumes from, and keeps ``job.json``, the record of its starts.

    new run             runs/digits-001, runs/digits-002, ...      the next free number, created at once
    [run] name = "x"    runs/x                                     refused if it exists and nothing is resumed
    resume = "auto"     the latest runs/digits-NNN that has a checkpoint; a new run if there is none
    resume = FOLDER     that run folder, written on
    resume = CHECKPOINT a new run that starts from it

    {"starts": [{"step": 0, "strategy": "ddp", "shares": [...], "job": {...}}, {"step": 450, ...}]}

A resumed run may have another layout than before, or other settings, which are named. A step belongs to the last start
at or before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.checks import near_path
from lockstep.config.job import JobConfig, ScheduleConfig
from lockstep.config.reader import flat
from lockstep.config.strategy_options import STRATEGIES
from lockstep.core.atomic import sole_use, told_holder
from lockstep.core.plan import Share
from lockstep.errors import ConfigError
from lockstep.runtime.output import say
from lockstep.text import shorten

FILE, LOCK, RANKS = "job.json", "lock", "ranks"
OUTCOME = "outcome.json"
"""The file that has the fingerprint in which the run ended, and a command that ends in the same."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run."""

    step: int
    """The step at which it resumed; 0 for a new run."""
    strategy: str
    """The layout's name, as in ``hybrid data=2,pipeline=2``."""
    shares: Sequence[Share]
    """The share of each rank in the micro-batches of a step, by rank."""
    level: str
    """The level that the strategy promises: A, B or C."""
    device: str
    """Type of the device: cpu or cuda."""
    context: Mapping[str, Any]
    """The conditions of the bits, see ``lockstep.core.fingerprint.Context``."""
    job: JobConfig

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return len(self.shares)

    def holders(self, micro_batch: int, leaves: int) -> list[int]:
        """The ranks that computed a micro-batch, or stages of it, in a step of ``leaves`` micro-batches."""
        return [rank for rank, share in enumerate(self.shares) if micro_batch in share.of(leaves)]

    def as_table(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        own = {name: getattr(self, name) for name in ("step", "strategy", "level", "device")}
        shares = [asdict(share) for share in self.shares]
        return {**own, "shares": shares, "context": dict(self.context), "job": json.loads(self.job.to_json())}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Start:
        """Reads what ``as_table`` gave; ``ConfigError`` for a job of other settings than are known here."""
        own = {name: table[name] for name in ("step", "strategy", "level", "device", "context")}
        types = {"step": int, "context": dict}
        if other := [name for name, value in own.items() if not isinstance(value, types.get(name, str))]:
            raise TypeError(f"{other[0]} is {own[other[0]]!r:.60}")
        shares = [Share(**share) for share in table["shares"]]
        return cls(**own, shares=shares, job=JobConfig.from_json(json.dumps(table["job"])))


def require_run_folder(folder: Path) -> None:
    """Raises ``ConfigError`` where there is no such folder."""
    if not folder.is_dir():
        hint = near_path(folder) or " Give one, such as runs/digits-001."
        hint = f" It is a file. Give the folder that it is in: {folder.parent}." if folder.is_file() else hint
        raise ConfigError(f"There is no run folder '{folder}'.{hint}")


def read_starts(folder: Path) -> list[Start]:
    """The starts of a run, oldest first; ``ConfigError`` where the folder does not tell."""
    require_run_folder(folder)
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"'{folder}' holds no {FILE}, in which 'lockstep train' records what it runs. Give the run folder of a "
            "job; that of a script cannot be used here, since it does not record the script's model and data."
        )
    try:
        starts = [Start.from_table(entry) for entry in json.loads(path.read_bytes())["starts"]]
        if not starts:
            raise ValueError("it names no start")
        return starts
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not what 'lockstep train' wrote: {error!r}.") from error


def read_outcome(folder: Path) -> dict[str, Any]:
    """The record that a run wrote when it ended; empty where it has not."""
    path = folder / OUTCOME
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


def with_start(earlier: Sequence[Start], new: Start) -> str:
    """The file's text with one more start; those at the same or a later step are left out."""
    kept = [start for start in earlier if start.step < new.step]
    return json.dumps({"starts": [start.as_table() for start in (*kept, new)]}, indent=1) + "\n"


def one_recipe(starts: Sequence[Start]) -> bool:
    """True where a run started from step 0, and every start had the same recipe and, if it was forced, conditions."""
    recipes = {_recipe(start.job, without=(*_OF_LAYOUT, *_OF_READING)) for start in starts}
    forced = [pair for pair in itertools.pairwise(starts) if pair[1].job.checkpoint.force_context]
    return starts[0].step == 0 and len(recipes) == 1 and all(a.context == b.context for a, b in forced)


_ABSENT = "-"
_OF_ONE_RUN = ("run.name", "run.directory", "checkpoint.resume", "code")
_CONDITIONS = ("torch", "device", "cpu", "photos", "optimizers")
"""Entries of ``Start.context`` that no setting decides."""
_OF_RECIPE = ("run.threads", "tensor.shards")
"""Settings that decide bits, in tables that otherwise decide none."""
_OF_LAYOUT = (
    *("run", "checkpoint", "log", *STRATEGIES, "training.strategy", "training.mesh", "training.checks"),
    *("training.fingerprint_every", "training.audit"),
    *("training.gradients_every", "training.record_micro_batches"),
)
"""Tables and settings that decide no bit, but for those of ``_OF_RECIPE``."""
_OF_READING = ("job", "data.root", "data.workers", "data.prefetch", "data.timeout", "data.cache")
"""Settings that decide no bit either, but are in ``recipe_digest``, as audits have recorded it."""


def settings_that_differ(starts: Mapping[str, Start]) -> list[tuple[str, ...]]:
    """A table of the settings that are not the same in all of these starts, by the names of their runs.

    With a head; only the head where all are the same. What only names a run or a place is left out.
    """
    tables = [flat(json.loads(start.job.to_json())) for start in starts.values()]
    keys = {key for table in tables for key in table} - set(_OF_ONE_RUN)
    return [("setting", *starts), *_differing(keys, tables)]


def conditions_that_differ(starts: Mapping[str, Start]) -> list[tuple[str, ...]]:
    """The same table of what decides the bits and is not a setting: versions, the CPU or GPU model, and so on."""
    tables = [start.context for start in starts.values()]
    return [("condition", *starts), *_differing(_CONDITIONS, tables)]


def _differing(keys: Collection[str], tables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each key whose values are not the same in all tables."""
    for key in sorted(keys):
        values = [json.dumps(table[key]) if key in table else _ABSENT for table in tables]
        if len(set(values)) > 1:
            yield (key, *values)


def decides_result(setting: str) -> bool:
    """True if a setting, such as ``optimizer.lr``, belongs to the recipe: under level A, no other changes a bit."""
    return setting in _OF_RECIPE or {setting, setting.partition(".")[0]}.isdisjoint(_OF_LAYOUT + _OF_READING)


def recipe_digest(job: JobConfig) -> str:
    """SHA-256 of the settings that the result depends on, in hexadecimal."""
    return hashlib.sha256(_recipe(job, without=_OF_LAYOUT).encode()).hexdigest()


def _recipe(job: JobConfig, *, without: Sequence[str]) -> str:
    """The settings of a job without some of them, and those of ``_OF_RECIPE``."""
    tables = json.loads(job.to_json())
    for setting in without:
        table, _, key = setting.rpartition(".")
        (tables[table] if table else tables).pop(key, None)
    tables["threads"] = job.run.threads
    if job.tensor.shards:  # then every layout computes in them
        tables["tensor"] = dataclasses.asdict(job.tensor)
    return json.dumps(tables, sort_keys=True)


def run_folder(config: JobConfig) -> Path:
    """The folder of a run whose name is decided."""
    return Path(config.run.directory).expanduser() / config.run.name


def choose_run_folder(config: JobConfig) -> JobConfig:
    """Creates the run's folder, or takes up the one that is resumed; returns the job with both decided.

    In the job that comes back, ``resume`` is empty, ``auto`` (the newest checkpoint of the run's folder) or
    the path of one checkpoint. ``ConfigError`` if the folder exists or cannot be written.
    """
    resume = config.checkpoint.resume
    if folder := _resumed_folder(config):
        _name_other_settings(config, folder)
        return _placed(config, folder, "auto")
    if resume and resume != "auto":
        _name_other_settings(config, Path(resume).parent)
    folder = _create(config)
    if resume == "auto":
        say(f"nothing to resume: no run of this job in '{folder.parent.resolve()}' has a checkpoint.")
    return _placed(config, folder, "" if resume == "auto" else resume)


def _name_other_settings(config: JobConfig, folder: Path) -> None:
    """Says which settings of the recipe are not those with which the run in a folder was last started."""
    try:
        last = read_starts(folder)[-1]
    except ConfigError:  # one of a script, or of another version
        return
    ends = isinstance(config.schedule, ScheduleConfig) and config.schedule.kind in ("cosine", "linear")
    free = () if ends else ("training.epochs", "training.max_steps")
    _, *rows = settings_that_differ({"before": last, "now": dataclasses.replace(last, job=config)})
    others = [
        f"{key} {now} (was {was})".replace(f" {_ABSENT}", " not set")
        for key, was, now in rows
        if decides_result(key) and key not in free
    ]
    if others:
        say(
            f"the run goes on with other settings than before: {shorten(others, 5)}. Its result is not that of one job "
            "from beginning to end."
        )


def planned_run_folder(config: JobConfig) -> Path:
    """The folder that `choose_run_folder` would take; creates nothing."""
    new = run_folder(config) if config.run.name else _numbered(config, _last_number(config) + 1)
    return _resumed_folder(config) or new


def _resumed_folder(config: JobConfig) -> Path | None:
    """The folder of the run that is resumed, if it continues there."""
    resume = config.checkpoint.resume
    if resume == "auto":
        return latest_run(config)
    return Path(resume) if resume and _has_checkpoint(Path(resume)) else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a run folder; the lock goes with this process, however it ends."""
    with ExitStack() as stack:
        try:
            has_locks = stack.enter_context(sole_use(folder / LOCK))
        except BlockingIOError as error:
            raise ConfigError(
                f"The run folder '{folder}' is used by a run that is still going on{told_holder(error)}."
            ) from error
        except OSError as error:
            raise ConfigError(f"The run folder '{folder}' cannot be written: {error.strerror}.") from error
        if not has_locks:
            say(f"the file system of {folder} has no locks; {LOCK}.owner there keeps other runs out.")
        yield


def discard(folder: Path) -> Path | None:
    """Removes a run folder in which no run has begun; returns the temporary folder that its logs are moved to.

    A folder that holds anything else stays, and None is returned, as if there were no logs.
    """
    if {path.name for path in folder.iterdir()} - {RANKS, LOCK, f"{LOCK}.owner"}:
        return None
    logs, aside = folder / RANKS, None
    if logs.is_dir():
        aside = Path(tempfile.mkdtemp(prefix=f"lockstep-logs-{folder.name}-"))
        shutil.move(logs, aside)
    shutil.rmtree(folder)
    return aside and aside / RANKS


def latest_run(config: JobConfig) -> Path | None:
    """The run of this job with the highest number that has a checkpoint; where it is named, that one."""
    if config.run.name:
        return run_folder(config) if _has_checkpoint(run_folder(config)) else None
    numbers = range(_last_number(config), 0, -1)
    return next((_numbered(config, n) for n in numbers if _has_checkpoint(_numbered(config, n))), None)


def _placed(config: JobConfig, folder: Path, resume: str) -> JobConfig:
    run = dataclasses.replace(config.run, directory=str(folder.parent), name=folder.name)
    checkpoint = dataclasses.replace(config.checkpoint, resume=resume)
    return dataclasses.replace(config, run=run, checkpoint=checkpoint)


def _create(config: JobConfig) -> Path:
    directory = Path(config.run.directory).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if config.run.name:
            run_folder(config).mkdir(exist_ok=config.checkpoint.resume == "auto")
            return run_folder(config)
        numbers = itertools.count(_last_number(config) + 1)
        while True:
            folder = _numbered(config, next(numbers))
            with suppress(FileExistsError):  # another run took the number
                folder.mkdir()
                return folder
    except FileExistsError as error:
        raise ConfigError(
            f"The run folder '{error.filename}' exists. Choose another run.name, or go on with --resume auto."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"No run folder can be made in '{directory}': {os.strerror(error.errno or 0)}. Set run.directory."
        ) from error


def _numbered(config: JobConfig, number: int) -> Path:
    return Path(config.run.directory).expanduser() / f"{config.job}-{number:03}"


def _last_number(config: JobConfig) -> int:
    directory = Path(config.run.directory).expanduser()
    pattern = re.compile(re.escape(config.job) + r"-(\d{3,})")
    found = (pattern.fullmatch(path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    return max((int(match[1]) for match in found if match), default=0)


def _has_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() for path in folder.glob("step-*"))
