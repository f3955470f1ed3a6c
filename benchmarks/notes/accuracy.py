"""Accuracy of the plain script in fp32 and of Lockstep in bf16 after the same number of epochs.

``python benchmarks/notes/accuracy.py --data DIR`` writes ACCURACY.md, which ``run.py`` puts into RESULTS.md. As in the
notes, training begins with weights that another training has left, and the learning rate falls to zero: two runs of
one side from random weights differ by several points, which would hide what is asked. The first weights are Lockstep's
after some epochs under a seed of its own, because it is done in a quarter of the plain script's time.
Every second photo is held out, because an accuracy over few photos says little (decision 28).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIRST_SEED = 1000
"""Of the training that leaves the first weights."""
RUN = "accuracy"
sys.path[:0] = [str(HERE), str(HERE.parent)]

from harness import report  # noqa: E402  the line above makes it importable
from harness.commands import environment, torchrun  # noqa: E402
from harness.options import add_photos  # noqa: E402
from sides import GLOBAL_BATCH, PROCESSES, settings  # noqa: E402


def main() -> None:
    given = read_command_line()
    rows, differences = [], []
    with tempfile.TemporaryDirectory(prefix="notes-") as folder:
        photos = divided(given.data, Path(folder) / "photos")
        runs = Path(folder) / "first"
        begun = lockstep(given, photos, runs, FIRST_SEED, given.first_epochs)
        print(f"first weights: {100 * begun:.2f} %", flush=True)
        first = runs / RUN / "model.safetensors"
        for seed in given.seeds:
            start = time.monotonic()
            theirs = plain(given, photos, first, seed)
            between = time.monotonic()
            runs = Path(folder) / f"runs-{seed}"
            ours = lockstep(given, photos, runs, seed, given.epochs, f"weights.path={first}")
            seconds = [between - start, time.monotonic() - between]
            differences.append(100 * (ours - theirs))
            rows.append([str(seed), *(f"{100 * value:.2f} %" for value in (theirs, ours))])
            rows[-1] += [f"{differences[-1]:+.2f}", *(f"{value:.0f}" for value in seconds)]
            print(rows[-1], flush=True)
            text = described(given, begun, rows, differences)
            if not given.quick:
                (HERE / "ACCURACY.md").write_text(text + "\n")
    print(text)


def divided(data: Path, folder: Path) -> Path:
    """Copies the photos, every second one of each class to ``validation`` and the others to ``train``."""
    for place in sorted(path for path in data.iterdir() if path.is_dir()):
        paths = sorted(path for path in place.iterdir() if path.suffix.lower() in {".jpg", ".jpeg"})
        for number, path in enumerate(paths):
            target = folder / ("validation" if number % 2 else "train") / place.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return folder


def plain(given: argparse.Namespace, photos: Path, first: Path, seed: int) -> float:
    """The plain script's accuracy after its last epoch."""
    arguments = ["--train", photos / "train", "--validation", photos / "validation", "--size", given.size]
    arguments += ["--epochs", given.epochs, "--workers", 1, "--seed", seed, "--global-batch", GLOBAL_BATCH]
    arguments += ["--final-factor", 0, "--weights", first]
    printed = finished(torchrun(PROCESSES, HERE / "plain.py", *map(str, arguments)))
    return float(json.loads(printed.splitlines()[-1])["accuracy"])


def lockstep(given: argparse.Namespace, photos: Path, runs: Path, seed: int, epochs: int, *more: str) -> float:
    """The accuracy that ``lockstep train`` wrote after its last epoch."""
    program = str(Path(sys.executable).with_name("lockstep"))
    size = given.size
    validation = (
        '{ target = "lockstep.data:ImageFolder", root = "{data}", split = "validation", transform = '
        f'{{ target = "lockstep.data:CenterCrop", size = {size}, resize = {round(size * 256 / 224)} }} }}'
    )
    changed = settings(
        "data.train.split=train",
        f"data.train.transform.size={size}",
        f"data.validation={validation}",
        "schedule.final_factor=0.0",
        "data.workers=1",
        f"training.precision={given.precision}",
        f"training.seed={seed}",
        f"training.evaluate_every={epochs}",
        f"run.directory={runs}",
        f"run.name={RUN}",
        "log.json=true",
        *more,
    )
    places = ["--data", str(photos), "--devices", f"cpu:{PROCESSES}", "--epochs", str(epochs)]
    finished([program, "train", str(HERE / "notes.toml"), *places, *changed])
    lines = [json.loads(line) for line in (runs / RUN / "log.jsonl").read_text().splitlines()]
    return [line["validation_accuracy"] for line in lines if "validation_accuracy" in line][-1]


def finished(command: list[str]) -> str:
    """The output of a command, and its error if it failed."""
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def described(given: argparse.Namespace, begun: float, rows: list[list[str]], differences: list[float]) -> str:
    """The section of the report."""
    head = [
        "seed",
        "plain script, fp32",
        f"Lockstep, {given.precision}",
        "difference",
        "s, plain",
        "s, Lockstep",
    ]
    command = (
        f"python benchmarks/notes/accuracy.py --data DIR --first-epochs {given.first_epochs} --epochs {given.epochs} "
        f"--size {given.size}"
    )
    return "\n\n".join(
        [
            f"## Accuracy after {given.epochs} epochs at {given.size} pixels",
            f"    {command} --seeds {' '.join(map(str, given.seeds))}",
            report.table(head, rows),
            f"{summed_up(differences)} All begin with the weights that Lockstep had after {given.first_epochs} epochs "
            f"under another seed, with an accuracy of {100 * begun:.2f} %; the learning rate falls from 0.02 to zero. "
            "From a seed the sides draw other orders and crops, so rows differ as two seeds of one side do. Every "
            "second photo is held out. The seconds are not a measurement.",
        ]
    )


def summed_up(differences: list[float]) -> str:
    """The mean difference of the seeds, and how far chance alone may have moved it."""
    mean = f"Mean difference {statistics.mean(differences):+.2f} points"
    if len(differences) < 2:
        return f"{mean}, of one seed."
    return f"{mean}, standard error {statistics.stdev(differences) / math.sqrt(len(differences)):.2f}."


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_photos(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--first-epochs", type=int, default=16, help="of Lockstep, for the first weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of Lockstep's side")
    parser.add_argument("--quick", action="store_true", help="one epoch of one seed, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.first_epochs, given.epochs = [0], 1, 1
    return given


if __name__ == "__main__":
    main()
