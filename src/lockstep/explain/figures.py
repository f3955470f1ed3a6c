"""Writes the figures of the documentation: ``python -m lockstep.explain.figures docs/figures``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.explain.pipeline import explain_pipeline, pipeline_svg
from lockstep.explain.samples import explain_samples, samples_svg
from lockstep.explain.traffic import explain_traffic, traffic_svg
from lockstep.explain.tree import explain_tree, tree_svg


def figures() -> dict[str, str]:
    """The SVG of every figure, by file name."""
    return {
        "samples.svg": samples_svg(explain_samples()),
        "tree.svg": tree_svg(explain_tree(micro_batches=8, ranks=2)),
        "tree-ragged.svg": tree_svg(explain_tree(micro_batches=8, leaves=7, ranks=3)),
        "traffic.svg": traffic_svg(explain_traffic()),
        "pipeline.svg": pipeline_svg(explain_pipeline(stages=4, micro_batches=8)),
    }


def main(words: Sequence[str]) -> int:
    """Writes all figures to a folder, by default ``docs/figures``; returns 2 where that fails."""
    folder = Path(words[0] if words else "docs/figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in figures().items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"Cannot write the figures to {folder}: {error.strerror}.\n")
        return 2
    sys.stdout.write(f"Wrote {len(figures())} figures to {folder}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
