"""``lockstep doctor``: checks devices, versions, memory, interfaces and leftovers, and times the exchange of ranks.

On several hosts each command checks its own host, and the ranks of all hosts exchange data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence

from lockstep.cli.shared_options import (
    add_host_arguments,
    add_options,
    joined_hosts,
    refuse_hosts,
    take_nodes,
    take_rendezvous,
)
from lockstep.core.world import World, host_name
from lockstep.doctor import CheckResult, Grade, judge_links, look_at_host
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED
from lockstep.launch.hosts import parse_master
from lockstep.launch.options import LaunchOptions, parse_devices
from lockstep.launch.outcome import WorldOutcome
from lockstep.launch.supervisor import run_world
from lockstep.launch.targets import FunctionTarget
from lockstep.runtime.parent_death import tie_to_launcher

EXIT_FAULT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        ("--devices", "N", "auto", "ranks that exchange data: N, auto, cpu, cpu:N or a list such as 0,5"),
        ("--no-exchange", "", False, "start no ranks and measure nothing"),
        ("--json", "", False, "print one JSON object per line"),
    )
    add_host_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Prints the results; returns 1 if one of them is a fault, else 0."""
    from lockstep.doctor import look_at_software

    world = take_rendezvous(arguments, take_nodes(arguments, World.from_environment()))
    master = None if arguments.master is None else parse_master(arguments.master)
    findings = [*look_at_host(os.environ, master, arguments.interface), *look_at_software()]
    if not arguments.no_exchange:
        findings += _exchange(arguments, world)
    is_main = world.is_main and not (arguments.shares_terminal and arguments.node_rank)
    for each in findings if is_main else _bad(findings, world):
        fields = {**dataclasses.asdict(each), "grade": each.grade.value}
        print(json.dumps(fields) if arguments.json else each.text, flush=True)
    return EXIT_FAULT if any(each.grade is Grade.FAULT for each in findings) else EXIT_DONE


def _bad(findings: Sequence[CheckResult], world: World) -> list[CheckResult]:
    """The results of another host than that of the main rank that are not ok, with its name."""
    bad = [each for each in findings if each.grade is not Grade.OK and world.local_rank == 0]
    return [dataclasses.replace(each, found=f"{host_name()}: {each.found}") for each in bad]


def _exchange(arguments: argparse.Namespace, world: World) -> list[CheckResult]:
    """Times an exchange between the ranks of another launcher, or between new ones, one per device of every host."""
    from lockstep.doctor import measure

    if world.launcher != "python":
        refuse_hosts(arguments, world.launcher)
        tie_to_launcher(world)
        return judge_links(measure())
    options = LaunchOptions(devices=parse_devices(arguments.devices))
    target = FunctionTarget.from_function(measure, (), {})
    with joined_hosts(arguments, options.devices) as joined:
        return _judge(run_world(target, options, joined))


def _judge(outcome: WorldOutcome) -> list[CheckResult]:
    if outcome.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.code != EXIT_DONE:
        advice = "Check the interface above. 'lockstep run --devices cpu:2 SCRIPT' repeats it with a script."
        return [CheckResult(Grade.FAULT, "all-reduce", outcome.lines[0], advice)]
    return judge_links(outcome.results[0])
