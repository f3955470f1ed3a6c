"""``lockstep explain``: draws who reads, adds, sends and computes what, for given numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE, ConfigError

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subjects, each with its numbers."""
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    for add in (_add_samples, _add_tree, _add_traffic, _add_pipeline, _add_timeline):
        add(subjects)


def main(arguments: argparse.Namespace) -> int:
    """Prints the picture, or writes it as SVG."""
    facts, text, svg = arguments.explain(arguments)
    if arguments.svg is not None:
        _write(arguments.svg, svg(facts))
    if arguments.json:
        sys.stdout.write(json.dumps(facts.as_json(), indent=2) + "\n")
    elif arguments.svg is None:
        sys.stdout.write(text(facts) + "\n")
    else:
        sys.stdout.write(f"Wrote {arguments.svg}.\n")
    return EXIT_DONE


def number(words: str) -> int:
    """Parses a count such as ``25M``, ``1.5G`` or ``21,797,672``. Raises ``ConfigError`` where it is not one."""
    plain = words.replace(",", "").replace("_", "")
    unit = _UNITS.get(plain[-1:], 1)
    try:
        return round(float(plain if unit == 1 else plain[:-1]) * unit)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--parameters {words} is not a number. Use one such as 21797672 or 25M."
        ) from error


def _add_samples(subjects: Any) -> None:
    samples = _subject(
        subjects, "samples", _samples, "which rank reads which samples, compared with torch's sampler"
    )
    samples.add_argument("--samples", type=int, default=11, help="size of the data set (default: 11)")
    samples.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (default: 2)")
    samples.add_argument("--batch", type=int, default=2, help="samples of a rank in a step (default: 2)")
    _add_micro_batches(samples, "as many as ranks")
    samples.add_argument("--shuffle", action="store_true", help="shuffle by --seed and --epoch")
    samples.add_argument("--seed", type=int, default=0, help="seed of the order (default: 0)")
    samples.add_argument("--epoch", type=int, default=0, help="epoch of the order (default: 0)")
    samples.add_argument(
        "--drop-last", action="store_true", help="skip the samples that do not fill the last step"
    )


def _add_tree(subjects: Any) -> None:
    tree = _subject(subjects, "tree", _tree, "how micro-batches fold into the fixed summation tree")
    tree.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (default: 2)")
    _add_micro_batches(tree, "8, or as many as ranks")
    tree.add_argument(
        "--leaves", type=int, help="micro-batches that are not empty, as in a last step that is not full"
    )


def _add_traffic(subjects: Any) -> None:
    traffic = _subject(
        subjects, "traffic", _traffic, "who sends what to whom: ring, ordered, parameter server"
    )
    traffic.add_argument("--ranks", type=int, default=4, help="ranks that compute gradients (default: 4)")
    traffic.add_argument(
        "--servers", type=int, default=1, help="parameter servers, in addition to the ranks (default: 1)"
    )
    _add_micro_batches(traffic, "8, or as many as ranks")
    traffic.add_argument(
        "--parameters",
        default="21797672",
        metavar="N",
        help="parameters of the model, such as 25M (default: those of ResNet-34)",
    )


def _add_pipeline(subjects: Any) -> None:
    pipeline = _subject(subjects, "pipeline", _pipeline, "when each rank of a pipeline computes what")
    pipeline.add_argument("--stages", type=int, default=4, help="ranks of the pipeline (default: 4)")
    _add_micro_batches(pipeline, "the first multiple of the stages from 8 on")
    pipeline.add_argument("--schedule", metavar="NAME", help="1f1b, gpipe or interleaved (default: all)")
    pipeline.add_argument(
        "--stages-per-rank", type=int, default=2, help="stages of each rank, for interleaved (default: 2)"
    )


def _add_timeline(subjects: Any) -> None:
    timeline = _subject(
        subjects, "timeline", _timeline, "what the ranks of a run did and when, from its timeline"
    )
    timeline.add_argument("file", metavar="FILE", help="timeline.json of a run with --profile")


def _subject(
    subjects: Any, name: str, explain: Callable[[argparse.Namespace], tuple[Any, Any, Any]], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subjects.add_parser(name, help=summary, description=f"Draws {summary}.")
    parser.add_argument("--svg", metavar="FILE", help="write the picture as one self-contained SVG")
    parser.add_argument("--json", action="store_true", help="print the numbers behind the picture as JSON")
    parser.set_defaults(explain=explain)
    return parser


def _add_micro_batches(parser: argparse.ArgumentParser, default: str) -> None:
    words = f"micro-batches of a step (default: {default})"
    parser.add_argument("--micro-batches", type=int, metavar="K", help=words)


# Each imports its subject only: traffic and pipeline need torch, the tree does not.


def _samples(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from lockstep.explain.samples import explain_samples, samples_svg, samples_text

    facts = explain_samples(
        samples=arguments.samples,
        ranks=arguments.ranks,
        batch=arguments.batch,
        micro_batches=arguments.micro_batches,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
        epoch=arguments.epoch,
        drop_last=arguments.drop_last,
    )
    return facts, samples_text, samples_svg


def _tree(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from lockstep.explain.tree import explain_tree, tree_svg, tree_text

    facts = explain_tree(
        micro_batches=arguments.micro_batches, ranks=arguments.ranks, leaves=arguments.leaves
    )
    return facts, tree_text, tree_svg


def _traffic(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from lockstep.explain.traffic import explain_traffic, traffic_svg, traffic_text

    facts = explain_traffic(
        ranks=arguments.ranks,
        servers=arguments.servers,
        micro_batches=arguments.micro_batches,
        parameters=number(arguments.parameters),
    )
    return facts, traffic_text, traffic_svg


def _pipeline(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from lockstep.explain.pipeline import explain_pipeline, pipeline_svg, pipeline_text

    only = {} if arguments.schedule is None else {"schedules": (arguments.schedule,)}
    facts = explain_pipeline(
        stages=arguments.stages,
        micro_batches=arguments.micro_batches,
        stages_per_rank=arguments.stages_per_rank,
        **only,
    )
    return facts, pipeline_text, pipeline_svg


def _timeline(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from lockstep.explain.timeline import explain_timeline, timeline_svg, timeline_text

    return explain_timeline(Path(arguments.file)), timeline_text, timeline_svg


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--svg {name} cannot be written: {error.strerror}. Choose a file in a folder that you can write to."
        ) from error


COMMANDS = {"explain": (add_arguments, main)}
