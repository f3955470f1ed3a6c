"""The command line: finds the command, runs it, and turns an error into one sentence and an exit status."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from lockstep import __version__
from lockstep.cli.parser import Parser
from lockstep.errors import EXIT_INTERRUPTED, LockstepError

_COMMANDS = {
    "train": ("lockstep.cli.train", "train a job: a TOML file or a built-in name"),
    "run": ("lockstep.cli.run", "start your own script on several local processes"),
    "lint": ("lockstep.cli.lint", "check training scripts for the known mistakes of distributed training"),
    "slurm": ("lockstep.cli.slurm", "write and submit the batch script of a job"),
    "verify": ("lockstep.cli.verify", "prove that a job gives the same bits in every layout, or say why not"),
    "scale": ("lockstep.cli.scale", "measure how training gets faster with more devices, and what limits it"),
    "replay": ("lockstep.cli.replay", "recompute a step of a run on one device and compare its bits"),
    "doctor": ("lockstep.cli.doctor", "look at this machine: devices, versions, memory, links"),
    "debug": (
        "lockstep.cli.debug",
        "write VS Code's configurations for one rank, rank R of N, or a running one",
    ),
    "explain": ("lockstep.cli.explain", "draw who reads, adds, sends and computes what, for given numbers"),
    "ps": ("lockstep.cli.ps", "list your runs on this host and their processes"),
    "stacks": ("lockstep.cli.stacks", "show in which line every rank of a run stands"),
    "stop": ("lockstep.cli.stop", "stop a run, with a checkpoint if it saves any, and nothing else"),
    "clean": ("lockstep.cli.clean", "end what is left of runs whose command was killed"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``lockstep ARGUMENTS`` and returns the exit status.

    Nothing of torch is imported here; a mistake in the arguments or the job ends before a process is started.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser(words).parse_args(words)
        return int(arguments.command_main(arguments))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a dry run has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SystemExit as ending:  # argparse ends this way after --help and --version
        return ending.code if isinstance(ending.code, int) else 0


def _parser(words: Sequence[str]) -> Parser:
    """The parser of the whole line; only the module of the command that is asked for is imported."""
    parser = Parser(
        prog="lockstep", description="Trains a PyTorch model on any number of devices, bit for bit alike."
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == asked:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(command_main=module.main)
    return parser
