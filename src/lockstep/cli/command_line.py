"""The command line: finds the command, runs it, and turns an error into one sentence and an exit status.

``lockstep NAME`` lives in ``cli/NAME.py``: ``add_arguments(parser)`` declares the arguments, ``main(arguments)``
returns the exit status or raises a ``LockstepError``. Commands that belong together share a file, whose table
``COMMANDS`` has such functions by name. To add a command, write them and add a line to ``_COMMANDS`` below, which holds
the one sentence of ``lockstep --help``. Only the module of the command that is asked for is imported.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from lockstep import __version__
from lockstep.core.atomic import NOT_WRITABLE
from lockstep.errors import EXIT_CONFIG, EXIT_DATA, EXIT_INTERRUPTED, ConfigError, LockstepError, nearest
from lockstep.runtime.output import lasting_stderr, open_standard_streams
from lockstep.runtime.stop_signals import undo_inherited_signal_settings
from lockstep.text import printable

_CHOICE = re.compile(r"invalid choice: '(.*?)'")
_OTHER_NAMES = {
    "--devices": "nproc-per-node nproc n np num-processes num-gpus gpus ntasks-per-node",
    "--nnodes": "num-machines num-nodes",
    "--node-rank": "machine-rank",
    "--master": "master-addr master-port main-process-ip main-process-port rdzv-endpoint",
    "--restarts": "max-restarts",
    "--threads": "num-cpu-threads-per-process",
    "--precision": "amp fp16 bf16 mixed-precision",
    "--epochs": "num-epochs max-epochs num-train-epochs",
    "--logs": "log-dir logdir",
    "--set optimizer.lr=...": "lr learning-rate",
    "--set optimizer.weight_decay=...": "weight-decay wd",
    "--set optimizer.momentum=...": "momentum",
    "--set training.global_batch=...": "batch-size global-batch-size train-batch-size",
    "--set data.workers=...": "workers num-workers j",
    "--set run.directory=...": "output out-dir output-dir save-dir log-dir logdir",
}
"""Options by what other launchers (torchrun, accelerate, srun, ...) and training scripts call them, ``-`` for ``_``."""
_OTHER_WORDS = {
    "lockstep new DATA": "init create",
    "lockstep run SCRIPT": "launch start",
    "lockstep train JOB --resume auto": "resume continue",
    "lockstep train JOB --profile": "profile",
    "lockstep predict RUN": "infer inference",
    "lockstep compare RUN RUN --svg FILE": "plot curves",
    "lockstep scale JOB": "bench benchmark",
    "lockstep ps": "list status",
    "lockstep stop RUN": "kill cancel",
}
"""Commands by other words for them."""


class Parser(argparse.ArgumentParser):
    """``argparse`` without abbreviations, whose errors are ``ConfigError`` and name the nearest option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises an error for unknown options here, where the options of the command are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            asked = unknown[0].partition("=")[0]
            self.error(f"{asked} is not an argument of '{self.prog}'.{self._own_name(asked)}")
        return found, unknown

    def _own_name(self, asked: str) -> str:
        """A sentence that says what an unknown option may mean, or where its setting is given; empty if unknown."""
        name = asked.lstrip("-").replace("_", "-")
        setting = name.replace("-", "_")
        if self.prog.endswith(" run"):
            options = importlib.import_module("lockstep.config.options").RunOptions  # which imports NumPy
            if any(setting == each.name for each in fields(options)):
                return f" The script gives it: lockstep.init({setting}=...)."
        for option, others in _OTHER_NAMES.items():
            if name in others.split() and option.split()[0] in self._option_string_actions:
                return f" Use {option}."
        # Without their dashes, which are alike in all options
        bare = {each.lstrip("-"): each for each in self._option_string_actions}
        close = difflib.get_close_matches(name, bare, n=1, cutoff=0.6)
        near = f" Did you mean '{bare[close[0]]}'?" if close else ""
        if "--set" in self._option_string_actions and not difflib.get_close_matches(name, close, cutoff=0.75):
            job = importlib.import_module("lockstep.config.job")
            if any(setting == each.name for each in fields(job.TrainingConfig)):
                return f" It is a setting of the job: --set training.{setting}=..."
        return near

    def error(self, message: str) -> NoReturn:
        """Raises a ``ConfigError`` instead of printing the usage and exiting."""
        choice = _CHOICE.search(message)
        if choice:
            known = [name for action in self._actions if action.choices for name in action.choices]
            asked = choice.group(1)
            words = _OTHER_WORDS if self.prog == "lockstep" else {}
            meant = (f" Use '{command}'." for command, other in words.items() if asked in other.split())
            used = next(meant, "")
            message = f"{asked!r} is not a command of '{self.prog}'.{used or nearest(asked, known)}"
        sentence = message if message.endswith((".", "?")) else f"{message[0].upper()}{message[1:]}."
        raise ConfigError(f"{sentence} See '{self.prog} --help'.")


class _Version(argparse.Action):
    """Prints the versions, which are looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed"
        versions = f"torch {torch}, Python {platform.python_version()}"
        print(f"lockstep {__version__} (commit {_commit()}, {versions})")
        parser.exit()


def _commit() -> str:
    """The commit that a package was built from, or that a checkout is at; ``unknown`` where neither tells."""
    package = Path(__file__).parent.parent
    try:
        if (package / "commit.txt").is_file():
            return (package / "commit.txt").read_text().strip()
        root = package.parent.parent
        if (root / ".git").exists():
            git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, ValueError, subprocess.CalledProcessError):
        pass
    return "unknown"


_COMMANDS = {
    "new": ("lockstep.cli.new", "write a job file and a script for your own images, table, text or tensors"),
    "train": ("lockstep.cli.train", "train a job: a TOML file, a built-in name or a folder of images"),
    "run": ("lockstep.cli.run", "start your own script on every device of one or several hosts"),
    "port": ("lockstep.cli.lint", "list the lines of a script that change when it trains with Lockstep"),
    "lint": ("lockstep.cli.lint", "check training scripts for known mistakes of distributed training"),
    "slurm": ("lockstep.cli.slurm", "write or submit the SLURM batch script of a job"),
    "kubernetes": ("lockstep.cli.kubernetes", "write or apply the Kubernetes manifest of a job"),
    "verify": ("lockstep.cli.verify", "compare a job or script on several numbers of devices with one"),
    "scale": ("lockstep.cli.scale", "measure how much faster training gets with more devices, and its limit"),
    "data": (
        "lockstep.cli.data",
        "look at the data of a job: classes, broken files, one batch, who reads what",
    ),
    "download": ("lockstep.cli.data", "download a published data set, checked: cifar10 or mnist"),
    "predict": ("lockstep.cli.predict", "write a run's output for every sample of a data set as a table"),
    "replay": ("lockstep.cli.replay", "recompute a step of a run on one device and compare it bit for bit"),
    "audit": ("lockstep.cli.replay", "recompute some intervals of a recorded run and check all it claims"),
    "doctor": ("lockstep.cli.doctor", "check this machine: devices, versions, memory, the exchange of ranks"),
    "debug": ("lockstep.cli.debug", "write VS Code's debug configurations, or attach to a running rank"),
    "report": ("lockstep.cli.replay", "write one page about a run: curves, wrong samples, recipe, fingerprint"),
    "compare": (
        "lockstep.cli.explain",
        "show in which settings several runs differ, their fingerprints and curves",
    ),
    "explain": ("lockstep.cli.explain", "draw which rank reads, adds, sends and computes what"),
    "ps": ("lockstep.cli.runs", "list your runs on this host and their processes"),
    "stacks": ("lockstep.cli.runs", "print the stack of every rank of a run, without stopping it"),
    "stop": ("lockstep.cli.runs", "stop one run, with a checkpoint if it saves any"),
    "clean": ("lockstep.cli.runs", "end the processes that runs left when their command was killed"),
}

_LIMITS = {errno.EMFILE: "ulimit -n", errno.EAGAIN: "ulimit -u", errno.ENOMEM: "ulimit -v"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``lockstep ARGUMENTS`` and returns the exit status.

    Does not import torch: a mistake in the arguments or the job is reported before any process is started.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    undo_inherited_signal_settings()
    with lasting_stderr():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    try:
        arguments = _parser(words).parse_args(words)
        _check_local_rank(arguments.local_rank)
        _check_current_folder(arguments.command_main)
        return int(arguments.command_main(arguments))
    except LockstepError as error:
        print(f"lockstep: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the output was closed, as by ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        from lockstep.runtime.error_record import users_lines

        limit = _LIMITS.get(error.errno or 0)
        if users_lines(error) or (not limit and error.filename is None and error.errno not in NOT_WRITABLE):
            raise  # with the lines of the user's files
        if limit:
            print(f"lockstep: {error.strerror}. Raise the limit of this shell ({limit}).", file=sys.stderr)
            return EXIT_CONFIG
        if error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the buffer holds
            print(f"lockstep: the output could not be written: {error.strerror}.", file=sys.stderr)
            return EXIT_DATA
        print(f"lockstep: {printable(str(error.filename))}: {error.strerror}.", file=sys.stderr)
        return EXIT_CONFIG
    except SystemExit as ending:  # argparse ends this way after --help and --version
        return ending.code if isinstance(ending.code, int) else 0


def _check_local_rank(given: int | None) -> None:
    """Raises ``ConfigError`` unless ``--local-rank``, if given, is what torch's former launcher sets as well."""
    if given is not None and str(given) != os.environ.get("LOCAL_RANK"):
        found = os.environ.get("LOCAL_RANK", "not set")
        raise ConfigError(
            f"--local-rank {given} was given, and LOCAL_RANK is {found}. Leave it out: torch.distributed.launch sets "
            "both, and other launchers need none."
        )


def _check_current_folder(command_main: Callable[[argparse.Namespace], int]) -> None:
    """Raises ``ConfigError`` where it was deleted, as torch then ends the process; ``ps`` and ``stop`` work there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        if command_main.__module__ != "lockstep.cli.runs":
            raise ConfigError("The current folder of this shell was deleted. Change to one that exists (cd).") from None


def _parser(words: Sequence[str]) -> Parser:
    """Makes the parser, with the arguments of the command that is asked for."""
    parser = Parser(
        prog="lockstep", description="Trains a PyTorch model on any number of devices with bit-equal results."
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="print the versions of Lockstep, torch and Python, and exit",
    )
    # Given by python -m torch.distributed.launch
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == asked:
            module = importlib.import_module(module_name)
            table = getattr(module, "COMMANDS", {})
            add_arguments, command_main = table.get(name) or (module.add_arguments, module.main)
            add_arguments(command)
            command.set_defaults(command_main=command_main)
    return parser
