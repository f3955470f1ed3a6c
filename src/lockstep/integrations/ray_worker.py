"""A rank in a worker of Ray: its place in the world, its run folder, its reports, and what is asked of it meanwhile.

The loop runs in the training thread that Ray makes. Ray's own thread of the process calls the functions that the
controller sends: ``place``, ``make_run_directory`` and ``take_place`` before the loop, ``look_for_stall`` beside it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
from ray.train import Checkpoint, get_checkpoint, get_context, report
from ray.train.collective import barrier
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2.api.report_config import CheckpointUploadMode

from lockstep.config.job import JobConfig
from lockstep.config.options import RunOptions
from lockstep.core.world import World
from lockstep.distributed.authentication import write_rank_key
from lockstep.errors import ConfigError
from lockstep.job.rank import train
from lockstep.job.run_folder import read_outcome
from lockstep.launch.hosts.coordinator import SharedStall
from lockstep.launch.runs import run_directory, write_note
from lockstep.launch.stalls import StallWatch
from lockstep.run import Run
from lockstep.runtime.control import Control, Stopped, StopReason
from lockstep.runtime.error_record import ErrorRecord, record_of, write_record
from lockstep.runtime.events import Callback, observe_new_runs
from lockstep.runtime.heartbeat import Heartbeat, read_beat
from lockstep.runtime.stack_dump import Mark, serve_stack_dumps, stack_marker

RANKS = "ranks"
"""The folder for error records, in the run folder."""


class WorkerFailure(Exception):
    """The end of a worker, in a form that Ray can send: its error record, or why it stopped."""

    def __init__(self, record: dict[str, Any] | None, stopped: int = 0) -> None:
        super().__init__(record, stopped)
        self.record, self.stopped = record, stopped

    def __str__(self) -> str:
        return "stopped, to be started again" if self.record is None else str(self.record["message"])


@stack_marker(Mark.RUNS_RANK)
def run_worker(function: Callable[..., Any], arguments: Callable[[RunPlace], tuple[Any, ...]]) -> Any:
    """Runs the loop of one worker; returns what it returned.

    Args:
        function: the loop.
        arguments: gives its arguments from the place where the worker writes.

    Raises:
        WorkerFailure: the loop failed, or stopped because a node is to be taken away.
    """
    world = World.from_environment()
    heartbeat = Heartbeat.open(world)
    serve_stack_dumps(world)
    heartbeat.mark("start")
    try:
        with ExitStack() as stack:
            place = stack.enter_context(_run_place())
            stack.push(partial(_write_record, place, world, heartbeat))
            reports = _Reports(place)
            stack.enter_context(observe_new_runs(reports, options=place.options))
            stack.enter_context(_drains_noticed(heartbeat.control))
            result = _run_target(function, arguments(place))
            reports.close()
            if world.is_main:
                place.publish(*(path for path in place.folder.iterdir() if not path.name.startswith("step-")))
            return result
    except Stopped as stop:
        # Until the controller has taken every report of every rank
        get_train_context().get_result_queue().join()
        barrier()
        raise WorkerFailure(None, int(stop.reason)) from stop
    except Exception as error:
        raise WorkerFailure(dataclasses.asdict(_record(error, world, heartbeat))) from error


def _record(error: Exception, world: World, heartbeat: Heartbeat) -> ErrorRecord:
    """Its time is one that can be compared between hosts."""
    return dataclasses.replace(record_of(error, rank=world.rank, beat=heartbeat.last), time=time.time())


def _write_record(
    place: RunPlace, world: World, heartbeat: Heartbeat, kind: Any, error: BaseException | None, trace: Any
) -> None:
    """Writes the error that ends a worker, if one does, while its run folder is there."""
    if isinstance(error, Exception):
        folder = place.folder / RANKS
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            write_record(folder, _record(error, world, heartbeat))
            place.publish(folder)


@stack_marker(Mark.RUNS_TARGET)
def _run_target(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def train_job(job: str, place: RunPlace) -> dict[str, Any]:
    """Trains a job; returns its outcome and its report on the main process. Collective."""
    config, world, folder = JobConfig.from_json(job), World.from_environment(), place.folder
    run = dataclasses.replace(config.run, directory=str(folder.parent), name=folder.name)
    lines = train(dataclasses.replace(config, run=run), world)
    if not world.is_main:
        return {}
    lines = lines.replace(str(folder), place.shown)
    return {**read_outcome(folder), "report": lines}


@dataclasses.dataclass(frozen=True)
class RunPlace:
    """Where a worker writes, and what it resumes from."""

    folder: Path
    resume: str
    storage: Any
    """Ray's storage of the run."""
    is_shared: bool
    """True if the folder is the storage itself, so that nothing has to be copied there."""

    def options(self, options: RunOptions) -> RunOptions:
        """The options of the worker's run, with this place. Which checkpoints stay is for Ray to say."""
        resume = self.resume or options.resume
        return dataclasses.replace(options, directory=self.folder, resume=resume, save_in_background=False, keep=None)

    @property
    def shown(self) -> str:
        """The run folder, where it stays."""
        return str(self.storage.experiment_fs_path)

    def publish(self, *paths: Path) -> None:
        """Copies files and folders of the run folder into the storage, if they are not there."""
        local, files = pyarrow.fs.LocalFileSystem(), self.storage.storage_filesystem
        for path in () if self.is_shared else paths:
            target = f"{self.shown}/{path.name}"
            if path.is_dir():
                files.create_dir(target, recursive=True)
            pyarrow.fs.copy_files(str(path), target, source_filesystem=local, destination_filesystem=files)


@contextmanager
def _run_place() -> Iterator[RunPlace]:
    """The run folder: Ray's folder of the run where all nodes see its file system, else a temporary one."""
    storage = get_context().get_storage()
    if isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        folder = Path(storage.experiment_fs_path)
        folder.mkdir(parents=True, exist_ok=True)
        resume = "auto" if any(folder.glob("step-*")) else ""
        yield RunPlace(folder, resume, storage, is_shared=True)
        return
    found = get_checkpoint()
    with found.as_directory() if found is not None else nullcontext("") as resume:
        # One path on every node, because the options of all ranks must be equal.
        folder = Path(tempfile.gettempdir(), f"lockstep-ray-{os.environ['LOCKSTEP_RUN_ID']}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            raise ConfigError(f"The folder {folder} belongs to another user. Start the run again.")
        try:
            yield RunPlace(folder, resume, storage, is_shared=False)
        finally:
            if os.environ["LOCAL_RANK"] == "0":
                shutil.rmtree(folder, ignore_errors=True)


class _Reports(Callback):
    """Reports every checkpoint to Ray, with the newest results of evaluations."""

    def __init__(self, place: RunPlace) -> None:
        self._place = place
        self._results: dict[str, Any] = {}
        self._run: Run | None = None

    def on_prepare_end(self, run: Any) -> None:
        self._run = run

    def on_evaluation(self, step: int, results: Any) -> None:
        self._results = dict(results) if isinstance(results, dict) else {"metric": results}

    def on_save(self, step: int, folder: Path | None) -> None:
        assert self._run is not None, "it saves"
        mode = CheckpointUploadMode.NO_UPLOAD if self._place.is_shared else CheckpointUploadMode.SYNC
        report(
            {**self._results, "step": step, "epoch": self._run.position.epoch},
            checkpoint=None if folder is None else Checkpoint.from_directory(str(folder)),
            checkpoint_upload_mode=mode,
        )

    def on_close(self, run: Any) -> None:
        self._run = None

    def close(self) -> None:
        """Closes a run that the function has left open. Collective."""
        if self._run is not None:
            self._run.close()


_DRAIN_INTERVAL = 0.5
"""Seconds between two looks for a node that is to be taken away."""


@contextmanager
def _drains_noticed(control: Control) -> Iterator[None]:
    """Asks all ranks to save and stop when a node of this run is to be taken away, as a signal would."""
    ended, context = threading.Event(), get_train_context()

    def look() -> None:
        while not ended.wait(_DRAIN_INTERVAL):
            if context.preemption_context.preemption_info is not None:
                control.request_stop(StopReason.PREEMPTED)
                return

    thread = threading.Thread(target=look, name="lockstep-drains", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def place() -> dict[str, int]:
    """The place of this worker in the world, as the variables of a rank."""
    context = get_context()
    return {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
    }


def free_address() -> str:
    """The address of this worker's node, with a port that is free there."""
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_kept: list[ExitStack] = []
"""The run directory that this process has made for its node."""


def make_run_directory(ranks: range, run_id: str, token: bytes) -> str:
    """Makes the run directory of this worker's node, for these ranks; returns its path."""
    opened = ExitStack()
    _kept.append(opened)
    directory = opened.enter_context(run_directory(ranks=ranks))
    write_rank_key(directory, token, run_id)
    write_note(directory, run_id, ["ray"], directory, ranks.stop)
    return str(directory)


def take_place(variables: dict[str, Any]) -> None:
    """Makes this process a rank, by its variables."""
    os.environ.update({name: str(value) for name, value in variables.items()})


def remove_run_directory() -> None:
    """Removes the run directory, in the process that has made it."""
    while _kept:
        _kept.pop().close()


_watches: dict[Path, tuple[StallWatch, SharedStall]] = {}


def look_for_stall(limit: float) -> list[dict[str, Any]]:
    """Snapshots of the ranks of this node, as JSON, if one of them has made no progress for ``limit`` seconds."""
    directory = Path(os.environ["LOCKSTEP_RUN_DIRECTORY"])
    if directory not in _watches:
        _watches[directory] = StallWatch(directory, limit, is_part=True), SharedStall(directory, directory)
    watch, shared = _watches[directory]
    ranks = [int(path.name.rpartition("-")[2]) for path in directory.glob("heartbeat-*")]
    processes = {rank: beat.pid for rank in ranks if (beat := read_beat(directory, rank)) is not None}
    shared.expire()
    if (found := watch.look(processes)) is not None:
        shared.set(found, lasts=limit / 2)
    return shared.to_json()
