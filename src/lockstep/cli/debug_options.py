"""The options ``--debug-rank`` and ``--debug-port`` of the commands that start ranks."""

from __future__ import annotations

import argparse

from lockstep.errors import ConfigError
from lockstep.launch import LaunchOptions
from lockstep.launch.debugger import DEFAULT_PORT, with_debugger


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


def with_debug_arguments(options: LaunchOptions, arguments: argparse.Namespace) -> LaunchOptions:
    """The options, with a debugger where one was asked for; ``ConfigError`` where it cannot be had."""
    if arguments.debug_rank is None:
        return options
    if (arguments.nnodes or 1) > 1:
        raise ConfigError(
            "--debug-rank was asked for with --nnodes. It works on one host; on several, start without it and then ask "
            "a rank of this host by 'lockstep debug --attach'."
        )
    return with_debugger(options, arguments.debug_rank, arguments.debug_port)


def refuse_debugger(arguments: argparse.Namespace, launcher: str) -> None:
    """Raises ``ConfigError`` where a debugger was asked for and this command does not start the ranks itself."""
    if arguments.debug_rank is not None:
        raise ConfigError(
            f"--debug-rank was asked for in a world that {launcher} started. It works where Lockstep starts the ranks: "
            f"leave out {launcher}, or attach to the process of a running rank."
        )
