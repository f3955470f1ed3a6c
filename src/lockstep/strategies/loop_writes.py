"""The loop's own writes into parameters and gradients, compared over the ranks.

    optimizer.step()   note              the values that the run has set
    the loop's code    p.mul_(0.9)       written on the rank that holds p; on others an ``AbsentTensor`` counts it
    run.backward       look              p has not the values that were noted
    now and then       one_sided         rank 0 has written, rank 1 was not asked to: code under a rank condition

Where every rank keeps all values, comparing these is enough. In a pipeline a rank has those of its stages, and the
workers of a parameter server get the servers' after each step, so what only one rank has written is seen by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lockstep.distributed.collectives import gather_json

if TYPE_CHECKING:
    from lockstep.strategies.strategy import Strategy

_SAMPLE = 64
"""Numbers out of the middle of a tensor that are compared: no version counts what is written to ``p.data``."""


@dataclass(frozen=True)
class _Values:
    """The state of tensors at a moment."""

    versions: Sequence[tuple[int, int]]
    """How often each was written to, and its address."""
    samples: Tensor
    """Bytes of each, one after the other."""
    sizes: Sequence[int]
    """How many of each."""


class LoopWrites:
    """Notices writes of the loop to tensors of this process. The host waits for a device in ``take`` only."""

    def __init__(self) -> None:
        self._tensors: dict[str, TensorWeakRef] = {}
        self._noted: _Values | None = None
        self._views: dict[int, tuple[int, Tensor]] = {}
        self._written: set[str] = set()
        self._seen: dict[tuple[tuple[str, int], ...], Tensor] = {}
        """Of tensors that were compared together, by name and bytes, for each byte if it differed, and was not 0."""

    def note(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what tensors have now, by name, for what the run has set."""
        self._tensors = {name: TensorWeakRef(tensor) for name, tensor in tensors.items()}
        self._noted = self._values(tensors.values()) if tensors else None

    @torch.inference_mode(mode=False)  # an evaluation of the loop's may be in one, and the next look is not
    def look(self) -> None:
        """Remembers which of the tensors have changed since, and notes them; those that are gone have."""
        if (before := self._noted) is None:
            return
        names, versions, samples = list(self._tensors), before.versions, before.samples
        alive = {name: tensor for name, each in self._tensors.items() if (tensor := each()) is not None}
        if len(alive) < len(names):
            kept = [name in alive for name in names]
            self._written |= {name for name in names if name not in alive}
            versions = [*compress(versions, kept)]
            parts = [*compress(torch.split(samples, list(before.sizes)), kept)]
            samples = torch.cat(parts) if parts else samples
            self._tensors = {name: self._tensors[name] for name in alive}
        self._noted = now = self._values(alive.values()) if alive else None
        if now is None:
            return
        if samples.shape != now.samples.shape:
            samples = now.samples  # some have got other values, which lie at another address
        if versions != now.versions:
            self._written |= {name for name, old, new in zip(alive, versions, now.versions) if old != new}
        seen = torch.stack((samples != now.samples, now.samples != 0))
        compared = tuple(zip(alive, now.sizes))
        known = self._seen.get(compared)
        self._seen[compared] = seen if known is None else known.logical_or_(seen)

    def take(self) -> dict[str, bool | None]:
        """True for tensors written to since the last call, by name; None for zeros, which no factor changes."""
        self.look()
        written, everything = self._written, self._seen
        self._written, self._seen = set(), {}
        found: dict[str, bool | None] = {}
        if everything:
            tensors = [each for compared in everything for each in compared]
            # All at once: the host waits for the device.
            read = torch.cat([*everything.values()], dim=1).cpu()
            parts = torch.split(read, [size for _, size in tensors], dim=1)
            for (name, _), (differs, is_set) in zip(tensors, parts):
                found[name] = False if is_set.any() else found.get(name)
                if differs.any():
                    written.add(name)
        return found | dict.fromkeys(written, True)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _values(self, tensors: Iterable[Tensor]) -> _Values:
        """The state of tensors now. Of a parameter the view is kept, as making one takes longer than reading it."""
        known, versions, views = self._views, [], []
        for tensor in tensors:
            address = tensor.data_ptr() if tensor.layout is torch.strided else 0
            versions.append((tensor._version, address))
            found = known.get(id(tensor))
            if found is None or found[0] != address:
                found = address, _middle(tensor)
                if isinstance(tensor, nn.Parameter):
                    known[id(tensor)] = found
            views.append(found[1])
        if len({view.dtype for view in views}) > 1:
            views = [view.view(torch.uint8) for view in views]
        return _Values(versions, torch.cat(views).view(torch.uint8), [view.nbytes for view in views])


def _middle(tensor: Tensor) -> Tensor:
    """Some numbers in the middle of a tensor, a flat view; of a sparse one none."""
    if tensor.layout is not torch.strided:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start, stored = tensor.storage_offset(), tensor.numel()
    if not tensor.is_contiguous():  # of an expanded one fewer are stored
        stored = min(stored, tensor.untyped_storage().nbytes() // tensor.element_size() - int(start))
    numbers = min(_SAMPLE, stored)
    return tensor.as_strided((numbers,), (1,), start + (stored - numbers) // 2)


@dataclass(frozen=True)
class RankWrites:
    """The changes by the loop on a rank since the last comparison."""

    written: Mapping[str, bool | None]
    """By the names of tensors that are here, whether they have other values; None where zeros might hide it."""
    asked: Mapping[str, Sequence[int]]
    """By names of tensors elsewhere: how often the loop changed them, and 1 if that is surely noticed there."""

    def has_run(self, name: str, *, surely: bool) -> bool | None:
        """True if the code that changes a tensor has run on this rank; None where that is not known.

        Args:
            surely: what ran elsewhere leaves a trace wherever the values are.
        """
        if name not in self.written:
            return name in self.asked
        return self.written[name] or (False if surely and self.written[name] is not None else None)

    def text(self, name: str) -> str:
        """The changes of this rank to a tensor."""
        count = self.asked.get(name, (0,))[0]
        if name in self.written:
            return "changed" if self.written[name] else "unchanged"
        return f"changed {count} times" if count > 1 else "changed" if count else "unchanged"


def one_sided(ranks: Sequence[RankWrites]) -> list[str]:
    """The names of tensors that the loop has changed on some ranks only, or not as often on all."""
    changed = {name for each in ranks for name, is_written in each.written.items() if is_written}
    found = []
    for name in sorted(changed.union(*(each.asked for each in ranks))):
        surely = any(each.written.get(name) or each.asked.get(name, (0, 0))[1] for each in ranks)
        has_run = {each.has_run(name, surely=bool(surely)) for each in ranks}
        counts = {each.asked.get(name, (0, 0))[0] for each in ranks if name not in each.written}
        if has_run >= {True, False} or len(counts) > 1:
            found.append(name)
    is_elsewhere = all(each.written.get(name, True) for each in ranks for name in found)
    if is_elsewhere and all(any(map(each.written.get, found)) for each in ranks):
        return []  # each rank has changed what it holds, as an optimizer's own eval() does that looks at its state
    return found


@contextmanager
def setting_values(strategy: Strategy) -> Iterator[None]:
    """A context in which the run itself sets values, or lets hooks of the user do so as part of that."""
    if strategy.writes is not None:
        strategy.writes.look()
    for absence in strategy.absences:
        absence.is_set_by_run = True
    try:
        yield
    finally:
        for absence in strategy.absences:
            absence.is_set_by_run = False
        if strategy.writes is not None:
            strategy.writes.note(strategy.watched())


def one_sided_writes(strategy: Strategy, group: dist.ProcessGroup) -> dict[str, list[str]]:
    """Tensors that the loop has not changed on all ranks since the last call, with what each rank did. Collective."""
    if strategy.writes is None and not strategy.absences:
        return {}
    written = {} if strategy.writes is None else strategy.writes.take()
    asked: dict[str, tuple[int, int]] = {}
    for absence in strategy.absences:
        for name, (count, surely) in absence.asked.items():
            known = asked.get(name, (0, 0))
            asked[name] = known[0] + count, max(known[1], surely)
        absence.asked.clear()
    if not any(gather_json(bool(asked) or any(written.values()), group, strategy.device)):
        return {}
    ranks = [RankWrites(*each) for each in gather_json([written, asked], group, strategy.device)]
    return {name: [each.text(name) for each in ranks] for name in one_sided(ranks)}
