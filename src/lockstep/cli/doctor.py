"""``lockstep doctor``: devices, versions, memory, interfaces, leftovers, and how fast the ranks exchange data."""

from __future__ import annotations

import argparse
import json
import os

from lockstep.doctor import Finding, Grade, judge_links, look_at_host
from lockstep.errors import EXIT_DONE, RankError
from lockstep.launch import launch

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


def main(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a fault, else 0."""
    from lockstep.doctor.software import look_at_software

    findings = [*look_at_host(os.environ), *look_at_software()]
    if not arguments.no_exchange:
        findings += _exchange(arguments.devices)
    for each in findings:
        if arguments.json:
            fields = {
                "grade": each.grade.value,
                "subject": each.subject,
                "found": each.found,
                "advice": each.advice,
            }
            print(json.dumps(fields))
        else:
            print(each.text)
    return EXIT_FAULT if any(each.grade is Grade.FAULT for each in findings) else EXIT_DONE


def _exchange(devices: str) -> list[Finding]:
    """Starts a rank per device and lets them exchange data."""
    from lockstep.doctor.links import measure

    try:
        results = launch(measure, devices=devices)
    except RankError as error:
        advice = (
            "Look at the interface above; 'lockstep run --devices cpu:2 SCRIPT' shows the same with a script."
        )
        return [Finding(Grade.FAULT, "all-reduce", str(error).splitlines()[0], advice)]
    if len(results) < 2:
        return [Finding(Grade.OK, "all-reduce", "one device: nothing to exchange")]
    return judge_links(results[0], len(results))
