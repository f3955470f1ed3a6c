"""Writes the figures of the documentation: ``make figures``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from lockstep.explain.pipeline import explain_pipeline, pipeline_svg
from lockstep.explain.samples import explain_samples, samples_svg
from lockstep.explain.traffic import explain_traffic, traffic_svg
from lockstep.explain.tree import explain_tree, tree_svg

FIGURES: dict[str, Callable[[], str]] = {
    "samples.svg": lambda: samples_svg(explain_samples()),
    "tree.svg": lambda: tree_svg(explain_tree(micro_batches=8, ranks=2)),
    "tree-one.svg": lambda: tree_svg(explain_tree(micro_batches=8, ranks=1)),
    "tree-ragged.svg": lambda: tree_svg(explain_tree(micro_batches=8, leaves=7, ranks=3)),
    "traffic.svg": lambda: traffic_svg(explain_traffic()),
    "pipeline.svg": lambda: pipeline_svg(explain_pipeline(stages=4, micro_batches=8)),
}
"""The function that draws each figure, by file name."""


def figures() -> dict[str, str]:
    """The SVG of every figure, by file name."""
    return {name: draw() for name, draw in FIGURES.items()}


if __name__ == "__main__":
    for name, text in figures().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
