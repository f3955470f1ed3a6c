"""``lockstep doctor``: devices, versions, memory, interfaces, leftovers, and how fast the ranks exchange data.

On several hosts every command looks at its own host, and the ranks of all exchange data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence

from lockstep.cli.host_options import (
    add_host_arguments,
    add_rendezvous_argument,
    common_settings,
    host_options,
    refuse_hosts,
    take_rendezvous,
)
from lockstep.doctor import Finding, Grade, judge_links, look_at_host
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED
from lockstep.launch.devices import parse_devices
from lockstep.launch.hosts import join_hosts
from lockstep.launch.options import LaunchOptions
from lockstep.launch.parent_death import tie_to_launcher
from lockstep.launch.supervisor import Outcome, run_world
from lockstep.launch.targets import FunctionTarget
from lockstep.world import World, host_name

EXIT_FAULT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--devices",
        default="auto",
        help="the ranks that exchange data: N, auto, cpu, cpu:N or a list (default: auto)",
    )
    parser.add_argument("--no-exchange", action="store_true", help="start no ranks")
    parser.add_argument("--json", action="store_true", help="one JSON object per finding")
    add_host_arguments(parser)
    add_rendezvous_argument(parser)


def main(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a fault, else 0."""
    from lockstep.doctor.software import look_at_software

    world = take_rendezvous(arguments, World.from_environment())
    findings = [*look_at_host(os.environ), *look_at_software()]
    if not arguments.no_exchange:
        findings += _exchange(arguments, world)
    for each in _to_be_shown(findings, world):
        print(json.dumps(_fields(each)) if arguments.json else each.text, flush=True)
    return EXIT_FAULT if any(each.grade is Grade.FAULT for each in findings) else EXIT_DONE


def _to_be_shown(findings: Sequence[Finding], world: World) -> list[Finding]:
    """All of them; where many ranks share one terminal, of each other host what is not ok, with its name."""
    if world.is_main:
        return list(findings)
    bad = [each for each in findings if each.grade is not Grade.OK and world.local_rank == 0]
    return [dataclasses.replace(each, found=f"{host_name()}: {each.found}") for each in bad]


def _fields(finding: Finding) -> dict[str, str]:
    return {**dataclasses.asdict(finding), "grade": finding.grade.value}


def _exchange(arguments: argparse.Namespace, world: World) -> list[Finding]:
    """Lets the ranks exchange data: those of another launcher, or a new one per device of every host."""
    from lockstep.doctor.links import measure

    if world.launcher != "python":
        refuse_hosts(arguments, world.launcher)
        tie_to_launcher(world)
        return judge_links(measure())
    options = LaunchOptions(devices=parse_devices(arguments.devices))
    target = FunctionTarget.from_function(measure, (), {})
    hosts = host_options(arguments)
    if hosts is None:
        return _judge(run_world(target, options))
    settings = common_settings(options.devices.kind, ())
    with join_hosts(hosts, ranks=options.devices.count, settings=settings) as joined:
        return _judge(run_world(target, options, joined))


def _judge(outcome: Outcome) -> list[Finding]:
    if outcome.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.code != EXIT_DONE:
        advice = (
            "Look at the interface above; 'lockstep run --devices cpu:2 SCRIPT' shows the same with a script."
        )
        return [Finding(Grade.FAULT, "all-reduce", outcome.lines[0], advice)]
    return judge_links(outcome.results[0])
