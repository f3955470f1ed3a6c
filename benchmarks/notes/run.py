"""Images per second of the whole job of the notes: ResNet-34, 224 pixels, 2 processes of one thread each.

``python benchmarks/notes/run.py --data DIR`` writes RESULTS.md, in about 11 minutes; ``--quick`` is one short
alternation, nothing written. DIR has one folder of photos for each class; ``LOCKSTEP_IMAGES`` serves as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from harness import report  # noqa: E402  the line above makes it importable
from harness.alternate import Rounds  # noqa: E402
from harness.commands import environment  # noqa: E402
from harness.options import add_photos  # noqa: E402
from harness.sides import Command, running  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402
from sides import BF16, FP32, GLOBAL_BATCH, PLAIN, PROCESSES, compared, ours, parts  # noqa: E402

CLAIM = (
    "ResNet-34 on photos of 224 pixels, 2 processes on 2 cores: Lockstep trains at least 1.3 times as many images a "
    "second in fp32 as a plain DistributedDataParallel script, and at least 4 times as many in bf16 where the "
    "processor has matrix units for it."
)
_STEPS = {PLAIN: 3, FP32: 3}
"""Timed steps of a round; the others take 6."""


def main() -> None:
    given = read_command_line()
    sections = [described(given)]
    with tempfile.TemporaryDirectory(prefix="notes-") as runs:
        if not given.only_parts:
            rates = alternate(compared(given.data, Path(runs), given.workers), given.alternations)
            sections.append(compared_section(rates))
            print(sections[-1], flush=True)
        if not given.skip_parts:
            sections += [parts_section(given, Path(runs)), profile_section()]
            print(*sections[-2:], sep="\n\n", flush=True)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="The whole job",
            claim=CLAIM,
            command="python benchmarks/notes/run.py --data DIR",
            sections=[*sections, report.LEGEND, *accuracy_section()],
        )


def alternate(commands: Mapping[str, Command], alternations: int) -> Rounds:
    """Images per second of each side, one number an alternation, after one step of each that is not timed."""
    with running(commands, PROCESSES) as sides:
        for side in sides:
            side.round(1, 1)
        rates: Rounds = {side.name: [] for side in sides}
        for _ in range(alternations):
            for side in sides:
                milliseconds = side.round(1, _STEPS.get(side.name, 6))
                rates[side.name].append(1000 * GLOBAL_BATCH / milliseconds)
    return rates


def compared_section(rates: Rounds) -> str:
    rows = [
        [name, Spread(tuple(values)).text(), ratios(values, rates[PLAIN]).text() if name != PLAIN else "1"]
        for name, values in rates.items()
    ]
    return "## The whole job\n\n" + report.table(["side", "images/s", "ratio to the plain script"], rows)


def parts_section(given: argparse.Namespace, runs: Path) -> str:
    """The loss without each part, measured in groups so that all sides of one fit into memory."""
    changed = list(parts(given.data, runs, given.workers).items())
    rows = []
    for first in range(0, len(changed), given.together):
        group = {BF16: ours(given.data, runs, given.workers), **dict(changed[first : first + given.together])}
        rates = alternate(group, given.alternations)
        for name in list(group)[1:]:
            whole = ratios(rates[BF16], rates[name])
            rows.append([name, Spread(tuple(rates[name])).text(), whole.text()])
    head = ["left out", "images/s", "all parts against this"]
    return f"## What each part contributes, from {BF16}\n\n" + report.table(head, rows)


def profile_section() -> str:
    """Milliseconds of processor time of one rank's step, without data and exchange."""
    ways = {
        "fp32": [],
        "fp32, freed memory kept": ["--keep"],
        "fp32, and channels-last": ["--keep", "--channels-last"],
        "bf16": ["--precision", "bf16"],
        "bf16, freed memory kept": ["--precision", "bf16", "--keep"],
        "bf16, and channels-last": ["--precision", "bf16", "--keep", "--channels-last"],
    }
    rows = []
    for name, arguments in ways.items():
        command = [sys.executable, str(HERE / "step_profile.py"), *arguments]
        answer = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout
        found = json.loads(answer)
        times = [found["forward"], found["backward"], found["update"], found["system"]]
        rows.append([name, *(f"{1000 * seconds:.0f}" for seconds in times), f"{found['faults']:,.0f}"])
    head = ["step of 32 photos", "forward", "backward", "update", "of it in the kernel", "page faults"]
    title = "## Where a rank's step goes: ms of processor time, without data and exchange"
    return f"{title}\n\n{report.table(head, rows)}"


def accuracy_section() -> list[str]:
    """The table of ``accuracy.py``, if it has been run."""
    path = HERE / "ACCURACY.md"
    return [path.read_text().strip()] if path.exists() else []


def described(given: argparse.Namespace) -> str:
    photos = sum(1 for path in given.data.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    return (
        f"Global batches of {GLOBAL_BATCH}, {PROCESSES} processes with one thread and {given.workers} loader workers "
        f"each, {given.alternations} alternations of 3 steps (bf16: 6) after one that is not timed. {photos:,} photos, "
        f"{given.data.name}. The plain script (`plain.py`) is started by torchrun: torchvision's ResNet-34 and "
        "transforms, Pillow, DistributedDataParallel over gloo, SGD, the loss all-reduced and read in every step. "
        "Lockstep's side is `notes.toml` with K = 2, through its own trainer."
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_photos(parser)
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each rank, on both sides")
    parser.add_argument("--alternations", type=int, default=4)
    parser.add_argument("--together", type=int, default=4, help="parts measured at once; each takes 4 GB of memory")
    parser.add_argument("--skip-parts", action="store_true", help="only the comparison with the plain script")
    parser.add_argument("--only-parts", action="store_true", help="only what each part contributes")
    parser.add_argument("--quick", action="store_true", help="two alternations, nothing written")
    given = parser.parse_args()
    given.data = given.data.resolve()
    if given.quick:
        given.alternations = 2
    return given


if __name__ == "__main__":
    main()
