"""``lockstep scale``: measures the speed-up with more devices, where the time of a step goes, and what limits it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, add_train_options, require_at_least, require_files, write_files
from lockstep.cli.train import device_counts, job_on_one_device, strategy_names
from lockstep.config.job import JobConfig
from lockstep.config.strategy_options import STRATEGIES
from lockstep.core.world import usable_cores
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.explain.chart import png, svg
from lockstep.scale.measured import Rounds, Row
from lockstep.scale.prediction import PRESETS, OneDevice, forecast, presets, require_formula
from lockstep.scale.report import Resources, ScaleReport, as_json, chart, page, sentence, text
from lockstep.verify.layouts import DEVICES, Layout, layouts

_FILES = {
    "json": "write all results to a JSON file",
    "html": "write a self-contained HTML page with all results",
    "svg": "write the bar chart of seconds per epoch over devices as SVG",
    "png": "write the same chart as PNG",
}


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        ("job", "JOB", "digits", "a TOML file, a folder of images or a built-in job"),
        ("--devices", "N,N", "", "numbers of CPU devices to measure (default: 1,2,4)"),
        ("--strategies", "A,B", "", f"some of {', '.join(STRATEGIES)} (default: those that fit)"),
        ("--steps", "N", 20, "measured steps of each run"),
        ("--warm-up", "N", 3, "steps before the measured ones"),
        ("--rounds", "N", 3, "runs of each layout, in turn"),
        ("--predict", "", False, "predict the speed-up on 2 to 4096 devices"),
        ("--interconnect", "A,B", "", f"for --predict, some of {', '.join(PRESETS)} (default: all)"),
        *((f"--{name}", "FILE", "", what) for name, what in _FILES.items()),
    )
    add_train_options(parser, "data", "precision", "threads")


def main(arguments: argparse.Namespace) -> int:
    """Measures the layouts, prints the tables and writes what was asked for."""
    require_at_least(arguments, 1, "steps", "rounds")
    require_at_least(arguments, 0, "warm_up")
    require_files(arguments, _FILES)
    if arguments.interconnect and not arguments.predict:
        raise ConfigError("--interconnect was given without --predict. Add --predict.")
    config = job_on_one_device(arguments.job, arguments)
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        report = _measure(config, arguments, Path(folder))
    print(text(report))
    title = f"{report.job}: seconds per epoch over devices"
    contents: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: as_json(report),
        "html": lambda: page(report),
        "svg": lambda: svg(chart(report.ran, title)),
        "png": lambda: png(chart(report.ran, title)),
    }
    write_files(arguments, contents)
    return EXIT_DONE


def _measure(config: JobConfig, arguments: argparse.Namespace, folder: Path) -> ScaleReport:
    links = presets(arguments.interconnect)
    if arguments.predict:
        require_formula(config.training.reduce)
    counts = sorted(set(device_counts(arguments.devices)))
    chosen = _layouts(config, counts, strategy_names(arguments.strategies))
    rounds = Rounds(config, arguments.steps, arguments.warm_up, folder)
    rows = rounds.measure(chosen, arguments.rounds, lambda line: print(line, file=sys.stderr))
    most = max((each.devices for each in chosen), default=1)
    machine = Resources(
        cores=usable_cores(),
        threads=config.run.threads,
        workers=config.data.loader_processes(config.run.threads, most),
        micro_batches=config.training.micro_batches,
    )
    limit = _limit(rows, machine)
    report = ScaleReport(config.job, arguments.steps, arguments.rounds, tuple(rows), limit, machine=machine)
    if not arguments.predict:
        return report
    one = OneDevice.of(rows[0], rounds.alone[0], config.training.reduce)
    return dataclasses.replace(report, forecast=forecast(config, one, rows, links, machine.cores, folder))


def _limit(rows: list[Row], machine: Resources) -> str:
    """The sentence about the best layout of the most devices."""
    many = [row for row in rows[1:] if not row.refused]
    if not many:
        return "Only one device was measured. To see the speed-up, use --devices 1,2."
    most = max(row.devices for row in many)
    best = max((row for row in many if row.devices == most), key=lambda row: row.speed_up.median)
    return sentence(rows[0], best, machine)


def _layouts(config: JobConfig, numbers: list[int], strategies: list[str]) -> list[Layout]:
    """The layouts to measure, without the one on one device, which is always measured."""
    k = config.training.micro_batches
    if too_many := [number for number in numbers if number > k]:
        raise ConfigError(
            f"--devices {too_many[0]} was asked for, and the job has micro_batches={k}, which at most {k} devices can "
            "share. Use fewer devices, or another training.micro_batches, which changes the results."
        )
    numbers = numbers or [number for number in DEVICES if number <= k]
    return [layout for layout in layouts(config, numbers, strategies) if layout.devices > 1]
