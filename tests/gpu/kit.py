"""The proof kit for GPUs: one command, one table, one file.

    make gpu PYTHON=/path/to/python          all parts, on the torch and the GPUs of that Python
    make gpu ARGS="--parts ab"               some of them
    make gpu SIMULATED=1                     on simulated devices, so that the kit itself is known to run

    a  what is there: versions, NCCL on one card, a training of every strategy
    b  bits: one fingerprint in all layouts, for each model and precision; clip norms; resume
    c  speed: against a plain loop, of a ResNet-50 and a small net; sums of gradients; photos
    d  the host waits for nothing in a step; races
    e  faults: a rank killed or stuck, no memory, an assert on the device
    f  memory: what a step takes, and that a run gives it back
    g  CIFAR-10, by one recipe in a plain loop and under Lockstep, and by the built-in job

Ranks beyond the number of cards share them (``--devices 0,0``): NCCL takes them as of several hosts. Every check is a
row; gpu.json is written after each, with versions and cards, and how a check failed, so that a kit that is cut short
leaves what it has found. A part that is over its time, or the command over that of all, skips its other checks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_NEEDED = {"PIL": "pillow"} | {name: name for name in ("torch", "numpy", "safetensors", "tqdm", "psutil", "filelock")}
"""Packages by the names of their modules."""


def _require_packages() -> None:
    if missing := [package for module, package in _NEEDED.items() if not find_spec(module)]:
        sys.exit(
            f"{sys.executable} has no {', '.join(missing)}, which the kit needs. Name another Python (make gpu "
            "PYTHON=/path/to/python), or install into this one what is missing; the kit installs nothing."
        )
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 8):
        sys.exit(f"{sys.executable} has torch {version('torch')}; Lockstep needs 2.8 or newer. Name another Python.")


if __name__ == "__main__":
    _require_packages()

from tests.gpu import checks  # noqa: E402  # after what they import was looked for
from tests.simcuda.machine import Machine  # noqa: E402

PARTS = {
    "a": checks.what_is_there,
    "b": checks.bits,
    "c": checks.speed,
    "d": checks.waits_and_races,
    "e": checks.faults,
    "f": checks.memory,
    "g": checks.cifar10,
}


_SIDE_BY_SIDE = "abd"
_LONGER_SECONDS, _DETAILS = 30.0, 3000
_OVER = "the time of this part was over"


@dataclass
class Row:
    """One check."""

    part: str
    check: str
    expected: str
    found: str
    verdict: str
    """``met``, ``not met``, ``measured``, or ``skipped``."""
    seconds: float
    details: str = ""
    """Of what was raised: the end of its traceback."""


class Kit:
    """Runs checks on a machine and writes down what they find.

    Args:
        simulated: on simulated devices.
        seconds: of each part.
        within: seconds of all parts together, from now on.
        out: the file.
        cifar10: the data set's archive or folder; None where it is not there.
        only: a regular expression; checks in whose names it is not found are left out.
        jobs: how many checks run side by side in parts that measure neither times nor memory.
    """

    def __init__(
        self,
        simulated: bool,
        seconds: float,
        within: float,
        out: Path,
        cifar10: Path | None = None,
        only: str = "",
        jobs: int = 1,
    ) -> None:
        self._end = time.monotonic() + within
        self.simulated, self._seconds, self._out, self.cifar10 = simulated, seconds, out, cifar10
        self._only, self._jobs = re.compile(only), jobs
        self._of_thread, self._machines, self._lock = threading.local(), list[Machine](), threading.Lock()
        self.rows: list[Row] = []
        self.about: dict[str, Any] = {"simulated": simulated}
        self.cards = 4 if simulated else int(self.machine.run(checks.count_cards, 1)[0])

    @property
    def machine(self) -> Machine:
        """The process that forks ranks for the checks of this thread."""
        if not hasattr(self._of_thread, "machine"):
            self._of_thread.machine = Machine(simulated=self.simulated)
            self._machines.append(self._of_thread.machine)
        found: Machine = self._of_thread.machine
        return found

    def close(self) -> None:
        """Ends those processes."""
        for machine in self._machines:
            machine.__exit__()

    def run(self, part: str) -> None:
        """Runs the checks of a part until its time is over, and no check for more than some seconds longer."""
        end = min(time.monotonic() + self._seconds, self._end - _LONGER_SECONDS)
        chosen = [each for each in PARTS[part](self) if self._only.search(each[0])]
        with ThreadPoolExecutor(self._jobs if part in _SIDE_BY_SIDE else 1) as pool:
            for running in [pool.submit(self._check, part, end, *each) for each in chosen]:
                running.result()

    def _check(self, part: str, end: float, name: str, expected: str, check: Callable[[], tuple[str, str]]) -> None:
        began, details = time.monotonic(), ""
        if began > end:
            self._add(Row(part, name, expected, _OVER, "skipped", 0.0))
            return
        self.machine.deadline = end + _LONGER_SECONDS
        try:
            found, verdict = check()
        except checks.Skip as reason:
            found, verdict = str(reason), "skipped"
        except Exception as error:
            if time.monotonic() > end:
                self._add(Row(part, name, expected, _OVER, "skipped", round(time.monotonic() - began, 1)))
                return
            details = "\n".join([str(error), *getattr(error, "__notes__", [])])[-_DETAILS:]
            print(details, file=sys.stderr)
            found, verdict = f"{type(error).__name__}: {str(error)[:200]}", "not met"
        self._add(Row(part, name, expected, found, verdict, round(time.monotonic() - began, 1), details))

    def seconds_left(self, most: float) -> float:
        """Seconds for a check that asks for so many at most."""
        assert self.machine.deadline is not None
        return max(1.0, min(most, self.machine.deadline - time.monotonic()))

    def _add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            content = {"about": self.about, "rows": [asdict(each) for each in self.rows]}
            self._out.write_text(json.dumps(content, indent=1))
            print(_line(row), flush=True)


def _line(row: Row) -> str:
    found = row.found if len(row.found) <= 70 else row.found[:67] + "..."
    return f"{row.part}  {row.verdict:8}  {row.seconds:6.1f} s  {row.check:44} {row.expected:24} {found}"


Check = tuple[str, str, Callable[[], tuple[str, str]]]


def main() -> int:
    """Runs the kit; the exit status is 1 where a check was not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="abcdefg", help="which parts, in which order")
    parser.add_argument("--simulated", action="store_true", help="on simulated devices")
    parser.add_argument("--seconds", type=float, default=510.0, help="of each part")
    parser.add_argument("--within", type=float, default=1800.0, help="seconds of all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the file that is written")
    parser.add_argument("--cifar10", type=Path, help="archive or folder of CIFAR-10, for part g")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="checks whose names match this regular expression"
    )
    parser.add_argument("--jobs", type=int, default=1, help="checks side by side in parts a, b and d")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"--parts takes letters of {''.join(PARTS)}, and not {', '.join(sorted(unknown))}.")
    try:
        re.compile(arguments.only)
    except re.error as error:
        parser.error(f"--only takes a regular expression: {error}.")
    given = ("simulated", "seconds", "within", "out", "cifar10", "only", "jobs")
    kit = Kit(*(getattr(arguments, each) for each in given))
    try:
        if not kit.cards:
            print("The torch of this Python sees no CUDA device.", file=sys.stderr)
            return 2
        checks.describe(kit)
        for part in arguments.parts:
            kit.run(part)
    finally:
        kit.close()
    print(f"\n{'':21}  check{'':40}expected{'':17}found")
    for row in kit.rows:
        print(_line(row))
    verdicts = ("met", "not met", "measured", "skipped")
    counts = {verdict: sum(row.verdict == verdict for row in kit.rows) for verdict in verdicts}
    print(f"\n{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; {arguments.out}")
    return int(counts["not met"] > 0)


if __name__ == "__main__":
    sys.exit(main())
