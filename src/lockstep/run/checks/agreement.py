"""Checks that all ranks agree: on the settings and the model, the data set, and the replicas.

start of the run     agree                    settings, source code, structure and values of the model, which are
                                              rank 0's from then on
start of an epoch    AgreedData.require       the data set, and the one that a checkpoint was reading
now and then         require_equal_replicas   the bits of all parameters
                     require_equal_writes     what the loop changed, where no rank has all parameters
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.state import has_extra_state
from lockstep.config.options import RunOptions
from lockstep.core.fingerprint import Context, checksums, combine, digest_tensors
from lockstep.core.plan import SamplePlan
from lockstep.core.values import differing, repr_of, short_digest, short_text, stored_in
from lockstep.data.changes import BEGINNING, CHOICE
from lockstep.distributed.collectives import broadcast_tensors
from lockstep.errors import GO_ON_AT_LEVEL_B, CheckpointMismatch, ConfigError, ReplicaError
from lockstep.numerics.hidden_state import without_key
from lockstep.run.attributes import Values, holders_in
from lockstep.run.checks.calls import by_rank, gather_agreed, watching_once
from lockstep.run.epoch_loop import Position
from lockstep.run.loop_state import LoopState
from lockstep.run.prepare import EVALUATING, FREEZING, Parts, frozen_parameters, hyperparameters
from lockstep.strategies import Strategy, one_sided_writes
from lockstep.text import at_most, plural, shorten

if TYPE_CHECKING:
    from lockstep.run.state import RunState

logger = logging.getLogger(__name__)
_MOST_NAMES = 5
_SHA = "SHA-256 "
_SOURCE = "source of"
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
"""Folders of installed packages, which two hosts may have under paths of their own."""
_OF_TORCH = vars(nn.Module()).keys() - {"training"} | {"_torchdynamo_wrapper_id"}  # an address
"""Attributes in which every module keeps its parameters, buffers, children and hooks."""
_COMPOSABLE = "__composable_api_state_key"
"""Begins the random names of the attributes of torch's activation checkpointing."""
_VALUES = "with the values"
_PLAIN = (bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype)


def agree(parts: Parts, context: Context, group: dist.ProcessGroup, device: torch.device, from_main: bool) -> None:
    """Compares settings, code, structure and values over the ranks; gives all of them rank 0's values. Collective.

    ``from_main``: only rank 0 has loaded values, so a difference is expected.
    """
    settings = {**context.as_dict(), **hyperparameters(parts.optimizers), "initial values": parts.start}
    require_equal_settings(settings, group, device)
    for module in (parts.model, *parts.modules):
        require_equal_structure(module, group, device)
    require_equal_code((parts.model, *parts.modules), group, device)
    for module in (parts.model, *parts.modules):
        share_start(module, group, device, expected=from_main)


def require_equal_settings(settings: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raises ``ConfigError`` on every rank where ranks were told different things. Collective."""
    found = differences(settings, group, device, absent=None)
    lines = [f"  {key}: {by_rank(found[key])}" for key in sorted(found)]
    if lines:
        lines.append("Give all ranks one value, which follows from neither the rank, nor the clock, nor the process.")
        raise ConfigError("The ranks were started with different settings:\n" + "\n".join(lines))


def require_equal_data(digests: Mapping[str, str], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raises ``ConfigError`` on every rank where samples, given by digests, are not the same everywhere. Collective."""
    for name, values in differences(digests, group, device).items():
        remedy = (
            "Choose by numbers that all ranks have, as run.backward and run.evaluate give them: a loss or a metric "
            "keeps those of one rank's samples."
            if name.startswith(CHOICE)
            else "Files must be the same on every host, and every rank reads all of them: leave out nodesplitter=, "
            "split_dataset_by_node and the like. What a loop or a loss changes in the data set must not come from one "
            "rank's samples; run.predict(data, everywhere=True) gives all ranks the outputs for every sample."
        )
        raise ConfigError(
            f"The ranks hold different data: {name} of the data set has the digest {by_rank(values)}. Random numbers "
            "in it need a seed that all ranks share: make the data set after lockstep.init(seed=...), or call "
            "torch.manual_seed(0) and numpy.random.seed(0) before. A set of strings has another order in each process: "
            f"use sorted(set(...)). {remedy}"
        )


def require_equal_structure(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ``ConfigError`` on every rank where the models differ in a name, its place, shape or type. Collective."""
    mine = {
        name: f"{tuple(tensor.shape)} {tensor.dtype}{'' if tensor.requires_grad else ' fixed'}"
        for name, tensor in _named_tensors(model).items()
    }
    for name, shapes in differences(mine, group, device).items():
        raise ConfigError(
            f"The ranks hold different models. The first difference is {name!r}: {by_rank(shapes)}. "
            "Build the model alike on every rank."
        )
    for orders in differences({"order": "\n".join(mine)}, group, device).values():
        of_all = [order.split("\n") for order in orders]
        place = next(n for n in range(len(mine)) if len({names[n] for names in of_all}) > 1)
        raise ConfigError(
            f"The ranks have the parts of the model in other orders, as a set of names gives them: number {place} is "
            f"{by_rank([names[place] for names in of_all])}. Sort the names."
        )


def require_equal_code(models: Sequence[nn.Module], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ``ConfigError`` on every rank where ranks run other code, or models that compute otherwise. Collective.

    Compared are the sources of what each rank has imported, as far as other ranks have imported it too, and the class
    and attributes of each module of the models.
    """
    mine = source_digests()
    for number, model in enumerate(models):
        mine |= {f"{key} of module {number}" if number else key: v for key, v in described(model).items()}
    lines = [
        f"{key}: {by_rank([short_text(value, _SHA) for value in values])}"
        for key, values in differences(mine, group, device).items()
        # One rank alone may need more modules, for example to draw or to write.
        if not key.startswith(_SOURCE) or len({*values} - {"absent"}) > 1
    ]
    if lines:
        hidden = ""
        if any(_VALUES in line for line in lines):
            hidden = " Modules belong into nn.ModuleList and tensors into register_buffer: rank 0's values go to all."
        raise ConfigError(
            "The ranks do not run the same code, so their results would not belong together:\n  "
            + "\n  ".join(at_most(_MOST_NAMES, lines))
            + "\nGive all hosts the same files, and build the model alike on every rank. An attribute that has to "
            f"differ, such as a rank, belongs outside of the model.{hidden}"
        )


def source_digests(*, own: bool = False) -> dict[str, str]:
    """A digest of the file of every module that was imported, by name; of installed packages, only Lockstep's.

    ``own``: of the user's modules only.
    """
    others = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "scripts"))
    found = {}
    for name, module in sorted(sys.modules.items()):
        # Not by getattr: a module that is imported when an attribute is asked for may not be there
        file = getattr(module, "__dict__", {}).get("__file__")
        is_lockstep = name.partition(".")[0] == "lockstep"
        if not isinstance(file, str) or file.startswith(others):
            continue
        is_wanted = not own if is_lockstep else not any(folder in file for folder in _INSTALLED)
        if is_wanted:
            with suppress(OSError):
                found[f"{_SOURCE} {name}"] = _digest_of_file(file)
    return found


@cache
def _digest_of_file(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def described(model: nn.Module) -> dict[str, str]:
    """The class of every module of a model, and its attributes that are plain values, as text by name.

    Tensors that are not buffers, and modules in plain lists, are given by a digest: nobody shares rank 0's. Of other
    objects, such as devices and process groups, it is only the type; so it is of absolute paths.
    """
    found, shared = {}, frozenset(map(id, _named_tensors(model).values()))
    for name, module in model.named_modules():
        found[f"class of {name or 'the model'}"] = _name_of(type(module))
        for key, value in vars(module).items():
            if key not in _OF_TORCH and not key.startswith(_COMPOSABLE):
                found[f"{name}.{key}" if name else key] = _text(value, shared)
    return found


def made_with(model: nn.Module) -> tuple[dict[str, str], ...]:
    """Describes what a model was made with beside its state: what it computes with for certain, and the rest.

    Certain are the classes of modules, the settings of torch's layers, and tensors that no ``state_dict()`` has. Two
    more are like these: arrays and tensors in all that attributes hold, and numbers with a fraction there.
    """
    texts, certain, others = described(model), dict[str, str](), dict[str, str]()
    inner, held = (dict[str, str](), dict[str, str]()), Values(holders_in(dict(model.named_modules())))
    for path, module in model.named_modules():
        name, prefix = path or "the model", f"{path}." if path else ""
        certain[f"the class of {name}"] = type(module).__qualname__
        if has_extra_state(module):
            continue
        is_torchs = type(module).__module__.startswith("torch.")
        for key in vars(module):
            text = texts.get(prefix + key)
            if text is not None and not key.startswith("_") and key not in ("training", "inplace"):
                is_certain = is_torchs or _VALUES in text
                words = f"the attribute {key!r} of {name}"
                (certain if is_certain else others)[words] = short_text(text, _SHA)
                for kind, numbers in zip(inner, (held.arrays, held.fractions)):
                    if found := numbers[f"module {path}", key]:
                        kind[words] = f"values of digest {short_digest(json.dumps(found).encode())}"
        for key in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers[key]) is not None:
                certain[f"the attribute {key!r} of {name}"] = _text(buffer, frozenset())
    return certain, others, *inner


def made_otherwise(
    there: Iterable[Mapping[str, str]], here: Iterable[Mapping[str, str]], restored: Set[str], *, warns: bool
) -> list[str]:
    """Tells what ``made_with`` gives that differs from a checkpoint's run (``there``) and is not ``restored``.

    What is not certain is named in a warning.
    """

    def unequal(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
        names = [name for name in differing(before, now) if name not in restored]
        values = [(name, before.get(name, "absent"), now.get(name, "absent")) for name in names]
        return {name: f"{name}: {old} there, {new} here" for name, old, new in values}

    found = [*map(unequal, there, here), {}, {}]  # a checkpoint of an earlier version has the first two
    certain, others = ([*{**texts, **digests, **texts}.values()] for texts, digests in zip(found[:2], found[2:]))
    if others and warns:
        logger.warning(
            "The model was made with other values than in the checkpoint's run: %s. This run goes on with those here, "
            "so it ends in other bits if the model computes with them.",
            shorten(others, _MOST_NAMES),
        )
    more = [f"and {len(certain) - _MOST_NAMES} more of the model"] if len(certain) > _MOST_NAMES else []
    return certain[:_MOST_NAMES] + more


def _text(value: Any, shared: Set[int], depth: int = 4) -> str:
    """A value as text; ``shared`` has the ids of tensors that get rank 0's values, such as weights an LSTM lists."""
    if isinstance(value, str) and value.startswith(os.sep):
        return "an absolute path"
    if value is None or isinstance(value, _PLAIN):
        return repr_of(value)
    if isinstance(value, Tensor | nn.Module):
        held = {"": value} if isinstance(value, Tensor) else _named_tensors(value)
        known = {
            name: each
            for name, each in held.items()
            if id(each) not in shared and each.layout is torch.strided and not each.is_meta
        }
        return f"{_name_of(type(value))} {_VALUES} {combine(digest_tensors(known))[:8]}"
    inner = partial(_text, shared=shared, depth=depth - 1)
    if depth and isinstance(value, list | tuple):
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(map(inner, stored_in(value))))
    if depth and isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(inner, stored_in(value))))})"
    if depth and isinstance(value, Mapping):
        return "{" + ", ".join(f"{inner(key)}: {inner(each)}" for key, each in stored_in(value)) + "}"
    if depth and isinstance(value, partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if depth and is_dataclass(value) and not isinstance(value, type):
        return _name_of(type(value)) + inner({each.name: getattr(value, each.name, None) for each in fields(value)})
    with suppress(AttributeError):  # __getattr__ of the user's may make one of any name
        type(value).__getattribute__(value, "__qualname__")  # type: ignore[call-arg]  # of a class, if it is one
        return _name_of(value)
    return _name_of(type(value))


def _name_of(definition: Any) -> str:
    """The import path of a class or function; methods of classes that are written in C have no module."""
    return f"{getattr(definition, '__module__', None)}.{definition.__qualname__}"


def share_start(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, *, expected: bool = False
) -> list[str]:
    """Gives every rank the parameters and buffers of rank 0; returns the names of those that differed. Collective.

    A difference is warned about unless it is ``expected``, as when only rank 0 has read a file of weights.
    """
    tensors = {name: each for name, each in _named_tensors(model).items() if not each.is_meta}
    different = sorted(differences(digest_tensors(tensors), group, device))
    if different:
        source = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for name in different:
                at_device = tensors[name].detach().to(device)
                broadcast_tensors([at_device], source, group)
                tensors[name].copy_(at_device)
        logger.log(
            logging.DEBUG if expected else logging.WARNING,
            "The ranks began with different values in %d of %d tensors (%s); all have rank 0's now.",
            len(different),
            len(tensors),
            shorten(different, _MOST_NAMES),
        )
    return different


_SWITCHES = {
    EVALUATING: ("in evaluation mode", "in training mode", "model.eval() and model.train()"),
    FREEZING: ("frozen", "trained", "requires_grad_()"),
}
"""By the beginning of a name in ``Parts.digests``: the words for set, for not set, and the calls that set it."""


def require_equal_replicas(
    digests: Mapping[str, str], step: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises ``ReplicaError`` naming tensors and ranks where digests differ. Collective."""
    found = differences(digests, group, device)
    if not found:
        return
    names = sorted(found, key=lambda name: (not name.startswith("<"), name))  # a setting explains the tensors
    for prefix, (on, off, calls) in _SWITCHES.items():
        if names[0].startswith(prefix):
            switched = sorted(name[len(prefix) : -1] for name in names if name.startswith(prefix))
            values = found[f"{prefix}{switched[0]}>"]
            states = by_rank([on if value == "set" else off for value in values])
            raise ReplicaError(
                f"After {plural(step, 'step')} the ranks differ in whether {shorten(switched, _MOST_NAMES)} "
                f"{'is' if len(switched) == 1 else 'are'} {on}: {switched[0]} is {states}. Every rank has to call "
                f"{calls}: take it out of if run.is_main: and other conditions on the rank."
            )
    values = [value[:8] for value in found[names[0]]]
    tensors, every = ([name for name in each if not name.startswith("<")] for each in (names, digests))
    what = f"hold different bits in {len(tensors)} of {len(every)} tensors" if tensors else "differ"
    raise ReplicaError(
        f"After {plural(step, 'step')} the ranks {what} "
        f"({shorten(names, _MOST_NAMES)}). {names[0]!r} is {by_rank(values)}. Something changed it on some ranks "
        "only: code under a rank condition, an update outside of optimizer.step(), an optimizer that computes a "
        "setting from the gradients of its process (use strategy 'ddp'), a step that uses what hooks keep (read p.grad "
        "in the loop), a forward pass that changes a buffer (name it in running_buffers), or faulty memory."
    )


def require_equal_writes(strategy: Strategy, step: int, group: dist.ProcessGroup) -> None:
    """Raises ``ReplicaError`` where the loop has changed parameters, gradients or momenta on some ranks. Collective."""
    found = one_sided_writes(strategy, group)
    if found:
        name = next(iter(found))
        raise ReplicaError(
            f"Before step {step} the loop changed {shorten(list(found), _MOST_NAMES)} on some ranks only: {name} is "
            f"{by_rank(found[name])}. Under strategy {strategy.name!r} each rank changes the part that it holds, so "
            "every rank has to run that code: take it out of if run.is_main: and other conditions on the rank. Code "
            "that goes by the optimizer's state, which a rank has of its part only, needs strategy 'ddp' or 'fsdp'."
        )


def agreed_digests(
    run: RunState,
    digests: Callable[..., dict[str, str]],
    *,
    of_all_modules: bool,
    more: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The digests of the model's state, after checking that all ranks agree on them. Collective.

    ``of_all_modules``: see ``Parts.digests``; ``more``: other texts that have to be equal, by name in angle brackets.
    """
    run.model.require_own_parameters()
    group, device = run.strategy.all_ranks, run.strategy.device
    if not run.strategy.replicated:  # its ranks give each other the state, each in the same call
        run.strategy.require_no_calls()
        gather_agreed(None, group, device)
    found, step = run.model.with_all_buffers(digests(run.strategy.state())), run.position.step
    if group is not None:
        beside = run.parts.digests(run.model.module, of_all_modules=of_all_modules)
        require_equal_writes(run.strategy, step, group)
        require_equal_replicas({**found, **beside, **more}, step, group, device)
    return found


def require_equal_models(model: nn.Module, trained: nn.Module, strategy: Strategy) -> None:
    """Raises ``ConfigError`` where a model beside the trained one has other values on some ranks. Collective."""
    if (group := strategy.all_ranks) is None:
        return
    known = {id(tensor) for tensor in _named_tensors(trained).values()}
    own = [(name, tensor) for name, tensor in _named_tensors(model).items() if id(tensor) not in known]
    found = differences(checksums(own, strategy.device), group, strategy.device)
    if not found:
        return
    name = min(found)
    raise ConfigError(
        f"The {type(model).__name__} that is evaluated as model= has other values on other ranks: {name!r} is "
        f"{by_rank([value[:8] for value in found[name]])}. Each rank evaluates some of the samples, so seed and "
        "update it on every rank alike; run.state_dict() has the trained values on the main process only. A moving "
        "average that is given to run.prepare is kept equal."
    )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differences(
    mine: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device, *, absent: Any = "absent"
) -> dict[str, list[Any]]:
    """The values by rank of each entry that is not equal on all ranks. Collective.

    Where all are equal, one digest is all that is sent.
    """
    if group is None:
        return {}
    totals = gather_agreed(combine({name: repr(value) for name, value in mine.items()}), group, device)
    if all(total == totals[0] for total in totals):
        return {}
    everyone = gather_agreed(dict(mine), group, device)
    keys = dict.fromkeys(key for each in everyone for key in each)
    values = {key: [each.get(key, absent) for each in everyone] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


_EVALUATED = "The run evaluates"
_HOW = ("drop_last", "shuffle")
"""How the samples of a data set are read; earlier versions did not store that."""
_CHANGES = "changes"
"""Stored beside the digests where an epoch has had other samples than the one before, as in reinforcement learning."""
Digests = Callable[[], Mapping[str, str]]
"""Gives digests of some samples of a data set by name."""
Compared = tuple[int, Digests]  # the number of a data set, the same on every rank, and its digests


class AgreedData:
    """The data sets that all ranks have been asked about, and the one that a checkpoint was reading."""

    def __init__(self, strategy: Strategy, position: Position, options: RunOptions, *, warns: bool) -> None:
        self._strategy, self._position = strategy, position
        self._options, self._warns = options, warns
        self._agreed: set[tuple[int, SamplePlan | int]] = set()
        self._known: dict[tuple[int, SamplePlan], dict[str, str]] = {}
        self._resumed_samples, self._resumed_digests = 0, dict[str, str]()
        self.refuses_others = True
        """False in tools that look for what differs: other samples than those of the checkpoint are named only."""
        self.found_others = False
        """True where the run goes on with other samples than those of its checkpoint, of as many."""
        self.digests: dict[str, str] = {}
        """Of some samples of the current set; empty where no checkpoint is written."""
        self._evaluated, self._evaluated_before = dict[str, str](), dict[str, str]()

    def resume(self, digests: Mapping[str, str]) -> None:
        """Says that the position comes from a checkpoint; ``digests`` are those of the set that it was reading."""
        self._resumed_samples = self._position.samples
        self._evaluated = {name: each for name, each in digests.items() if name.startswith(_EVALUATED)}
        self._evaluated_before = dict(self._evaluated)
        self.digests = {name: each for name, each in digests.items() if name not in self._evaluated}
        self._resumed_digests = dict(self.digests)

    def require(self, plan: SamplePlan, photos: str, compared: Compared, loop: LoopState, *, has_changed: bool) -> None:
        """Raises where a checkpoint within an epoch, or another rank, is about another data set. Collective.

        Args:
            photos: a hash of what its photos are decoded to; empty for other sets.
            loop: reading the samples is no change that it makes.
            has_changed: the program has changed it since; it is compared again where any rank says so.
        """
        number, digests = compared
        self._forget(number, has_changed)
        before, self._resumed_samples = self._resumed_samples, 0
        if before not in (0, plan.samples) and self._position.done:
            raise CheckpointMismatch(
                f"The checkpoint was written at step {self._position.done} of an epoch over {before} samples, and this "
                f"data set has {plan.samples}. Resume with the data set that the run was trained on."
            )
        self._position.samples = plan.samples
        if (number, plan) not in self._known and self._options.directory is not None:
            how = {name: str(getattr(plan, name)) for name in _HOW}
            self._known[number, plan] = {**self._read(digests, loop), **how}
        now = self._known.get((number, plan), {})
        is_other = self.digests.keys() - {_CHANGES} == now.keys() and any(
            self.digests[name] != now[name] for name in now
        )
        changes = {_CHANGES: "yes"} if is_other or _CHANGES in self.digests else {}
        self.digests = {**now, **changes} if now else {}
        if self._strategy.all_ranks is not None and (number, plan) not in self._agreed:
            seen = {name: getattr(plan, name) for name in ("samples", *_HOW)}
            self._require_equal({**seen, "pixels of photos": photos}, self.digests or self._read(digests, loop))
            self._agreed.add((number, plan))
        if before == plan.samples:
            self._compare_with_checkpoint()

    def _read(self, digests: Digests, loop: LoopState) -> Mapping[str, str]:
        # In this order: what is watched is slower, and the loop's variables need not be.
        with loop.reading(alone=True), watching_once("the data set", looks=self._options.checks != "off"):
            return digests()

    def require_equal_changes(self, loop: LoopState) -> None:
        """Raises ``ConfigError`` where the loop has made other samples on some ranks. Collective."""
        if self._strategy.all_ranks is None:
            return
        if found := self._differences(loop.changed_in_data(), absent="unchanged"):
            name, held = min(found), sorted({*map(without_key, found)})
            raise ConfigError(
                f"The loop, or the loss, has changed {shorten(held, _MOST_NAMES)} in a data set, or what it "
                f"reads, and not to the same values on all ranks: {name} is {by_rank(found[name])}. What a step leaves "
                "on its rank is of that rank's samples only, so samples would depend on the number of processes. Take "
                "such numbers from run.predict(data, everywhere=True), which gives all ranks those of every sample."
            )

    def _compare_with_checkpoint(self) -> None:
        """Refuses samples that differ from those of the resumed epoch; warns of them in the epoch after it."""
        stored, self._resumed_digests = self._resumed_digests, {}
        have_samples = all(
            each.keys() - {*_HOW, _CHANGES} for each in (stored, self.digests)
        )  # not where checks are off
        names = sorted(
            name
            for name in ({*stored, *self.digests} - {_CHANGES} if have_samples else _HOW)
            if stored.get(name) != self.digests.get(name) and (name in stored or name not in (*_HOW, BEGINNING))
        )
        self.found_others = bool(names and stored and self.digests)
        if not self.found_others or self._options.force_context:
            return
        names = [f"{name}={self.digests[name]}" if name in _HOW else name for name in names]
        found = f"{shorten(names, _MOST_NAMES)} of the data set {'is' if len(names) == 1 else 'are'} not what"
        if self._position.done and self.refuses_others:
            raise CheckpointMismatch(
                f"{found} the checkpoint was reading in this epoch, so the bits would not continue. Resume with the "
                "same samples in the same order: sort what a folder lists, and split or shuffle with a seed, after "
                f"lockstep.init(seed=...); or {GO_ON_AT_LEVEL_B}"
            )
        if self._warns and _CHANGES not in stored:
            logger.warning(
                "%s the epoch before the checkpoint had, of as many samples. If the data set was not to change, sort "
                "what a folder lists, and split or shuffle with a seed, after lockstep.init(seed=...).",
                found,
            )

    def require_freezing(self, model: nn.Module) -> None:
        """Raises ``ReplicaError`` where other parameters of the model are frozen on other ranks. Collective."""
        found = self._differences(dict.fromkeys(frozen_parameters(model), "frozen"), absent="trained")
        if not found:
            return
        name = min(found)
        raise ReplicaError(
            f"{shorten(sorted(found), _MOST_NAMES)} {'is' if len(found) == 1 else 'are'} frozen on some ranks only: "
            f"{name!r} is {by_rank(found[name])}. Freeze on every rank: take requires_grad_(False) out of "
            "if run.is_main: and other conditions on the rank."
        )

    def require_evaluated(self, samples: int, number: int, digests: Digests, *, has_changed: bool) -> None:
        """The same for a data set of ``samples`` samples that is evaluated. Collective."""
        self._forget(number, has_changed)
        if (number, samples) in self._agreed or not (self._strategy.all_ranks or self._options.directory):
            return
        self._agreed.add((number, samples))
        digest = digests()
        self._require_equal({"samples that are evaluated": samples}, digest)
        name, found = f"{_EVALUATED} {samples}", " ".join(sorted(digest.values()))
        before = self._evaluated_before.pop(name, "")
        if self._evaluated.setdefault(name, found) != found:
            self._evaluated[name] = ""  # there are several of this size
        if found and before not in ("", found) and self._warns:
            logger.warning(
                "%s samples, not those from before the stop. Split with a seed, after lockstep.init(seed=...).",
                name,
            )

    def _require_equal(self, seen: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Raises ``ConfigError`` where ranks see a data set of other size or settings, or of other samples."""
        group, device = self._strategy.all_ranks, self._strategy.device
        require_equal_settings(seen, group, device)
        require_equal_data(digests, group, device)

    def _differences(self, mine: Mapping[str, Any], *, absent: str) -> dict[str, list[Any]]:
        return differences(mine, self._strategy.all_ranks, self._strategy.device, absent=absent)

    @property
    def stored(self) -> dict[str, str]:
        """The part of a checkpoint that is of data sets."""
        return {**self.digests, **self._evaluated}

    def _forget(self, number: int, has_changed: bool) -> None:
        if any(gather_agreed(has_changed, self._strategy.all_ranks, self._strategy.device)):
            self._agreed = {each for each in self._agreed if each[0] != number}
            self._known = {key: found for key, found in self._known.items() if key[0] != number}
