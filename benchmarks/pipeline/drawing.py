"""Draws passes over time and bubbles against theory as SVG, without a plotting library."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

WIDTH, ROW, LEFT, TOP = 900, 26, 110, 34
FORWARD, BACKWARD = "#4c8bd6", "#e08a3c"
_BACKGROUND = '<rect width="100%" height="100%" fill="white"/>'
"""Pages may be dark, and the words are black."""
COLOURS = {"gpipe": "#4c8bd6", "1f1b": "#3f9d5c", "interleaved": "#c2527a"}


def timelines(found: Sequence[Any]) -> str:
    """The passes of each schedule's median step: a row for each rank, forward blue, backward orange, waiting grey."""
    parts, y = [], TOP
    longest = max(stop for each in found for _, _, stop in relative(each.spans))
    scale = (WIDTH - LEFT - 20) / longest
    for each in found:
        waits = 100 * statistics.median(each.waiting)
        parts.append(text(LEFT, y - 8, f"{each.schedule}, {each.count} micro-batches: {waits:.0f} % waiting"))
        first = min(start for rank in each.spans for _, start, _ in rank)
        length = max(stop for _, _, stop in relative(each.spans))
        for number, rank in enumerate(each.spans):
            parts.append(text(LEFT - 10, y + ROW - 9, f"rank {number}", anchor="end"))
            parts.append(box(LEFT, y, length * scale, ROW - 4, "#e4e4e4"))
            for name, start, stop in rank:
                colour = FORWARD if name.endswith("F") else BACKWARD
                parts.append(box(LEFT + (start - first) * scale, y, (stop - start) * scale, ROW - 4, colour))
            y += ROW
        y += TOP
    parts.append(text(LEFT, y - 8, f"forward blue, backward orange, waiting grey; {1000 * longest:.0f} ms across"))
    return picture(parts, y)


def bubbles(found: Sequence[Any], ranks: int) -> str:
    """The part of the time that is waited over the number of micro-batches: lines for theory, points with range."""
    height, bottom = 380, 330
    counts = sorted({each.count for each in found})
    top = max(max(each.waiting) for each in found) * 1.1
    xs = {count: LEFT + 24 + (WIDTH - LEFT - 150) * n / (len(counts) - 1) for n, count in enumerate(counts)}

    def at(part: float) -> float:
        return bottom - (bottom - TOP) * part / top

    parts = [
        text(
            LEFT,
            20,
            f"part of the time that {ranks} ranks wait, with M micro-batches: lines theory (gpipe as 1f1b), "
            "points measured (median, range)",
        )
    ]
    for tick in range(0, int(100 * top) + 1, 10):
        parts.append(line(LEFT, at(tick / 100), WIDTH - 100, at(tick / 100), "#dddddd"))
        parts.append(text(LEFT - 10, at(tick / 100) + 4, f"{tick} %", anchor="end"))
    parts += [text(xs[count], bottom + 22, f"M = {count}", anchor="middle") for count in counts]
    for number, (schedule, colour) in enumerate(COLOURS.items()):
        mine = [each for each in found if each.schedule == schedule]
        for left, right in pairwise(mine):
            parts.append(line(xs[left.count], at(left.expected), xs[right.count], at(right.expected), colour))
        for each in mine:
            x = xs[each.count] + 8 * (number - 1)
            parts.append(line(x, at(min(each.waiting)), x, at(max(each.waiting)), colour))
            middle = at(statistics.median(each.waiting))
            parts.append(f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="5" fill="{colour}"/>')
        parts.append(box(WIDTH - 95, TOP + 20 * number, 12, 12, colour))
        parts.append(text(WIDTH - 78, TOP + 11 + 20 * number, schedule))
    return picture(parts, height)


def relative(spans: Sequence[Sequence[tuple[str, float, float]]]) -> Iterable[tuple[str, float, float]]:
    """The spans of all ranks from the first one's start."""
    first = min(start for rank in spans for _, start, _ in rank)
    return [(name, start - first, stop - first) for rank in spans for name, start, stop in rank]


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" '
        'stroke="white" stroke-width="0.5"/>'
    )


def line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" stroke-width="1.5"/>'


def text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def picture(parts: Iterable[str], height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
    return "\n".join([head + 'font-family="sans-serif" font-size="13">', _BACKGROUND, *parts, "</svg>", ""])
