"""The command lines that start N ranks, and the environment that all sides get."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
"""The benchmarks folder."""

Launcher = Callable[..., list[str]]
"""Makes a command line from the number of processes, a script and its arguments."""


def torchrun(processes: int, script: Path, *arguments: str) -> list[str]:
    """torch's own launcher on one host, as its documentation has it."""
    program = Path(sys.executable).with_name("torchrun")
    return [str(program), "--standalone", f"--nproc_per_node={processes}", str(script), *arguments]


def lockstep_run(processes: int, script: Path, *arguments: str) -> list[str]:
    """``lockstep run`` on one host."""
    program = Path(sys.executable).with_name("lockstep")
    return [str(program), "run", "--devices", f"cpu:{processes}", str(script), *arguments]


def environment() -> dict[str, str]:
    """This process's environment with one thread a rank; rank variables of an outer launcher are left out."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "LOCKSTEP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(filter(None, [str(HERE), kept.get("PYTHONPATH", "")]))
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return kept | one_thread | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
