"""Combinations of settings that cannot work, each sound on its own: one table of rules.

To add a rule, add a row; ``tests/job/test_config_rules.py`` has an example that breaks each, by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.job import layout_rules
from lockstep.job.component import Component
from lockstep.job.config import JobConfig, ScheduleConfig
from lockstep.job.config_reader import KeyPath, Problem
from lockstep.strategy_options import SYNC_BATCH_NORM


@dataclass(frozen=True)
class Rule:
    """One combination that is refused."""

    name: str
    """What the rule holds, for tests and documentation."""
    path: KeyPath
    """The setting that the message is about."""
    broken: Callable[[JobConfig], str | None]
    """Says what is wrong with a job, or None."""


def broken_rules(job: JobConfig) -> list[Problem]:
    """Every rule that the job breaks."""
    found = ((rule.path, rule.broken(job)) for rule in RULES)
    return [Problem(path, message) for path, message in found if message]


def machine_problems(job: JobConfig, count: int, kind: str = "") -> list[Problem]:
    """What does not fit between a job that breaks no rule and the ``count`` devices it would get.

    ``kind`` is ``cpu`` or ``cuda``; empty where it is not known yet.
    """
    run = dataclasses.replace(job.run, devices=f"cpu:{count}" if kind == "cpu" else count)
    return broken_rules(dataclasses.replace(job, run=run))


def _batch_is_divisible(job: JobConfig) -> str | None:
    batch, parts = job.training.global_batch, job.training.micro_batches
    if batch % parts:
        near = max(1, round(batch / parts)) * parts
        return (
            f"is {batch}, which micro_batches={parts} does not divide. Choose a multiple, for example {near}."
        )
    return None


def _tf32_is_not_on_cpu(job: JobConfig) -> str | None:
    if job.training.precision == "tf32" and str(job.run.devices).startswith("cpu"):
        return (
            f"is 'tf32', which CUDA devices have, but run.devices is {job.run.devices!r}. Use fp32 or bf16."
        )
    return None


def _scale_is_kept(job: JobConfig) -> str | None:
    if job.training.reduce == "powersgd" and job.training.precision == "fp16":
        return (
            "is 'powersgd', which keeps gradients from step to step, but precision fp16 changes their scale between "
            "them. Use precision bf16 or fp32, or reduce = 'bf16'."
        )
    return None


def _workers_find_no_scale(job: JobConfig) -> str | None:
    servers, training = job.parameter_server, job.training
    is_asynchronous = training.strategy == "parameter_server" and servers.mode == "asynchronous"
    if is_asynchronous and training.precision == "fp16":
        return (
            "is 'fp16', whose loss scale follows what all ranks find together, and asynchronous workers find nothing "
            "together. Use bf16 or fp32, or parameter_server.mode='synchronous'."
        )
    return None


def _shares_run_at_once(job: JobConfig) -> str | None:
    training = job.training
    if not training.sync_batch_norm:
        return None
    if training.strategy not in SYNC_BATCH_NORM:
        return (
            "is true: a process would run its whole share of a step in one forward pass, which strategy "
            f"{training.strategy!r} does not. Use strategy 'ddp'."
        )
    if training.compile:
        return "is true, and training.compile cannot go through its exchanges. Use one of the two."
    return None


def _micro_batches_have_a_record(job: JobConfig) -> str | None:
    training = job.training
    if not training.record_micro_batches:
        return None
    if training.sync_batch_norm:
        return (
            "is true, but with sync_batch_norm a process computes its micro-batches in one pass, and none has a "
            "gradient of its own. Leave one of the two out."
        )
    if training.gradients_every == 0 or (training.gradients_every is None and not training.fingerprint_every):
        return "is true, but no step is recorded. Set gradients_every to 1 or more, or leave it out."
    return None


def _one_warm_up(job: JobConfig) -> str | None:
    schedule = job.schedule
    if isinstance(schedule, ScheduleConfig) and schedule.warmup_steps and schedule.warmup_epochs:
        return (
            f"is {schedule.warmup_steps} and warmup_epochs is {schedule.warmup_epochs}. Give one of the two."
        )
    return None


def _warm_up_ends(job: JobConfig) -> str | None:
    schedule, epochs = job.schedule, job.training.epochs
    if isinstance(schedule, ScheduleConfig) and schedule.warmup_epochs > epochs:
        return (
            f"is {schedule.warmup_epochs}, but the job has {epochs} epochs, so the warm-up would never end."
        )
    return None


def _schedule_counts_steps(job: JobConfig) -> str | None:
    if isinstance(job.schedule, Component) and job.schedule.target.endswith(":ReduceLROnPlateau"):
        return (
            "is ReduceLROnPlateau, which waits for a measurement, but schedules count optimizer steps. "
            "Use kind = 'cosine' or another torch scheduler."
        )
    return None


def _optimizer_gets_parameters(job: JobConfig) -> str | None:
    return "is given by the model; leave it out." if "params" in job.optimizer.args else None


def _early_stop_has_validation(job: JobConfig) -> str | None:
    if job.training.early_stop and job.data.validation is None:
        return f"is {job.training.early_stop}, but the job has no [data.validation] to judge by."
    return None


def _data_exists(job: JobConfig) -> str | None:
    if job.data.root and not Path(job.data.root).exists():
        return f"is '{job.data.root}', which does not exist. Give the folder of the data with --data DIR."
    return None


def _weights_exist(job: JobConfig) -> str | None:
    if job.weights.path and not Path(job.weights.path).is_file():
        return f"is '{job.weights.path}', which is not a file. Give a file of weights, or leave it out."
    return None


def _resume_exists(job: JobConfig) -> str | None:
    resume = job.checkpoint.resume
    if resume not in ("", "auto") and not Path(resume).exists():
        return f"is '{resume}', which does not exist. Give a run folder or a checkpoint in it, or 'auto'."
    return None


def _run_folder_is_free(job: JobConfig) -> str | None:
    folder = Path(job.run.directory).expanduser() / job.run.name
    if job.run.name and not job.checkpoint.resume and folder.exists():
        return f"is '{job.run.name}', and '{folder}' exists. Choose another name, or go on with --resume."
    return None


RULES = (
    Rule("global_batch is a multiple of micro_batches", ("training", "global_batch"), _batch_is_divisible),
    Rule("single uses one device", ("run", "devices"), layout_rules.single_has_one_device),
    Rule("every rank has a micro-batch", ("run", "devices"), layout_rules.ranks_have_micro_batches),
    Rule("a mesh fits the devices", ("training", "mesh"), layout_rules.mesh_fits),
    Rule("servers leave a worker", ("parameter_server", "servers"), layout_rules.servers_leave_a_worker),
    Rule("a reducer that is chosen is used", ("training", "reduce"), layout_rules.reducer_is_used),
    Rule(
        "fsdp shares out contiguous weights", ("training", "channels_last"), layout_rules.rows_are_contiguous
    ),
    Rule("what is offloaded comes from a GPU", ("fsdp", "cpu_offload"), layout_rules.offload_has_a_gpu),
    Rule("stages are gathered once", ("training", "mesh"), layout_rules.stages_are_gathered_once),
    Rule("a pipeline is filled", ("training", "micro_batches"), layout_rules.pipeline_is_filled),
    Rule("parts are stepped alone", ("optimizer", "target"), layout_rules.parts_are_stepped_alone),
    Rule("whole models are compiled", ("training", "compile"), layout_rules.compiled_models_are_whole),
    Rule("tf32 needs CUDA", ("training", "precision"), _tf32_is_not_on_cpu),
    Rule("powersgd keeps gradients of one scale", ("training", "reduce"), _scale_is_kept),
    Rule("asynchronous workers have no loss scale", ("training", "precision"), _workers_find_no_scale),
    Rule("SyncBatchNorm has whole shares", ("training", "sync_batch_norm"), _shares_run_at_once),
    Rule(
        "recorded micro-batches belong to recorded steps",
        ("training", "record_micro_batches"),
        _micro_batches_have_a_record,
    ),
    Rule("the warm-up is given once", ("schedule", "warmup_steps"), _one_warm_up),
    Rule("the warm-up ends before the run", ("schedule", "warmup_epochs"), _warm_up_ends),
    Rule("a schedule counts optimizer steps", ("schedule", "target"), _schedule_counts_steps),
    Rule(
        "the optimizer's parameters come from the model", ("optimizer", "params"), _optimizer_gets_parameters
    ),
    Rule("early stopping has something to judge by", ("training", "early_stop"), _early_stop_has_validation),
    Rule("the data exists", ("data", "root"), _data_exists),
    Rule("the weights exist", ("weights", "path"), _weights_exist),
    Rule("what is resumed exists", ("checkpoint", "resume"), _resume_exists),
    Rule("a run never writes over another", ("run", "name"), _run_folder_is_free),
)
