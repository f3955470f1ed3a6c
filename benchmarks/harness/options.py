"""The options that several benchmarks share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def parser_of_alternations(alternations: int) -> argparse.ArgumentParser:
    """For sides that run on several processes in turn; read it by ``read``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--alternations", type=int, default=alternations)
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long a round lasts")
    parser.add_argument("--quick", action="store_true", help="two short alternations, nothing written")
    return parser


def read(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the command line."""
    given = parser.parse_args()
    if given.quick:
        given.alternations, given.seconds = 2, 0.3
    return given


def add_photos(parser: argparse.ArgumentParser) -> None:
    """Adds ``--data``, which ``LOCKSTEP_IMAGES`` can stand for."""
    known = os.environ.get("LOCKSTEP_IMAGES")
    parser.add_argument("--data", type=Path, default=known, required=known is None, help="folder of class folders")
