"""The option ``--profile`` of the commands that train."""

from __future__ import annotations

import argparse

from lockstep.timeline.window import DEFAULT, Window


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the option; it is the steps as FIRST:COUNT, empty where no timeline is asked for."""
    parser.add_argument(
        "--profile",
        type=_window,
        nargs="?",
        const=DEFAULT,
        default="",
        metavar="FIRST:COUNT",
        help=f"write what each rank does when in COUNT steps into timeline.json (default: {DEFAULT})",
    )


def _window(text: str) -> str:
    if text:
        Window.parse(text)
    return text
