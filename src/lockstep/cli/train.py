"""``lockstep train``: checks a job and starts its ranks, or joins the world of another launcher.

``verify``, ``scale`` and ``slurm`` take a job with the same options; what they share with ``train`` is here too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import (
    SHORTCUTS,
    add_launch_arguments,
    add_options,
    add_train_options,
    debug_setting,
    debugged,
    joined_hosts,
    refuse_hosts,
    take_nodes,
    take_rendezvous,
    with_debug_arguments,
)
from lockstep.config.checks import refuse
from lockstep.config.job import JobConfig
from lockstep.config.job_file import Override, built_in_jobs, find_job, load_job, parse_set, toml_value
from lockstep.config.rules import data_parallel_holders, machine_problems
from lockstep.config.strategy_options import ONE_PROCESS, STRATEGIES, devices_per_process
from lockstep.core.world import World, make_environment_portable
from lockstep.errors import EXIT_CONFIG, EXIT_DATA, EXIT_DONE, ConfigError, nearest
from lockstep.job.run_folder import RANKS, choose_run_folder, discard, locked, run_folder
from lockstep.launch import Devices, EntryTarget, LaunchOptions, parse_devices, supervise
from lockstep.launch.hosts import Joined
from lockstep.launch.options import visible_gpus
from lockstep.profile import trace
from lockstep.runtime.output import say
from lockstep.runtime.parent_death import tie_to_launcher
from lockstep.text import comma_separated, plural, shorten

ENTRY = "lockstep.job.rank:main"

_OF_HOST = ("run.devices",)
"""Settings that may differ between hosts."""
_OF_PLACE = (("run", "name"), ("checkpoint", "resume"), ("training", "mesh"))
"""Settings of one run or layout, which another one with the same result cannot have."""
_NUMBERS = ("devices", "epochs", "threads", "restarts")
"""Options whose value may be a number; those of others are texts."""


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        ("job", "JOB", "digits", f"a TOML file, a folder of images, or one of: {', '.join(built_in_jobs())}"),
    )
    add_train_options(parser, *SHORTCUTS)
    add_options(
        parser,
        ("--per-device-batch", "N", int, "global batch = N times the data-parallel replicas: part of the recipe"),
        ("--portable", "", False, "the same bits on every x86-64 CPU with AVX2"),
    )
    add_launch_arguments(parser)
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="train on the workers of a Ray cluster, --devices N or 1-N of them; without ADDRESS on a new one here",
    )
    add_options(parser, ("--dry-run", "", False, "print what would run, and exit"))


def main(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit status."""
    if arguments.ray is not None:
        return _train_on_ray(arguments)
    world = take_rendezvous(arguments, take_nodes(arguments, World.from_environment()))
    is_one_command = world.launcher == "python" and arguments.nnodes in (None, 1)
    config = load_job(arguments.job, overrides(arguments), devices_are_all=is_one_command)
    if Path(arguments.job).is_dir() and world.is_main:
        from lockstep.config.starter import look_at

        for line in look_at(Path(arguments.job), "images").remarks:
            say(f"{line}.")
        if changed := [text for text in arguments.set if text.startswith(("data.", "model.", "weights."))]:
            say(f"--set changes that: {shorten(changed, 5)}.")
        say(f"To change this: lockstep new {shlex.quote(arguments.job)} writes it as a job file and a script.")
    if world.launcher != "python" and not arguments.dry_run:
        refuse_hosts(arguments, world.launcher)
        count = world.world_size * devices_per_process(config.training.mesh)
        config = with_batch_per_device(config, arguments, count, shown=world.is_main)
        refuse(machine_problems(config, count))
        if config.training.portable:
            make_environment_portable()
        from lockstep.cli.in_process import join

        tie_to_launcher(world)
        kind = "cuda" if visible_gpus() else "cpu"
        same = proof(config, arguments, world.world_size, kind)
        join(config, debugged(world, arguments), ENTRY, same, arguments.profile)
        return EXIT_DONE
    hosts = arguments.nnodes or 1
    devices = resolve_devices(config, hosts=hosts)
    if hosts == 1:
        config = _laid_out(config, arguments, devices, len(devices.names))
    elif arguments.dry_run:  # the other hosts are unknown, and taken for equal
        config = with_batch_per_device(config, arguments, len(devices.names) * hosts)
    if arguments.dry_run:
        from lockstep.cli.in_process import print_plan

        print_plan(config, len(devices.names) * hosts, hosts)
        return EXIT_DONE
    return _supervise(config, devices, arguments)


def overrides(arguments: argparse.Namespace) -> list[Override]:
    """The settings that the options override; ``--set`` comes first, so that a named option wins."""
    found = [parse_set(text) for text in arguments.set]
    for option, (setting, *_) in SHORTCUTS.items():
        text = getattr(arguments, option.replace("-", "_"), None)
        if text is not None:
            value = toml_value(text) if option in _NUMBERS else text
            found.append(Override(path=tuple(setting.split(".")), value=value, origin=f"--{option} {text}"))
    if getattr(arguments, "portable", False):
        found.append(Override(path=("training", "portable"), value=True, origin="--portable"))
    return found


_WORKERS = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")
_NOT_ON_RAY = (
    *("nnodes", "node_rank", "master", "debug_rank"),
    *("rendezvous", "profile", "per_device_batch", "restart_world"),
)


def _train_on_ray(arguments: argparse.Namespace) -> int:
    if given := [name for name in _NOT_ON_RAY if getattr(arguments, name)]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} was given with --ray, which has none. Leave one of the two out."
        )
    asked, arguments.devices = arguments.devices, None
    config = load_job(arguments.job, overrides(arguments), devices_are_all=False, is_here=not arguments.ray)
    found = _WORKERS.fullmatch(asked or str(config.run.devices))
    if found is None:
        raise ConfigError(
            f"--devices {asked or config.run.devices} was given with --ray. Give a number of workers, such as 4, or "
            "the fewest and the most, such as 1-8."
        )
    workers = int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))
    refuse(machine_problems(config, int(found[2] or found[1]), is_here=not arguments.ray))
    storage, name = config.run.directory if "://" in config.run.directory else "", config.run.name
    if storage and not name:
        raise ConfigError(f"run.directory is {config.run.directory}. Give the run a name: --set run.name=NAME.")
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--ray was given, and the package ray is not installed. Install it: pip install 'lockstep-train[ray]'"
        )
    if not storage:
        config = choose_run_folder(config)
        storage, name = str(run_folder(config).resolve().parent), config.run.name
    from lockstep.integrations.ray import train_on_cluster  # imports Ray

    print(train_on_cluster(config, arguments.ray, workers, storage, name), flush=True)
    return EXIT_DONE


def _laid_out(config: JobConfig, arguments: argparse.Namespace, devices: Devices, count: int) -> JobConfig:
    """The job on ``count`` devices, like these, of all hosts. Raises ``ConfigError`` where they do not fit."""
    config = with_devices_of_process(with_batch_per_device(config, arguments, count), devices)
    refuse(machine_problems(config, count, devices.kind))
    return config


def resolve_devices(config: JobConfig, *, hosts: int = 1) -> Devices:
    """The devices of this host for the job. Raises ``ConfigError`` where the job and the machine do not fit.

    How many devices several hosts have together is known, and checked, when all have connected.
    """
    devices = parse_devices(config.run.devices)
    if config.training.strategy == "single" and config.run.devices in ("auto", "cpu"):
        devices = dataclasses.replace(devices, names=devices.names[:1])
    if hosts > 1 and (config.training.strategy in ONE_PROCESS or config.training.strategy == "single"):
        raise ConfigError(
            f"{hosts} hosts were asked for, and the strategy {config.training.strategy!r} is one process. "
            "Use ddp, fsdp or another strategy of several processes."
        )
    refuse(machine_problems(config, devices.count if hosts == 1 else None, devices.kind))
    return dataclasses.replace(devices, per_rank=_devices_per_rank(config, devices))


def with_batch_per_device(
    config: JobConfig, arguments: argparse.Namespace, count: int, *, shown: bool = True
) -> JobConfig:
    """The job with the global batch of ``--per-device-batch`` on ``count`` devices, which is printed if ``shown``."""
    each = arguments.per_device_batch
    if each is None:
        return config
    if each < 1:
        raise ConfigError(f"--per-device-batch is {each}, and must be at least 1.")
    holders = data_parallel_holders(config.settings, count)
    batch, rate = each * holders, config.optimizer.args.get("lr")
    if shown:
        shares = plural(holders, "device" if holders == count else "data-parallel replica")
        words = f"{shares} x {plural(each, 'sample')} = training.global_batch {batch}"
        if isinstance(rate, int | float):
            words += (
                f"; optimizer.lr stays {rate:g}, where a script with lr *= world_size has {rate * holders:g}. The same "
                f"on any number of devices: --set training.global_batch={batch} --set optimizer.lr={rate:g}"
            )
        say(f"{words}.")
    return dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch=batch))


def with_devices_of_process(config: JobConfig, devices: Devices) -> JobConfig:
    """The job, with the number of devices for a strategy that trains in one process."""
    name = config.training.strategy
    option = ONE_PROCESS.get(name)
    if option is None:
        return config
    options = getattr(config, name)
    count = getattr(options, option) or devices.per_rank
    return dataclasses.replace(config, **{name: dataclasses.replace(options, **{option: count})})


def _devices_per_rank(config: JobConfig, devices: Devices) -> int:
    if config.training.strategy in ONE_PROCESS:
        return devices.count
    layers = devices_per_process(config.training.mesh)
    if devices.count % layers:
        raise ConfigError(
            f"The mesh {config.training.mesh} gives each process {layers} devices, and there are {devices.count}. "
            f"Use a multiple of {layers}."
        )
    return layers


def _supervise(config: JobConfig, devices: Devices, arguments: argparse.Namespace) -> int:
    """Starts the ranks of this host, together with those of other hosts if there are any, and waits for them."""
    options = LaunchOptions(
        devices=devices,
        threads=config.run.threads,
        portable=bool(config.training.portable),
        grace=config.run.grace,
        stall_limit=config.run.stall_limit,
        restarts=config.run.restarts,
        restart_world=config.run.restart_world,
        fits=lambda ranks: not machine_problems(config, ranks * devices.per_rank, devices.kind),
    )

    def decide(world_size: int) -> str:
        laid_out = _laid_out(config, arguments, devices, world_size * devices.per_rank)
        return choose_run_folder(laid_out).to_json()

    batch = ("per-device-batch", str(arguments.per_device_batch))
    settings = [*_of_job(config), debug_setting(arguments), batch]
    with joined_hosts(arguments, devices, settings, decide) as joined:
        options = with_debug_arguments(options, arguments, joined)
        ranks = devices.count if joined is None else joined.layout.world_size
        placed = choose_run_folder(config) if joined is None else JobConfig.from_json(joined.shared)
        same = proof(dataclasses.replace(config, training=placed.training), arguments, ranks, devices.kind)
        return _start(placed, options, same, arguments.profile, joined)


def _start(config: JobConfig, options: LaunchOptions, same: str, profile: str, joined: Joined | None) -> int:
    """Trains into the run's folder, which this host or node 0 locks against other runs."""
    folder = run_folder(config)
    options = dataclasses.replace(options, log_directory=str(folder / RANKS))
    if profile:
        trace.begin(folder)  # raises before any rank is started
    payload = {"config": config.to_json(), "proof": same, "profile": profile}
    target = EntryTarget(entry=ENTRY, payload=payload)
    if joined is not None and joined.node:
        return supervise(target, options, joined)
    with locked(folder):
        code = supervise(target, options, joined)
        if code in (EXIT_CONFIG, EXIT_DATA):
            with suppress(OSError):  # it then stays, with its logs
                if logs := discard(folder):
                    say(f"no run has begun, so {folder} was removed. Its logs are now in {logs}.")
        return code


def command_of(arguments: argparse.Namespace, settings: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words of ``lockstep train`` with these settings, and those of the named options that were given."""
    words = ["lockstep", "train", arguments.job]
    for text in settings:
        words += ["--set", text]
    for option in options:
        if getattr(arguments, option) is not None:
            words += [f"--{option}", getattr(arguments, option)]
    return words


OPTIONS_OF_NODES = ("data", "strategy", "mesh", "precision", "epochs", "threads")
"""Those of ``train`` that a cluster's command takes."""
_REPORT_SECONDS = 10
"""The ranks must have saved so long before the limit: then they are ended, and the report is written."""


def job_of_nodes(arguments: argparse.Namespace, *, is_here: bool = True) -> tuple[JobConfig, int, int]:
    """The job of a cluster's command, the ranks of each node, and the cores that these need.

    Raises:
        ConfigError: the job and the nodes do not fit; ``is_here`` is as in ``AvailableDevices``.
    """
    ranks = arguments.tasks_per_node or arguments.gpus_per_node or 1
    config = load_job(arguments.job, overrides(arguments), devices_are_all=False, is_here=is_here)
    refuse(machine_problems(config, arguments.nodes * ranks, is_here=is_here))
    return config, ranks, ranks * (arguments.cpus_per_task or config.run.threads or 1)


def command_of_node(arguments: argparse.Namespace, ranks: int, seconds: int) -> list[str]:
    """The words of ``lockstep train`` on one node of a cluster, which has ``--gpus-per-node``.

    Of GPUs each is named, so that none is replaced by a process on the CPU.

    Args:
        arguments: of the command that writes a script or manifest.
        ranks: of the node.
        seconds: from the request to stop until the node is taken away.
    """
    gpus = ",".join(map(str, range(ranks))) + ("," if ranks == 1 else "")
    devices = gpus if arguments.gpus_per_node else f"cpu:{ranks}"
    grace = f"run.grace={max(seconds - _REPORT_SECONDS, seconds // 2)}"
    return [*command_of(arguments, [grace, *arguments.set], OPTIONS_OF_NODES), "--devices", devices]


def proof(config: JobConfig, arguments: argparse.Namespace, ranks: int, kind: str) -> str:
    """The command, as it stands, that trains the same recipe in another layout on this host.

    Args:
        config: the job, before its run folder is chosen.
        arguments: those of the command that trains it.
        ranks: processes of the run.
        kind: ``cpu`` or ``cuda``.
    """
    strategy, count = "single" if config.training.strategy not in ("single", "ddp") else "ddp", 1
    if ranks == 1 and strategy == "ddp":
        two = dataclasses.replace(
            config,
            training=dataclasses.replace(config.training, strategy="ddp", mesh=""),
            run=dataclasses.replace(config.run, name=""),  # whose folder is made by now
        )
        fits = (kind == "cpu" or len(visible_gpus()) > 1) and not machine_problems(two, 2, kind)
        strategy, count = ("ddp", 2) if fits else ("single", 1)
    in_file = tomllib.loads(find_job(arguments.job).text)
    settings = [text for text in arguments.set if parse_set(text).path not in _OF_PLACE]
    settings += [f"{section}.{name}=" for section, name in _OF_PLACE if in_file.get(section, {}).get(name)]
    if arguments.per_device_batch is not None:
        settings.append(f"training.global_batch={config.training.global_batch}")
    words = command_of(arguments, settings, ("data", "precision", "epochs", "threads"))
    words += ["--portable"] if arguments.portable else []
    devices = f"cpu:{count}" if kind == "cpu" else f"{count}"
    return shlex.join([*words, "--strategy", strategy, "--devices", devices])


def _of_job(config: JobConfig) -> list[tuple[str, str]]:
    """Every setting of the job that must be equal on all hosts, by its name in the job file."""
    found = []
    for name, value in json.loads(config.to_json()).items():
        settings = value.items() if isinstance(value, dict) else [("", value)]
        found += [(".".join(filter(None, (name, key))), json.dumps(each)) for key, each in settings]
    return [(name, text) for name, text in found if name not in _OF_HOST]


def device_counts(text: str) -> list[int]:
    """Parses ``--devices 1,2,4``; empty if it was not given. Raises ``ConfigError`` for anything else."""
    words = comma_separated(text)
    if any(not word.isdecimal() or int(word) < 1 for word in words):
        raise ConfigError(f"--devices {text!r} is not a list of numbers from 1 on. Use for example --devices 1,2,4.")
    return [int(word) for word in words]


def strategy_names(text: str) -> list[str]:
    """Parses ``--strategies ddp,fsdp``; empty if it was not given. Raises ``ConfigError`` for an unknown one."""
    names = comma_separated(text)
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"strategy {name!r} is not known.{nearest(name, STRATEGIES)}")
    return names


def require_no_launcher() -> None:
    """Raises ``ConfigError`` in a process that torchrun or another launcher started, as one of several."""
    launcher = World.from_environment().launcher
    if launcher != "python":
        raise ConfigError(f"The command starts processes, and {launcher} started this one. Run it by itself.")


def job_on_one_device(job: str, arguments: argparse.Namespace) -> JobConfig:
    """The job with the options of the command line, for one device. Raises ``ConfigError`` where one is wrong."""
    require_no_launcher()
    return load_job(job, overrides(argparse.Namespace(**vars(arguments) | {"devices": "1"})))
