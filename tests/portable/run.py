"""Compares this CPU with emulated ones, operator by operator and program by program, with and without ``portable``.

``make portable`` runs it and writes docs/portable.md between its marks. Needs ``qemu-x86_64`` (Debian: qemu-user),
which runs torch under other CPU models, with AVX2 at most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def operators(model: str) -> dict[str, str]:
    """The digest of each operator's results, with ``portable``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "digests.json"
        python(model, "operators.py", str(out), portable=True)
        found: dict[str, str] = json.loads(out.read_text())
        return found


def program(name: str, model: str, *, portable: bool) -> str:
    """The fingerprint of a program."""
    return python(model, "programs.py", name, str(STEPS), portable=portable)


def operator_lines(models: tuple[str, ...], pool: ThreadPoolExecutor) -> list[str]:
    """A table of the operators whose results are not those of this CPU, with ``portable``."""
    lines = ["| emulated CPU | operators that differ from this CPU, with `portable` |", "|---|---|"]
    here, *there = pool.map(operators, ("", *models))
    for model, found in zip(models, there, strict=True):
        names = [f"`{name}`" for name in here if found[name] != here[name]]
        lines.append(f"| {model} | {len(names)} of {len(here)}{': ' * bool(names)}{', '.join(names)} |")
    print("\n".join(lines), flush=True)
    return lines


def program_lines(models: tuple[str, ...], pool: ThreadPoolExecutor) -> tuple[list[str], bool]:
    """A table of fingerprints, and whether ``portable`` made them equal where they were not."""
    lines = [f"| program | | this CPU | {' | '.join(models)} |", f"|---|---|---|{'---|' * len(models)}"]
    good = True
    for name in PROGRAMS:
        for portable in (False, True):
            asked = ("", *(models if portable else models[:1]))
            run = partial(program, name, portable=portable)
            prints = list(pool.map(run, asked))
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
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        by_operator = operator_lines(models, pool)
        by_program, good = program_lines(models, pool)
    print(f"{time.monotonic() - begun:.0f} s")
    if given.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        tables = "\n".join([head, "", *by_operator, "", *by_program, ""])
        PAGE.write_text(f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    if not good:
        raise SystemExit("A fingerprint differs with portable, or none differs without it.")


if __name__ == "__main__":
    main()
