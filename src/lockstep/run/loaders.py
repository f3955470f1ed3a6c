"""Keeps one loader for each data set of a run, so that worker processes stay; counts the samples that were skipped."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.config.options import RunOptions
from lockstep.core.plan import SamplePlan, Share
from lockstep.data import EvaluationLoader, SkipBroken, Source, StepLoader, Stream, adopt, check_batch_size
from lockstep.data.adopt import SideBySide, unused_side_by_side
from lockstep.data.batch import Batch
from lockstep.data.changes import Notes, choices
from lockstep.data.naming import unwrap_subset
from lockstep.data.reader import ReadTrace
from lockstep.data.workers import ReadingOptions, sample_digests
from lockstep.distributed.collectives import all_reduce_max, gather_json
from lockstep.errors import ConfigError, DataError
from lockstep.numerics.running_buffers import has_batch_norm
from lockstep.run.epoch_loop import Read
from lockstep.runtime.devices import has_gpus, is_gpu
from lockstep.strategies import Strategy
from lockstep.text import shorten

logger = logging.getLogger(__name__)
_MOST_SOURCES, _MOST_WORKERS = 8, 4096
_Kind = Literal["training", "evaluation"]
_Key = tuple[Hashable, ...]
"""The id of the data, and how and by whom it is to be read."""


class LoaderCache:
    """Makes loaders for the share of one process."""

    def __init__(self, options: RunOptions, strategy: Strategy) -> None:
        self._options, self._strategy = options, strategy
        self._sources: OrderedDict[int, tuple[Source, Any]] = OrderedDict()
        self._numbers: dict[int, int] = {}
        self._notes: dict[int, Notes] = {}
        self._shared: dict[int, list[bytes]] = {}
        """The contents of memory that data shared with workers when they were last read."""
        self._checked: set[int] = set()
        """Ids of sources whose samples need not be read twice, since those before the last change were."""
        self._numbered = 0
        self._plans: dict[_Key, SamplePlan] = {}
        self._training: dict[_Key, StepLoader] = {}
        self._evaluation: dict[_Key, EvaluationLoader] = {}
        self._lately: set[_Key] = set()
        self._changed: set[tuple[int, _Kind]] = set()
        """Loaders that were made before their data were changed."""
        self._told: set[str] = set()
        """Notes that were logged."""
        self._partly_noted: set[int] = set()
        """Ids of data that can be changed unseen, so that no worker may read them ahead of the loop."""
        self.clocks: list[ReadTrace] | None = None
        """Gets the notes of every loader that is made from now on about when it reads; None: nothing is noted."""

    def refresh(self, data: Any, loaders: _Kind) -> bool:
        """Forgets what was made of a data set where the program has changed it since; loaders are made anew.

        Args:
            data: that is going to be read.
            loaders: that will read it. Their workers are started anew where a change of the set may not be seen.

        Returns:
            Whether it has.
        """
        notes = Notes(data)
        if id(data) in self._sources and self._notes.get(id(data), notes) != notes:
            self._checked.discard(id(self._sources[id(data)][0]))
            source = adopt(data)
            self._sources[id(data)] = source, data
            self._checked.add(id(source))
            self._changed |= {(id(data), "training"), (id(data), "evaluation")}
        self._notes[id(data)] = notes
        self._shared[id(data)] = notes.shared()
        self._partly_noted.discard(id(data))
        if not notes.are_whole:
            self._partly_noted.add(id(data))
            for loader in self._made(loaders, id(data)).values():
                loader.close()
        if changed := (id(data), loaders) in self._changed:  # the others may be in use
            self._changed.remove((id(data), loaders))
            self._drop(loaders, id(data))
        return changed

    def _made(self, loaders: _Kind, data: int) -> dict[_Key, StepLoader | EvaluationLoader]:
        made: Mapping[_Key, StepLoader | EvaluationLoader] = self._training
        if loaders == "evaluation":
            made = self._evaluation
        return {key: loader for key, loader in made.items() if key[0] == data}

    def _drop(self, loaders: _Kind, data: int) -> None:
        for key, loader in self._made(loaders, data).items():
            loader.close()
            (self._training if loaders == "training" else self._evaluation).pop(key)
        if loaders == "training":
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] != data}

    def source(self, data: Any) -> Source:
        """The source of ``data``: its data set and how to read it; warns once of what is handled differently."""
        if id(data) not in self._sources:
            source = adopt(data)
            self._warn(*source.notes)
            known = next(
                (i for i, (each, _) in self._sources.items() if each.dataset is source.dataset), None
            )
            self._numbers[id(data)] = self._numbered if known is None else self._numbers[known]
            self._numbered += known is None
            self._sources[id(data)] = source, data  # the data is kept, so that its id stays its own
            while len(self._sources) > _MOST_SOURCES:  # a loop may make a new DataLoader in every epoch
                self._forget(next(iter(self._sources)))
        self._sources.move_to_end(id(data))
        return self._sources[id(data)][0]

    def compared(self, data: Any, workers: int | None) -> tuple[int, Callable[[], dict[str, str]]]:
        """A number for the data set, which is the same on every rank and with other loaders of it; gives digests."""
        self.source(data)
        return self._numbers[id(data)], partial(self.digests, data, workers)

    def plan(self, data: Any, shuffle: bool, drop_last: bool, smallest: int) -> SamplePlan:
        """The sample plan of a training set; ``smallest`` is the smallest micro-batch that can be computed."""
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool | int | np.bool_ | None):
                raise ConfigError(f"{name}={value!r:.60} was given. Give True or False.")
        source = self.source(data)
        if source.shuffle and not shuffle:
            raise ConfigError(
                "run.batches(..., shuffle=False) was given a DataLoader that shuffles. Make it with shuffle=False."
            )
        key = (id(data), len(source.dataset), shuffle, drop_last, smallest)
        if key not in self._plans:
            self._plans[key] = SamplePlan(
                samples=len(source.dataset),
                shape=self._options.shape,
                seed=self._options.seed,
                shuffle=shuffle if source.shuffle is None else source.shuffle,
                drop_last=drop_last or bool(source.drop_last),
                smallest_micro_batch=smallest,
            )
        return self._plans[key]

    def training(
        self, data: Any, shuffle: bool, drop_last: bool, workers: int | None, smallest: int
    ) -> StepLoader:
        """The loader of a training set for this process's micro-batches."""
        key = (id(data), shuffle, drop_last, workers, self._strategy.share)
        if key not in self._training:
            plan, source = self.plan(data, shuffle, drop_last, smallest), self.source(data)
            is_ragged = bool(plan.samples % plan.shape.global_batch)
            side_by_side = source.dataset.sources if isinstance(source.dataset, SideBySide) else []
            self._warn(
                *(
                    check_batch_size(
                        each,
                        global_batch=plan.shape.global_batch,
                        micro_batch_size=plan.shape.micro_batch_size,
                        holders=self._strategy.share.holders,
                    )
                    for each in side_by_side or [source]
                ),
                *unused_side_by_side(
                    side_by_side, shuffle=plan.shuffle, drop_last=plan.drop_last or not is_ragged
                ),
            )
            if plan.dropped_samples and not plan.drop_last:
                self._warn(
                    f"The last micro-batch of each epoch would hold {plan.dropped_samples} sample, too few for "
                    "BatchNorm: it is left out."
                )
            self._training[key] = StepLoader(
                source.dataset,
                plan,
                share=self._strategy.share,
                prefetch=self._options.prefetch,
                **self._reading(source, workers, "loader"),
            )
        return self._training[key]

    def evaluation(self, data: Any, workers: int | None) -> EvaluationLoader:
        """The loader of an evaluation set for this process's micro-batches."""
        key = (id(data), workers, self._evaluation_share)
        self._lately.add(key)
        if key not in self._evaluation:
            source = self.source(data)
            self._evaluation[key] = EvaluationLoader(
                source.dataset,
                micro_batch_size=self._options.evaluation_batch
                or source.evaluation_batch
                or self._options.shape.micro_batch_size,
                share=self._evaluation_share,
                **self._reading(source, workers, "loader of evaluation"),
            )
        return self._evaluation[key]

    def digests(self, data: Any, workers: int | None) -> dict[str, str]:
        """Digests of the first, the middle and the last sample, which every rank reads, and of what wrappers choose.

        Empty without checks.
        """
        source = self.source(data)
        if self._options.checks == "off":
            return {}
        count = len(source.dataset)
        some = sorted({0, count // 2, count - 1})
        is_stream = isinstance(source.dataset, Stream)
        if is_stream:
            some, source.dataset.is_compared = [0], True
        found = sample_digests(source.dataset, some, **self._reading(source, workers))
        if (
            is_stream
        ):  # equal on all ranks says nothing of what it keeps: a count of its readings is equal, too
            source.dataset.is_compared = False
        return {**found, **choices(source.dataset)}

    def read_ahead(self, loader: StepLoader, next_epoch: int | None) -> None:
        """At the last step of an epoch: lets workers read what will be wanted after it, while the step computes.

        That is what has been evaluated since the last call, and ``next_epoch``, where one may follow. ``SkipBroken``
        counts by epoch, so of such a set none is read before its epoch has come.
        """
        for key in self._lately:
            if key in self._evaluation and key[0] not in self._partly_noted:
                self._evaluation[key].begin()
        self._lately.clear()
        data = next((key[0] for key, each in self._training.items() if each is loader), None)
        if (
            loader.has_workers
            and data in self._notes
            and self._shared.get(data) != self._notes[data].shared()
        ):
            self._warn(
                "Memory that the data set shares with its loader workers, such as a multiprocessing.Value, has changed "
                "within the epoch. They read ahead, so which samples come under which value is a matter of time. If "
                "samples depend on it, change it between epochs, before run.batches, or read without workers."
            )
        if next_epoch is not None and not loader.counts_skipped and data not in self._partly_noted:
            loader.begin(next_epoch)

    def _warn(self, *notes: str | None) -> None:
        for note in notes if self._strategy.share.holder == 0 else ():
            if note and note not in self._told:  # a loop may make a new tuple or DataLoader in every epoch
                self._told.add(note)
                logger.warning("%s", note)

    def close(self) -> None:
        """Ends all worker processes."""
        for data in list(self._sources):
            self._forget(data)

    def _forget(self, data: int) -> None:
        self._checked.discard(id(self._sources[data][0]))
        del self._sources[data], self._numbers[data]
        self._notes.pop(data, None)
        self._shared.pop(data, None)
        self._partly_noted.discard(data)
        self._changed -= {(data, "training"), (data, "evaluation")}
        self._drop("training", data)
        self._drop("evaluation", data)

    def _reading(self, source: Source, workers: int | None, name: str = "") -> ReadingOptions:
        """How a loader reads, and the notes of it where they are asked for and it has a name."""
        if workers is not None and not (isinstance(workers, Integral) and 0 <= workers <= _MOST_WORKERS):
            raise ConfigError(
                f"workers={workers!r:.60} was given. Give the processes that read ahead, from 0 to {_MOST_WORKERS}."
            )
        processes = int(workers) if workers is not None else source.workers or 0
        if self.clocks is not None and name:
            self.clocks.append(ReadTrace(name, processes))
        devices = self._strategy.devices or (self._strategy.device,)
        gpus = [each for each in dict.fromkeys(devices) if is_gpu(each)] if has_gpus() else []
        return ReadingOptions(
            seed=self._options.seed,
            workers=processes,
            collate=source.collate,
            gpus=gpus if source.pin_memory is not False else (),
            timeout=source.timeout or self._options.loader_timeout,
            clock=self.clocks[-1] if self.clocks else None,
            checks=self._options.checks != "off" and id(source) not in self._checked,
        )

    @property
    def _evaluation_share(self) -> Share:
        return self._strategy.evaluation_share or self._strategy.share


def smallest_micro_batch(model: nn.Module) -> int:
    """The fewest rows that the model can be trained on at once: BatchNorm has no variance over one."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60} was given, a {type(model).__name__}. Give a torch.nn.Module.")
    return 2 if has_batch_norm(model) else 1


@dataclass
class SkippedSamples:
    """Counts what the processes of a run skip.

    A sample counts at the step that holds it, however far ahead it was read, and in each epoch anew.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    seed: int
    says: bool
    """True for the process that logs."""

    def counted(self, read: Read, dataset: Any) -> Read:
        """The same steps; of a ``SkipBroken`` set, what was skipped is counted before each, which is collective."""
        inner, numbers = unwrap_subset(dataset)
        if not isinstance(inner, SkipBroken):
            return read
        if numbers is not None:
            raise ConfigError(
                "SkipBroken belongs around Subset, not inside it: SkipBroken(Subset(dataset, ...))."
            )

        def steps(epoch: int, first: int) -> Iterator[Batch]:
            found: set[int] = set()
            for batch in read(epoch, first):
                new = set(_everyones(_skipped(batch, inner), self.group, self.device)) - found
                if new:
                    found |= new
                    self._report(inner, new, found, epoch)
                yield batch

        return steps

    def _report(self, dataset: SkipBroken, new: set[int], found: set[int], epoch: int) -> None:
        named = {index: dataset.named(self.seed, epoch, index) for index in sorted(found)}
        if len(found) > dataset.limit:
            raise DataError(
                f"{len(found)} of {len(dataset)} samples could not be read in epoch {epoch}, and at most "
                f"{dataset.limit} ({dataset.most:.3g} of them) may be skipped: "
                f"{shorten(named.values(), 10)}. Repair or remove them."
            )
        for index in sorted(new) if self.says else ():
            logger.warning(
                "In epoch %d %s could not be read and was skipped (%d so far, at most %d).",
                epoch,
                named[index],
                len(found),
                dataset.limit,
            )


def _skipped(batch: Batch, dataset: SkipBroken) -> list[int]:
    held = [part.indices for part in batch.micro_batches]
    return [int(index) for index in dataset.skipped(np.concatenate(held))] if held else []


def _everyones(mine: list[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The numbers of all processes; they say first whether there are any, which is the cheap and usual case."""
    if group is None:
        return mine
    if not int(all_reduce_max(torch.tensor([len(mine)], device=device), group)):
        return []
    return [index for each in gather_json(mine, group, device) for index in each]
