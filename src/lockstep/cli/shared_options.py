"""Options that several commands share: jobs, debugging a rank, several hosts, rendezvous and profile.

For each there is a function that declares the options, and functions that apply what was given.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.checks import file_path
from lockstep.config.components import origins
from lockstep.config.strategy_options import PRECISIONS, STRATEGIES
from lockstep.core.world import RENDEZVOUS, World, master_of_step
from lockstep.distributed.authentication import read_token
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import LaunchOptions
from lockstep.launch.debugger import DEFAULT_PORT, take_part_in_debugging, with_debugger
from lockstep.launch.hosts import HostOptions, Joined, join_hosts
from lockstep.launch.options import Devices
from lockstep.profile.trace import DEFAULT, ProfileWindow
from lockstep.runtime.output import say
from lockstep.runtime.stop_signals import stop_signals_raise
from lockstep.text import plural, printable

if TYPE_CHECKING:
    from lockstep.config.job import JobConfig


def add_options(parser: argparse._ActionsContainer, *options: tuple[str, str, Any, str]) -> None:
    """Declares options, each as (flag, name of its value, default, help), and arguments without a flag likewise.

    The value has the type of the default. In its place, a type stands for no default, ``False`` for a switch, and a
    list for an option that may be given several times. An argument without a flag may be left out unless a type
    stands there.
    """
    for flag, metavar, default, words in options:
        if default is False:
            parser.add_argument(flag, action="store_true", help=words)
        elif isinstance(default, list):
            parser.add_argument(flag, action="append", default=default, metavar=metavar, help=words)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, metavar=metavar, help=words)
        else:
            words += f" (default: {default})" if default != "" else ""
            more: Any = {} if flag.startswith("-") else {"nargs": "?"}
            parser.add_argument(flag, type=type(default), default=default, metavar=metavar, help=words, **more)


SET: tuple[str, str, Any, str] = (
    "--set",
    "KEY=VALUE",
    [],
    "any setting of the job, such as optimizer.lr=0.1; KEY=none removes it",
)


def require_files(arguments: argparse.Namespace, options: Iterable[str]) -> None:
    """Raises ``ConfigError`` for a file of these options that cannot be written, before any work is done for it."""
    for name in options:
        if not (given := getattr(arguments, name)):
            continue
        if problem := file_path(given):
            raise ConfigError(f"--{name} {problem}")
        path = Path(given)
        if not path.parent.is_dir():
            raise ConfigError(f"--{name} {given}: the folder {str(path.parent)!r} does not exist. Create it first.")
        if path.is_dir():
            raise ConfigError(f"--{name} {given} is a folder. Name a file in it.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--{name} {given} cannot be written. Choose a file in a folder that you can write to.")


def write_file(path: Path | str, content: str | bytes) -> None:
    """Writes a file that an option names; ``ConfigError`` where that cannot be done."""
    try:
        # Names that are not in the encoding of the locale, with the bytes that they have on the disk
        bare = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        Path(path).write_bytes(bare)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Choose a file in a folder that you can write to."
        ) from error


def write_files(arguments: argparse.Namespace, contents: Mapping[str, Callable[[], str | bytes]]) -> None:
    """Writes the files that options name, each with what a function makes for it; see ``write_file``."""
    for name, make in contents.items():
        if path := getattr(arguments, name):
            write_file(path, make())


_MOST_HOSTS = 65_536


def require_at_least(arguments: argparse.Namespace, least: int, *options: str, most: float = math.inf) -> None:
    """Raises ``ConfigError`` for a number of these options that was given and is too small, or too large."""
    for name in options:
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most:,}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, and must be {limit}.")


def require_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Raises ``ConfigError`` for a number of these options that was given and is below 1, or of more than there are."""
    require_at_least(arguments, 1, *options, most=_MOST_HOSTS)


def node_options(number: str) -> list[tuple[str, str, Any, str]]:
    """The options on the hosts of a cluster; ``number`` is the help of how many there are."""
    return [
        ("--nodes", "N", 1, number),
        ("--gpus-per-node", "N", 0, "GPUs of each host, one rank each; 0: ranks on CPUs"),
        ("--tasks-per-node", "N", int, "ranks of each host, on CPUs (default: 1)"),
        ("--cpus-per-task", "N", int, "cores of each rank (default: --threads)"),
    ]


def deliver(arguments: argparse.Namespace, text: str, words: Sequence[str], advice: str) -> int:
    """Writes a script or manifest to ``--output``, submits it, or prints it where neither was asked for.

    Args:
        arguments: of the cluster's command.
        text: the script or manifest.
        words: submit what they read from standard input.
        advice: what to do with the file, whose name replaces ``{}``.

    Raises:
        ConfigError: the file cannot be written, or the words' program is not installed here or refuses the text.
    """
    if path := arguments.output:
        write_file(path, text)
        if text.startswith("#!"):
            Path(path).chmod(0o755)
        print(f"Wrote {path}. {advice.format(path)}")
    if arguments.submit:
        program = shutil.which(words[0])
        if program is None:
            raise ConfigError(
                f"{words[0]} was not found on this host. Write a file with --output FILE and submit it on another."
            )
        done = subprocess.run([program, *words[1:]], input=text, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{words[0]} refused the job: {done.stderr.strip()}")
        print(done.stdout.strip())
    elif not path:
        print(text, end="")
    return EXIT_DONE


SHORTCUTS = {
    "data": ("data.root", "DIR", "folder of the data, {data} in a job file"),
    "devices": ("run.devices", "N", "N, auto, cpu, cpu:N or a list such as 0,5"),
    "strategy": ("training.strategy", "NAME", ", ".join(STRATEGIES)),
    "mesh": ("training.mesh", "AXES", "axes of the strategy hybrid, such as data=2,pipeline=2"),
    "precision": ("training.precision", "NAME", ", ".join(PRECISIONS)),
    "epochs": ("training.epochs", "N", "number of passes over the data"),
    "threads": ("run.threads", "N", "CPU threads of each rank (part of the recipe)"),
    "resume": ("checkpoint.resume", "PATH", "run folder or checkpoint to resume from; auto: the latest run"),
    "restarts": ("run.restarts", "N", "restarts after a lost process (default: 3)"),
    "restart-world": ("run.restart_world", "same|remaining", "devices of a restart (default: same)"),
}
"""Options that are short for a setting: the setting, what they take, and their help."""


def shortcut(name: str) -> tuple[str, str, Any, str]:
    """The option that is short for a setting, for ``add_options``."""
    _, metavar, words = SHORTCUTS[name]
    return f"--{name}", metavar, str, words


def add_train_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Declares ``--set`` and options that are short for a setting, for a command that takes a job."""
    add_options(parser, *map(shortcut, names), SET)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the debugged rank, several hosts, and ``--profile``: the steps as FIRST:COUNT, empty for none."""
    rank = "rank R waits for a debugger before it starts; the others wait for it without a time limit"
    port = "its port on 127.0.0.1; 0: any free port"
    add_options(parser, ("--debug-rank", "R", int, rank), ("--debug-port", "PORT", DEFAULT_PORT, port))
    add_host_arguments(parser)
    parser.add_argument(
        "--profile",
        type=_window,
        nargs="?",
        const=DEFAULT,
        default="",
        metavar="FIRST:COUNT",
        help=f"record what each rank does in COUNT steps from FIRST on, in timeline.json ({DEFAULT} without a value)",
    )


def _window(text: str) -> str:
    if text:
        ProfileWindow.parse(text)
    return text


def with_debug_arguments(options: LaunchOptions, arguments: argparse.Namespace, joined: Joined | None) -> LaunchOptions:
    """The options of this host, with the debugger that was asked for. Raises ``ConfigError`` where it cannot start."""
    if arguments.debug_rank is None:
        return options
    layout = joined.layout if joined else None
    return with_debugger(options, arguments.debug_rank, arguments.debug_port, layout)


def debug_setting(arguments: argparse.Namespace) -> tuple[str, str]:
    """A setting that must be equal on all hosts, as name and value: each must know that it waits."""
    return "debug-rank", "none" if arguments.debug_rank is None else str(arguments.debug_rank)


def debugged(world: World, arguments: argparse.Namespace) -> World:
    """Waits for the debugger if this rank of another launcher's world is to be debugged; returns the world."""
    if arguments.debug_rank is None:
        return world
    return take_part_in_debugging(world, arguments.debug_rank, arguments.debug_port)


SLURM = "slurm"
"""The launcher, and the value of ``--nnodes`` that makes its tasks supervisors."""
_RENDEZVOUS = re.compile(r"env://|tcp://.+:\d{1,5}|file:///.+")
_COMPARED_PACKAGES = ("lockstep-train", "torch", "numpy")


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options for several hosts, and ``--rendezvous``."""
    hosts = parser.add_argument_group("several hosts", "the same command on each, with its own --node-rank")
    hosts.add_argument(
        "--nnodes",
        type=_number_of_hosts,
        metavar="N",
        help="number of hosts (default: 1); slurm: the nodes of this SLURM step, which has one task on each",
    )
    secret = "the hosts' secret (default: LOCKSTEP_TOKEN, else lockstep/token in ~/.config)"
    add_options(
        hosts,
        ("--node-rank", "I", int, "number of this host, from 0"),
        ("--master", "HOST:PORT", str, "of the host of node-rank 0; it uses PORT and PORT+1"),
        ("--interface", "NAME", "", "network interface for the data (default: the route to --master)"),
        ("--token-file", "FILE", "", secret),
        ("--start-limit", "SECONDS", 60.0, "time limit for all hosts to connect"),
    )
    parser.set_defaults(shares_terminal=False)
    words = "how ranks of torchrun, SLURM or MPI connect: env://, tcp://HOST:PORT of rank 0, or file:///PATH"
    add_options(parser, ("--rendezvous", "PLACE", "", words))


def _number_of_hosts(text: str) -> int | str:
    if text != SLURM and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of hosts nor '{SLURM}'")
    if text != SLURM and len(text) > len(str(_MOST_HOSTS)):
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_HOSTS:,} hosts")
    return text if text == SLURM else int(text)


def take_nodes(arguments: argparse.Namespace, world: World) -> World:
    """Replaces ``--nnodes slurm`` by the numbers of the SLURM step, whose tasks start the ranks of their nodes.

    Where no host option was given, takes torchrun's variables (``PET_NNODES`` ...), which Kubeflow sets in each pod.

    Returns the world: with ``--nnodes slurm``, that of a process that no launcher started as a rank.

    Raises:
        ConfigError: this process is not the only task of its node in a SLURM step, or a variable is not valid.
    """
    if world.launcher == "python":
        _take_variables_of_torchrun(arguments, os.environ)
    if arguments.nnodes != SLURM:
        return world
    if world.launcher != SLURM:
        raise ConfigError(
            "--nnodes slurm was given, and this process is not a task of a SLURM step. Start it in a job with "
            "'srun --ntasks-per-node=1', or give the number of hosts."
        )
    if world.world_size != world.nodes or world.local_world_size > 1:
        raise ConfigError(
            f"--nnodes slurm was given, and this step has {plural(world.world_size, 'task')} on "
            f"{plural(world.nodes, 'node')}. Start one task on each node, which starts the ranks of the node: "
            "'srun --ntasks-per-node=1', with the number of ranks in --devices."
        )
    if arguments.node_rank is not None:
        raise ConfigError(f"--node-rank {arguments.node_rank} was given; leave it out, because SLURM sets it.")
    arguments.nnodes, arguments.shares_terminal = world.nodes, True
    if world.nodes > 1:
        arguments.node_rank = world.node
        arguments.master = arguments.master or master_of_step(os.environ)
    return World()


def _take_variables_of_torchrun(arguments: argparse.Namespace, variables: Mapping[str, str]) -> None:
    """Takes torchrun's variables as the defaults of the options for several hosts and of ``--devices``."""
    given = (arguments.nnodes, arguments.node_rank, arguments.master)
    nodes = variables.get("PET_NNODES", "1")
    if nodes == "1" or any(each is not None for each in given):
        return
    if not nodes.isdecimal():
        raise ConfigError(
            f"PET_NNODES is {nodes!r}, and a run of Lockstep starts on a fixed number of hosts. Set it to a number, or "
            "give --nnodes, --node-rank and --master."
        )
    absent = [name for name in ("PET_NODE_RANK", "PET_MASTER_ADDR") if not variables.get(name)]
    if absent or not variables["PET_NODE_RANK"].isdecimal():
        raise ConfigError(
            f"PET_NNODES is {nodes}, and {' and '.join(absent) or 'PET_NODE_RANK'} should be set to "
            f"{'values' if len(absent) > 1 else 'a value'} too, as Kubeflow does. Set them, or give --nnodes, "
            "--node-rank and --master."
        )
    address, port = variables["PET_MASTER_ADDR"], variables.get("PET_MASTER_PORT", "29500")
    with stop_signals_raise():
        _wait_for_name(address, arguments.start_limit)
    arguments.nnodes, arguments.node_rank = int(nodes), int(variables["PET_NODE_RANK"])
    arguments.master = f"{address}:{port}"
    if arguments.devices in (None, "auto") and variables.get("PET_NPROC_PER_NODE", "").isdecimal():
        arguments.devices = variables["PET_NPROC_PER_NODE"]


def _wait_for_name(host: str, seconds: float) -> None:
    """Waits until a host's name is known: that of a pod is, soon after the pod was started."""
    deadline, told = time.monotonic() + seconds, False
    while True:
        with suppress(OSError):
            socket.getaddrinfo(host, None)
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"PET_MASTER_ADDR is {host!r}, a name that is not known after {seconds:g} s. Give the address of the "
                "first host, or a longer --start-limit."
            )
        if not told:
            say(f"waiting for the name {host} to be known")
            told = True
        time.sleep(_NAME_INTERVAL)


_NAME_INTERVAL = 0.5
"""Seconds between two questions to the name service."""


def take_rendezvous(arguments: argparse.Namespace, world: World) -> World:
    """The world with the rendezvous that was asked for, which is set in the environment too.

    Raises:
        ConfigError: it is invalid, or no other launcher started this process as a rank.
    """
    asked = arguments.rendezvous
    if not asked:
        return world
    if world.launcher == "python":
        raise ConfigError(
            f"--rendezvous {asked} was given, but this process was not started as a rank. Start the ranks with "
            "torchrun, SLURM or MPI, or leave it out: Lockstep's own launcher connects its ranks by itself."
        )
    if not _RENDEZVOUS.fullmatch(asked):
        raise ConfigError(f"--rendezvous {asked!r} is not valid. Use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH.")
    os.environ[RENDEZVOUS] = asked
    return dataclasses.replace(world, rendezvous=asked)


def host_options(arguments: argparse.Namespace) -> HostOptions | None:
    """The options of several hosts, or None for one host.

    Raises:
        ConfigError: an option is missing or does not fit, or there is no token.
    """
    given = {
        "--node-rank": arguments.node_rank is not None,
        "--master": arguments.master is not None,
        "--interface": bool(arguments.interface),
        "--token-file": bool(arguments.token_file),
    }
    if arguments.nnodes in (None, 1):
        if alone := [option for option, is_given in given.items() if is_given and arguments.nnodes is None]:
            raise ConfigError(f"{alone[0]} was given without --nnodes. Add the number of hosts: --nnodes N.")
        return None
    absent = [option for option in ("--node-rank", "--master") if not given[option]]
    if absent:
        raise ConfigError(
            f"--nnodes {arguments.nnodes} was given without {' and '.join(absent)}. Start on host I of N "
            "with: --nnodes N --node-rank I --master HOST_OF_0:PORT."
        )
    return HostOptions(
        nodes=arguments.nnodes,
        node=arguments.node_rank,
        master=arguments.master,
        interface=arguments.interface,
        start_limit=arguments.start_limit,
        shares_terminal=arguments.shares_terminal,
        token=read_token(arguments.token_file, os.environ),
    )


def refuse_hosts(arguments: argparse.Namespace, launcher: str) -> None:
    """Raises ``ConfigError`` if ``--nnodes`` was given to a rank of another launcher."""
    if arguments.nnodes is not None:
        raise ConfigError(
            f"--nnodes {arguments.nnodes} was given to a rank that {launcher} started, which sets the number of hosts. "
            f"Leave it out, {'give --nnodes slurm to one task on each node, ' if launcher == SLURM else ''}or start "
            f"without {launcher}."
        )


@contextmanager
def joined_hosts(
    arguments: argparse.Namespace,
    devices: Devices,
    settings: Sequence[tuple[str, str]] = (),
    decide: Callable[[int], Any] = lambda world_size: None,
) -> Iterator[Joined | None]:
    """Connects this host with the others that were asked for; None without any. Every host must call this.

    Args:
        arguments: the command line.
        devices: of this host.
        settings: names and values that must be equal on all hosts, beside those of ``common_settings``.
        decide: see ``join_hosts``.
    """
    hosts = host_options(arguments)
    if hosts is None:
        yield None
        return
    common = common_settings(devices.kind, settings)
    with (
        stop_signals_raise(),
        join_hosts(hosts, ranks=devices.count, settings=common, decide=decide) as joined,
    ):
        yield joined


def common_settings(kind: str, more: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Settings that must be equal on every host: versions, the kind of device, and ``more`` names and values."""
    settings = {"python": ".".join(platform.python_version_tuple()[:2]), "devices": kind}
    for package in _COMPARED_PACKAGES:
        try:
            settings[package] = version(package)
        except PackageNotFoundError:
            settings[package] = "not installed"
    return {**settings, **dict(more)}


def print_origins(job: JobConfig) -> None:
    """Prints, to stderr, from where the job's own modules are imported: that code runs as the user."""
    for line in origins(job.components(), [*job.code, str(Path.cwd())]):
        print(printable(f"imports: {line}"), file=sys.stderr, flush=True)
