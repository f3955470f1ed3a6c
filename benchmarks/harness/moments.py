"""When each rank finished its first step, on the clock that all processes of a machine share."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from harness.workloads import WORKLOADS, Workload


def read_arguments() -> argparse.Namespace:
    """Reads the command line of a launched script and sets one thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=Path, required=True, help="folder for one file a rank")
    torch.set_num_threads(1)
    return parser.parse_args()


def small_perceptron() -> Workload:
    """The perceptron with a data set that takes no time to make."""
    return replace(WORKLOADS["perceptron"], samples=1024)


def mark(folder: Path, rank: int) -> None:
    """Writes the present moment as this rank's."""
    (folder / f"rank-{rank}").write_text(repr(time.monotonic()))
