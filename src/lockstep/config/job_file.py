"""Loads a job file: TOML, what the command line sets on top, checks; every error is named with its line.

    file  ->  tables  ->  --set, --epochs, ...  ->  JobConfig  ->  {data}, {seed}, paths  ->  rules

A relative path in a job file starts at the folder of that file, one on the command line (or in a job of Lockstep's own)
at the current folder. A path below ``{data}`` may not leave it with ``..``.
Nothing here imports torch or starts anything, so a job with a mistake ends in well under a second.
"""

from __future__ import annotations

import dataclasses
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from lockstep.config.checks import KeyPath, Problem, near_path, spell
from lockstep.config.components import Component, preflight
from lockstep.config.job import JobConfig
from lockstep.config.reader import line_of, read_table
from lockstep.config.rules import AvailableDevices, job_problems
from lockstep.config.starter import folder_job
from lockstep.errors import ConfigError, nearest

_DOWNLOADS = ("cifar10", "mnist")
"""Built-in jobs whose data ``lockstep download`` fetches under the same name."""
_NOT_PLAIN = re.compile(r"[^\w.-]+", re.ASCII)
PLACEHOLDERS = ("data", "seed")
SCHEDULE_PLACEHOLDERS = ("steps", "steps_per_epoch", "epochs")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
BUILT_IN_JOBS = Path(__file__).parent.parent / "jobs"
_LARGEST = 1 << 20
"""Bytes of a job file."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file as it was found, not yet checked."""

    name: str
    """Name of the job."""
    path: Path
    """The file."""
    text: str
    """Its content."""
    built_in: bool
    """True for Lockstep's own jobs, whose relative paths start at the current folder."""


def built_in_jobs() -> list[str]:
    """The names of Lockstep's own jobs."""
    return sorted(path.stem for path in BUILT_IN_JOBS.glob("*.toml"))


def find_job(job: str) -> JobFile:
    """Finds a job by the path of its file or the name of a built-in one; ``ConfigError`` if there is none.

    A folder of images is a job, too: the one that ``starter`` writes for it.
    """
    path = Path(job)
    if path.suffix == ".py" and path.is_file():
        raise ConfigError(
            f"{job!r} is a Python script, and a job is a TOML file. To start it: lockstep run {job!r}. To verify it: "
            f"lockstep verify --script {job!r}. To get a job: lockstep new DATA."
        )
    built_in = not path.suffix and path.name == job and job in built_in_jobs()
    if built_in:
        path = BUILT_IN_JOBS / f"{job}.toml"
    try:
        text = folder_job(path) if path.is_dir() else _read(path)
    except FileNotFoundError:
        near = path.with_suffix(".toml") if path.name else path
        hint = f" Did you mean {str(near)!r}?" if near.is_file() else near_path(path) if path.suffix else ""
        raise ConfigError(
            f"The job {job!r} is neither a file nor a built-in job.{hint or nearest(job, built_in_jobs())}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"The job file {job!r} cannot be read: {reason}.") from error
    stem = path.resolve().name if path.is_dir() else path.stem
    name = _NOT_PLAIN.sub("-", stem).strip("-.")[:100] or "job"
    return JobFile(name=name, path=path, text=text, built_in=built_in)


def _read(path: Path) -> str:
    """The text of an ordinary file, of a size that a person may have written; ``ValueError`` for any other."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("Is a directory" if stat.S_ISDIR(found.st_mode) else "it is not a regular file")
    if found.st_size > _LARGEST:
        raise ValueError(f"it has {found.st_size:,} bytes, and no job is larger than {_LARGEST:,}")
    try:
        return path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not in UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x}); save it so"
        ) from error


def load_job(
    job: str,
    overrides: Sequence[Override] = (),
    *,
    imports: bool = True,
    devices_are_all: bool = True,
    is_here: bool = True,
) -> JobConfig:
    """The checked job of a file or built-in name with overrides on top.

    Args:
        job: path of a TOML file, or name of a built-in job.
        overrides: what the command line sets.
        imports: also look into the source files of the import paths, which takes tens of milliseconds.
        devices_are_all: whether ``run.devices`` counts all devices of the run; if not, the caller checks their number.
        is_here: whether this host runs it; if not, data and weights are not looked for.

    All mistakes of the file and the overrides are in one ``ConfigError``, each with ``file:line`` or option.
    """
    file = find_job(job)
    try:
        return _load(file, overrides, imports, devices_are_all, is_here)
    except RecursionError as error:
        raise ConfigError(f"{file.path}: tables or lists are nested too deeply to be a job.") from error


def _load(
    file: JobFile, overrides: Sequence[Override], imports: bool, devices_are_all: bool, is_here: bool
) -> JobConfig:
    try:
        table = tomllib.loads(file.text)
    except ValueError as error:
        raise ConfigError(f"{_place_of_syntax_error(file, error)} The job file is not valid TOML.") from error
    table.setdefault("job", file.name)
    origin = _Origin(file, overrides)
    problems = apply_overrides(table, overrides)
    config, wrong = read_table(JobConfig, table)
    problems += [problem for problem in wrong if problem.path not in {known.path for known in problems}]
    if config is None or problems:
        problems += _of_components(table, problems, file, origin) if imports else []
        raise _report(problems, origin)
    folder = None if file.built_in else file.path.parent
    config, problems = resolve_placeholders(config, folder, origin.is_override)
    devices = dataclasses.replace(AvailableDevices.asked_for(config.run.devices), is_here=is_here)
    if not devices_are_all:
        devices = dataclasses.replace(devices, count=None)
    problems = problems or job_problems(config, devices)
    if imports:
        found = {problem.path for problem in problems}
        problems += [problem for problem in preflight(config.components(), config.code) if problem.path not in found]
    if problems:
        raise _report(problems, origin)
    return config


def _of_components(table: dict[str, Any], problems: Sequence[Problem], file: JobFile, origin: _Origin) -> list[Problem]:
    """The mistakes in components of a job that has others, whose settings are taken out of ``table``."""
    for *above, last in (problem.path for problem in problems if problem.path):
        inner: Any = table
        for key in above:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(last, None)
    config, _ = read_table(JobConfig, table)
    if config is None:
        return []
    config, _ = resolve_placeholders(config, None if file.built_in else file.path.parent, origin.is_override)
    return preflight(config.components(), config.code)


class _Origin:
    """The origin of each value: a line of the file or an option of the command line."""

    def __init__(self, file: JobFile, overrides: Sequence[Override]) -> None:
        self._file = file
        self._overrides = {override.path: override.origin for override in overrides}

    def is_override(self, path: KeyPath) -> bool:
        """True where the command line gave the value."""
        return self.override(path) is not None

    def override(self, path: KeyPath) -> str | None:
        """The option that gave the value, as it was written."""
        texts = tuple(str(part) for part in path)
        return next(
            (self._overrides[texts[:n]] for n in range(len(texts), 0, -1) if texts[:n] in self._overrides),
            None,
        )

    def of(self, path: KeyPath) -> str:
        """The option, or ``file:line``, or the file; of a job that is made for a folder, the folder."""
        override = self.override(path)
        if override is not None:
            return override
        if self._file.path.is_dir():
            return f"the job made for '{self._file.path}'"
        line, texts = self.line(path), tuple(map(str, path))
        within = [origin for key, origin in self._overrides.items() if key[: len(texts)] == texts]  # --set optimzer.lr=
        return f"{self._file.path}:{line}" if line else (within or [str(self._file.path)])[0]

    def line(self, path: KeyPath) -> int:
        """The line of the file; 0 for a value of the command line, and for one that is in neither."""
        return 0 if self.is_override(path) else line_of(path, self._file.text) or 0


def _report(problems: Sequence[Problem], origin: _Origin) -> ConfigError:
    ordered = sorted(problems, key=lambda problem: origin.line(problem.path))
    lines = [f"{origin.of(problem.path)}: {problem.text}" for problem in ordered]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"The job has {len(lines)} mistakes.\n  " + "\n  ".join(lines))


def _place_of_syntax_error(file: JobFile, error: ValueError) -> str:
    before, found, place = str(error).rpartition(" (at line ")
    if not found:
        return f"{file.path}: {str(error).rstrip('.')}."
    number = int(place.split(",")[0])
    line = file.text.split("\n")[number - 1].strip()
    return f"{file.path}:{number}: {before}, in `{line}`."


@dataclass(frozen=True, kw_only=True)
class Override:
    """One value and the option that gave it."""

    path: tuple[str, ...]
    """Keys from the outermost table to the value; the number of an item, from 0, in a list."""
    value: Any
    """The value, of the types that TOML has; None leaves the key out."""
    origin: str
    """The option as the user wrote it, for messages."""


def parse_set(text: str) -> Override:
    """Reads ``key.key=value``; the value is written as in TOML, and a text needs no quotes.

    ``none`` without quotes leaves the key out of the job.
    """
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError(f"--set {text}: should be a key, '=' and a value, for example --set optimizer.lr=0.1.")
    value = value.strip()
    return Override(path=parts, value=None if value == "none" else toml_value(value), origin=f"--set {text}")


def toml_value(text: str) -> Any:
    """The value that a text means in TOML; the text itself where it means none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text


def apply_overrides(table: dict[str, Any], overrides: Sequence[Override]) -> list[Problem]:
    """Writes the values into the table, later ones over earlier ones; returns those that have no place."""
    problems = []
    for override in overrides:
        inner: Any = table
        for number, part in enumerate(override.path):
            last = number == len(override.path) - 1
            if isinstance(inner, dict):
                if not last:
                    inner = inner.setdefault(part, {})
                elif override.value is None and part in inner:
                    del inner[part]
                else:
                    inner[part] = override.value  # None: the reader judges whether there is such a key
            elif isinstance(inner, list) and part.isdecimal() and int(part) < len(inner):
                if last:
                    inner[int(part)] = override.value
                else:
                    inner = inner[int(part)]
            else:
                holder = override.path[:number]
                kind = f"a list of {len(inner)}" if isinstance(inner, list) else "a single value"
                problems.append(Problem(override.path, f"cannot be set: {spell(holder)} is {kind}."))
                break
    return problems


def resolve_placeholders(
    config: JobConfig, folder: Path | None, from_command_line: Callable[[KeyPath], bool]
) -> tuple[JobConfig, list[Problem]]:
    """The job with every placeholder and path filled in, and what could not be.

    Args:
        config: the job as it was read.
        folder: that of the job file; None for a built-in job.
        from_command_line: whether the value at a key path was given on the command line.
    """
    config = _absolute(config, folder, from_command_line)
    fill = _Filler(config.data.root, config.training.seed)
    filled = {
        path: fill.component(part, path, SCHEDULE_PLACEHOLDERS if path == ("schedule",) else ())
        for path, part in config.components()
    }
    parts: dict[str, Any] = {str(path[0]): part for path, part in filled.items() if len(path) == 1}

    def table(name: str) -> dict[str, Any]:
        return {str(path[1]): part for path, part in filled.items() if path[0] == name and len(path) > 1}

    data = dataclasses.replace(config.data, **table("data"))
    parts |= {"data": data, "metrics": table("metrics"), "callbacks": tuple(table("callbacks").values())}
    return dataclasses.replace(config, **parts), fill.remarks(config)


def _absolute(config: JobConfig, folder: Path | None, from_command_line: Callable[[KeyPath], bool]) -> JobConfig:
    """The job with absolute paths, and the folders of the user's own modules."""

    def place(value: str, *path: str) -> str:
        start = Path.cwd() if folder is None or from_command_line(path) else folder.resolve()
        return str(start / Path(value).expanduser()) if value else ""

    resume = config.checkpoint.resume
    if resume != "auto":
        resume = place(resume, "checkpoint", "resume")
    cache = config.data.cache
    if isinstance(cache, str):
        cache = place(cache, "data", "cache")
    own = [folder.resolve(), Path.cwd()] if folder is not None else [Path.cwd()]
    given = [place(each, "code") for each in config.code]
    return dataclasses.replace(
        config,
        code=tuple(dict.fromkeys([*given, *map(str, own)])),
        data=dataclasses.replace(config.data, root=place(config.data.root, "data", "root"), cache=cache),
        weights=dataclasses.replace(config.weights, path=place(config.weights.path, "weights", "path")),
        checkpoint=dataclasses.replace(config.checkpoint, resume=resume),
    )


def with_lengths(scheduler: Component, *, epochs: int, steps: int, steps_per_epoch: int) -> Component:
    """A torch scheduler's component with ``{epochs}``, ``{steps}`` and ``{steps_per_epoch}`` filled in."""
    lengths = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, "steps": steps}
    named = {f"{{{name}}}": length for name, length in lengths.items()}

    def fill(value: Any, path: KeyPath) -> Any:
        return named.get(value, value) if isinstance(value, str) else value

    return Component(target=scheduler.target, args=map_values(fill, scheduler.args))


def map_values(change: Callable[[Any, KeyPath], Any], value: Any, path: KeyPath = ()) -> Any:
    """Nested tables and lists with ``change(value, its key path)`` in place of each single value."""
    if isinstance(value, Mapping):
        return {key: map_values(change, item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_values(change, item, (*path, number)) for number, item in enumerate(value)]
    return change(value, path)


class _Filler:
    """Replaces placeholders in the arguments of components."""

    def __init__(self, root: str, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._problems: list[Problem] = []
        self._reads_folder = False

    def component(self, component: Component, path: KeyPath, later: tuple[str, ...] = ()) -> Component:
        """The component with its placeholders filled in; those in ``later`` are left to the run."""
        args = map_values(lambda value, here: self._fill(value, here, later), component.args, path)
        return Component(target=component.target, args=args)

    def remarks(self, config: JobConfig) -> list[Problem]:
        """All problems; one more where a folder was needed and not given, or given and not used."""
        if self._reads_folder and not self._root:
            message = f"is not given: the job {config.job!r} reads a folder of data. Give it with --data DIR."
            if config.job in _DOWNLOADS:
                message = f"{message[:-1]}; 'lockstep download {config.job}' writes one."
            return [*self._problems, Problem(("data", "root"), message)]
        if self._root and not self._reads_folder:
            message = f"is {config.data.root!r}, but no argument of job {config.job!r} uses it as '{{data}}'."
            return [*self._problems, Problem(("data", "root"), message)]
        return self._problems

    def _fill(self, value: Any, path: KeyPath, later: tuple[str, ...]) -> Any:
        found = _PLACEHOLDER.match(value) if isinstance(value, str) else None
        if found is None:
            return value
        name, rest = found.group(1), value[found.end() :]
        if name == "data" and (not rest or rest.startswith("/")):
            self._reads_folder = True
            if ".." in PurePath(rest).parts:
                self._problems.append(Problem(path, f"is {value!r}, which leaves the data folder with '..'."))
            return self._root + rest
        if name == "seed" and not rest:
            return self._seed
        if name in later and not rest:
            return value
        if not rest or rest.startswith("/"):
            hint = nearest(name, (*PLACEHOLDERS, *later))
            self._problems.append(Problem(path, f"is {value!r}, an unknown placeholder.{hint}"))
        return value
