"""A ``LockstepTrainer`` for Ray Train V2, whose result does not depend on the number of workers.

    from lockstep.integrations.ray import LockstepTrainer   # instead of: from ray.train.torch import TorchTrainer
    trainer = LockstepTrainer("job.toml", scaling_config=ScalingConfig(num_workers=(1, 8)), run_config=RunConfig(...))
    result = trainer.fit()

A worker of Ray is a rank. With a range of workers Ray restarts them whenever nodes come or go; they resume from the
last checkpoint, in the middle of an epoch too, and the parameters at the end are those of one process.

    driver       LockstepTrainer.fit, which names the rank that failed first
    controller   Ray's own, with LockstepBackend, RestartAfterLoss and WatchForStalls
    worker       lockstep.integrations.ray_worker: a rank in Ray's training thread
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from lockstep.config.checks import refuse
from lockstep.config.job import JobConfig
from lockstep.config.job_file import load_job, parse_set
from lockstep.config.rules import machine_problems
from lockstep.core.world import PORTABLE_ENVIRONMENT
from lockstep.errors import ConfigError, LockstepError, RankError, StallError
from lockstep.launch.hosts.outcome import snapshot_from_json
from lockstep.launch.options import new_run_id
from lockstep.launch.outcome import RankEnd, judge, report
from lockstep.launch.restarts import find_lost_ranks
from lockstep.launch.stalls import describe
from lockstep.launch.stalls.report import judge_stall
from lockstep.runtime.control import StopReason
from lockstep.runtime.error_record import ErrorRecord
from lockstep.runtime.heartbeat import Beat, Membership
from lockstep.text import grouped


class LockstepTrainer(DataParallelTrainer):  # type: ignore[misc]  # Ray has no types
    """Trains on Ray Train V2 with bits that do not depend on the number of workers.

    Args:
        job: path of a job file, name of a built-in job, a ``JobConfig``, or a function that every worker calls. The
            function calls ``lockstep.init``; what it returns on rank 0 becomes ``Result.return_value``.
        settings: of a job by its name, as ``--set`` takes them, such as ``training.epochs=5``.
        train_loop_config: the argument of the function, if it has one.
        scaling_config: of Ray. ``num_workers`` is a number, or the fewest and the most.
        run_config: of Ray. With a range of workers, losses restart the run without limit unless ``FailureConfig`` has
            one.
        threads: CPU threads of each worker; part of the recipe. A job has its own setting.
        portable: gives the workers of a function the environment that ``lockstep.init(portable=True)`` needs. A job has
            its own setting.
        stall_limit: seconds without progress after which a run that waits for a rank is ended; 0: never. A job has its
            own setting.

    Raises:
        ConfigError: the job is wrong, or cannot be shared by so many workers.
    """

    def __init__(
        self,
        job: str | JobConfig | Callable[..., Any],
        *,
        settings: Sequence[str] = (),
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        threads: int = 1,
        portable: bool = False,
        stall_limit: float = 60.0,
    ) -> None:
        scaling, run_config = scaling_config or ScalingConfig(), run_config or RunConfig()
        given = [parse_set(text) for text in settings]
        config = load_job(job, given, devices_are_all=False, is_here=False) if isinstance(job, str) else job
        if not isinstance(config, JobConfig):
            loop = partial(_call, config, train_loop_config)
        else:
            for count in {scaling.min_workers, scaling.max_workers}:
                refuse(machine_problems(config, count, is_here=False))
            threads, stall_limit = config.run.threads, config.run.stall_limit
            portable = bool(config.training.portable)
            loop = partial(_train_job, config.to_json())
        if portable:  # workers must have these variables before they import torch
            environment = run_config.worker_runtime_env or {}
            variables = {**PORTABLE_ENVIRONMENT, **environment.get("env_vars", {})}
            run_config.worker_runtime_env = {**environment, "env_vars": variables}
        if scaling.elasticity_enabled and run_config.failure_config.max_failures == 0:
            run_config.failure_config = dataclasses.replace(run_config.failure_config, max_failures=-1)
        self._stall_limit = stall_limit
        super().__init__(
            loop,
            backend_config=LockstepBackendConfig(threads=threads),
            scaling_config=scaling,
            run_config=run_config,
        )

    def fit(self) -> Result:
        """Trains to the end.

        Returns:
            Ray's result. Of a job, ``return_value`` is a dict with the fingerprint and the report as text.

        Raises:
            RankError: a worker failed; names the one that failed first, with its traceback.
            StallError: the workers waited for one; names it, and its line of code.
        """
        try:
            return super().fit()
        except WorkerGroupError as error:
            lines = _report(error.worker_failures, Path(self.run_config.storage_path, self.run_config.name))
            raise RankError("\n".join(lines)) from None
        except ControllerError as error:
            cause: BaseException = error
            while isinstance(cause, ControllerError):
                cause = cause.controller_failure
            if isinstance(cause, LockstepError):
                raise cause from None
            raise

    def _initialize_and_run_controller(self, **given: Any) -> Result:
        given["failure_policy"] = RestartAfterLoss(given["failure_policy"], self.run_config.failure_config)
        given["callbacks"] = [*given["callbacks"], WatchForStalls(self._stall_limit)]
        return super()._initialize_and_run_controller(**given)


def train_on_cluster(config: JobConfig, address: str, workers: int | tuple[int, int], storage: str, name: str) -> str:
    """Trains a job on a Ray cluster, on GPUs if it has any; returns the report.

    Args:
        config: the job.
        address: of the cluster; empty: a new one on this machine.
        workers: how many, or the fewest and the most.
        storage: the folder or URI of all runs.
        name: of this run's folder in it.

    Raises:
        ConfigError: there is no cluster at the address, or the job is wrong.
        RankError: see ``LockstepTrainer.fit``; ``StallError`` too.
    """
    try:
        ray.init(address=address or None, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray {address} was given, and Ray cannot connect: {error}. Give the address of the head node, as in "
            "10.0.0.1:6379, or none for a cluster on this machine."
        ) from error
    try:
        uses_gpus = bool(ray.cluster_resources().get("GPU"))
        run = RunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=config.run.restarts),
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.keep),
        )
        scaling = ScalingConfig(num_workers=workers, use_gpu=uses_gpus)
        result = LockstepTrainer(config, scaling_config=scaling, run_config=run).fit()
        return str(result.return_value["report"])
    finally:
        ray.shutdown()


def _train_job(job: str) -> Any:
    from lockstep.integrations.ray_worker import run_worker, train_job  # imports torch

    return run_worker(train_job, lambda place: (job, place))


def _call(function: Callable[..., Any], config: dict[str, Any] | None) -> Any:
    from lockstep.integrations.ray_worker import run_worker  # imports torch

    arguments = (config or {},) if inspect.signature(function).parameters else ()
    return run_worker(function, lambda place: arguments)


def _ends(failures: Mapping[int, BaseException]) -> list[RankEnd]:
    """How the workers ended that Ray has seen fail; one without a record was killed, or its node was lost."""
    return [_end(rank, error) for rank, error in failures.items() if not getattr(error, "stopped", 0)]


def _end(rank: int, error: BaseException) -> RankEnd:
    found = getattr(error, "record", None)
    if found is None:
        killer = f"its node or by a signal, says Ray: {str(error).splitlines()[0]}"
        return RankEnd(rank=rank, pid=0, code=-9, time=time.time(), killer=killer)
    record = ErrorRecord(**found)
    beat = Beat(
        phase=record.phase,
        epoch=record.epoch,
        step=record.step,
        micro_batch=-1,
        time=record.time,
        pid=record.pid,
        membership=Membership.JOINED,
        samples=record.samples,
    )
    return RankEnd(rank=rank, pid=record.pid, code=record.exit_code, time=record.time, beat=beat, record=record)


def _report(failures: Mapping[int, BaseException], storage: Path) -> list[str]:
    ends = _ends(failures)
    if not ends:
        return ["Stopped with a checkpoint, because a node was to be taken away."]
    if not storage.is_dir():  # it is not a folder of this machine
        ends = [dataclasses.replace(end, logs="ranks", host=str(storage)) for end in ends]
    return report(judge(ends, StopReason.NONE), ends, StopReason.NONE, storage / "ranks")


class RestartAfterLoss(FailurePolicy):  # type: ignore[misc]
    """Starts the workers again where Ray's own policy does, unless they would fail again.

    A lost worker, node or connection may not fail again, nor may workers that saved because a node was to be taken
    away; an exception of the program would.
    """

    def __init__(self, of_ray: FailurePolicy, failure_config: FailureConfig) -> None:
        super().__init__(failure_config)
        self._of_ray = of_ray

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Decides for one failure of the workers, or of the controller."""
        if isinstance(training_failed_error, WorkerGroupError):
            ends = _ends(training_failed_error.worker_failures)
            if not ends:
                return FailureDecision.RETRY
            if find_lost_ranks(judge(ends, StopReason.NONE), ends) is None:
                return FailureDecision.RAISE
        return self._of_ray.make_decision(training_failed_error)


_LOOKS_PER_LIMIT = 4
_ANSWER_WITHIN = 5.0


class WatchForStalls(WorkerGroupCallback):  # type: ignore[misc]
    """Asks a worker of each node for its ranks, now and then, and ends a run in which ranks wait for one."""

    def __init__(self, limit: float) -> None:
        self._limit, self._next_look = limit, 0.0
        self._nodes: list[list[Any]] = []

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Notes the workers of each node."""
        workers = worker_group.get_workers()
        self._nodes = [*grouped((each.distributed_context.node_rank, each) for each in workers).values()]
        self._next_look = time.monotonic() + self._limit

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Looks, if it is time to.

        Raises:
            StallError: a rank holds the others up.
        """
        if not self._limit or time.monotonic() < self._next_look or worker_group_status.errors:
            return
        self._next_look = time.monotonic() + self._limit / _LOOKS_PER_LIMIT
        answers = [_snapshots(workers, self._limit) for workers in self._nodes]
        if not all(answers):
            return
        snapshots = [snapshot_from_json(fields, 0.0) for answer in answers for fields in answer]
        verdict = judge_stall(snapshots)
        if verdict is not None and verdict.is_deadlock:
            raise StallError("\n".join(describe(verdict, snapshots)))


def _look_for_stall(limit: float) -> list[dict[str, Any]]:
    from lockstep.integrations.ray_worker import look_for_stall  # imports torch

    return look_for_stall(limit)


def _snapshots(workers: Sequence[Any], limit: float) -> list[dict[str, Any]]:
    """The answer of the first worker of a node that gives one; nothing if none does."""
    for worker in workers:
        with suppress(GetTimeoutError, RayError):
            found: list[dict[str, Any]] = ray.get(worker.execute_async(_look_for_stall, limit), timeout=_ANSWER_WITHIN)
            return found
    return []


@dataclasses.dataclass
class LockstepBackendConfig(BackendConfig):  # type: ignore[misc]
    """The options of the backend."""

    threads: int = 1
    """CPU threads of each worker, if its run does not say otherwise."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that makes ranks of the workers."""
        return LockstepBackend


class LockstepBackend(Backend):  # type: ignore[misc]
    """Makes ranks of Ray's workers: each learns its place, where the ranks meet, and where its heartbeat goes."""

    share_cuda_visible_devices = True
    """Every worker sees all GPUs of its node that the run has, and takes that of its local rank."""

    def on_start(self, worker_group: Any, backend_config: LockstepBackendConfig) -> None:
        """Tells every worker its place, when all have been started."""
        from lockstep.integrations import ray_worker  # imports torch

        places = worker_group.execute(ray_worker.place)
        run_id, token = new_run_id(), secrets.token_bytes(32)
        address = worker_group.execute_single(0, ray_worker.free_address)
        host, _, port = address.rpartition(":")
        nodes = max(each["GROUP_RANK"] for each in places) + 1
        common = {
            "GROUP_WORLD_SIZE": nodes,
            "LOCKSTEP_RUN_ID": run_id,
            "LOCKSTEP_RENDEZVOUS": f"tcp://{address}",
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": backend_config.threads,
        }
        waiting = []
        for node in range(nodes):
            here = [number for number, each in enumerate(places) if each["GROUP_RANK"] == node]
            ranks = range(here[0], here[-1] + 1)
            directory = worker_group.execute_single(here[0], ray_worker.make_run_directory, ranks, run_id, token)
            for number in here:
                variables = {**common, **places[number], "LOCKSTEP_RUN_DIRECTORY": directory}
                waiting.append(worker_group.execute_single_async(number, ray_worker.take_place, variables))
        ray.get(waiting)

    def on_shutdown(self, worker_group: Any, backend_config: LockstepBackendConfig) -> None:
        """Removes what the workers have made on their nodes."""
        from lockstep.integrations import ray_worker  # imports torch

        with suppress(GetTimeoutError):
            ray.get(worker_group.execute_async(ray_worker.remove_run_directory), timeout=_ANSWER_WITHIN)
