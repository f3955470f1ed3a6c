"""A forecast as rows of text, for the terminal and the page."""

from __future__ import annotations

from lockstep.scale.prediction.forecast import Checked, Forecast
from lockstep.scale.prediction.model import Prediction

HEAD_OF_HERE = ("layout", "predicted s/epoch", "measured s/epoch", "error")


def here_cells(each: Checked) -> tuple[str, ...]:
    """A row under ``HEAD_OF_HERE``."""
    return each.label, f"{each.predicted:.3g}", f"{each.measured:.3g}", f"{100 * each.error:+.0f} %"


def world_head(found: Forecast) -> tuple[str, ...]:
    """Devices, then the interconnects."""
    return "devices", *dict.fromkeys(each.interconnect for each in found.worlds)


def world_cells(found: Forecast) -> list[tuple[str, ...]]:
    """A row for each number of devices; ``*`` where it takes another recipe."""
    rows: dict[int, list[Prediction]] = {}
    for each in found.worlds:
        rows.setdefault(each.devices, []).append(each)
    return [
        (f"{devices}{'' if row[0].same_recipe else ' *'}", *(_world(each) for each in row))
        for devices, row in rows.items()
    ]


def message_head(found: Forecast) -> tuple[str, ...]:
    """Bytes, then the numbers of ranks that exchanged them."""
    return "bytes", *(f"{ranks} ranks" for ranks in found.messages)


def message_cells(found: Forecast) -> list[tuple[str, ...]]:
    """A row for each size, in milliseconds."""
    sizes = next(iter(found.messages.values()))
    return [
        (f"{size:,}", *(f"{1000 * seconds[size]:.3g}" for seconds in found.messages.values()))
        for size in sizes
    ]


def _world(each: Prediction) -> str:
    return f"{each.epoch:.3g} ({100 * each.efficiency:.0f} %)"
