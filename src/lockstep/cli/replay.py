"""``lockstep replay``, ``audit`` and ``report``: take a recorded run and compute parts of it again in this process.

lockstep replay   recomputes a step on one device, where a debugger can follow, and compares it bit for bit
lockstep audit    checks a recorded run, and recomputes some of its intervals on one device
lockstep report   writes one page of HTML about a run, which needs no network
"""

from __future__ import annotations

import argparse
import bdb
import logging
import os
import secrets
import sys
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, print_origins, require_files
from lockstep.core.atomic import write_whole
from lockstep.core.world import make_environment_portable
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from lockstep.job.run_folder import FILE, Start, read_starts
from lockstep.runtime.output import log_to_terminal

EXIT_DIFFERENT = 1
_RUN = ("run", "RUN", str, "a run folder, such as runs/digits-001")
_TRUST = "a run of another user, whose job names code that runs as you"
_FORCE = ("--force-context", "", False, "compare even if versions, device or threads of the run were others")


def prepare_process(folder: Path, arguments: argparse.Namespace) -> Start:
    """Prepares this process, which has not imported torch, to compute what a run computed; returns its last start.

    Raises:
        ConfigError: the run does not exist, or another user may have written it and ``--trust`` was not given.
    """
    for path in (folder, folder / FILE):
        if not arguments.trust and path.exists() and path.stat().st_uid != os.getuid():
            raise ConfigError(
                f"'{path}' belongs to user {path.stat().st_uid}, and the job in it names code that would run as you. "
                "Give --trust if you trust them."
            )
    start = read_starts(folder)[-1]
    if start.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if start.job.training.portable:
            make_environment_portable()
    return start


def add_replay_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(parser, _RUN)
    parser.add_argument("--step", type=int, required=True, metavar="S", help="optimizer step of the run, from 0")
    add_options(
        parser,
        ("--micro-batch", "K", int, "only this micro-batch of the step, counted from 0"),
        ("--debug", "", False, "stop in the debugger before the samples of the step are read"),
        ("--trust", "", False, f"replay {_TRUST}"),
        _FORCE,
    )


def replay_run(arguments: argparse.Namespace) -> int:
    """Replays the step and prints the comparison; returns 1 if it differs, 130 if the debugger was quit, else 0."""
    folder = Path(arguments.run)
    prepare_process(folder, arguments)
    from lockstep.replay import ReplayRequest, describe, find_origin, replay

    log_to_terminal(logging.WARNING)
    origin = find_origin(folder, arguments.step)
    print_origins(origin.start.job)
    asked = ReplayRequest(
        folder=folder,
        step=arguments.step,
        micro_batch=arguments.micro_batch,
        force_context=arguments.force_context,
        pause=_pause if arguments.debug else None,
    )
    try:
        report = replay(asked, origin)
    except bdb.BdbQuit:
        return EXIT_INTERRUPTED
    print(describe(report))
    return EXIT_DIFFERENT if report.differs else EXIT_DONE


def _pause() -> None:
    """Stops in the debugger of ``PYTHONBREAKPOINT``, by default pdb."""
    print("The step runs next. Set breakpoints, such as 'b FILE.py:12', and continue with 'c'.")
    breakpoint()


def add_audit_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    sign = "instead: sign the chain with this private key of ssh-keygen, into audit.jsonl.sig"
    add_options(
        parser,
        ("run", "RUN", str, "a run folder, trained with training.audit=true"),
        ("--checks", "N", 3, "intervals between checkpoints to recompute; 0: all"),
        ("--seed", "N", int, "chooses the intervals (default: drawn now, and printed)"),
        ("--head", "HASH", "", "a hash of the chain that the run's owner has published"),
        ("--sign", "KEY", "", sign),
        ("--signer", "KEY.pub", "", "require a signature of the chain by this public key"),
        ("--trust", "", False, f"audit {_TRUST}"),
        _FORCE,
    )


def audit_run(arguments: argparse.Namespace) -> int:
    """Audits the run, or signs its chain; returns 1 where something is not as it was recorded, else 0."""
    folder = Path(arguments.run)
    if arguments.checks < 0:
        raise ConfigError(f"--checks is {arguments.checks}, and must be 0 (all intervals) or more.")
    if arguments.sign:
        from lockstep.audit import sign

        print(f"signed    {sign(folder, Path(arguments.sign))}")
        return EXIT_DONE
    log_to_terminal(logging.ERROR)
    start = prepare_process(folder, arguments)
    from lockstep.audit import audit, describe, verify_signature

    if arguments.signer:
        verify_signature(folder, Path(arguments.signer))
    print_origins(start.job)
    report = audit(
        folder,
        seed=secrets.randbelow(10**9) if arguments.seed is None else arguments.seed,
        checks=arguments.checks,
        head=arguments.head,
        force_context=arguments.force_context,
        tell=lambda interval: print(f"recomputing {interval}", file=sys.stderr),
    )
    print(describe(report))
    return EXIT_DIFFERENT if report.findings else EXIT_DONE


def add_report_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        _RUN,
        ("--html", "FILE", "", "the file to write (default: report.html in the run folder)"),
        ("--recorded-only", "", False, "compute nothing: only what the run folder holds"),
        ("--trust", "", False, f"report {_TRUST}"),
    )


def report_run(arguments: argparse.Namespace) -> int:
    """Writes the page and names it; returns the exit status."""
    require_files(arguments, ["html"])
    folder = Path(arguments.run)
    start = prepare_process(folder, arguments)
    from lockstep.explain.run_report import run_page

    log_to_terminal(logging.WARNING)
    if not arguments.recorded_only:
        print_origins(start.job)
    path = Path(arguments.html) if arguments.html else folder / "report.html"
    page = run_page(folder, computes=not arguments.recorded_only)
    try:
        write_whole(path, page.encode(errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}.") from error
    print(f"Wrote {path}.")
    return EXIT_DONE


COMMANDS = {
    "replay": (add_replay_arguments, replay_run),
    "audit": (add_audit_arguments, audit_run),
    "report": (add_report_arguments, report_run),
}
