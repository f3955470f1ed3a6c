"""Images per second from photo files to normalised float batches, ours against torch's DataLoader and torchvision.

``python benchmarks/images/run.py --data DIR`` writes RESULTS.md; ``--quick`` is two short alternations, nothing
written. DIR has one folder of photos for each class; ``LOCKSTEP_IMAGES`` serves as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import sides  # noqa: E402  the line above makes it importable
import torch  # noqa: E402
from harness import report  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402
from stages import stages  # noqa: E402

CLAIM = (
    "Photos are decoded, cut at random, resized to 224 pixels, mirrored, batched and normalised at no less than the "
    "speed of torch's DataLoader with Pillow and torchvision's transforms, on the same number of workers."
)
THEIRS, OURS, CUT = "DataLoader + torchvision", "Lockstep, K = 1", "Lockstep, K = 8"


def main() -> None:
    given = read_command_line()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    sections = []
    for workers in given.workers:
        rates = measure(given, workers)
        sections.append(section(workers, rates))
        print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="Photos per second",
            claim=CLAIM,
            command="python benchmarks/images/run.py --data DIR",
            sections=[described(given), *sections, report.LEGEND, stage_section(given)],
        )


def measure(given: argparse.Namespace, workers: int) -> dict[str, list[float]]:
    """Images per second of each side, one number an alternation: A B C A B C ..."""
    streams: dict[str, Iterator[Any]] = {
        THEIRS: sides.with_torchvision(given.data, batch=given.batch, workers=workers),
        OURS: sides.with_lockstep(given.data, batch=given.batch, workers=workers),
        CUT: sides.with_lockstep(given.data, batch=given.batch, workers=workers, micro_batches=8),
    }
    rates: dict[str, list[float]] = {name: [] for name in streams}
    for alternation in range(given.alternations + 1):
        for name, stream in streams.items():
            rate = timed(stream, given.batch, given.batches, ahead=2 * workers + 2)
            if alternation:  # the first starts the workers and reads the files from disk
                rates[name].append(rate)
    for stream in streams.values():
        stream.close()  # type: ignore[attr-defined]  # both are generators
    return rates


def timed(stream: Iterator[Any], batch: int, batches: int, *, ahead: int) -> float:
    """Images per second over ``batches``, after what was read ahead while the other sides ran is used up."""
    for _ in range(ahead):
        next(stream)
    start = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return batch * batches / (time.perf_counter() - start)


def section(workers: int, rates: dict[str, list[float]]) -> str:
    rows = [
        [name, Spread(tuple(values)).text(0), ratios(values, rates[THEIRS]).text() if name != THEIRS else "1"]
        for name, values in rates.items()
    ]
    title = (
        f"{workers} worker{'s' * (workers != 1)}" if workers else "No workers: read in the training process"
    )
    return f"## {title}\n\n" + report.table(["side", "images/s", "ratio"], rows)


def stage_section(given: argparse.Namespace) -> str:
    rows = [[name, f"{microseconds:.0f}", side] for name, microseconds, side in stages(given.data)]
    return "## One photo, stage by stage\n\n" + report.table(["stage", "microseconds", "side"], rows)


def described(given: argparse.Namespace) -> str:
    return (
        f"Batches of {given.batch}, {given.batches} batches a round, {given.alternations} alternations after one to "
        "warm up, one thread a process. The clock runs in the training process until the batch is float32 and "
        "normalised. K is the number of micro-batches a batch is delivered in. "
        f"{sum(1 for path in given.data.rglob('*') if path.is_file()):,} files, {given.data.name}."
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = os.environ.get("LOCKSTEP_IMAGES")
    parser.add_argument(
        "--data", type=Path, default=known, required=known is None, help="folder of class folders"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=30, help="batches of a round")
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two short alternations, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.alternations, given.batches = 2, 10
    return given


if __name__ == "__main__":
    main()
