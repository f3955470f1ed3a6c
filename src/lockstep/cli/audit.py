"""``lockstep audit``: checks a recorded run, and recomputes some of its intervals on one device."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.replay import prepare_process
from lockstep.cli.shared_options import add_options, print_origins
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.runtime.output import log_to_terminal

EXIT_DIFFERENT = 1


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder, trained with training.audit=true")
    sign = "instead: sign the chain with this private key of ssh-keygen, into audit.jsonl.sig"
    add_options(
        parser,
        ("--checks", "N", 3, "intervals between checkpoints to recompute; 0: all"),
        ("--seed", "N", int, "chooses the intervals (default: drawn now, and printed)"),
        ("--head", "HASH", "", "a hash of the chain that the run's owner has published"),
        ("--sign", "KEY", "", sign),
        ("--signer", "KEY.pub", "", "require a signature of the chain by this public key"),
        ("--trust", "", False, "audit a run of another user, whose job names code that runs as you"),
        ("--force-context", "", False, "compare even if versions, device or threads of the run were others"),
    )


def main(arguments: argparse.Namespace) -> int:
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
