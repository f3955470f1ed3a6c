"""The console: a progress bar on a terminal, and one line per epoch everywhere."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from lockstep.text import format_duration, percent, samples_per_second


class Console:
    """Shows loss and accuracy of the epoch so far, samples per second and the time left.

    Args:
        stream: where to write, standard error unless given. On a terminal a bar moves through the epoch;
            into a file or pipe goes one line per epoch and nothing else.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar: Any = None
        self._epochs = 1
        self._start = 0
        self._began: float | None = None
        self._first = self._total = self._ends = 0
        self._steps = 1
        self._logged: float | None = None
        self._between = 0.0
        """Seconds after the last steps of epochs, in which nothing was trained."""

    def begin(
        self, epoch: int, *, epochs: int, start: int, steps: int, done: int = 0, total: int | None = None
    ) -> None:
        """Opens the bar of an epoch."""
        self._epochs, self._start, self._steps, self._logged = epochs, start, steps, None
        self._total = start + (epochs - epoch) * steps if total is None else total
        if self._began is None:
            self._began, self._first = time.monotonic(), start + done
        self.close()
        if self._stream.isatty():
            here = min(steps, self._total - start)
            self._bar = _open_bar(self._stream, f"epoch {epoch + 1}/{epochs}", here, done)

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Moves the bar to ``step``; beside it are the loss and accuracy of the epoch so far, and the latest speed."""
        self._logged = time.monotonic()
        if self._bar is not None:
            means = {name: value for name, value in (so_far or {}).items() if name in ("loss", "accuracy")}
            self._bar.set_postfix_str(", ".join(_shown({**values, **means})), refresh=False)
            self._bar.update(step - self._start - self._bar.n)

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Writes the epoch's line."""
        self.close()
        parts = [f"epoch {epoch + 1}/{self._epochs}", *_shown(values)]
        if not is_last and (left := self._seconds_left(step)) is not None:
            parts.append(f"{format_duration(left)} left")
        self._stream.write("  ".join(parts) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.close()

    def _seconds_left(self, step: int) -> float | None:
        """Time for the steps to come, and for what follows epochs, at the pace of this process; None after the last."""
        now, done, to_come = time.monotonic(), step - self._first, self._total - step
        if self._began is None or done <= 0:
            self._began = None  # until the first steps: the run went on with an evaluation
            return None
        self._between += 0.0 if self._logged is None else now - self._logged
        self._ends += 1
        if to_come <= 0:
            return None
        pace = (now - self._began - self._between) / done
        return pace * to_come + self._between / self._ends * math.ceil(to_come / self._steps)


def import_installed(name: str) -> ModuleType:
    """Imports a package of the command's own, for which a module of that name in the current folder is not taken."""
    former, here = sys.path[:], Path.cwd()
    sys.path[:] = [path for path in former if path and Path(path).resolve() != here]
    try:
        return import_module(name)
    finally:
        sys.path[:] = former


def _open_bar(stream: TextIO, text: str, steps: int, done: int) -> Any:
    tqdm = import_installed("tqdm").tqdm
    # No monitor thread: a process with threads should not fork, and data workers are forked.
    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})
    return quiet(
        total=steps,
        initial=done,
        desc=text,
        file=stream,
        leave=False,
        dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]",
    )


def _shown(values: Mapping[str, float]) -> list[str]:
    return [_metric(name, value) for name, value in values.items()]


def _metric(name: str, value: float) -> str:
    if name == "samples_per_second":
        return samples_per_second(value)
    short = name.replace("learning_rate", "lr")
    words = re.sub(r"_(?!\d+$)", " ", short)  # the number of a class or of a group stays, as in lr_1
    if name.endswith("accuracy") and value <= 1:  # else a metric of the user's gives percent itself
        return f"{words} {percent(value)}"
    return f"{words} {value:.4g}"
