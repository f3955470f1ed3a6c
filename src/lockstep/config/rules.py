"""Combinations of settings that cannot work, each valid on its own: one table for `lockstep.init` and job files.

`RULES` compare the settings that both have; `JOB_RULES` those that only a job file has. To add a rule, write a function
that yields what is wrong; ``tests/config/test_rules.py`` has an example that breaks each, by name.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from lockstep.config.checks import KeyPath, Problem, device_request, refuse
from lockstep.config.components import Component
from lockstep.config.starter import TRAINING_FOLDERS
from lockstep.config.strategy_options import (
    ELEMENTWISE,
    IN_SHARDS,
    ONE_PROCESS,
    OWN_EXCHANGE,
    SYNC_BATCH_NORM,
    devices_per_process,
    mesh_of,
    shares_rows_out,
    steps_parts,
)
from lockstep.core.mesh import Mesh, hybrid_mesh
from lockstep.core.plan import Share
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.job import JobConfig
    from lockstep.config.options import RunSettings

S = TypeVar("S")


@dataclass(frozen=True)
class AvailableDevices:
    """The devices that a run is laid out on, as far as they are known."""

    shown: int | str = "auto"
    """The number as the user gave it."""
    count: int | None = None
    """Number of devices; None where it is not known yet."""
    kind: str = ""
    """``cpu`` or ``cuda``; empty where it is not known yet."""
    is_here: bool = True
    """False where other hosts run the job, whose files and packages are not known."""

    @classmethod
    def asked_for(cls, devices: int | str) -> AvailableDevices:
        """The devices of a setting ``run.devices``."""
        asked = device_request(devices)
        if isinstance(asked, str):
            return cls(devices)
        return cls(devices, len(asked.indices) or asked.count, "cpu" if asked.is_cpu else "")


_Problems = Callable[[S, AvailableDevices], Iterator[str]]


@dataclass(frozen=True)
class SettingsRule(Generic[S]):
    """One combination of settings that is refused."""

    name: str
    """Name of the rule, for tests and documentation."""
    key: str
    """The setting that the message is about: a keyword of `lockstep.init`, or a key of a job file with its table."""
    problems: _Problems[S]
    """Yields what is wrong, if anything."""

    @property
    def path(self) -> KeyPath:
        """The setting in a job file."""
        tables = {"devices": ("run", "devices"), "metrics": ("metrics",)}
        given = tuple(self.key.split("."))
        return given if len(given) > 1 else tables.get(self.key, ("training", self.key))


_MOST_DEVICES = 65_536
RULES: list[SettingsRule[RunSettings]] = []
JOB_RULES: list[SettingsRule[JobConfig]] = []


def _rule(rules: list[SettingsRule[S]], name: str, key: str) -> Callable[[_Problems[S]], _Problems[S]]:
    """Adds the function below it to the rules."""

    def add(problems: _Problems[S]) -> _Problems[S]:
        rules.append(SettingsRule(name, key, problems))
        return problems

    return add


def require_rules(options: RunSettings, machine: AvailableDevices | None = None) -> None:
    """Raises ``ConfigError`` for the rules that the options of a run break, by their keywords.

    Args:
        options: of `lockstep.init`.
        machine: the processes that were started; None before that is known.
    """
    machine = machine or AvailableDevices()
    keys = {"devices": "world_size"}
    refuse(
        Problem((keys.get(rule.key, rule.key),), message)
        for rule in RULES
        for message in rule.problems(options, machine)
    )


def job_problems(job: JobConfig, machine: AvailableDevices | None = None) -> list[Problem]:
    """Every rule that a job breaks, on the devices that it asks for or on those given."""
    options, machine = job.settings, machine or AvailableDevices.asked_for(job.run.devices)
    if machine.count is not None and machine.count > _MOST_DEVICES:
        problem = f"is {machine.shown!r}, and a run has at most {_MOST_DEVICES:,} devices."
        return [Problem(("run", "devices"), problem)]
    found = [Problem(rule.path, message) for rule in RULES for message in rule.problems(options, machine)]
    return found + [Problem(rule.path, each) for rule in JOB_RULES for each in _of_job(rule, job, machine)]


def _of_job(rule: SettingsRule[JobConfig], job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    """The problems that a rule yields; of a file or folder that it may not look at, that."""
    try:
        yield from rule.problems(job, machine)
    except OSError as error:
        yield f"leads to {error.filename!r}, which cannot be read: {error.strerror}."


def machine_problems(job: JobConfig, count: int | None, kind: str = "", *, is_here: bool = True) -> list[Problem]:
    """Problems of a job that breaks no rule with the ``count`` devices it would get.

    ``kind`` is ``cpu`` or ``cuda``; None and empty where they are not known yet. ``is_here`` is as in
    ``AvailableDevices``.
    """
    shown = job.run.devices if count is None else f"cpu:{count}" if kind == "cpu" else count
    return job_problems(job, AvailableDevices(shown, count, kind, is_here))


@_rule(RULES, "global_batch is a multiple of micro_batches", "global_batch")
def _batch_is_divisible(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    batch, parts = options.global_batch, options.micro_batches
    if batch % parts:
        near = max(1, round(batch / parts)) * parts
        fitting = next(k for k in range(min(parts, batch), 0, -1) if batch % k == 0)
        other = f", or use micro_batches={fitting}{'' if fitting > 1 else ', which one process computes alone'}"
        yield (
            f"is {batch}, which micro_batches={parts} does not divide. Choose a multiple, for example {near}{other}."
        )


@_rule(RULES, "single uses one device", "devices")
def _single_has_one_device(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.strategy == "single" and machine.count is not None and machine.count > 1:
        yield f"is {machine.shown!r}, but strategy 'single' uses one. Use 1, or strategy 'ddp'."


@_rule(RULES, "every rank has a micro-batch", "devices")
def _ranks_have_micro_batches(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    """Every rank, or group of ranks that holds one model, has a micro-batch."""
    count, parts = machine.count, options.micro_batches
    if count is None or any(_mesh_fits(options, machine)):
        return
    holders = data_parallel_holders(options, count)
    if holders > parts:
        spare = count - holders if options.strategy == "parameter_server" else 0
        yield (
            f"is {machine.shown!r}: {holders} devices cannot share micro_batches={parts}. "
            f"Use at most {parts + spare}, or a recipe with more micro-batches."
        )


def data_parallel_holders(options: RunSettings, count: int) -> int:
    """Number of devices, or groups of them with one model, that share the micro-batches of a step."""
    return count if options.strategy == "dp" else planned_shares(options, count)[0].holders


def planned_shares(options: RunSettings, count: int) -> list[Share]:
    """The share of each process, by rank, in the micro-batches of a step on ``count`` devices.

    The strategies make their own from their process groups; this says the same before there are any.
    """
    if options.strategy in (*ONE_PROCESS, "single"):
        return [Share()]
    mesh = mesh_of(options.strategy, options.mesh, count // devices_per_process(options.mesh))
    table = options.parameter_server
    if options.strategy == "parameter_server" and mesh.ranks > table.servers:
        workers = mesh.ranks - table.servers
        numbers = range(-table.servers, workers) if table.mode == "asynchronous" else range(mesh.ranks)
        return [Share(holders=workers, holder=n if 0 <= n < workers else None) for n in numbers]
    is_sharded, is_piped = mesh.size("fsdp") > 1, mesh.size("pipeline") > 1
    axis = "fsdp" if is_sharded else "data"
    rounds, spare = is_sharded and not is_piped, options.sync_batch_norm and mesh.size("data") > 1
    return [
        Share(holders=mesh.size(axis), holder=mesh.coordinate(axis, rank), rounds=rounds, spare=spare)
        for rank in range(mesh.ranks)
    ]


@_rule(RULES, "a mesh fits the devices", "mesh")
def _mesh_fits(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    """A mesh belongs to strategy hybrid, has axes that go together, and takes all devices."""
    mesh, count = options.mesh, machine.count
    try:
        if options.strategy != "hybrid":
            mesh_of(options.strategy, mesh, 1)
        elif not mesh:
            yield "is not given, and strategy 'hybrid' needs one, such as 'data=2,pipeline=2'."
        else:
            laid_out = hybrid_mesh(mesh)
            layers = laid_out.size("layers")
            if count is not None and count % layers:
                yield f"is {mesh!r}: each process gets {layers} devices of {count}. Use a multiple of {layers}."
            elif count is not None:
                laid_out.check_world(count // layers)
    except ConfigError as error:
        yield f"is {mesh!r}. {error}"


@_rule(RULES, "shards are shared out", "tensor.shards")
def _shards_are_shared_out(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    """Every rank of the axis tensor holds as many shards; other strategies have none."""
    shards, strategy, mesh = options.tensor.shards, options.strategy, options.mesh
    if not shards:
        return
    if strategy not in IN_SHARDS and not (strategy == "hybrid" and "tensor" in mesh):
        yield (
            f"is {shards}, and strategy {mesh or strategy!r} computes whole layers. Use strategy 'tensor', 'ddp' or "
            "'single', or mesh='data=2,tensor=2', or leave it out."
        )
    elif options.sync_batch_norm or options.compile:
        key = "sync_batch_norm" if options.sync_batch_norm else "compile"
        yield f"is {shards}, and {key} is true, which needs whole layers. Use one of the two."
    ranks = machine.count if strategy == "tensor" else Mesh.parse(mesh).size("tensor") if mesh else 1
    if ranks and shards % ranks:
        fitting = [count for count in range(1, shards + 1) if shards % count == 0]
        yield (
            f"is {shards}, which cannot be shared out evenly over {ranks} ranks. Use "
            f"{' or '.join(map(str, fitting))} ranks, or other shards, which are another recipe."
        )


@_rule(RULES, "servers leave a worker", "parameter_server.servers")
def _servers_leave_a_worker(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    count, servers = machine.count, options.parameter_server.servers
    if options.strategy == "parameter_server" and count is not None and 1 < count <= servers:
        yield f"is {servers}, which leaves no worker among {count} processes. Use at most {count - 1}."


@_rule(RULES, "a reducer that is chosen is used", "reduce")
def _reducer_is_used(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    reduce, strategy = options.reduce, options.strategy
    if reduce != "ordered" and (strategy in OWN_EXCHANGE or shares_rows_out(strategy, options.mesh)):
        yield f"is {reduce!r}, and strategy {strategy!r} has an exchange of its own. Use 'ordered', or strategy 'ddp'."


@_rule(RULES, "fsdp shards contiguous weights", "channels_last")
def _rows_are_contiguous(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    strategy = options.strategy
    if options.channels_last and shares_rows_out(strategy, options.mesh):
        yield f"is true, and strategy {strategy!r} shards contiguous weights. Use false, or strategy 'ddp'."


@_rule(RULES, "what is offloaded comes from a GPU", "fsdp.cpu_offload")
def _offload_has_a_gpu(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.fsdp.cpu_offload and options.strategy == "fsdp" and machine.kind == "cpu":
        yield "is true, which moves parameters from a GPU to the host, and the devices are CPUs. Use false."


@_rule(RULES, "what stays whole after backward does after forward", "fsdp.reshard_after_backward")
def _stays_whole(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.fsdp.reshard_after_forward and not options.fsdp.reshard_after_backward:
        yield "is false and fsdp.reshard_after_forward is true. Make both false, or leave this out."


@_rule(RULES, "stages are gathered once", "mesh")
def _stages_are_gathered_once(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    given = [each.name for each in fields(options.fsdp) if getattr(options.fsdp, each.name) != each.default]
    if options.strategy == "hybrid" and "fsdp" in options.mesh and given:
        yield (
            f"is {options.mesh!r}, which gathers a stage once in a step and has no use for fsdp.{given[0]}. Leave that "
            "out."
        )


@_rule(RULES, "a pipeline is filled", "micro_batches")
def _pipeline_is_filled(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    """There are at least as many micro-batches as stages on every pipeline."""
    hybrid = options.strategy == "hybrid" and not any(_mesh_fits(options, machine))
    mesh = Mesh.parse(options.mesh) if hybrid else None
    ranks = mesh.size("pipeline") if mesh else machine.count if options.strategy == "pipeline" else None
    if ranks is None or ranks < 2:
        return
    holders = mesh.size("data") * mesh.size("fsdp") if mesh else 1
    try:
        options.pipeline.check_micro_batches(options.micro_batches, holders, ranks)
    except ConfigError as error:
        yield f"is {options.micro_batches}. {error}"


@_rule(RULES, "compiled code is not portable", "portable")
def _compiled_code_is_not_portable(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.portable is True and options.compile:
        yield "is true: torch.compile writes code for the CPU that it runs on. Use one of the two."


@_rule(RULES, "split layers are not compiled", "compile")
def _split_layers_are_not_compiled(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    split = options.strategy == "tensor" or (options.strategy == "hybrid" and "tensor" in options.mesh)
    if options.compile and split:
        yield (
            "is true, and the layers that strategy 'tensor' splits exchange inside of the model, where compile cannot "
            "go. Use one of the two."
        )


@_rule(RULES, "tf32 needs CUDA", "precision")
def _tf32_is_not_on_cpu(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.precision == "tf32" and machine.kind == "cpu":
        yield "is 'tf32', which CUDA devices have, and the devices are CPUs. Use fp32 or bf16."


@_rule(RULES, "a loss scale is used", "precision")
def _loss_scale_is_used(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    given = [
        each.name
        for each in fields(options)
        if each.name.startswith("loss_scale") and getattr(options, each.name) != each.default
    ]
    if given and options.precision != "fp16":
        yield f"is {options.precision!r}, which scales no loss, and {given[0]} is set. Leave that out, or use fp16."


@_rule(RULES, "powersgd keeps gradients of one scale", "reduce")
def _scale_is_kept(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.reduce == "powersgd" and options.precision == "fp16":
        yield (
            "is 'powersgd', which keeps gradients from step to step, but precision fp16 changes their scale between "
            "them. Use precision bf16 or fp32, or reduce='bf16'."
        )


@_rule(RULES, "asynchronous workers have no loss scale", "precision")
def _workers_find_no_scale(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    asynchronous = options.parameter_server.mode == "asynchronous"
    if options.strategy == "parameter_server" and asynchronous and options.precision == "fp16":
        yield (
            "is 'fp16', whose loss scale follows what all ranks find together, and asynchronous workers find nothing "
            "together. Use bf16 or fp32, or parameter_server.mode='synchronous'."
        )


@_rule(RULES, "SyncBatchNorm has whole models", "sync_batch_norm")
def _micro_batches_meet(options: RunSettings, machine: AvailableDevices) -> Iterator[str]:
    if options.sync_batch_norm and options.strategy not in SYNC_BATCH_NORM:
        yield (
            "is true: the micro-batches of a process would run side by side and meet at every BatchNorm, and strategy "
            f"{options.strategy!r} runs one after the other. Use strategy 'ddp'."
        )
    elif options.sync_batch_norm and options.compile:
        yield "is true: statistics are exchanged inside the model, where compile cannot go. Use one of the two."


@_rule(JOB_RULES, "SyncBatchNorm keeps activations", "training.checkpoint_activations")
def _activations_are_kept(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.training.checkpoint_activations and job.training.sync_batch_norm:
        yield (
            "is given beside sync_batch_norm: the micro-batches of a process run side by side, and torch computes the "
            "activations of a module again for one at a time. Use one of the two."
        )


@_rule(JOB_RULES, "parts are stepped alone", "optimizer.target")
def _parts_are_stepped_alone(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    """An optimizer of torch's that is stepped on parts of parameters is elementwise."""
    strategy, target = job.training.strategy, job.optimizer.target
    module, _, name = target.partition(":")
    in_parts = machine.count != 1 and steps_parts(strategy, job.training.mesh)
    if in_parts and module.startswith("torch.optim") and name not in ELEMENTWISE:
        yield (
            f"is {target!r}, and strategy {strategy!r} steps it on parts of parameters, where it would see too little. "
            f"Use one of {', '.join(sorted(ELEMENTWISE))}, or strategy 'ddp'."
        )


@_rule(JOB_RULES, "recorded micro-batches belong to recorded steps", "training.record_micro_batches")
def _micro_batches_have_a_record(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.training.record_micro_batches and not job.training.record_every:
        yield "is true, but no step is recorded. Set gradients_every to 1 or more, or leave it out."


@_rule(JOB_RULES, "the warm-up is given once", "schedule.warmup_steps")
def _one_warm_up(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    schedule = job.schedule
    if not isinstance(schedule, Component) and schedule.warmup_steps and schedule.warmup_epochs:
        yield f"is {schedule.warmup_steps} and warmup_epochs is {schedule.warmup_epochs}. Give one of the two."


@_rule(JOB_RULES, "the warm-up ends before the run", "schedule.warmup_epochs")
def _warm_up_ends(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    schedule, epochs = job.schedule, job.training.epochs
    if not isinstance(schedule, Component) and schedule.warmup_epochs > epochs:
        yield f"is {schedule.warmup_epochs}, but the job has {epochs} epochs, so the warm-up would never end."


@_rule(JOB_RULES, "statistics are frozen beside parameters", "weights.freeze_statistics")
def _statistics_have_parameters(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.weights.freeze_statistics and not job.weights.freeze:
        yield "is true, which keeps statistics beside frozen parameters, and weights.freeze is not given. Give it."


@_rule(JOB_RULES, "a schedule counts optimizer steps", "schedule.target")
def _schedule_counts_steps(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if isinstance(job.schedule, Component) and job.schedule.target.endswith(":ReduceLROnPlateau"):
        yield (
            "is ReduceLROnPlateau, which waits for a measurement, but schedules count optimizer steps. "
            "Use kind = 'cosine' or another torch scheduler."
        )


@_rule(JOB_RULES, "the optimizer's parameters come from the model", "optimizer.params")
def _optimizer_gets_parameters(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if "params" in job.optimizer.args:
        yield "is given by the model; leave it out."


@_rule(JOB_RULES, "an evaluation every n steps has data", "training.evaluate_every_steps")
def _evaluations_have_data(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.training.evaluate_every_steps and job.data.validation is None:
        yield f"is {job.training.evaluate_every_steps}, but the job has no [data.validation] to evaluate."


@_rule(JOB_RULES, "metrics are of an evaluation", "metrics")
def _metrics_have_data(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.metrics and job.data.validation is None:
        yield "are given, but the job has no [data.validation] to compute them on."
    elif "loss" in job.metrics:
        yield "has 'loss', and the validation_loss of the log is that of [loss]. Give the metric another name."


@_rule(JOB_RULES, "layer_decay is of a known learning rate", "parameters.layer_decay")
def _layers_have_a_rate(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.parameters.layer_decay is not None and not isinstance(job.optimizer.args.get("lr"), int | float):
        yield "is given, which multiplies the learning rate, and optimizer.lr is not. Give optimizer.lr a number."


@_rule(JOB_RULES, "an average is of weights that processes hold", "training.ema_decay")
def _average_has_whole_weights(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    asynchronous = job.parameter_server.mode == "asynchronous"
    if job.training.ema_decay is not None and asynchronous and job.training.strategy == "parameter_server":
        yield f"is {job.training.ema_decay}, and asynchronous workers hold no weights that all agree on. Leave it out."


@_rule(JOB_RULES, "the package of wandb is there", "log.wandb")
def _wandb_is_installed(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    yield from _not_installed("wandb", job.log.wandb, machine)


@_rule(JOB_RULES, "the package of mlflow is there", "log.mlflow")
def _mlflow_is_installed(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    yield from _not_installed("mlflow", job.log.mlflow, machine)


def _not_installed(package: str, given: str, machine: AvailableDevices) -> Iterator[str]:
    if given and machine.is_here and importlib.util.find_spec(package) is None:
        yield f"is {given!r}, and the package {package} is not installed. Install it: pip install {package}"


@_rule(JOB_RULES, "early stopping has something to judge by", "training.early_stop")
def _early_stop_has_validation(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if job.training.early_stop and job.data.validation is None:
        yield f"is {job.training.early_stop}, but the job has no [data.validation] to judge by."


def _exists(path: str | Path) -> bool:
    """``Path.exists``, which since Python 3.14 is False, and no ``OSError``, where it may not be looked at."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last where the name has a zero byte
        return False
    return True


@_rule(JOB_RULES, "the data exists", "data.root")
def _data_exists(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    if machine.is_here and job.data.root and not _exists(job.data.root):
        yield f"is '{job.data.root}', which does not exist. Give the folder of the data with --data DIR."


@_rule(JOB_RULES, "runs are no class of photos", "run.directory")
def _runs_are_no_class(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    root = job.data.train.args.get("root")
    if job.data.train.target != "lockstep.data:ImageFolder" or not (machine.is_here and isinstance(root, str)):
        return
    photos, runs = Path(root).resolve(), Path(job.run.directory).expanduser().resolve()
    has_splits = any((photos / name).is_dir() for name in TRAINING_FOLDERS)
    if runs.is_relative_to(photos) and not has_splits:
        yield (
            f"is '{runs}', in the folder of the photos, where it would be taken for a class. Set it to a folder "
            f"elsewhere: --set run.directory={shlex.quote(str(photos.parent / 'runs'))}"
        )


@_rule(JOB_RULES, "the weights exist", "weights.path")
def _weights_exist(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    path = job.weights.path
    if machine.is_here and path and not (_exists(path) and Path(path).is_file()):
        yield f"is '{path}', which is not a file. Give a file of weights, or leave it out."


@_rule(JOB_RULES, "what is resumed exists", "checkpoint.resume")
def _resume_exists(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    resume = job.checkpoint.resume
    if machine.is_here and resume not in ("", "auto") and not _exists(resume):
        yield f"is '{resume}', which does not exist. Give a run folder or a checkpoint in it, or 'auto'."


@_rule(JOB_RULES, "a run never writes over another", "run.name")
def _run_folder_is_free(job: JobConfig, machine: AvailableDevices) -> Iterator[str]:
    folder = Path(job.run.directory).expanduser() / job.run.name
    if machine.is_here and job.run.name and not job.checkpoint.resume and _exists(folder):
        yield f"is '{job.run.name}', and '{folder}' exists. Choose another name, or go on with --resume auto."
