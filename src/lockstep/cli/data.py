"""``lockstep data`` and ``lockstep download``: looks at the data of a job, and downloads published data sets.

lockstep data       shows the classes of a job's data, samples that cannot be read, and a step: its pictures and readers
lockstep download   downloads a published data set and checks it
"""

from __future__ import annotations

import argparse
import json
import shlex
from functools import partial
from io import BytesIO
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, add_train_options, require_files, write_file
from lockstep.cli.train import overrides, resolve_devices
from lockstep.config.job_file import load_job
from lockstep.core.world import World
from lockstep.errors import EXIT_DONE, ConfigError, nearest
from lockstep.text import printable

EXIT_UNREADABLE = 1


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(parser, ("job", "JOB", "digits", "a TOML file, a folder of images or a built-in job"))
    add_train_options(parser, "data", "devices", "strategy", "mesh")
    add_options(
        parser,
        ("--epoch", "E", 0, "epoch of the step, from 0"),
        ("--step", "S", 0, "step within the epoch, from 0"),
        ("--sheet", "FILE", str, "write the pictures of the step, augmented, as PNG"),
        ("--json", "FILE", str, "write all that is found, with every sample of the step"),
        ("--quick", "", False, "do not read every sample"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints what is found; returns 1 if a sample cannot be read, else 0."""
    config = load_job(arguments.job, overrides(arguments))
    devices = resolve_devices(config)
    if not 0 <= arguments.epoch < 1 << 63:
        raise ConfigError(f"--epoch {arguments.epoch} should be 0 or more, and below 2^63.")
    require_files(arguments, ("json", "sheet"))
    from lockstep.data.labels import known_classes
    from lockstep.job import data_report

    sets = data_report.data_sets(config)
    training = sets["data.train"]
    step = data_report.look_at_step(config, training, len(devices.names), arguments.epoch, arguments.step)
    workers = config.data.loader_processes(config.run.threads, 1)
    found = [
        data_report.look_at_set(name, each, workers=workers, reads=not arguments.quick) for name, each in sets.items()
    ]
    print(printable(data_report.describe(found, step)))
    if arguments.json:
        write_file(arguments.json, json.dumps(data_report.as_table(found, step), indent=1) + "\n")
    if arguments.sheet:
        batch, picture = data_report.batch_of(config, training, arguments.epoch, arguments.step), BytesIO()
        data_report.sheet(batch, known_classes(training)).save(picture, "PNG")
        write_file(arguments.sheet, picture.getvalue())
    return EXIT_UNREADABLE if any(each.unreadable for each in found) else EXIT_DONE


def add_download_arguments(parser: Parser) -> None:
    """Declares the set, its folder and where to take it from."""
    parser.add_argument("set", metavar="SET", help="cifar10 or mnist")
    parser.add_argument("--to", metavar="DIR", help="folder of the files (default: one of the set's name)")
    parser.add_argument("--mirror", metavar="URL", help="take the files, under their names, from below URL")


def download(arguments: argparse.Namespace) -> int:
    """Downloads what is absent, and prints the command that trains on it; only rank 0 of a launcher's ranks does."""
    from lockstep.data.download import PUBLISHED, download_archive

    if arguments.set not in PUBLISHED:
        raise ConfigError(f"There is no published set {arguments.set!r}.{nearest(arguments.set, PUBLISHED)}")
    world = World.from_environment()
    if not world.is_main:
        print(f"Rank {world.rank} downloads nothing: rank 0 does.")
        return EXIT_DONE
    folder, archives = Path(arguments.to or arguments.set), PUBLISHED[arguments.set]
    tell = partial(print, flush=True)
    files = [download_archive(each, folder, mirror=arguments.mirror, tell=tell) for each in archives]
    data = shlex.quote(str(files[0] if len(files) == 1 else folder))
    print(f"Train on it: lockstep train {arguments.set} --data {data}")
    return EXIT_DONE


COMMANDS = {"data": (add_arguments, main), "download": (add_download_arguments, download)}
