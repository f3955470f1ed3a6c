"""Curves of several runs from their logs: loss, accuracy and learning rate against epochs and against time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.explain.chart import (
    COLOURS,
    INK,
    PALE,
    Chart,
    Curve,
    Label,
    Rectangle,
    Shape,
    html_document,
    legend,
    svg,
    table,
    tick_step,
)
from lockstep.job.run_folder import require_run_folder
from lockstep.loggers.metrics_files import read_json_lines
from lockstep.text import aligned, format_duration, percent

FILE = "log.jsonl"
_GROUP = re.compile(r"learning_rate_\d+")
_DIGITS = 16
"""Of a fingerprint that are shown."""
_METRICS = ("loss", "validation_loss", "accuracy", "validation_accuracy", "learning_rate", "loss_scale")

Point = tuple[float, float]


@dataclass(frozen=True)
class RunLog:
    """The records of a run, in their order."""

    name: str
    records: tuple[Mapping[str, Any], ...]

    @cached_property
    def ends(self) -> list[Mapping[str, Any]]:
        """The records of finished epochs."""
        return [record for record in self.records if record.get("kind") == "epoch"]

    @property
    def epochs(self) -> float:
        """Epochs up to the last end of one; the end of a run may lie within one."""
        if not self.ends:
            return 0
        last = self.ends[-1]
        return float(last.get("epochs_done") or last["epoch"] + 1)

    def values(self, metric: str) -> list[tuple[Mapping[str, Any], float]]:
        """Records and their values of a metric, without what is not finite.

        All records of an evaluation; what is measured while training from steps where those have it, else from epochs.
        """
        pairs = ((record, _number(record[metric])) for record in self._with(metric))
        return [(record, y) for record, y in pairs if math.isfinite(y)]

    def _with(self, metric: str) -> list[Mapping[str, Any]]:
        every = [record for record in self.records if metric in record]
        if metric.startswith("validation_"):
            return every
        steps = [record for record in every if record.get("kind") == "step"]
        return steps or [record for record in self.ends if metric in record]

    def final(self, metric: str) -> float | None:
        """The metric of the last finished epoch, over all of it where the epoch's record has it, else the last.

        NaN where it was not finite.
        """
        if self.ends and metric in self.ends[-1]:
            return _number(self.ends[-1][metric])
        last = self.ends[-1]["step"] if self.ends else math.inf
        found = (_number(each[metric]) for each in reversed(self._with(metric)) if each["step"] <= last)
        return next(found, None)

    def is_share(self, metric: str) -> bool:
        """True for an accuracy from 0 to 1; a metric of the user's of that name may be in percent."""
        return metric.endswith("accuracy") and all(value <= 1 for _, value in self.values(metric))

    def points(self, metric: str, axis: str) -> list[Point]:
        """The curve of a metric; ``axis`` is ``epochs`` or ``seconds``.

        Without a finished epoch nothing has a place among epochs, and old logs have no seconds.
        """
        if axis == "seconds":
            placed = ((_number(record.get("seconds")), y) for record, y in self.values(metric))
            return [(x, y) for x, y in placed if math.isfinite(x)]
        if not self.ends:
            return []
        steps_per_epoch = self.ends[-1]["step"] / (self.epochs or 1)
        return [(record["step"] / steps_per_epoch, y) for record, y in self.values(metric)]


def _number(value: Any) -> float:
    """A number of a log, in which null stands for one that is not finite: NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def read_logs(folders: Sequence[Path], labels: Sequence[str] = ()) -> list[RunLog]:
    """Reads the logs of run folders; ``labels`` name them, by default their folders do.

    Raises:
        ConfigError: a folder has no log, or an empty one, or there are more or fewer labels than folders.
    """
    if labels and len(labels) != len(folders):
        raise ConfigError(f"--labels gives {len(labels)} names, and there are {len(folders)} runs. Give one for each.")
    alike = len({folder.name for folder in folders}) < len(folders)
    names = labels or [str(folder) if alike else folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"Two runs have the same name: {', '.join(names)}. Give each its own with --labels A,B.")
    logs = []
    for name, folder in zip(names, folders, strict=True):
        require_run_folder(folder)
        path = folder / FILE
        try:
            records = tuple(read_json_lines(path))
        except OSError as error:
            raise ConfigError(
                f"'{path}' cannot be read: {error.strerror}. Give the run folders of jobs, with log.json = true."
            ) from error
        if not records:
            raise ConfigError(f"'{path}' has no record yet. Compare the run after its first {FILE} line.")
        logs.append(RunLog(name, records))
    return logs


def metrics_of(logs: Sequence[RunLog]) -> list[str]:
    """The metrics that some run has, in order; groups of parameters may have learning rates of their own."""
    of_groups = {name for log in logs for record in log.records for name in record if _GROUP.fullmatch(name)}
    rates = sorted(of_groups, key=lambda name: int(name.rpartition("_")[2]))
    names = [*_METRICS[:-1], *rates, _METRICS[-1]]
    return [name for name in names if any(name in record for log in logs for record in log.records)]


def final_table(logs: Sequence[RunLog], fingerprints: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
    """A column for each run: its name, epochs, time, each metric of the last epoch, and the best accuracy.

    ``fingerprints`` are those in which runs ended, by their names; the first digits are shown.
    """
    fingerprints = fingerprints or {}
    metrics = metrics_of(logs)
    best = "validation_accuracy" in metrics
    head = ("run", "epochs", "time", *map(_title, metrics), *(["best accuracy (epoch)"] if best else []))
    head += ("fingerprint",) if fingerprints else ()
    columns: list[tuple[str, ...]] = [head]
    for log in logs:
        seconds = log.records[-1].get("seconds")
        cells = [log.name, f"{log.epochs:.4g}", "-" if seconds is None else format_duration(seconds)]
        finals = {metric: log.final(metric) for metric in metrics}
        cells += [
            "-" if value is None else _shown(value, percent if log.is_share(metric) else None)
            for metric, value in finals.items()
        ]
        if best:
            found = [(value, -record["epoch"]) for record, value in log.values("validation_accuracy")]
            value, epoch = max(found, default=(0.0, 0))
            form = percent if log.is_share("validation_accuracy") else None
            cells.append(f"{_shown(value, form)} ({1 - epoch})" if found else "-")
        if fingerprints:
            cells.append(fingerprints.get(log.name, "")[:_DIGITS] or "-")
        columns.append(tuple(cells))
    return [*zip(*columns, strict=True)]


def text(logs: Sequence[RunLog], fingerprints: Mapping[str, str] | None = None) -> str:
    """The table for the terminal."""
    return "\n".join(aligned(final_table(logs, fingerprints)))


def page(
    logs: Sequence[RunLog],
    fingerprints: Mapping[str, str] | None = None,
    settings: Mapping[str, Sequence[tuple[str, ...]]] | None = None,
) -> str:
    """The curves and the table as one page of HTML, with tables of the settings that differ by their titles."""
    title = f"Curves of {', '.join(log.name for log in logs)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<figure class="scroll">{svg(chart(logs))}</figure>',
        "<h2>At the end</h2>",
        table(final_table(logs, fingerprints)),
    ]
    for heading, rows in (settings or {}).items():
        parts += [f"<h2>{escape(heading)}</h2>", table(rows)]
    return html_document(title, parts)


_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 400.0, 180.0, 62.0, 64.0, 74.0


def chart(logs: Sequence[RunLog], also: Sequence[str] = ()) -> Chart:
    """A row of panels for each metric that a run has: against epochs, and against time where logs have it.

    ``also`` names more metrics than those that ``metrics_of`` gives.
    """
    colours = {log.name: COLOURS[number % len(COLOURS)] for number, log in enumerate(logs)}
    metrics = [name for name in (*metrics_of(logs), *also) if any(log.values(name) for log in logs)]
    axes = [
        axis for axis in ("epochs", "seconds") if any(log.points(metric, axis) for log in logs for metric in metrics)
    ]
    if not axes:
        raise ConfigError("The runs have nothing to draw: none has finished an epoch, or logged a loss.")
    width = len(axes) * (_WIDTH + _GAP) + 24
    shapes, _ = legend(colours, _LEFT, width, 18)
    for row, metric in enumerate(metrics):
        for column, axis in enumerate(axes):
            curves = {log.name: points for log in logs if (points := log.points(metric, axis))}
            left, top = _LEFT + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP)
            if curves:
                shapes += _panel(left, top, metric, axis, curves, colours)
    return Chart(width, _TOP + len(metrics) * (_HEIGHT + _GAP), tuple(shapes))


def _panel(
    left: float,
    top: float,
    metric: str,
    axis: str,
    curves: Mapping[str, Sequence[Point]],
    colours: Mapping[str, str],
) -> list[Shape]:
    longest = max(x for points in curves.values() for x, _ in points)
    units = {3600.0: "hours", 60.0: "minutes", 1.0: "seconds"} if axis == "seconds" else {1.0: "epochs"}
    unit = next((each for each in units if longest >= 2 * each), 1.0)
    values = [y for points in curves.values() for _, y in points]
    low, high, step = _bounds(values)
    is_share = metric.endswith("accuracy") and max(values) <= 1
    across = max(longest / unit, 1e-9)
    shapes: list[Shape] = [Label(left, top - 14, _title(metric), "start", 13)]
    form = (lambda share: f"{100 * share:.4g} %") if is_share else None
    for number in range(round((high - low) / step) + 1):
        y = top + _HEIGHT - number * step / (high - low) * _HEIGHT
        shapes += [
            Rectangle(left, y, _WIDTH, 1, PALE),
            Label(left - 6, y, _shown(low + number * step, form), "end", 11),
        ]
    along = tick_step(across)
    for number in range(int(across / along + 1e-9) + 1):
        x = left + number * along / across * _WIDTH
        shapes += [
            Rectangle(x, top + _HEIGHT, 1, 5, INK),
            Label(x, top + _HEIGHT + 15, f"{number * along:g}", size=11),
        ]
    shapes.append(Label(left + _WIDTH / 2, top + _HEIGHT + 32, units[unit], size=11))
    drawn: list[Shape] = []
    # A curve that others cover is wide enough to be seen below them.
    alike: Counter[tuple[Point, ...]] = Counter()
    for run, points in reversed(list(curves.items())):
        placed = tuple(
            (left + x / unit / across * _WIDTH, top + (high - y) / (high - low) * _HEIGHT) for x, y in points
        )
        extra, colour = 3.2 * alike[placed], colours[run]
        if len(placed) == 1:
            side = 4 + extra
            drawn.append(Rectangle(placed[0][0] - side / 2, placed[0][1] - side / 2, side, side, colour))
        else:
            drawn.append(Curve(placed, colour, 1.6 + extra))
        alike[placed] += 1
    return shapes + drawn[::-1]


def _bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """Round numbers at or beyond the least and the greatest value, and the distance of the marks between them."""
    least, most = min(values), max(values)
    step = tick_step((most - least) or abs(most) or 1.0)
    low = math.floor(least / step + 1e-9) * step
    high = math.ceil(most / step - 1e-9) * step
    return low, high if high > low else low + step, step


def _title(metric: str) -> str:
    return metric.replace("_", " ")


def _shown(value: float, of_share: Callable[[float], str] | None) -> str:
    if math.isnan(value):
        return "not finite"
    return f"{value + 0.0:.4g}" if of_share is None else of_share(value)
