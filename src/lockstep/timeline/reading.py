"""What loaders noted, as spans: named by the micro-batch that they read, where the trace shows its use."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.data.read_clock import ReadClock, ReadSpan
from lockstep.timeline.recorder import Span


def read_spans(clocks: Sequence[ReadClock], used: Sequence[Span], began: int, ended: int) -> list[Span]:
    """The readings between two moments, each process in a lane of its own.

    Args:
        clocks: of the rank's loaders.
        used: spans of the rank; those of micro-batches carry ``epoch`` and ``first``.
        began: nanoseconds.
        ended: nanoseconds.
    """
    names: dict[tuple[object, object], str] = {}
    for span in used:
        if "first" in span.about:
            names.setdefault((span.about["epoch"], span.about["first"]), _name(span))
    found = []
    for clock in clocks:
        for read in clock.spans():
            if read.ended >= began and read.began <= ended:
                name = names.get((read.epoch, read.first), f"{read.samples} samples")
                about = {"epoch": read.epoch, "first": read.first, "samples": read.samples}
                found.append(Span(_lane(clock, read), name, read.began, read.ended, about))
    return found


def _lane(clock: ReadClock, read: ReadSpan) -> str:
    return f"{clock.name}, worker {read.worker}" if read.worker >= 0 else f"{clock.name}, this process"


def _name(span: Span) -> str:
    kind, _, number = span.name.partition(" ")
    return f"{number} (evaluation)" if kind == "evaluate" else f"step {span.about.get('step', '?')} {number}"
