"""The command lines of all sides: the plain script, Lockstep in fp32 and bf16, and bf16 with one part left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.commands import lockstep_run, torchrun
from harness.sides import Command

HERE = Path(__file__).resolve().parent
PROCESSES, GLOBAL_BATCH = 2, 64
PLAIN, FP32, BF16 = "plain script, fp32", "Lockstep, fp32", "Lockstep, bf16"


def compared(data: Path, runs: Path, workers: int) -> dict[str, Command]:
    """The three sides of the claim."""
    return {
        PLAIN: plain(data, workers),
        FP32: ours(data, runs, workers, settings("training.precision=fp32")),
        BF16: ours(data, runs, workers),
    }


def parts(data: Path, runs: Path, workers: int) -> dict[str, Command]:
    """Lockstep in bf16 with one part left out, or changed."""
    theirs = '{ target = "harness.torchvision_here:training_photos", root = "{data}" }'
    changed = {
        "image pipeline: torchvision's instead": settings(f"data.train={theirs}"),
        "photos as bytes to the device: floats from the workers": settings(
            "data.train.target=float_photos:FloatPhotos"
        ),
        "channels-last": settings("training.channels_last=false"),
        "freed memory kept": ["--give-back"],
        "loss not read back: read in every step": ["--read-loss"],
        "ordered sum in shared memory: gloo's all-reduce instead": settings("training.reduce=ring"),
        "one micro-batch a rank: four (K = 8)": settings("training.micro_batches=8"),
    }
    return {name: ours(data, runs, workers, arguments) for name, arguments in changed.items()}


def settings(*texts: str) -> list[str]:
    """The options that change settings of the job."""
    return [word for text in texts for word in ("--set", text)]


def plain(data: Path, workers: int) -> Command:
    """The plain script under torchrun."""
    arguments = ["--train", str(data), "--global-batch", str(GLOBAL_BATCH), "--workers", str(workers)]
    return partial(_command, torchrun, "plain.py", arguments)


def ours(data: Path, runs: Path, workers: int, arguments: list[str] | None = None) -> Command:
    """The job file under ``lockstep run``."""
    common = settings(f"data.root={data}", f"run.directory={runs}", f"data.workers={workers}")
    return partial(_command, lockstep_run, "with_lockstep.py", [*common, *(arguments or [])])


def _command(start, script: str, arguments: list[str], control: Path) -> list[str]:
    return start(PROCESSES, HERE / script, *arguments, "--control", str(control))
