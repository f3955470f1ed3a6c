"""``lockstep train`` without a supervisor: ``--dry-run``, and one rank of a world of torchrun, SLURM or MPI.

    every rank      check the job -> process group -> receive the run folder -> train -> exit together
    rank 0          check the job -> process group -> choose the folder, send it -> train -> exit together

No supervisor is there to end the other ranks, so a rank that fails exits at once, with the exit status of its error,
and never waits in a destructor for ranks that will not come.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.cli.shared_options import print_origins
from lockstep.config.job import JobConfig
from lockstep.core.world import World
from lockstep.data import adopt
from lockstep.distributed.collectives import gather_json
from lockstep.distributed.process_group import open_process_group
from lockstep.errors import EXIT_DONE, EXIT_RANK, ConfigError, DataError, LockstepError
from lockstep.job.assemble import build_model, build_recipe, sample_plan
from lockstep.job.instantiate import importable_from, instantiate
from lockstep.job.run_folder import choose_run_folder, discard, planned_run_folder, run_folder
from lockstep.job.summary import Facts, describe
from lockstep.launch import EntryTarget
from lockstep.launch.rank_process import LAST_WRITE_SECONDS, end_process, run_target
from lockstep.models import freeze
from lockstep.runtime.control import Stopped
from lockstep.runtime.devices import collectives_for, gpu, has_gpus
from lockstep.runtime.lazy_compiler import postpone_compiler
from lockstep.runtime.output import say
from lockstep.runtime.parent_death import arm_future_children, tie_to_launcher
from lockstep.runtime.stop_signals import wait_for_critical_threads


def print_plan(config: JobConfig, devices: int, hosts: int) -> None:
    """Prints what the job would do on this many devices, without writing a file or starting a process."""
    print_origins(config)
    postpone_compiler()  # an optimizer is made, and not stepped
    importable_from(config.code)
    model, validation = build_model(config), config.data.validation
    held_out = None if validation is None else adopt(instantiate(validation, name="data.validation")).dataset
    plan = sample_plan(config, instantiate(config.data.train, name="data.train"), model)
    if config.weights.freeze:
        freeze(model, config.weights.freeze)
    build_recipe(config, model, plan.steps_per_epoch)
    facts = Facts(
        plan=plan,
        validation_samples=None if held_out is None else len(held_out),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        devices=devices,
        hosts=hosts,
    )
    sys.stdout.write(describe(config, facts, str(planned_run_folder(config))) + "\n")


def join(config: JobConfig, world: World, entry: str, proof: str, profile: str) -> None:
    """Trains the job in this process. Collective: every rank of the world must call this.

    Args:
        config: the checked job.
        world: this rank.
        entry: the import path of what a rank runs.
        proof: a command that gives the same result.
        profile: the steps of the timeline, as FIRST:COUNT; empty without one.
    """
    tie_to_launcher(world)
    arm_future_children()
    backend = collectives_for(gpu(0) if has_gpus() else torch.device("cpu"))
    folder: Path | None = None
    try:
        with open_process_group(world, backend=backend, timeout=config.run.timeout):
            config = agree_on_run_folder(config, world)
            folder = run_folder(config)
            payload = {"config": config.to_json(), "proof": proof, "profile": profile}
            run_target(EntryTarget(entry=entry, payload=payload))
    except Stopped as stop:
        end_process(int(stop.reason))
    except Exception as error:
        if folder is not None and world.is_main and isinstance(error, ConfigError | DataError):
            with suppress(OSError):
                discard(folder)
        _end(error, world)
    end_process(EXIT_DONE)


def agree_on_run_folder(config: JobConfig, world: World) -> JobConfig:
    """The job with the run folder that rank 0 chose; raises its ``ConfigError`` on every rank. Collective."""
    answer: dict[str, str] = {}
    if world.is_main:
        try:
            answer = {"config": choose_run_folder(config).to_json()}
        except ConfigError as error:
            answer = {"refused": str(error)}
    if world.world_size > 1:
        assert dist.group.WORLD is not None, "it is open"
        answer = gather_json(answer, dist.group.WORLD, torch.device("cpu"))[0]
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return JobConfig.from_json(answer["config"])


def _end(error: Exception, world: World) -> None:
    if isinstance(error, LockstepError):
        say(f"rank {world.rank}: {error}")
    else:
        traceback.print_exception(error)
    wait_for_critical_threads(LAST_WRITE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, LockstepError) else EXIT_RANK)
