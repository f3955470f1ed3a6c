"""Compares this CPU with emulated ones, operator by operator and program by program, with and without ``portable``.

``make portable`` runs it and writes docs/portable.md between its marks. Needs ``qemu-x86_64`` (Debian: qemu-user),
which runs torch under other CPU models, with AVX2 at most.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lockstep.core.fingerprint import cpu_of, device_model
from lockstep.core.world import PORTABLE_VARIABLES

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "portable.md"
MARKS = "<!-- measured by make portable -->\n", "<!-- end -->\n"
MODELS = ("EPYC", "Haswell", "Skylake-Client")
"""Without ``portable``, the first one alone: it is enough to show that bits differ."""
PROGRAMS = ("digits", "resnet18", "decoder", "lstm")
STEPS = 12


def emulated(model: str) -> list[str]:
    """The beginning of a command that runs under that CPU; none for this one."""
    return ["qemu-x86_64", "-cpu", model] if model else []


def python(model: str, script: str, *arguments: str, portable: bool) -> str:
    """Runs a script of this folder and returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in PORTABLE_VARIABLES}
    environment = {**kept, "OMP_NUM_THREADS": "1", **(PORTABLE_VARIABLES if portable else {})}
    command = [*emulated(model), sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    command += ["--portable"] if portable else []
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
        if done.returncode != -signal.SIGSEGV or not model:  # qemu 7.2 itself crashes now and then
            break
    if done.returncode:
        raise SystemExit(f"{script} under {model or 'this CPU'} failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip()


def operators(model: str, *, portable: bool) -> dict[str, str]:
    """The digest of each operator's results."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "digests.json"
        python(model, "operators.py", str(out), portable=portable)
        found: dict[str, str] = json.loads(out.read_text())
        return found


def differing(runs: list[dict[str, str]]) -> list[str]:
    """The names whose digests are not equal in all runs."""
    return [name for name in runs[0] if len({run[name] for run in runs}) > 1]


def operator_lines(models: tuple[str, ...]) -> list[str]:
    lines = ["| | operators that differ |", "|---|---|"]
    for portable in (False, True):
        runs = [operators(model, portable=portable) for model in ("", *(models if portable else models[:1]))]
        names = differing(runs)
        kinds = collections.Counter(name.split(" ")[0] for name in names)
        listed = ", ".join(f"`{name}`" + f" ({number})" * (number > 1) for name, number in kinds.items())
        count = f"{len(names)} of {len(runs[0])}"
        lines.append(f"| {'`portable`' if portable else 'without'} | {count}{': ' * bool(names)}{listed} |")
        print(lines[-1], flush=True)
    return lines


def program_lines(models: tuple[str, ...]) -> tuple[list[str], bool]:
    """A table of fingerprints, and whether ``portable`` made them equal where they were not."""
    lines = [f"| program | | this CPU | {' | '.join(models)} |", f"|---|---|---|{'---|' * len(models)}"]
    good = True
    for name in PROGRAMS:
        for portable in (False, True):
            asked = ("", *(models if portable else models[:1]))
            prints = [python(model, "programs.py", name, str(STEPS), portable=portable) for model in asked]
            good = good and (len(set(prints)) == 1) is portable
            cells = " | ".join([f"`{each[:12]}`" for each in prints] + [""] * (len(models) + 1 - len(asked)))
            lines.append(f"| {name} | {'`portable`' if portable else 'without'} | {cells} |")
            print(lines[-1], flush=True)
    return lines, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="CPU models of qemu")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/portable.md")
    given = parser.parse_args()
    models = tuple(given.models.split(","))
    begun = time.monotonic()
    cpu = torch.device("cpu")
    head = (
        f"This CPU: {cpu_of(cpu)}, {device_model(cpu)}; torch {torch.__version__.partition('+')[0]}, Python "
        f"{platform.python_version()}. Emulated: {', '.join(models)} of qemu."
    )
    by_operator = operator_lines(models)
    by_program, good = program_lines(models)
    print(f"{time.monotonic() - begun:.0f} s")
    if given.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        tables = "\n".join([head, "", *by_operator, "", *by_program, ""])
        PAGE.write_text(f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    if not good:
        raise SystemExit("A fingerprint differs with portable, or none differs without it.")


if __name__ == "__main__":
    main()
