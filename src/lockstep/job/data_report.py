"""Looks at the data of a job without training: classes, samples that cannot be read, a step's batch, and who reads it.

Nothing here starts a rank. What a step holds is the sample plan, so what is shown is what a run would read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.config.job import JobConfig
from lockstep.config.rules import planned_shares
from lockstep.data import EvaluationLoader, SkipBroken, StepLoader
from lockstep.data.adopt import Stream, adopt
from lockstep.data.keyed import SampleKeys
from lockstep.data.labels import known_classes, known_labels
from lockstep.data.naming import sample_error
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.errors import ConfigError
from lockstep.job.assemble import collated, sample_plan
from lockstep.job.instantiate import importable_from, instantiate
from lockstep.text import at_most, grouped, numbered, plural, shorten

_ADDRESS = re.compile(r"<(?:[\w.<>]+\.)?(\w+) object at 0x[0-9a-f]+>")
"""The text that Python gives an object without one of its own."""
_AT_ONCE = 16
_BAR = 40
_MOST_CLASSES, _MOST_BROKEN, _MOST_NUMBERS, _MOST_FILES = 100, 20, 12, 2
_LEAST_TILE, _MOST_TILES, _CAPTION, _GAP = 64, 256, 14, 4


@dataclass(frozen=True)
class SetFacts:
    """The facts about one data set of a job."""

    name: str
    """``data.train`` or ``data.validation``."""
    text: str
    """The data set's own words."""
    samples: int
    classes: dict[str, int] | None
    """Samples of each class by name; None where the set shows no labels."""
    unreadable: list[str] | None
    """A sentence for each sample that cannot be read; None where they were not read."""
    read: int
    """Samples that are read to find these: also those that a set of draws leaves out."""


@dataclass(frozen=True)
class StepFacts:
    """Which samples of one step each rank reads."""

    epoch: int
    position: int
    """Within the epoch."""
    steps_per_epoch: int
    micro_batches: int
    """Micro-batches of the step that are not empty. Those with higher numbers are spares: a rank whose forward pass
    is collective runs the samples of micro-batch 0 again, and they count for nothing."""
    reads: list[dict[int, list[str]]]
    """For each rank the numbers of the samples, with their files where they are known, by micro-batch."""


def data_sets(config: JobConfig) -> dict[str, Any]:
    """The data sets of a job by their names in the job file."""
    importable_from(config.code)
    components = {"data.train": config.data.train, "data.validation": config.data.validation}
    return {name: instantiate(part, name=name) for name, part in components.items() if part is not None}


def look_at_set(name: str, data_set: Any, *, workers: int, reads: bool) -> SetFacts:
    """The classes of a data set and, if ``reads``, the samples that cannot be read; ``workers`` processes read."""
    given, data_set = data_set, adopt(data_set).dataset
    named = given if isinstance(data_set, Stream) else data_set  # of a DataLoader what it reads
    labels, classes = known_labels(data_set), None
    if labels is not None:
        names = known_classes(data_set)
        counts = np.bincount(labels[labels >= 0], minlength=len(names)).tolist()
        shown = [names[n] if n < len(names) else str(n) for n in range(len(counts))]
        alike = Counter(shown)
        unique = [f"{name} (class {n})" if alike[name] > 1 else name for n, name in enumerate(shown)]
        classes = dict(zip(unique, counts, strict=True))
        if wrong := int((labels < 0).sum()):
            classes["below 0"] = wrong
    broken = unreadable(data_set, workers) if reads else None
    text = _ADDRESS.sub(r"\1", repr(named).partition("\n")[0])
    return SetFacts(name, text, len(data_set), classes, broken, len(_stored(data_set)))


def unreadable(data_set: Any, workers: int) -> list[str]:
    """A sentence for each sample that cannot be read, in their order; for a stream the first, which ends it."""
    data_set = _stored(data_set)
    if isinstance(data_set, Stream):
        return _unreadable_in_order(data_set)
    loader = EvaluationLoader(_Tried(data_set), micro_batch_size=_AT_ONCE, workers=workers, collate=lambda said: said)
    with closing(loader):
        return [said for part in loader for said in part.data if said]


def _unreadable_in_order(stream: Stream) -> list[str]:
    for number in range(len(stream)):
        here = np.array([number])
        try:
            stream.get_batch(here, SampleKeys(0, 0, here))
        except MemoryError:
            raise
        except Exception as error:
            return [f"{sample_error(stream, number, error)}. What follows was not read."]
    return []


def _stored(data_set: Any) -> Any:
    """The data set that others are wrapped around."""
    while isinstance(data_set, Wrapping):
        data_set = data_set.dataset
    return data_set


class _Tried(Dataset[str]):
    """Reads each sample, and gives what went wrong."""

    def __init__(self, data_set: Any) -> None:
        self._data_set = data_set

    def __len__(self) -> int:
        return len(self._data_set)

    def __getitem__(self, index: int) -> str:
        try:
            self._data_set[index]
        except MemoryError:
            raise
        except Exception as error:
            return str(sample_error(self._data_set, index, error))
        return ""


def look_at_step(config: JobConfig, data_set: Any, devices: int, epoch: int, position: int) -> StepFacts:
    """Who reads which samples of a step. ``ConfigError`` where there is no such step."""
    plan = sample_plan(config, data_set)
    if not 0 <= position < plan.steps_per_epoch:
        raise ConfigError(
            f"--step {position} does not exist: the steps of an epoch are 0 to {plan.steps_per_epoch - 1}."
        )
    step, named = plan.step(epoch, position), SkipBroken(adopt(data_set).dataset).named
    names = [[named(plan.seed, epoch, i).removeprefix("sample ") for i in part.tolist()] for part in step.indices]
    return StepFacts(
        epoch=epoch,
        position=position,
        steps_per_epoch=plan.steps_per_epoch,
        micro_batches=step.leaves,
        reads=[
            {k: names[k if k < step.leaves else 0] for k in share.of(step.leaves)}
            for share in planned_shares(config.settings, devices)
        ],
    )


def batch_of(config: JobConfig, data_set: Any, epoch: int, position: int) -> list[Any]:
    """The micro-batches of a step, augmented, as the workers of a run read them."""
    if config.data.on_bad_sample == "skip":
        data_set = SkipBroken(data_set)
    plan, source = sample_plan(config, data_set), adopt(collated(data_set, config.data))
    loader = StepLoader(source.dataset, plan, seed=config.training.seed, prefetch=1, collate=source.collate)
    with closing(loader):
        return [part.data for part in next(loader.batches(epoch, position)).micro_batches]


def sheet(batch: Sequence[Any], classes: Sequence[str]) -> Image.Image:
    """The pictures of a batch side by side, at most 256, with their classes.

    Pictures of floats are scaled to the range that the batch has. ``ConfigError`` where samples hold no pictures.

    Args:
        batch: pairs of pictures (n, 1 or 3, height, width) and labels.
        classes: the names of the labels, or nothing.
    """
    shown = [data[:2] if isinstance(data, tuple | list) and len(data) > 1 else (None, None) for data in batch]
    if not all(isinstance(pictures, Tensor) and pictures.dim() == 4 for pictures, _ in shown):
        raise ConfigError("The samples of this job are not pairs of a picture and a label, so there is no sheet.")
    pixels = torch.cat([pictures for pictures, _ in shown])[:_MOST_TILES]
    if pixels.shape[1] not in (1, 3):
        raise ConfigError(f"The pictures of this job have {pixels.shape[1]} channels; a sheet needs 1 or 3.")
    labels = [_caption(label, classes) for _, targets in shown for label in targets][:_MOST_TILES]
    scale = max(1, -(-_LEAST_TILE // pixels.shape[3]))
    columns = math.isqrt(len(pixels) - 1) + 1
    width, height = pixels.shape[3] * scale + _GAP, pixels.shape[2] * scale + _CAPTION + _GAP
    page = Image.new("RGB", (columns * width + _GAP, -(-len(pixels) // columns) * height + _GAP), "white")
    pen = ImageDraw.Draw(page)
    for number, (picture, label) in enumerate(zip(_as_bytes(pixels), labels, strict=True)):
        row, column = divmod(number, columns)
        left, top = _GAP + column * width, _GAP + row * height
        size = width - _GAP, height - _GAP - _CAPTION
        tile = Image.fromarray(picture).resize(size, Image.Resampling.NEAREST)
        page.paste(tile, (left, top))
        pen.text((left, top + tile.height), label[: max(1, (width - _GAP) // 6)], fill="black")
    return page


def _as_bytes(pixels: Tensor) -> npt.NDArray[np.uint8]:
    """Pictures in RGB, of shape (n, height, width, 3)."""
    if pixels.dtype != torch.uint8:
        low, high = pixels.min(), pixels.max()
        pixels = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)
    return np.ascontiguousarray(pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy())


def _caption(label: Any, classes: Sequence[str]) -> str:
    if not isinstance(label, Tensor) or label.dim() or label.is_floating_point():
        return ""
    number = int(label)
    return classes[number] if 0 <= number < len(classes) else str(number)


def as_table(sets: Sequence[SetFacts], step: StepFacts) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    return {"sets": [asdict(each) for each in sets], "step": asdict(step)}


def describe(sets: Sequence[SetFacts], step: StepFacts) -> str:
    """The findings as text: a histogram of the classes, unreadable samples, and the readers of a step."""
    lines: list[str] = []
    for each in sets:
        lines += [f"{each.name}: {each.text} ({plural(each.samples, 'sample')})", *_histogram(each.classes)]
        if each.unreadable is not None:
            found = f"{len(each.unreadable):,} of {each.read:,}" if each.unreadable else "none"
            lines += [f"  unreadable: {found}"]
            lines += [f"    {sentence}" for sentence in at_most(_MOST_BROKEN, each.unreadable)]
        lines.append("")
    lines.append(f"step {step.position} of {step.steps_per_epoch:,} in epoch {step.epoch}, both counted from 0")
    # Ranks that read the same, such as the stages of one pipeline, share their lines.
    for ranks in grouped((tuple(reads), rank) for rank, reads in enumerate(step.reads)).values():
        lead, reads = numbered("rank", ranks), step.reads[ranks[0]]
        for k, names in reads.items():
            most = _MOST_FILES if "(" in "".join(names) else _MOST_NUMBERS
            again = "spare: " if k >= step.micro_batches else ""
            lines.append(f"  {lead:<12} k{k:<3} {again}{shorten(names, most)}")
            lead = ""
        if not reads:
            lines.append(f"  {lead:<12} nothing")
    return "\n".join(lines)


def _histogram(classes: dict[str, int] | None) -> list[str]:
    if classes is None:
        return ["  no class labels found: the data set has no labels or targets with a whole number for each sample"]
    width, most = max(map(len, classes), default=0), max([*classes.values(), 1])
    rows = [
        f"  {name:<{width}} {count:>9,}  {'#' * round(_BAR * count / most)}".rstrip() for name, count in classes.items()
    ]
    rest = len(rows) - _MOST_CLASSES
    return rows[:_MOST_CLASSES] + ([f"  and {rest:,} more classes"] if rest > 0 else [])
