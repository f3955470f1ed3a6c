"""The options ``--debug-rank`` and ``--debug-port`` of the commands that start ranks."""

from __future__ import annotations

import argparse

from lockstep.launch import LaunchOptions
from lockstep.launch.debugger import DEFAULT_PORT, take_part_in_debugging, with_debugger
from lockstep.launch.place import Place
from lockstep.world import World


def add_debug_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the two options."""
    parser.add_argument(
        "--debug-rank",
        type=int,
        default=None,
        metavar="R",
        help="rank R waits for a debugger before it begins, and the others for rank R without a limit",
    )
    parser.add_argument(
        "--debug-port",
        type=int,
        default=DEFAULT_PORT,
        metavar="PORT",
        help=f"where it listens, on 127.0.0.1; 0: any free port (default: {DEFAULT_PORT})",
    )


def with_debug_arguments(
    options: LaunchOptions, arguments: argparse.Namespace, place: Place | None = None
) -> LaunchOptions:
    """The options, with a debugger where one was asked for; ``ConfigError`` where it cannot be had.

    Args:
        options: of this host.
        arguments: of the command.
        place: of this host among several.
    """
    if arguments.debug_rank is None:
        return options
    return with_debugger(options, arguments.debug_rank, arguments.debug_port, place)


def debug_setting(arguments: argparse.Namespace) -> tuple[str, str]:
    """What must be equal on all hosts, as name and value: each must know that it waits."""
    return "debug-rank", "none" if arguments.debug_rank is None else str(arguments.debug_rank)


def debugged(world: World, arguments: argparse.Namespace) -> World:
    """The world that another launcher has started; its rank waits here where a debugger was asked for on it."""
    if arguments.debug_rank is None:
        return world
    return take_part_in_debugging(world, arguments.debug_rank, arguments.debug_port)
