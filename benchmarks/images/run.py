"""Images per second from photo files to normalised float batches, ours against torch's DataLoader and torchvision.

``python benchmarks/images/run.py --data DIR`` writes RESULTS.md; ``--quick`` is two short alternations, nothing
written. DIR has one folder of photos for each class; ``LOCKSTEP_IMAGES`` serves as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import sides  # noqa: E402  the line above makes it importable
import torch  # noqa: E402
from enlarging import enlarged  # noqa: E402
from harness import report  # noqa: E402
from harness.options import add_photos  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402
from stages import stages  # noqa: E402

from lockstep.data.images.decoding import jpeg_decoder  # noqa: E402

CLAIM = (
    "Photos are decoded, cut at random, resized to 224 pixels, mirrored, batched and normalised at twice the speed of "
    "torch's DataLoader with Pillow and torchvision's transforms on the same number of workers, at 1.3 times the speed "
    "of the same with TurboJPEG, and at five times with the cache of decoded photos."
)
THEIRS, TURBO = "DataLoader + torchvision", "the same with TurboJPEG"
OURS, CUT, KEPT = "Lockstep, K = 1", "Lockstep, K = 8", "Lockstep, K = 1, cache"


def main() -> None:
    given = read_command_line()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    sections = []
    with tempfile.TemporaryDirectory(prefix="lockstep-images-", dir=given.scratch) as scratch:
        for title, photos in photo_sets(given, Path(scratch)):
            sections.append(f"## {title}")
            for workers in given.workers:
                rates = measure(given, photos, workers, Path(scratch) / "cache")
                sections.append(section(workers, rates))
                print(f"{title}\n\n{sections[-1]}", flush=True)
            sections.append(stage_section(photos))
            print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="Photos per second",
            claim=CLAIM,
            command="python benchmarks/images/run.py --data DIR",
            sections=[described(given), *sections, report.LEGEND],
        )


def photo_sets(given: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Title and folder of each set of photos: as they are, and a part of them enlarged."""
    if "own" in given.sizes:
        count = sum(1 for path in given.data.rglob("*") if path.is_file())
        yield f"{given.data.name} as they are, {count:,} files", given.data
    if "500x333" in given.sizes:
        made = enlarged(given.data, scratch / "enlarged", count=given.enlarged)
        yield f"{given.enlarged:,} of them enlarged to 500 x 333, quality 90", made


def measure(given: argparse.Namespace, photos: Path, workers: int, cache: Path) -> dict[str, list[float]]:
    """Images per second of each side, one number an alternation: A B C A B C ..."""
    common: dict[str, Any] = {"batch": given.batch, "workers": workers}
    streams: dict[str, Iterator[Any]] = {THEIRS: sides.with_torchvision(photos, **common)}
    if sides.HAS_TURBO:
        streams[TURBO] = sides.with_torchvision(photos, **common, turbo=True)
    streams[OURS] = sides.with_lockstep(photos, **common)
    streams[CUT] = sides.with_lockstep(photos, **common, micro_batches=8)
    streams[KEPT] = sides.with_lockstep(photos, **common, cache=cache)
    rates: dict[str, list[float]] = {name: [] for name in streams}
    for alternation in range(given.alternations + 1):
        for name, stream in streams.items():
            rate = timed(stream, given.batch, given.batches, ahead=2 * workers + 2)
            if alternation:  # the first starts the workers and reads the files from disk
                rates[name].append(rate)
    for stream in streams.values():
        stream.close()  # type: ignore[attr-defined]  # all are generators
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
    against = [name for name in (THEIRS, TURBO) if name in rates]
    rows = [
        [
            name,
            Spread(tuple(values)).text(0),
            *("1" if name == other else ratios(values, rates[other]).text() for other in against),
        ]
        for name, values in rates.items()
    ]
    title = f"{workers} worker{'s' * (workers != 1)}" if workers else "No workers: in the training process"
    columns = ["side", "images/s", "ratio", *(["ratio to TurboJPEG"] if TURBO in against else [])]
    return f"### {title}\n\n" + report.table(columns, rows)


def stage_section(photos: Path) -> str:
    rows = [[name, f"{microseconds:.0f}", side] for name, microseconds, side in stages(photos)]
    return "### One photo, stage by stage\n\n" + report.table(["stage", "microseconds", "side"], rows)


def described(given: argparse.Namespace) -> str:
    return (
        f"Batches of {given.batch}, {given.batches} batches a round, {given.alternations} alternations after one to "
        "warm up, one thread a process. The clock runs in the training process until the batch is float32 and "
        "normalised. K is the number of micro-batches a batch is delivered in. The cache was made before. Lockstep "
        f"decodes by {jpeg_decoder()}."
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_photos(parser)
    parser.add_argument("--sizes", nargs="+", choices=["own", "500x333"], default=["own", "500x333"])
    parser.add_argument("--enlarged", type=int, default=1000, help="photos that are enlarged")
    parser.add_argument("--scratch", type=Path, help="folder for 1 GB of enlarged and decoded photos")
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
