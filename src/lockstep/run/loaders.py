"""Keeps one loader for each data set of a run, so that worker processes stay; counts the samples that were skipped."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from lockstep.config.options import RunOptions
from lockstep.core.fingerprint import combine
from lockstep.core.plan import SamplePlan, Share
from lockstep.data import EvaluationLoader, SkipBroken, Source, StepLoader, Stream, adopt, check_batch_size
from lockstep.data.adopt import SideBySide, unused_side_by_side
from lockstep.data.batch import Batch
from lockstep.data.changes import BEGINNING, Notes, choices, inherited_by_workers
from lockstep.data.labels import differing_classes, differing_columns
from lockstep.data.naming import unwrap_subset
from lockstep.data.reader import ReadTrace
from lockstep.data.rereading import asks_for_worker
from lockstep.data.workers import UNREADABLE, ReadingOptions, sample_digests
from lockstep.distributed.collectives import all_reduce_max, gather_json
from lockstep.errors import ConfigError, DataError
from lockstep.numerics.running_buffers import has_batch_norm
from lockstep.run.epoch_loop import EpochLoop, Read
from lockstep.run.loop_state import LoopState
from lockstep.runtime.devices import has_gpus, is_gpu
from lockstep.strategies import Strategy
from lockstep.text import shorten

logger = logging.getLogger(__name__)
_MOST_SOURCES, _MOST_WORKERS, _BEGINNING = 8, 4096, 16
_Kind = Literal["training", "evaluation"]
_Key = tuple[Hashable, ...]
"""How and by whom data are to be read."""
_Seen = tuple[list[bytes], list[int]]
"""The contents of the memory that a data set shares with its workers, and versions of the parameters that it reads."""


@dataclass
class _UsedData:
    """A data set or DataLoader that the program has read, and the loaders that were made of it."""

    data: Any
    """Kept, so that its id stays its own."""
    source: Source
    number: int
    """The same on every rank, and for other loaders of the same set."""
    notes: Notes | None = None
    """From when it was read last; None before."""
    is_checked: bool = False
    """True if samples need not be read twice, since those before the last change were."""
    training: dict[_Key, StepLoader] = field(default_factory=dict)
    evaluation: dict[_Key, EvaluationLoader] = field(default_factory=dict)
    lately: set[_Key] = field(default_factory=set)
    """Those of the evaluations since an epoch has ended."""
    changed: set[_Kind] = field(default_factory=lambda: {"training", "evaluation"})
    """Loaders that were made before the data were changed, as they may have been since another loader has read them."""
    inherited: dict[_Kind, object] = field(default_factory=dict)
    """The surroundings that the workers of these loaders have inherited."""

    @property
    def is_noted(self) -> bool:
        """False if it can be changed unseen, so that no worker may read it ahead of the loop."""
        return self.notes is None or self.notes.are_whole

    def close(self, *kinds: _Kind) -> None:
        """Ends the workers of these loaders, which start new ones when they are read again."""
        for kind in kinds:
            for loader in (self.training if kind == "training" else self.evaluation).values():
                loader.close()

    def forget(self, kind: _Kind) -> None:
        """Ends the workers of these loaders, and lets new loaders be made."""
        self.close(kind)
        (self.training if kind == "training" else self.evaluation).clear()


class LoaderCache:
    """Makes loaders for the share of one process."""

    def __init__(self, options: RunOptions, strategy: Strategy, *, warns: bool) -> None:
        self._options, self._strategy, self._warns = options, strategy, warns
        self._by_id: OrderedDict[int, _UsedData] = OrderedDict()
        self._numbered = 0
        self._told: set[str] = set()
        """Notes that were logged."""
        self.traces: list[ReadTrace] | None = None
        """Gets the notes of every loader that is made from now on about when it reads; None: nothing is noted."""

    def refresh(self, data: Any, loaders: _Kind) -> bool:
        """Forgets what was made of a data set where the program has changed it since; loaders are made again.

        Args:
            data: that is going to be read.
            loaders: that will read it. Their workers are restarted where a change of the set may not be seen.

        Returns:
            Whether it has.
        """
        notes = Notes(data)
        known = self._known(data)
        if known.notes not in (None, notes):
            known.source, known.is_checked = adopt(data), True
            known.changed = {"training", "evaluation"}
        known.notes = notes
        inherited = inherited_by_workers()
        if not known.is_noted or known.inherited.get(loaders) != inherited:
            known.close(loaders)
        known.inherited[loaders] = inherited
        if has_changed := loaders in known.changed:  # the others may be in use
            known.changed.remove(loaders)
            known.forget(loaders)
        return has_changed

    def source(self, data: Any) -> Source:
        """The source of ``data``: its data set and how to read it; warns once of what is handled differently."""
        return self._known(data).source

    def _known(self, data: Any) -> _UsedData:
        if id(data) not in self._by_id:
            source = adopt(data)
            self._warn(*source.notes)
            others = self._by_id.values()
            number = next((each.number for each in others if each.source.dataset is source.dataset), self._numbered)
            self._numbered = max(self._numbered, number + 1)
            self._by_id[id(data)] = _UsedData(data, source, number)
            while len(self._by_id) > _MOST_SOURCES:  # a loop may make a new DataLoader in every epoch
                self._close_oldest()
        self._by_id.move_to_end(id(data))
        return self._by_id[id(data)]

    def compared(self, data: Any, workers: int | None) -> tuple[int, Callable[[], dict[str, str]]]:
        """The set's number, the same for other loaders of it, and a function that gives digests: ranks compare both."""
        return self._known(data).number, partial(self._digests, data, workers)

    def _digests(self, data: Any, workers: int | None) -> dict[str, str]:
        """Digests of the first, the middle and the last sample, which every rank reads, and of what wrappers choose.

        Of a stream they are those of the first samples, whose order may come from a seed. Empty without checks.
        """
        if self._options.checks == "off":
            return {}
        known, source = self._known(data), self.source(data)
        count = len(source.dataset)
        some = sorted({0, count // 2, count - 1})
        is_stream = isinstance(source.dataset, Stream)
        if is_stream:
            some, source.dataset.is_compared = [*range(min(_BEGINNING, count))], True
        found = sample_digests(source.dataset, some, **self._reading(known, workers))
        if is_stream:
            # Equal on all ranks says nothing of what it keeps: a count of its readings is equal, too.
            source.dataset.is_compared = False
            found = {"sample 0": found["sample 0"], BEGINNING: combine(found)[:8]}
        return {**found, **choices(source.dataset)}

    def _warn_of_workers(self, source: Source, options: ReadingOptions) -> None:
        """Warns of samples that a loader worker reads otherwise than the process itself."""
        is_one = options["workers"] and self._warns and options["checks"] and not isinstance(source.dataset, Stream)
        if not is_one or not asks_for_worker(source.dataset, source.collate):
            return
        some = sorted({0, len(source.dataset) - 1})
        there, here = (sample_digests(source.dataset, some, **options | {"workers": n}) for n in (1, 0))
        names = [n for n in there if UNREADABLE not in (there[n], here[n]) and there[n] != here[n]]
        if names:
            self._warn(
                f"{type(source.dataset).__name__} asks get_worker_info() whether a loader worker reads it, and gives "
                f"other values there ({names[0]}): without workers a run would have another result. Read each sample "
                "in the same way in any process."
            )

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
        return SamplePlan(
            samples=len(source.dataset),
            shape=self._options.shape,
            seed=self._options.seed,
            shuffle=shuffle if source.shuffle is None else source.shuffle,
            drop_last=drop_last or bool(source.drop_last),
            smallest_micro_batch=smallest,
        )

    def training(self, data: Any, plan: SamplePlan, workers: int | None) -> StepLoader:
        """The loader of a training set for this process's micro-batches."""
        known, key = self._known(data), (plan, workers, self._strategy.share)
        if key not in known.training:
            self._warn_of_training(known.source, plan)
            options = self._reading(known, workers, "loader")
            self._warn_of_workers(known.source, options)
            known.training[key] = StepLoader(
                known.source.dataset,
                plan,
                share=self._strategy.share,
                prefetch=self._options.prefetch,
                **options,
            )
        return known.training[key]

    def _warn_of_training(self, source: Source, plan: SamplePlan) -> None:
        """Warns of settings of DataLoaders that the plan does not use, and of a micro-batch that it leaves out."""
        side_by_side = source.dataset.sources if isinstance(source.dataset, SideBySide) else []
        shape, holders = plan.shape, self._strategy.share.holders
        sizes = {"global_batch": shape.global_batch, "micro_batch_size": shape.micro_batch_size}
        self._warn(*(check_batch_size(each, holders=holders, **sizes) for each in side_by_side or [source]))
        drops = plan.drop_last or not plan.samples % shape.global_batch
        self._warn(*unused_side_by_side(side_by_side, shuffle=plan.shuffle, drop_last=drops))
        if plan.dropped_samples and not plan.drop_last:
            self._warn(
                f"The last micro-batch of each epoch would hold {plan.dropped_samples} sample, too few for BatchNorm: "
                "it is left out."
            )

    def evaluation(self, data: Any, workers: int | None) -> EvaluationLoader:
        """The loader of an evaluation set for this process's micro-batches."""
        known, key = self._known(data), (workers, self._evaluation_share)
        known.lately.add(key)
        if key not in known.evaluation:
            source = known.source
            known.evaluation[key] = EvaluationLoader(
                source.dataset,
                micro_batch_size=self._options.evaluation_batch
                or source.evaluation_batch
                or self._options.shape.micro_batch_size,
                share=self._evaluation_share,
                **self._reading(known, workers, "loader (evaluation)"),
            )
            for trained in [each.source.dataset for each in self._by_id.values() if each.training]:
                self._warn(differing_columns(trained, source.dataset), differing_classes(trained, source.dataset))
        return known.evaluation[key]

    def at_last_step(self, data: Any, loader: StepLoader, variables: LoopState, loop: EpochLoop) -> Callable[[], None]:
        """Returns a function for the last step of an epoch that begins now.

        It warns of what the epoch has changed and workers, which read ahead, have otherwise; then it lets them read on.
        """
        known = self._known(data)
        notes = known.notes if loader.has_workers else None
        before = (notes.shared(), notes.versions()) if notes else None

        def call() -> None:
            if notes and before:
                self._warn_of_changes(variables, before, (notes.shared(), notes.versions()))
            self._read_ahead(loader, known, loop.next_epoch)

        return call

    def _warn_of_changes(self, variables: LoopState, before: _Seen, now: _Seen) -> None:
        if changed := sorted(variables.changed_in_data(in_epoch=True)):
            self._warn(
                f"Within an epoch the loop has changed {shorten(changed, 3)}, which the data set holds or reads. "
                "Workers have it as it was when the epoch began, so samples that depend on it are not those that are "
                "read without workers. Change it between epochs, before run.batches, or read with workers=0."
            )
        if before[0] != now[0]:
            self._warn(
                "Memory that the data set shares with its loader workers, such as a multiprocessing.Value, has changed "
                "within the epoch. They read ahead, so which samples come under which value is a matter of time. If "
                "samples depend on it, change it between epochs, before run.batches, or read without workers."
            )
        if before[1] != now[1]:
            self._warn(
                "The data set holds or reads parameters that the steps have changed. Loader workers have them as they "
                "were when the epoch began, or before, so samples that are made of them are not those that are read "
                "without workers. Compute what depends on the model in the loop or in forward=, or read with workers=0."
            )

    def _read_ahead(self, loader: StepLoader, known: _UsedData, next_epoch: int | None) -> None:
        """Lets workers read what will be wanted after the last step of an epoch, while that computes.

        That is what has been evaluated since the last call, and ``next_epoch``, where one may follow. ``SkipBroken``
        counts by epoch, so of such a set none is read before its epoch has come.
        """
        for each in self._by_id.values():
            for key in each.lately & each.evaluation.keys() if each.is_noted else ():
                each.evaluation[key].begin()
            each.lately.clear()
        if next_epoch is not None and not loader.counts_skipped and known.is_noted:
            loader.begin(next_epoch)

    def _warn(self, *notes: str | None) -> None:
        for note in notes if self._warns else ():
            if note and note not in self._told:  # a loop may make a new tuple or DataLoader in every epoch
                self._told.add(note)
                logger.warning("%s", note)

    def close(self) -> None:
        """Ends all worker processes."""
        while self._by_id:
            self._close_oldest()

    def _close_oldest(self) -> None:
        self._by_id.popitem(last=False)[1].close("training", "evaluation")

    def _reading(self, known: _UsedData, workers: int | None, name: str = "") -> ReadingOptions:
        """How a loader reads, and the notes of it where they are asked for and it has a name."""
        source = known.source
        if workers is not None and not (isinstance(workers, Integral) and 0 <= workers <= _MOST_WORKERS):
            raise ConfigError(
                f"workers={workers!r:.60} was given. Give the processes that read ahead, from 0 to {_MOST_WORKERS}."
            )
        processes = int(workers) if workers is not None else source.workers or 0
        if self.traces is not None and name:
            self.traces.append(ReadTrace(name, processes))
        devices = self._strategy.devices or (self._strategy.device,)
        gpus = [each for each in dict.fromkeys(devices) if is_gpu(each)] if has_gpus() else []
        return ReadingOptions(
            seed=self._options.seed,
            workers=processes,
            collate=source.collate,
            gpus=gpus if source.pin_memory is not False else (),
            timeout=source.timeout or self._options.loader_timeout,
            trace=self.traces[-1] if self.traces else None,
            checks=self._options.checks != "off" and not known.is_checked,
        )

    @property
    def _evaluation_share(self) -> Share:
        return self._strategy.evaluation_share or self._strategy.share


def smallest_micro_batch(model: nn.Module) -> int:
    """The fewest rows that the model can be trained on at once: BatchNorm has no variance over one."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60} was given, a {type(model).__name__}. Give a torch.nn.Module.")
    return 2 if has_batch_norm(model) else 1


def counting_skipped(read: Read, dataset: Any, strategy: Strategy, seed: int, *, says: bool) -> Read:
    """The same steps; of a ``SkipBroken`` set, what was skipped is counted before each, which is collective.

    A sample counts at the step that holds it, however far ahead it was read, and again each epoch. ``says``: True for
    the process that logs.
    """
    inner, numbers = unwrap_subset(dataset)
    if not isinstance(inner, SkipBroken):
        return read
    if numbers is not None:
        raise ConfigError("SkipBroken belongs around Subset, not inside it: SkipBroken(Subset(dataset, ...)).")

    def steps(epoch: int, first: int) -> Iterator[Batch]:
        found: set[int] = set()
        since = f" from step {first} of the epoch on" if first else ""
        for batch in read(epoch, first):
            if new := _skipped(batch, inner, strategy) - found:
                found |= new
                named = {index: inner.named(seed, epoch, index) for index in sorted(found)}
                if len(named) > inner.limit:
                    raise DataError(
                        f"{len(named)} of {len(inner)} samples could not be read in epoch {epoch + 1}, and at most "
                        f"{inner.limit} ({inner.most:.3g} of them) may be skipped: {shorten([*named.values()], 10)}. "
                        "Repair or remove them."
                    )
                for index in sorted(new) if says else ():
                    logger.warning(
                        "In epoch %d %s could not be read and was skipped (%d so far%s, at most %d).",
                        *(epoch + 1, named[index], len(found), since, inner.limit),
                    )
            yield batch

    return steps


def _skipped(batch: Batch, dataset: SkipBroken, strategy: Strategy) -> set[int]:
    """The samples of a step that any process has skipped. Collective.

    They say first whether there are any, which is the cheap and usual case.
    """
    held, group, device = [part.indices for part in batch.micro_batches], strategy.all_ranks, strategy.device
    mine = [int(index) for index in dataset.skipped(np.concatenate(held))] if held else []
    if group is None:
        return set(mine)
    if not int(all_reduce_max(torch.tensor([len(mine)], device=device), group)):
        return set()
    return {index for each in gather_json(mine, group, device) for index in each}
