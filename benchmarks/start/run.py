"""The memory of a process until a model of 2 GB of parameters can be trained under ``fsdp``: built whole, or without
values, or resumed.

``python benchmarks/start/run.py`` writes RESULTS.md; ``--quick`` is a model of 0.1 GB, nothing written. It takes
18 GiB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402  the line above makes the harness importable
from harness import report  # noqa: E402
from torch import nn  # noqa: E402

import lockstep  # noqa: E402

CLAIM = "A model that is built without values starts in about its part of the memory on each process."
RANKS, BLOCKS = 4, 32
WHOLE, EMPTY, SAVED, RESUMED = "built whole", "built without values", "and saved", "and resumed"


def peak() -> float:
    """The most memory that this process has had since ``forget_peak``, in bytes, with mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> float:
    """Begins a new peak; gives the memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def start(side: str, width: int, folder: str) -> list[float]:
    """Prepares a model; gives its size in bytes, two peaks of memory in parts of that, and the seconds."""
    resume = "auto" if side == RESUMED else ""
    directory = folder if side in (SAVED, RESUMED) else None
    run = lockstep.init(
        global_batch=8, micro_batches=RANKS, strategy="fsdp", directory=directory, resume=resume, seed=0
    )
    before, began = forget_peak(), time.perf_counter()

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS)))

    if side == WHOLE:
        torch.manual_seed(0)
        model = build()
    else:
        with run.empty_model():
            model = build()
    prepared, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if side == SAVED:
        run.save(wait=True)
    size = 4.0 * sum(each.numel() for each in prepared.parameters())
    found = [size, (peak() - before) / size, peak() / size, time.perf_counter() - began]
    run.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    width = 1024 if given.quick else 4096
    folder = tempfile.mkdtemp(prefix="lockstep-start-")
    rows, size = [], 0.0
    try:
        for side in (WHOLE, EMPTY, SAVED, RESUMED):
            found = lockstep.launch(start, side, width, folder, devices=f"cpu:{RANKS}")
            size, more, all_of_it, seconds = (max(each) for each in zip(*found))
            rows.append([side, f"{more:.2f}", f"{all_of_it:.2f}", f"{seconds:.1f}"])
    finally:
        shutil.rmtree(folder)
    sections = [
        f"{BLOCKS} linear layers of {width} x {width} numbers, {size / 1e9:.1f} GB in all, on {RANKS} processes. The "
        "largest of the processes, in parts of the model's size: the peak of building and `run.prepare` above what the "
        "process had before, and with that, which is Python and torch. Mapped files count. One run.",
        report.table(["model", "peak above the start", "peak", "seconds"], rows),
    ]
    print("\n\n".join(sections))
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="The memory of a start",
            claim=CLAIM,
            command="python benchmarks/start/run.py",
            sections=sections,
        )


if __name__ == "__main__":
    main()
