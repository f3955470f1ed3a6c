"""Running statistics (BatchNorm's, and buffers the user declares) that do not depend on who ran which micro-batch.

Every micro-batch of a step starts from the step's old values. The step's new values are the tree mean of what the
micro-batches left behind; a module that no micro-batch used in training mode keeps its old ones, bit for bit.
BatchNorm's integer counters advance once per step; integer buffers that the user declares advance by the sum of what
the micro-batches added. The vectors of spectral normalisation are averaged too: all micro-batches begin with the same
ones and make the same iterations, which depend only on the weight. All averaged values lie in one flat tensor, so
that saving and restoring them is one copy; where the layers lie on several devices there is one on each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.core.fingerprint import digest_tensors
from lockstep.data.reader import gap_after
from lockstep.errors import ConfigError
from lockstep.text import plural, shorten

logger = logging.getLogger(__name__)
FEW = 8
"""Samples in a micro-batch, fewer than which the statistics of BatchNorm are told to be of few."""
_ROUNDED = 1e-3
_MOST_ADDED = 2**24
"""Integers below this are exact in float32."""
_COUNTING = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Forward passes that advance ``num_batches_tracked`` whenever they change the statistics."""
_STEPS_WATCHED = 3


@dataclass(frozen=True, eq=False)
class BufferLocation:
    """A buffer, and the module's dictionary that holds it."""

    name: str
    buffer: Tensor
    holder: dict[str, Tensor | None]
    key: str


@dataclass(frozen=True, eq=False)
class BufferGroup:
    """Buffers that are used together, and what tells whether they were."""

    locations: list[BufferLocation]
    counter: BufferLocation | None = None
    """A counter that advances exactly when they change; otherwise their values are compared."""

    @property
    def numel(self) -> int:
        """Number of values in all of them, with the gaps between them; see ``_room``."""
        return sum(_room(location.buffer) for location in self.locations)


def has_batch_norm(model: nn.Module) -> bool:
    """Returns whether a model computes statistics over the rows of a micro-batch, which needs at least two of them."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def normalises_by_batch(module: nn.Module) -> bool:
    """Returns whether a module is a BatchNorm that takes the statistics of what it is given now."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)


def explain_single_values(model: nn.Module, global_batch: int, micro_batches: int, *, in_training: bool) -> None:
    """Lets BatchNorm say what is wrong with the recipe where a batch of one row gives it no variance.

    Rows of images and sequences hold several values of each channel, so a row is enough for some models. One without
    running statistics is watched in evaluation too. ``in_training`` says whether micro-batches are that small.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if in_training:
            refuse = partial(_refuse_single_values, name, global_batch, micro_batches)
            module.register_forward_pre_hook(refuse)
        if module.running_mean is None:
            module.register_forward_pre_hook(partial(_refuse_single_values_in_evaluation, name))


def _has_single_values(inputs: tuple[Any, ...]) -> bool:
    return bool(inputs) and inputs[0].dim() >= 2 and inputs[0].numel() == inputs[0].shape[1]


def _refuse_single_values_in_evaluation(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not module.training and _has_single_values(inputs):
        raise ConfigError(
            f"BatchNorm {name!r} has no running statistics, so it takes those of each batch that is evaluated. It got "
            "one value of each channel and needs two for a variance: a batch has one row. Use "
            "track_running_stats=True, or evaluate a number of samples that leaves no batch of one."
        )


def _refuse_single_values(
    name: str, global_batch: int, micro_batches: int, module: nn.Module, inputs: tuple[Any, ...]
) -> None:
    if not module.training or not _has_single_values(inputs):
        return
    fewer = max((k for k in range(1, global_batch // 2 + 1) if global_batch % k == 0), default=0)
    remedy = f"micro_batches={fewer}" if fewer else "global_batch=2 or more"
    raise ConfigError(
        f"BatchNorm {name!r} got one value of each channel and needs two for a variance: with global_batch="
        f"{global_batch} and micro_batches={micro_batches} a micro-batch has one row. Use {remedy}, "
        "sync_batch_norm=True, which takes the statistics of the global batch, or LayerNorm or GroupNorm."
    )


def warn_of_few_samples(model: nn.Module, rows: int, samples: int) -> None:
    """Warns of BatchNorm that normalises micro-batches of few rows, where the step has more samples."""
    name = next((name for name, module in model.named_modules() if normalises_by_batch(module)), None)
    if name is None or rows >= min(samples, FEW):
        return
    fewer = max((k for k in range(1, samples // FEW + 1) if samples % k == 0), default=1)
    logger.warning(
        "BatchNorm %r normalises each micro-batch by itself, which has %s of the %d of a step. A loop without micro-"
        "batches normalises all of them together. Use micro_batches=%d (as many processes can share a step), "
        "sync_batch_norm=True, or GroupNorm.",
        *(name, plural(rows, "sample"), samples, fewer),
    )


def warn_of_no_means(names: Sequence[str], values: Sequence[Sequence[Tensor]], rows: int) -> None:
    """Warns of running buffers that do not get the average of what two halves of some rows leave in them.

    Args:
        names: of the buffers.
        values: of each before; after all rows; after these and all once more; after every second row; after these and
            the others; after the others; and after all again.
        rows: how many there are.
    """
    if odd := [name for name, each in zip(names, values, strict=True) if rows >= FEW // 2 and _is_no_mean(rows, *each)]:
        logger.warning(
            "%s in running_buffers: the average over micro-batches is not what all samples at once would give. A sum "
            "over samples becomes 1/K of it: let the forward pass set it anew in each step, and add it up in the loop, "
            "times batch.plan.leaves. Compute what follows from sums, such as a quotient, in the loop, too. Fill a "
            "queue, or a table with a row for each sample, in the loop or in a loss with whole_batch=True.",
            shorten(map(repr, odd), 3),
        )


def _is_no_mean(rows: int, *values: Tensor) -> bool:
    """Returns whether a buffer has after all rows another value than the average of those after two halves.

    Variances do by a few percent. Sums of one step alone may be taken times the number of micro-batches.
    """
    before, whole, again, even, both, odd, same = values
    changed, half = whole != before, -(-rows // 2)
    if not (torch.equal(whole, same) and changed.any() and torch.stack((before, whole, even, odd)).isfinite().all()):
        return False
    kept = min(float((again - whole)[changed].norm() / (whole - before)[changed].norm()), 1.0)
    if torch.equal(both, odd) and (even + odd - whole).norm() <= _ROUNDED * whole.norm():
        return False
    gap, most = whole - (even * half + odd * (rows - half)) / rows, 0.3 if rows >= FEW else 0.45
    return bool(gap[changed].norm() > most * (whole - kept * before)[changed].norm())


@dataclass(frozen=True, eq=False)
class FoundBuffers:
    """The buffers of a model that its forward pass changes."""

    groups: list[BufferGroup]
    """Averaged."""
    counters: list[BufferLocation]
    """BatchNorm's, which advance once per step."""
    summed: list[BufferLocation]
    """Integers that advance by the sum of what the micro-batches added."""

    @property
    def names(self) -> set[str]:
        """Of all of them."""
        averaged = (location for group in self.groups for location in group.locations)
        return {location.name for location in (*averaged, *self.counters, *self.summed)}

    def on(self, device: torch.device) -> FoundBuffers:
        """Those on a device."""
        return FoundBuffers(
            [group for group in self.groups if group.locations[0].buffer.device == device],
            [location for location in self.counters if location.buffer.device == device],
            [location for location in self.summed if location.buffer.device == device],
        )


def find(model: nn.Module, declared: Sequence[str]) -> FoundBuffers:
    """The buffers of a model that its forward pass changes, as far as they are known or ``declared``.

    Raises:
        ConfigError: a pattern of ``declared`` matches nothing, or the types of the buffers differ.
    """
    buffers = {location.name: location for location in _buffers(model)}
    found = _known_buffers(model, buffers)
    known = found.names
    for pattern in declared:
        matched = _declared_names(model, pattern, buffers)
        for location in (buffers[name] for name in matched if name not in known):
            if location.buffer.is_floating_point() or location.buffer.is_complex():
                found.groups.append(BufferGroup([location]))
            elif location.buffer.dtype == torch.bool:
                raise ConfigError(
                    f"running_buffers names {location.name!r}, which holds truth values. Floating-point buffers are "
                    "averaged over the micro-batches and integers are added up; set a flag outside of the forward pass."
                )
            else:
                found.summed.append(location)
        known.update(matched)
    averaged = [location for group in found.groups for location in group.locations]
    wide = torch.float64 if averaged and averaged[0].buffer.dtype == torch.float64 else torch.float32
    for location in averaged:
        if location.buffer.dtype != wide:
            raise ConfigError(
                f"The running buffer {location.name!r} is {location.buffer.dtype}, but running buffers must be all "
                "float32 or all float64. Convert them to one type."
            )
    return found


def _known_buffers(model: nn.Module, buffers: Mapping[str, BufferLocation]) -> FoundBuffers:
    """Those of torch's own modules: statistics of normalisation, and vectors of spectral normalisation."""
    found = FoundBuffers([], [], [])
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        keys = ("running_mean", "running_var", "num_batches_tracked")
        mean, variance, counter = (buffers.get(path + key) for key in keys)
        if isinstance(module, _NormBase) and mean is not None and variance is not None:
            if counter is not None:
                found.counters.append(counter)
            found.groups.append(BufferGroup([mean, variance], counter if type(module).forward in _COUNTING else None))
        iterated = [buffers[path + key] for key in _power_iteration(module) if path + key in buffers]
        if iterated:
            found.groups.append(BufferGroup(iterated))
    return found


def _declared_names(model: nn.Module, pattern: str, buffers: Collection[str]) -> list[str]:
    """The names of the buffers that a declared pattern matches; ``ConfigError`` where a checkpoint would lack one."""
    matched = [name for name in buffers if fnmatchcase(name, pattern)]
    if not matched:
        raise ConfigError(f"running_buffers: no buffer of the model matches {pattern!r}.")
    for name in matched:
        path, _, key = name.rpartition(".")
        if key in model.get_submodule(path)._non_persistent_buffers_set:
            raise ConfigError(
                f"running_buffers has {name!r}, which was registered with persistent=False: neither fingerprint "
                "nor checkpoint would hold it, and a resumed run would go on from its first value. Register it "
                "with persistent=True."
            )
    return matched


def _power_iteration(module: nn.Module) -> list[str]:
    """The names of the vectors that spectral normalisation keeps in a module, as either of torch's ways has them."""
    if isinstance(module, _SpectralNorm):
        return ["_u", "_v"]
    hooks = module._forward_pre_hooks.values()
    return [f"{hook.name}_{each}" for hook in hooks if isinstance(hook, SpectralNorm) for each in "uv"]


def _require_kind(location: BufferLocation, found: Tensor, before: Tensor | None = None) -> None:
    """Refuses a value of another shape, or a fraction where integers are added up."""
    before = location.buffer if before is None else before
    is_other = found.shape != before.shape and not found.numel() == before.numel() == 1
    if is_other or (found.is_floating_point() and not before.is_floating_point()):
        kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (before, found)]
        raise ConfigError(
            f"The running buffer {location.name!r} was {kinds[0]} and is {kinds[1]} now. A running buffer keeps its "
            "shape and type. If the first forward pass gives it its shape, call the model once before run.prepare; "
            "for fake quantisation see docs/moving.md."
        )


def _buffers(model: nn.Module) -> Iterator[BufferLocation]:
    """Every buffer once, under its first name, as ``named_buffers`` has it."""
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer not in seen:
                seen.add(buffer)
                yield BufferLocation(f"{prefix}.{key}" if prefix else key, buffer, module._buffers, key)


class RunningBuffers:
    """The buffers of a model that its forward pass changes.

    Args:
        model: the model, on its device; its running buffers become views of one flat tensor.
        declared: name patterns of further buffers (``["ema.*"]``): floating-point ones are averaged, integers added up.
        on: take only the buffers on this device; None for all.
    """

    _others: dict[str, str] | None = None
    _others_stayed = 0
    _passes: Sequence[list[Tensor]] = ()
    """In a step that is watched: the values before a forward pass and after it."""
    _late: tuple[str, ...] = ()
    """The buffers that a backward pass has changed, and not the forward pass before it."""

    def __init__(self, model: nn.Module, declared: Sequence[str] = (), on: torch.device | None = None) -> None:
        self._model = model
        found = find(model, declared)
        self._known = found.names
        found = found if on is None else found.on(on)
        groups, counters, self._summed = found.groups, found.counters, found.summed
        averaged = [location for group in groups for location in group.locations]
        self._locations = [*averaged, *counters, *self._summed]
        dtype = averaged[0].buffer.dtype if averaged else torch.float64 if self._summed else torch.float32
        self._flat = _flatten([location.buffer for location in averaged], dtype, _room)
        self._counts = _flatten([location.buffer for location in counters], torch.int64, torch.numel)
        self._old, self._old_counts = self._flat.clone(), self._counts.clone()
        self._old_summed = [location.buffer.clone() for location in self._summed]
        compared = [group for group in groups if group.counter is None]
        signal = {id(group): number for number, group in enumerate(compared, len(counters))}
        signal |= {id(g): counters.index(g.counter) for g in groups if g.counter is not None}
        sizes = torch.tensor([group.numel for group in groups], dtype=torch.int64)
        of_group = torch.tensor([signal[id(group)] for group in groups], dtype=torch.int64)
        self._signal_of = torch.repeat_interleave(of_group, sizes).to(self._flat.device)
        ends = sizes.cumsum(0).tolist()
        self._compared = [slice(end - group.numel, end) for group, end in zip(groups, ends) if group.counter is None]
        self.numel: int = self._flat.numel() + sum(before.numel() for before in self._old_summed)
        """Number of values that are averaged or added up, with the gaps between them."""
        self.counters: int = self._counts.numel() + len(self._compared)
        """Numbers that tell which buffers were used: the integer counters, and one for each other group."""
        self.dtype = dtype
        """Type of the values: float32, or float64 for a model of float64 and where only integers are added up."""
        self.device = self._summed[0].buffer.device if self._summed else self._flat.device

    def tensors(self) -> list[Tensor]:
        """The values and BatchNorm's counters, each as the one flat tensor that the model's buffers are views of, and
        the buffers that are added up."""
        self._take_back(keep=True)
        return [self._flat, self._counts, *(location.buffer for location in self._summed)]

    def new_rows(self, count: int) -> Tensor:
        """Zeros for the values of ``count`` micro-batches, shape (count, numel)."""
        return torch.zeros(count, self.numel, dtype=self.dtype, device=self.device)

    def begin_step(self) -> None:
        """Remembers the step's old values."""
        if self._locations:
            self._take_back(keep=True)
            self._old.copy_(self._flat)
            self._old_counts.copy_(self._counts)
            for location, before in zip(self._summed, self._old_summed):
                before.copy_(location.buffer)

    def begin_micro_batch(self) -> None:
        """Puts the old values back before a forward pass."""
        if self._locations:
            self._note_late_changes()
            self._take_back(keep=False)
            self._flat.copy_(self._old)
            self._counts.copy_(self._old_counts)
            for location, before in zip(self._summed, self._old_summed):
                location.buffer.copy_(before)
            self._passes = () if self._others is None else (self._values(),)

    def leave(self) -> list[Tensor]:
        """Returns copies of the values in the middle of a micro-batch, for ``resume``."""
        return [each.clone() for each in self.tensors()] if self._locations else []

    def resume(self, values: Sequence[Tensor]) -> None:
        """Puts back what ``leave`` returned, where the forward passes of others came between."""
        self._passes = ()
        for each, value in zip(self.tensors() if values else [], values):
            each.copy_(value)

    def take(self) -> tuple[Tensor, Tensor]:
        """Returns copies of a forward pass's values (numel,), and how often each group was used (counters,)."""
        self._take_back(keep=True)
        if self._passes:
            for location, before in zip(self._locations, self._passes[0]):
                _require_kind(location, location.buffer, before)
            self._passes = (*self._passes, self._values())
        advanced = self._counts - self._old_counts
        if self._compared:
            changed = [(self._flat[part] != self._old[part]).any() for part in self._compared]
            advanced = torch.cat([advanced, torch.stack(changed).to(advanced.dtype)])
        if not self._summed:
            return self._flat.clone(), advanced
        added = [location.buffer - before for location, before in zip(self._summed, self._old_summed)]
        return torch.cat([self._flat, *(each.flatten().to(self.dtype) for each in added)]), advanced

    def finish_step(self, total: Tensor, leaves: int, advanced: Tensor) -> None:
        """Sets the new values.

        Args:
            total: tree sum over the micro-batches of what ``take`` gave, shape (numel,).
            leaves: number of micro-batches in it.
            advanced: sum over the micro-batches of how often each group was used, shape (counters,).
        """
        self._note_late_changes()
        self._take_back(keep=False)
        sizes = [self._flat.numel(), *(before.numel() for before in self._old_summed)]
        averaged, *added = torch.split(total, sizes)
        unused = (advanced == 0).index_select(0, self._signal_of)
        torch.where(unused, self._old, averaged / leaves, out=self._flat)
        self._counts.copy_(self._old_counts + (advanced[: self._counts.numel()] > 0))
        for location, before, sums in zip(self._summed, self._old_summed, added):
            if bool((sums.abs() >= _MOST_ADDED).any()):
                raise ConfigError(
                    f"The buffer {location.name!r} changed by {_MOST_ADDED} or more in one step, which is more than "
                    "running_buffers adds up exactly. Count in larger units, or outside of the forward pass."
                )
            location.buffer.copy_(before + sums.view(before.shape).to(before.dtype))

    def _values(self) -> list[Tensor]:
        return [location.buffer.clone() for location in self._locations]

    def _note_late_changes(self) -> None:
        """Notes what a backward pass has changed; it may compute forward passes once more, which change it again."""
        if len(self._passes) < 2:
            return
        self._take_back(keep=True)
        for location, before, after in zip(self._locations, *self._passes):
            if torch.equal(before, after) and not torch.equal(location.buffer, after):
                self._late += (location.name,)
        self._passes = ()

    def _take_back(self, *, keep: bool) -> None:
        """Makes the model hold our views again where it was given other tensors, as ``self.mean = ...`` does."""
        for location in self._locations:
            found = location.holder[location.key]
            if found is not location.buffer:
                if keep and found is not None:
                    _require_kind(location, found)
                    with torch.no_grad():
                        location.buffer.copy_(found)
                location.holder[location.key] = location.buffer

    @staticmethod
    def names(model: nn.Module, declared: Sequence[str] = ()) -> set[str]:
        """The names of a model's running buffers and their counters."""
        return find(model, declared).names

    def take_over(self, other: RunningBuffers) -> None:
        """Sets the values to those of the same model's buffers elsewhere."""
        if self._locations:
            self._take_back(keep=False)
            self._flat.copy_(other._flat)
            self._counts.copy_(other._counts)
            for mine, theirs in zip(self._summed, other._summed):
                mine.buffer.copy_(theirs.buffer)

    def remember_others(self) -> None:
        """Notes the values of all buffers that are not averaged, until a step has left them as they were.

        A step is preceded by a rehearsal, which is two short ones.
        """
        if self._others_stayed < _STEPS_WATCHED:
            self._others = self._digest_others()

    def refuse_changed_others(self) -> None:
        """Raises ``ConfigError`` naming a buffer that changed although nobody said how to combine it."""
        if self._others is None:
            return
        before, self._others = self._others, None
        if self._late:
            raise ConfigError(
                f"The backward pass changes the buffer {self._late[0]!r}, which running_buffers names. A step keeps "
                "what the forward passes leave in running buffers, so this change would be lost. Change a running mean "
                "in the forward pass. Fill a table with a row for each sample in a loss with whole_batch=True."
            )
        changed = [name for name, digest in self._digest_others().items() if before.get(name) != digest]
        if changed:
            others = shorten(map(repr, changed[1:]), 5)
            if others:
                others = f" It changes {others}, too; running_buffers takes patterns such as '*.mean'."
            raise ConfigError(
                f"The forward pass changes the buffer {changed[0]!r}, and Lockstep does not know how to combine its "
                f"values from several micro-batches. {self._advice(changed[0])}{others}"
            )
        self._others_stayed += 1

    def _advice(self, name: str) -> str:
        buffer = self._model.get_buffer(name)
        instead = "in the loop, alike on all ranks."
        if buffer.numel() == 1:
            instead += (
                " If it says that the first forward pass has initialised something, as in ActNorm, call the model once "
                "before run.prepare."
            )
        if buffer.dtype == torch.bool:
            return f"Change it outside of the forward pass, {instead}"
        if buffer.is_floating_point() or buffer.is_complex():
            return (
                f"Average it with running_buffers=[{name!r}] if it is a running mean. Change anything else, such as a "
                f"queue of keys, outside of the forward pass, {instead}"
            )
        return (
            f"If it counts something, add its changes up with running_buffers=[{name!r}]: all micro-batches of a step "
            f"start with the step's old value. Change anything else outside of the forward pass, {instead}"
        )

    def _digest_others(self) -> dict[str, str]:
        names: dict[Tensor, str] = {}  # the first of each; others are judged as attributes are
        for name, buffer in saved_buffers(self._model).items():
            names.setdefault(buffer, name)
        return digest_tensors({name: each for each, name in names.items() if name not in self._known})


def persistent_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module that its ``state_dict()`` has, submodules aside, with those that are None."""
    others = module._non_persistent_buffers_set
    return {key: buffer for key, buffer in module._buffers.items() if key not in others}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of a model's ``state_dict()``, under each of their names; not those that are None."""
    return {
        f"{prefix}.{key}" if prefix else key: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, buffer in persistent_buffers(module).items()
        if buffer is not None
    }


def _room(buffer: Tensor) -> int:
    """The numbers between the beginning of a buffer and that of the next, which lies as in memory of its own.

    Products with a buffer that begins elsewhere have other bits, and a stage of a pipeline has only some of them.
    """
    return buffer.numel() + gap_after(buffer)


def _flatten(buffers: list[Tensor], dtype: torch.dtype, room: Callable[[Tensor], int]) -> Tensor:
    """Moves the buffers into one flat tensor, of which they become views, and returns it; ``room`` is that of each."""
    if not buffers:
        return torch.empty(0, dtype=dtype)
    flat = torch.zeros(sum(map(room, buffers)), dtype=buffers[0].dtype, device=buffers[0].device)
    position = 0
    for buffer in buffers:
        view = flat[position : position + buffer.numel()].view(buffer.shape)
        position += room(buffer)
        buffer.data = view.copy_(buffer.detach())
    return flat


class RunningBuffersOnDevices(RunningBuffers):
    """The running buffers of a model whose layers already lie on several devices, seen as one."""

    def __init__(self, model: nn.Module, declared: Sequence[str] = ()) -> None:
        names = RunningBuffers.names(model, declared)
        devices = dict.fromkeys(b.device for name, b in model.named_buffers() if name in names)
        self._model, self._known = model, names
        self._parts = [RunningBuffers(model, declared, device) for device in devices or [None]]
        self._sizes = [part.numel for part in self._parts]
        self.numel, self.counters = sum(self._sizes), sum(part.counters for part in self._parts)
        self.dtype, self.device = self._parts[0].dtype, self._parts[0].device

    def begin_step(self) -> None:
        """See ``RunningBuffers``."""
        for part in self._parts:
            part.begin_step()

    def begin_micro_batch(self) -> None:
        """See ``RunningBuffers``."""
        for part in self._parts:
            part._others = self._others
            part.begin_micro_batch()

    def take(self) -> tuple[Tensor, Tensor]:
        """See ``RunningBuffers``; the devices' values one after the other."""
        taken = [part.take() for part in self._parts]
        return tuple(torch.cat([each.to(self.device) for each in kind]) for kind in zip(*taken))  # type: ignore[return-value]  # two

    def finish_step(self, total: Tensor, leaves: int, advanced: Tensor) -> None:
        """See ``RunningBuffers``."""
        counts = torch.split(advanced, [part.counters for part in self._parts])
        for part, values, own in zip(self._parts, torch.split(total, self._sizes), counts):
            part.finish_step(values.to(part.device), leaves, own.to(part.device))
            self._late += part._late
