"""``lockstep train`` as one rank of a world that torchrun, SLURM or MPI started.

    every rank      check the job -> process group -> learn the run folder -> train -> leave together
    rank 0          check the job -> process group -> choose the folder, tell the others -> train -> leave together

No supervisor is there to end the ranks, so a rank that fails ends at once, with the exit status of its error, and
never waits in a destructor for ranks that will not come.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import EXIT_DONE, EXIT_RANK, ConfigError, LockstepError
from lockstep.job.config import JobConfig
from lockstep.job.run_folder import choose_run_folder
from lockstep.launch import EntryTarget
from lockstep.launch.control import Stopped
from lockstep.launch.parent_death import arm_future_children, tie_to_launcher
from lockstep.launch.rank import end_process
from lockstep.launch.run_target import run_target
from lockstep.launch.unfinished import wait_for_unfinished
from lockstep.process_group import open_process_group
from lockstep.world import World

_LAST_WRITE_SECONDS = 2.5
"""For a checkpoint on its way when a rank fails."""


def join(config: JobConfig, world: World, entry: str, command: list[str], profile: str = "") -> None:
    """Trains the job in this process. Collective: every rank of the world must call this.

    Args:
        config: the checked job.
        world: who this process is.
        entry: import path of what a rank runs.
        command: the words that started the run.
        profile: the steps of the timeline, as FIRST:COUNT; none by default.
    """
    tie_to_launcher(world)
    arm_future_children()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        with open_process_group(world, backend=backend, timeout=config.run.timeout):
            config = agree_on_run_folder(config, world)
            payload = {"config": config.to_json(), "command": command, "profile": profile}
            run_target(EntryTarget(entry=entry, payload=payload))
    except Stopped as stop:
        end_process(int(stop.reason))
    except Exception as error:
        _end(error, world)
    end_process(EXIT_DONE)


def agree_on_run_folder(config: JobConfig, world: World) -> JobConfig:
    """The job with the run folder that rank 0 chose, or its refusal on every rank. Collective."""
    answer: dict[str, str] = {}
    if world.is_main:
        try:
            answer = {"config": choose_run_folder(config).to_json()}
        except ConfigError as error:
            answer = {"refused": str(error)}
    if world.world_size > 1:
        answer = _from_main(answer)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return JobConfig.from_json(answer["config"])


def _from_main(value: dict[str, str]) -> Any:
    """Rank 0's value on every rank, sent as JSON. Collective."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)])
    dist.broadcast(length, 0)
    if dist.get_rank() != 0:
        text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return json.loads(bytes(text.tolist()))


def _end(error: Exception, world: World) -> None:
    if isinstance(error, LockstepError):
        print(f"lockstep: rank {world.rank}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    wait_for_unfinished(_LAST_WRITE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, LockstepError) else EXIT_RANK)
