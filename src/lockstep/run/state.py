"""The state that a checkpoint covers: captured by name, restored on any number of ranks under the same conditions.

``RunState`` captures and restores model, optimizers, schedulers and position. Where parameters are shared out over
processes, the optimizer's state is gathered for a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState, further_names, optimizer_state
from lockstep.core.fingerprint import Context
from lockstep.core.values import short_text
from lockstep.core.world import World
from lockstep.data.images.decoding import jpeg_decoder
from lockstep.distributed.collectives import gather_json
from lockstep.errors import GO_ON_AT_LEVEL_B, CheckpointError, CheckpointMismatch, ConfigError
from lockstep.numerics.precision import Precision, dtype_named, torch_settings
from lockstep.numerics.running_buffers import saved_buffers
from lockstep.run.attributes import Attributes, unsaved_tensors, words_of
from lockstep.run.checks.agreement import made_otherwise, source_digests
from lockstep.run.epoch_loop import Position
from lockstep.run.loop_state import LoopState
from lockstep.run.lost_variables import UnheldPlaces, united
from lockstep.run.optimizer_step import GradientState, PreparedOptimizer
from lockstep.run.prepare import Parts, PreparedModel, frozen_parameters, held_objects, plain_number
from lockstep.run.step import ForwardPass
from lockstep.runtime.events import StepEvents
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.strategies.absent import AbsentParameter, AbsentTensor
from lockstep.strategies.sharding import is_elementwise, quantised
from lockstep.text import at_most, shorten

logger = logging.getLogger(__name__)
_GRADIENT = "gradient|"
_MOST_NUMBERS = 1 << 18
"""Numbers of a state tensor that is not shaped like its parameter, such as a step counter."""
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that decide how, not what, is computed; this belongs to the context."""
_TENSOR = "tensor|"
"""Marks what stands for a tensor in a scheduler's state."""
_OF_OBJECTS = frozenset({"lr_lambdas", "_scale_fn_custom"})
"""Entries of a scheduler's state with attributes of what it calls for a learning rate; None for a function."""
_MOST_LINES = 5
_UNSAVED = {
    "unsaved": ("which no state_dict() has", "Keep it in self.state[parameter] of the optimizer"),
    "unsaved_optimizers": (
        "which run.prepare was not given",
        "Make all optimizers before run.prepare, and give it all of them",
    ),
    "unsaved_attributes": (
        "which has changed, is large, and is in another process than the first",
        "Make it a persistent buffer",
    ),
    "tied_buffers": (
        "which is None, of another shape or type, or one tensor with another buffer, unlike at run.prepare",
        "Make such changes of buffers before run.prepare",
    ),
}
"""Kinds of values that a checkpoint does not hold: why, and what to do."""


def _shared_state(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    members: Sequence[Sequence[str]],
    strategy: Strategy,
    rows: Collection[str] | None,
    *,
    keep: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As ``checkpoint.optimizer_state``, for an optimizer whose parameters several processes share. Collective.

    ``names`` are those of the parameters that the optimizer holds here, ``members`` those of its groups in the whole
    model; ``rows`` and ``keep``: see ``RunState.capture``.
    """
    tensors, record = optimizer_state(optimizer, names, with_wrapped=False)
    shapes = {names[p]: p.shape for each in optimizer.param_groups for p in each["params"]}
    by_name = ("state", "strides", "same")
    mine: dict[str, Any] = {key: record[key] for key in by_name} | {"dtypes": {}, "values": {}}
    for key, tensor in tensors.items():
        name = key.partition("|")[0]
        if name in shapes and tensor.shape == shapes[name]:
            mine["dtypes"][key] = str(tensor.dtype)
        elif name:
            mine["values"][key] = _as_json(key, tensor)
    everyone = strategy.gather_records(mine)
    groups = [{**each, "parameters": list(own)} for each, own in zip(record["groups"], members)]
    whole = {**record, "groups": groups} | {key: _union(everyone, key) for key in by_name}
    others = {key: tensor.clone() for key, tensor in tensors.items() if not key.partition("|")[0]}
    others |= {key: _from_json(value) for key, value in _union(everyone, "values").items()}
    parts = {key: tensors[key] for key in mine["dtypes"]}
    if rows is not None:
        own = {key: part for key, part in parts.items() if key.partition("|")[0] in rows}
        return own | (others if keep else {}), whole
    dtypes = {key: dtype_named(name) for key, name in _union(everyone, "dtypes").items()}
    return others | _gathered(strategy, parts, dtypes, keep=keep), whole


def _gathered(
    strategy: Strategy, parts: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], *, keep: bool
) -> dict[str, Tensor]:
    """Whole tensors on the CPU, where this process keeps them, by keys that begin with parameter names. Collective."""
    whole = {}
    for key, dtype in dtypes.items():
        found = strategy.gather_full(key.partition("|")[0], parts.get(key), dtype)
        if keep:
            whole[key] = found.detach().to("cpu", copy=True)
    return whole


def _union(everyone: list[Any], kind: str) -> dict[str, Any]:
    return dict(sorted({key: value for each in everyone for key, value in each[kind].items()}.items()))


def _as_json(key: str, tensor: Tensor) -> list[Any]:
    if tensor.numel() > _MOST_NUMBERS:
        raise ConfigError(
            f"The optimizer's state {key!r} has the shape {tuple(tensor.shape)}, which is not its parameter's, so it "
            "cannot be put together from parts. Use an elementwise optimizer such as SGD or AdamW, or strategy 'ddp'."
        )
    return [str(tensor.dtype), list(tensor.shape), tensor.detach().flatten().tolist()]


def _from_json(value: list[Any]) -> Tensor:
    dtype, shape, numbers = value
    return torch.tensor(numbers, dtype=dtype_named(dtype)).reshape(shape)


@dataclass
class RunState:
    """All that a checkpoint of a run covers."""

    parts: Parts
    model: PreparedModel
    strategy: Strategy
    precision: Precision
    position: Position
    context: Context
    made_with: tuple[dict[str, str], ...]
    """See ``agreement.made_with``."""
    world: World
    events: StepEvents
    extra: dict[str, Any] = field(default_factory=dict)
    """Values of the user, or the trainer, that are stored beside it; they must survive JSON."""
    data: dict[str, str] = field(default_factory=dict)
    """Digests of some samples of the data set that is read, by the words of messages."""
    changed_after_loop: list[str] = field(default_factory=list)
    """Words for what the script had changed when the newest checkpoint was written after a loop over epochs."""
    resumed_context: dict[str, Any] = field(default_factory=dict)
    """The conditions of the bits where the checkpoint was written."""
    _has_warned: bool = field(default=False, init=False)
    settings: dict[str, str] = field(init=False)
    """With which the optimizers and schedulers were made, before any step or checkpoint changed them."""
    add_group: Sequence[Callable[[dict[str, Any]], None]] = ()
    """By optimizer: adds a group of the prepared model's parameters."""
    unheld: UnheldPlaces = field(init=False)
    idle: set[str] = field(default_factory=set)
    """The places that each call sets again and on which nothing depends, as rehearsals find."""
    loop: LoopState = field(init=False)

    def __post_init__(self) -> None:
        self.unheld = UnheldPlaces(is_main=self.world.is_main)
        self.sources = source_digests(own=True)  # as they are now: somebody may edit them while they run
        self.loop = LoopState(
            held_objects(self.parts, self.model),
            is_main=self.world.is_main,
            events=self.events,
            settings=self._settings_now,
            hooks=self._step_hooks,
        )
        groups = {
            f"optimizer {number}, group {position}": group
            for number, optimizer in enumerate(self.parts.optimizers)
            for position, group in enumerate(optimizer.param_groups)
        }
        states = {
            f"scheduler {number}": _scheduler_as_json(each.state_dict())
            for number, each in enumerate(self.parts.schedulers)
        }
        self.settings = {
            f"{key} of {whose}": repr(plain_number(value))
            for whose, made_with in {**groups, **states}.items()
            for key, value in made_with.items()
            if key not in _HOW and _is_plain(plain_number(value))
        }
        self._made_groups = [len(each.param_groups) for each in self.parts.optimizers]
        is_whole = self.strategy.replicated
        self._attributes = Attributes(self.parts, self.idle, is_whole=is_whole)
        self._first_unsaved = [unsaved_tensors(each, is_whole) for each in self.parts.optimizers]
        self._first_buffers = self._buffers()

    def _step_hooks(self) -> list[object]:
        """The hooks of the optimizers' steps, and the functions by which schedulers and averages compute."""
        kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        hooks = [[*getattr(each, kind, {}).values()] for each in self.parts.optimizers for kind in kinds]
        beside = (*self.parts.schedulers, *self.parts.modules)
        parts = [part for each in beside for part in (each, *getattr(each, "_schedulers", ()))]
        held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
        called = [each for value in (*hooks, *held) for each in (value if isinstance(value, list) else [value])]
        return [getattr(each, "func", each) for each in called if callable(each)]

    def _settings_now(self) -> set[float]:
        """The numbers in the optimizers' groups, and in pairs of them such as betas; those of the run's place."""
        groups = [group for optimizer in self.parts.optimizers for group in optimizer.param_groups]
        values = [value for group in groups for key, value in group.items() if key != "params"]
        pairs = [each for value in values if isinstance(value, tuple) for each in value]
        values += [*pairs, *vars(self.position).values(), *self.extra.values()]
        return {value for value in values if type(value) in (int, float)}

    def held_attributes(self, *, alone: bool = False) -> dict[tuple[str, str], str]:
        """The attributes that a checkpoint would hold now, as texts by holder and name. Collective unless ``alone``."""
        held = self._attributes.capture(self.strategy, {}, alone=alone).get("held", ())
        return {(holder, key): json.dumps(value) for holder, key, value in held if key != "training"}

    def reads_photos(self, decoded: str) -> None:
        """Adds to the context what photos are decoded to; empty: the data set decodes none.

        Raises:
            CheckpointMismatch: they were decoded to other pixels where the checkpoint was written.
        """
        if not decoded or decoded == self.context.photos:
            return
        if self.world.is_main:
            logger.info("Photos are decoded by %s.", jpeg_decoder())
        self.context = replace(self.context, photos=decoded)
        if (before := self.resumed_context.get("photos") or decoded) != decoded:
            raise CheckpointMismatch(
                f"The checkpoint was trained on photos that were decoded to other pixels ({before} there, {decoded} "
                f"here), so Pillow has another JPEG library. Install the Pillow of that run, or {GO_ON_AT_LEVEL_B}"
            )

    def capture(self, fingerprint: str, *, keep: bool, rows: Mapping[str, Tensor] | None = None) -> CheckpointState:
        """The state as it stands; shares memory with the run where it is not gathered. Collective.

        Args:
            fingerprint: of the model as it stands.
            keep: whether this process needs what is not shared out, such as step counters, and the whole of what is;
                without, it only helps others to gather theirs.
            rows: from ``Strategy.own_rows``, where all processes write: only this process's part is captured.
        """
        held = self.model_state(keep=keep) if rows is None else rows
        state = self._without_tensors(fingerprint)
        whole: dict[str, Tensor] = {}
        extra = checkpoint.encoded_extra_states(self.parts.named_modules, whole)
        state.progress.update({"extra_states": extra} if extra else {})
        state.progress.update(self._attributes.capture(self.strategy, whole))
        state.model.update({name: held[name] for name in held if name not in self.model.aliases})
        names = self._names()
        for number, optimizer in enumerate(self.parts.optimizers):
            if self.strategy.replicated:
                tensors, record = optimizer_state(optimizer, names)
            else:
                members = self.model.members[number]
                tensors, record = _shared_state(optimizer, names, members, self.strategy, rows, keep=keep)
            state.optimizer_records[str(number)] = record
            state.optimizer.update({f"{number}|{key}": tensor for key, tensor in tensors.items()})
        frozen = sorted({*frozen_parameters(self.model.module)} - self.parts.frozen)
        found = {"frozen": frozen, **self._unsaved()}
        state.progress.update({name: values for name, values in found.items() if values})
        self._capture_gradients(state, keep, rows)
        for number, module in enumerate(self.parts.modules):
            own, _ = checkpoint.model_state(module)
            whole.update({f"module{number}|{name}": tensor for name, tensor in own.items()})
        if keep:  # of tensors that several processes write, a reader joins the rows, and each has these whole
            is_gathered = not self.strategy.replicated and rows is None
            if is_gathered:  # which nobody copies before it is written in the background
                whole = {name: tensor.clone() for name, tensor in whole.items()}
            state.optimizer.update(whole)
        return state

    def _unsaved(self) -> dict[str, list[str]]:
        """Names the values that a checkpoint does not hold, by the keys of ``_UNSAVED``; warns once. Collective."""
        mine = [
            f"{name} of {type(optimizer).__name__}"
            for optimizer, first in zip(self.parts.optimizers, self._first_unsaved)
            for name, value in unsaved_tensors(optimizer, self.strategy.replicated).items()
            if first.get(name) != value
        ]
        every = [mine, [f"the buffer {name!r}" for name, *_ in self._buffers() ^ self._first_buffers]]
        everyone = [every] if self.strategy.replicated else self.strategy.gather_records(every)
        unsaved, others = (sorted({n for names in of_ranks for n in names}) for of_ranks in zip(*everyone))
        found = {
            "unsaved": unsaved,
            "tied_buffers": others,
            "unsaved_optimizers": [f"the state of {each}" for each in self.loop.unsaved],
            "unsaved_attributes": self._attributes.lost,
        }
        for kind, names in found.items():
            if names and not self._has_warned and self.world.is_main:
                text = "No checkpoint holds %s, %s, so a resumed run would be refused. %s."
                logger.warning(text, shorten(names, 3), *_UNSAVED[kind])
        self._has_warned |= any(found.values())
        return found

    def _buffers(self) -> Set[tuple[object, ...]]:
        """Each persistent buffer of this process: its name, the first name of the tensor, its shape and type."""
        saved = saved_buffers(self.parts.model).items()
        held = {name: each for name, each in saved if not isinstance(each, AbsentTensor)}
        first = further_names(held)
        return {(name, first.get(name), each.shape, each.dtype) for name, each in held.items()}

    def _capture_gradients(self, state: CheckpointState, keep: bool, rows: Mapping[str, Tensor] | None) -> None:
        """Adds the gradients that the loop has not cleared, and which of them are zeros. Collective; see ``capture``.

        They are added to by the next backward pass.
        """
        self.strategy.before_step()
        kept = {name: p.grad for name, p in self.strategy.trainable().items() if p.grad is not None}
        zeros = {name for name, gradient in kept.items() if not gradient.any()}
        stored = kept if keep else {}
        if not self.strategy.replicated:
            mine = [sorted(kept.keys() - zeros), sorted(kept)]
            everyone = gather_json(mine, self.strategy.all_ranks, self.strategy.device)
            others, known = ({name for names in of_ranks for name in names} for of_ranks in zip(*everyone))
            zeros = known - others  # on a rank without rows, or with some, there may be nothing but zeros
            if isinstance(self.strategy, IndependentStrategy):  # whose servers clear all gradients
                stored = {}
            elif rows is None:
                dtypes = {name: parameter.dtype for name, parameter in self.parts.model.named_parameters()}
                wanted = {name: dtypes[name] for name in sorted(others)}
                stored = _gathered(self.strategy, kept, wanted, keep=keep)
            else:
                stored = {name: gradient for name, gradient in kept.items() if name in rows}
        tensors = {f"{_GRADIENT}{name}": gradient for name, gradient in stored.items() if name not in zeros}
        state.optimizer.update(tensors)
        state.progress.update({"zero_gradients": sorted(zeros)} if zeros else {})

    def model_state(self, *, keep: bool) -> dict[str, Tensor]:
        """Copies of whole parameters and buffers, tied ones under each name; none without ``keep``. Collective."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.strategy.state():
            if keep:
                first = found.get(self.model.aliases.get(name, ""))
                found[name] = tensor.detach().to("cpu", copy=True) if first is None else first
        return found

    def restore(self, state: CheckpointState, force_context: bool, *, restarted: bool = False) -> str:
        """Loads a state; returns the fingerprint it was written with. Collective.

        Args:
            state: of a checkpoint.
            force_context: continues under conditions that differ from those it was written under.
            restarted: the launcher has restarted the run, which is to end as if it had never stopped: settings of
                optimizers and schedulers that differ now, such as those that depend on the number of ranks, are named.

        Raises:
            CheckpointMismatch: it is of another model, recipe or software.
        """
        written = state.progress
        self._require_resumable(state, force_context)
        self._add_groups(state)
        self._compare_settings(written.get("settings", {}), restarted)
        self.resumed_context = {} if force_context else written["context"]
        self.precision.restored_settings = {} if force_context else dict(written.get("torch_settings", {}))
        self._load_tensors(state, force_context)
        if self.precision.scaler is not None and written["scaler"]:
            # Where the scale stands comes from the checkpoint; how it changes from here on, from the options.
            own, kept = self.precision.scaler.state_dict(), ("scale", "_growth_tracker")
            self.precision.scaler.load_state_dict({**own, **{key: written["scaler"][key] for key in kept}})
        self.precision.skipped_steps = int(written.get("skipped_steps", 0))
        for scheduler, stored in zip(self.parts.schedulers, written["schedulers"]):
            scheduler.load_state_dict(_scheduler_from_json(scheduler.state_dict(), stored))
        self.position.load_state_dict(written["position"])
        for optimizer in self.parts.optimizers if self.position.step else ():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler that is stepped first warns
        self.loop.resume(written.get("loop", {}), inside=self.position.is_begun)
        self.unheld.resume(written.get("places", {}), inside=self.position.is_begun)
        self.extra, self.data = dict(written["extra"]), dict(written.get("data", {}))
        self.changed_after_loop = list(written.get("changed_after_loop", ()))
        return str(written["fingerprint"])

    def _require_resumable(self, state: CheckpointState, force_context: bool) -> None:
        """Compares the conditions and the model of a checkpoint with those here; see ``restore``."""
        written = state.progress
        if words := quantised(self.parts.model):
            raise CheckpointMismatch(f"{words}: no checkpoint can give it back. Begin anew, without resume.")
        _require_none(self.context.differences(written["context"]), force_context)
        for kind, (why, remedy) in _UNSAVED.items():
            if (names := written.get(kind, [])) and not force_context:
                raise CheckpointMismatch(
                    f"The checkpoint does not hold {shorten(names, 3)}, {why}, so the bits would not continue. "
                    f"{remedy}, and begin anew; or {GO_ON_AT_LEVEL_B}"
                )
        self._require_equal_counts(state)
        checkpoint.require_same_model(state.model, state.aliases, self.model.tensors, self.model.aliases)
        if "made_with" in written:  # else of an earlier version
            restored = {words_of(holder, key) for holder, key, _ in written.get("held", ())}
            made = made_otherwise(written["made_with"], self.made_with, restored, warns=self.world.is_main)
            _require_none(made, force_context)

    def _load_tensors(self, state: CheckpointState, force_context: bool) -> None:
        """Loads parameters, buffers, optimizer states, attributes and gradients. Collective; see ``restore``."""
        written = state.progress
        aliases = {alias: state.model[name] for alias, name in state.aliases.items()}
        self.strategy.load_state({**state.model, **aliases})
        extra = written.get("extra_states", {})
        checkpoint.load_extra_states(self.parts.named_modules, extra, state.optimizer)
        for number, optimizer in enumerate(self.parts.optimizers):
            self._load_optimizer(number, optimizer, state)
        lost = self._attributes.restore(written, state.optimizer, self.strategy.device)
        if lost and not force_context:
            raise CheckpointMismatch(
                f"The checkpoint's values of {shorten(lost, 3)} do not fit what this run has there. Make the model and "
                "the optimizers as in the checkpoint's run, with an object of the same class there from the start; or "
                f"{GO_ON_AT_LEVEL_B}"
            )
        for name in written.get("frozen", ()):
            self.model.parameters[name].requires_grad_(False)
        self._restore_gradients(_under(_GRADIENT, state.optimizer), set(written.get("zero_gradients", ())))
        for number, module in enumerate(self.parts.modules):
            own = _under(f"module{number}|", state.optimizer)
            checkpoint.load_model_state(module, own, checkpoint.model_state(module)[1])

    def _restore_gradients(self, kept: Mapping[str, Tensor], zeros: Collection[str]) -> None:
        """Sets gradients that a checkpoint holds, whole and in parts; ``zeros``: those that are zeros."""
        for name, parameter in self.strategy.trainable().items():
            if name in kept:
                part = self.strategy.local_shard(name, kept[name])
                parameter.grad = None if part is None else part.to(parameter.device, copy=True)
            elif name in zeros:
                parameter.grad = torch.zeros_like(parameter)
        for name, parameter in self.parts.model.named_parameters():
            if name not in kept and name not in zeros:
                continue
            if isinstance(parameter, AbsentParameter):
                parameter.has_gradient = True  # in another process; one with rows here shows theirs
            elif type(parameter) is nn.Parameter:
                whole = kept.get(name)
                parameter.grad = torch.zeros_like(parameter) if whole is None else whole.to(parameter.device, copy=True)

    def _without_tensors(self, fingerprint: str) -> CheckpointState:
        if not isinstance(self.extra, dict):
            raise ConfigError(
                f"run.extra is a {type(self.extra).__name__}. Leave it a dict: run.extra['name'] = value."
            )
        progress = {
            "position": self.position.as_dict(),
            "fingerprint": fingerprint,
            "context": self.context.as_dict(),
            "scaler": {} if self.precision.scaler is None else self.precision.scaler.state_dict(),
            "skipped_steps": self.precision.skipped_steps,
            "schedulers": [_scheduler_as_json(each.state_dict()) for each in self.parts.schedulers],
            "settings": self.settings,
            "torch_settings": torch_settings(),
            "made_groups": self._made_groups,
            "modules": len(self.parts.modules),
            "extra": self.extra,
            "data": self.data,
            "run": self.world.run_id,
            "loop": self._loop_of_all(),
            "sources": self.sources,
            "made_with": list(self.made_with),
            "places": self.unheld.capture(self),
            "changed_after_loop": self.changed_after_loop,
        }
        return CheckpointState({}, {}, progress, self.model.aliases)

    def _loop_of_all(self) -> dict[str, Any]:
        """The notes of ``LoopState`` here, and those of a process that computes another part. Collective."""
        mine = self.loop.capture(inside=self.position.is_begun)
        if mine and self.position.inside and not self.position.done:  # a resumed run draws these numbers again
            mine["generators"].update(mine["at_epoch"])
        return mine if self.strategy.replicated else united(mine, self.strategy.gather_records(mine))

    def _add_groups(self, state: CheckpointState) -> None:
        """Adds the groups that the loop of the checkpoint's run had added; their settings come with the others."""
        known = self.model.parameters
        for number, made in enumerate(state.progress.get("made_groups", ())):
            groups = [each["parameters"] for each in state.optimizer_records[str(number)]["groups"]]
            if made == self._made_groups[number]:  # else of another script: see _load_optimizer
                if [*map(set, groups[:made])] != [*map(set, self.model.members[number])]:
                    raise CheckpointMismatch(
                        f"The groups of optimizer {number} have other parameters or another order in the checkpoint. "
                        "Make them before run.prepare, and let the loop do nothing to them but add_param_group."
                    )
                for group in groups[made:]:
                    if all(name in known for name in group):
                        self.add_group[number]({"params": [known[name] for name in group]})

    def _load_optimizer(self, number: int, optimizer: Optimizer, state: CheckpointState) -> None:
        tensors, record = _under(f"{number}|", state.optimizer), state.optimizer_records[str(number)]
        if not isinstance(record, dict):
            raise CheckpointError("The checkpoint's optimizer record is not one. Use another checkpoint.")
        held, elementwise = {}, is_elementwise(optimizer)
        for key, tensor in tensors.items():
            parameter = state.model.get(name := key.partition("|")[0])
            fits = parameter is not None and tensor.shape == parameter.shape
            if elementwise and parameter is not None and not fits and tensor.numel() != 1:
                raise CheckpointError(
                    f"The checkpoint's optimizer state {key!r} has the shape {list(tensor.shape)} and its parameter "
                    f"{list(parameter.shape)}. Use another checkpoint."
                )
            part = self.strategy.local_shard(name, tensor) if fits and not self.strategy.replicated else tensor
            if part is not None:
                held[key] = part
        members = None if self.strategy.replicated else self.model.members[number]
        checkpoint.load_optimizer_state(optimizer, self._names(), held, record, members)

    def _names(self) -> dict[Tensor, str]:
        if self.strategy.replicated:
            return checkpoint.parameter_names(self.parts.model)
        return {parameter: name for name, parameter in self.strategy.trainable().items()}

    def _compare_settings(self, stored: Mapping[str, str], restarted: bool) -> None:
        """Refuses settings that the checkpoint's would replace, or names them where the run was ``restarted``."""
        changed = {k: here for k, here in self.settings.items() if k in stored and stored[k] != here}
        owners = {key: key.partition(" of ")[2] for key in changed}
        explained = {owner for key, owner in owners.items() if not key.startswith("_")}
        others = [
            f"{key}: {short_text(stored[key])} in the checkpoint's run, {short_text(here)} here"
            for key, here in changed.items()
            if not key.startswith("_") or owners[key] not in explained  # a private one follows from the others
        ]
        if not others:
            return
        said = (
            "The optimizer or a scheduler was made with other settings than in the checkpoint's run:\n  "
            + "\n  ".join(at_most(_MOST_LINES, others))
        )
        if restarted:
            if self.world.is_main:
                logger.warning("%s\nThe restarted run goes on with those of the checkpoint.", said)
            return
        raise CheckpointMismatch(
            f"{said}\nA checkpoint restores its own, so the new ones would not be used. Give those of the checkpoint's "
            "run. To train on with others, start a new run from the checkpoint's model.safetensors (in a job: "
            "weights.path), or in a script set them after run.prepare, in optimizer.param_groups."
        )

    def _require_equal_counts(self, state: CheckpointState) -> None:
        written = state.progress
        for kind, stored, here in (
            ("optimizers", len(state.optimizer_records), len(self.parts.optimizers)),
            ("schedulers", len(written["schedulers"]), len(self.parts.schedulers)),
            ("further modules", written["modules"], len(self.parts.modules)),
        ):
            if stored != here:
                raise CheckpointMismatch(
                    f"The checkpoint holds {stored} {kind}, and run.prepare was given {here}. Give the same ones; in a "
                    "job, training.ema_decay makes one of the further modules."
                )


def _require_none(differences: Sequence[str], force_context: bool) -> None:
    if differences and not force_context:
        found = ["The checkpoint was written under other conditions, so the bits would not continue:", *differences]
        raise CheckpointMismatch("\n  ".join(found) + f"\nRestore these, or {GO_ON_AT_LEVEL_B}")


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _is_plain(value: Any) -> bool:
    """True for numbers, texts and what is made of them, whose text is the same in every process."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | complex | str)


def _scheduler_as_json(state: Any) -> Any:
    """A scheduler's state, and those inside of it, without functions, which the user's code makes again.

    Of an object that is called for a learning rate, as LambdaLR may have, its plain attributes.
    """
    if isinstance(state, Counter):
        return {str(name): count for name, count in state.items()}
    if isinstance(state, Tensor) and state.numel() <= _MOST_NUMBERS:  # as learning rates may be
        return {_TENSOR: _as_json("of a scheduler", state)}
    if isinstance(state, list):
        return [_scheduler_as_json(each) for each in state]
    if not isinstance(state, dict):
        return state
    kept = {key: value for key, value in state.items() if not callable(value)}
    for key in _OF_OBJECTS & kept.keys():
        kept[key] = _plain_attributes(kept[key])
    return {key: _scheduler_as_json(value) for key, value in kept.items()}


def _plain_attributes(objects: Any) -> Any:
    if isinstance(objects, list):
        return [_plain_attributes(each) for each in objects]
    return objects and {name: value for name, value in objects.items() if _is_plain(value)}


def _scheduler_from_json(own: Any, stored: Any) -> Any:
    """The stored state in the types of the scheduler's own."""
    if isinstance(own, Counter):
        return Counter({int(name): count for name, count in stored.items()})
    if isinstance(stored, dict) and stored.keys() == {_TENSOR}:
        tensor = _from_json(stored[_TENSOR])
        return tensor.to(own.device) if isinstance(own, Tensor) else tensor
    if isinstance(stored, list):
        mine = own if isinstance(own, list) and len(own) == len(stored) else [None] * len(stored)
        return [_scheduler_from_json(*pair) for pair in zip(mine, stored)]
    if isinstance(stored, dict):
        known = own if isinstance(own, dict) else {}
        return {
            **known,
            **{key: _scheduler_from_json(known.get(key), value) for key, value in stored.items()},
        }
    return stored


@dataclass(frozen=True)
class PreparedRun:
    """All that exists of a run once ``prepare`` was called."""

    state: RunState
    """All that a checkpoint covers: the user's objects, the model as it is trained, and where the run stands."""
    forward_pass: ForwardPass
    gradients: GradientState
    wrapped_optimizers: dict[int, PreparedOptimizer]
    """The wrapper of each optimizer, by the id of the user's own, in their order."""
