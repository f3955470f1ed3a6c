"""``lockstep run``: starts a script on every device of one or several hosts, or joins another launcher's world."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from lockstep.cli.shared_options import (
    add_launch_arguments,
    add_options,
    debug_setting,
    debugged,
    joined_hosts,
    refuse_hosts,
    take_nodes,
    take_rendezvous,
    with_debug_arguments,
)
from lockstep.core.world import PROFILE, World, make_environment_portable, threads_of_environment
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from lockstep.launch import LaunchOptions, ScriptTarget, parse_devices, supervise
from lockstep.launch.options import RESTART_WORLDS
from lockstep.launch.rank_process import end_process, run_script
from lockstep.runtime.parent_death import arm_future_children, tie_to_launcher

_PRELOAD = {
    "lockstep": "lockstep.run",
    "DistributedDataParallel": "torch._dynamo",
    "torch.compile": "torch._dynamo",
}
"""Modules that every rank of a script with this word imports; the fork server imports them once instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments; all that follow the script belong to the script."""
    add_options(
        parser,
        ("--devices", "N", "auto", "N, auto, cpu, cpu:N or a list such as 0,5"),
        ("--threads", "N", int, "intra-op threads per rank (default: OMP_NUM_THREADS, else 1)"),
        ("--portable", "", False, "the same bits on every x86-64 CPU with AVX2"),
        ("--logs", "DIR", "", "folder for the output and the errors of the ranks (default: a temporary one)"),
        ("--grace", "SECONDS", 25.0, "time to save and exit after SIGTERM or SIGUSR1"),
        ("--stall-limit", "SECONDS", 60.0, "time without progress until a hanging run is ended; 0: never"),
        ("--restarts", "N", 0, "restarts after a lost process, for a script that saves into a run folder"),
    )
    parser.add_argument(
        "--restart-world",
        choices=(*RESTART_WORLDS, "left"),
        metavar="same|remaining",
        default="same",
        help="restart on the same devices, or on those whose ranks were not lost (default: same)",
    )
    add_launch_arguments(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python script")
    rest = "all that follows is for the script"
    more = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help=rest)
    more.required = False  # or a command without a script would ask for both


def main(arguments: argparse.Namespace) -> int:
    """Runs the script and returns the exit status. Raises ``ConfigError`` before anything is started."""
    local_rank = getattr(arguments, "local_rank", None)  # torch.distributed.launch means it for the script
    words = arguments.arguments if local_rank is None else [f"--local-rank={local_rank}", *arguments.arguments]
    target = ScriptTarget.from_words([*(["-m"] if arguments.module else []), arguments.script, *words])
    world = take_rendezvous(arguments, take_nodes(arguments, World.from_environment()))
    if world.launcher != "python":
        refuse_hosts(arguments, world.launcher)
        return _join(target, world, arguments)
    text = Path(target.path).read_text(errors="replace")
    options = LaunchOptions(
        devices=parse_devices(arguments.devices),
        threads=arguments.threads,
        portable=arguments.portable,
        preload=tuple(sorted({module for word, module in _PRELOAD.items() if word in text})),
        log_directory=arguments.logs,
        grace=arguments.grace,
        stall_limit=arguments.stall_limit,
        restarts=arguments.restarts,
        restart_world=arguments.restart_world,
        profile=arguments.profile,
    )
    code = text.split('"""', 2)[-1] if text.lstrip().startswith('"""') else text  # a docstring shows commands
    _warn_of_misplaced(target, code.replace("_", "-"))
    settings = [*_of_script(target, options), debug_setting(arguments)]
    with joined_hosts(arguments, options.devices, settings) as joined:
        return supervise(target, with_debug_arguments(options, arguments, joined), joined)


def _warn_of_misplaced(target: ScriptTarget, text: str) -> None:
    """Warns of options of this command that come after the script, if the script does not mention them."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    known = parser._option_string_actions
    for word in target.arguments:
        option = word.partition("=")[0]
        if option in known and option.startswith("--") and option.lstrip("-") not in text:
            print(
                f"{option} comes after {target.path}, so it is passed to the script, which does not mention it. "
                f"Options of lockstep run go before the script: lockstep run {option} ... {target.path}",
                file=sys.stderr,
            )


def _of_script(target: ScriptTarget, options: LaunchOptions) -> list[tuple[str, str]]:
    """The settings that must be equal on every host, wherever the script is stored there."""
    digest = hashlib.sha256(Path(target.path).read_bytes()).hexdigest()[:12]
    return [
        (f"{Path(target.path).name} (sha256)", digest),
        ("the script's arguments", shlex.join(target.arguments) or "none"),
        ("threads", str(options.threads or threads_of_environment(os.environ))),
        ("portable", str(options.portable)),
        ("restarts", str(options.restarts)),
        ("profile", options.profile or "none"),
    ]


def _join(target: ScriptTarget, world: World, arguments: argparse.Namespace) -> NoReturn:
    """Runs the script in this process, which torchrun, SLURM or MPI started as a rank."""
    tie_to_launcher(world)
    arm_future_children()
    world = debugged(world, arguments)
    if arguments.portable:
        make_environment_portable()
    if arguments.profile:
        os.environ[PROFILE] = arguments.profile
    if arguments.rendezvous:
        from lockstep.distributed.rendezvous import register_env_rendezvous

        register_env_rendezvous(world)
    try:
        run_script(target)
    except SystemExit as ending:
        if ending.code not in (None, EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
            _end_at_once(ending)
        end_process(int(ending.code or EXIT_DONE))
    end_process(EXIT_DONE)


def _end_at_once(ending: SystemExit) -> NoReturn:
    """Exits a rank that failed, before anything at exit can wait for the other ranks."""
    is_number = isinstance(ending.code, int)
    if not is_number:
        print(ending.code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(ending.code or 0) & 0xFF if is_number else 1)
