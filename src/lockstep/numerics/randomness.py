"""Random numbers drawn inside a model, keyed by where they are drawn instead of by what was drawn before.

A *unit* is a child of a Sequential, ModuleList or ModuleDict at any depth, every module on the way to one, and the
model itself. Entering a unit seeds torch's generator with ``(seed, step, micro-batch, unit, call)``; leaving it seeds
the generator again for the unit around it:

    root         seeds (root, 0, 0)                          (root, 0, 1)
      block.0                        (block.0, 0, 0)
                 |--- root draws ---|--- block.0 draws ---|--- root draws ---|

so a unit draws the same numbers wherever the ones before it ran: on another rank, another device or another stage.
Units that cannot draw (a Linear, a ReLU) stay unchanged, so the usual model pays for its dropouts only, and a model in
which nothing can draw for nothing: several threads may then run replicas of it at once.

Activation checkpointing runs units again, in backward. It first puts the generator back, whose seed then tells which
call is meant: the units replay the keys they had when they were entered from that seed.

Backward goes on with the numbers of the loss, in the order in which autograd runs. That is the order of one device
wherever one process has the whole graph. The hooks of a parameter's gradient, and of a module's backward pass, have
keys of their own, and so draw the same numbers in a pipeline too.

The user's loop has keys as well: at the start of an epoch, before and after the gradients of each step, and when the
last step is done. So what it draws is the same on every rank, and after a stop what it would have been without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.core.seeding import derive_seed, unit_seed
from lockstep.errors import ConfigError
from lockstep.numerics.blocks import CONTAINERS
from lockstep.numerics.compilation import DispatchMode, compiled_around
from lockstep.numerics.hooks import (
    Hooks,
    Surrounded,
    backward_hooks,
    first_hooked,
    forward_hooks,
    gradient_hooks,
    hooked_globally,
    is_hooked,
    put_users_first,
)
from lockstep.runtime.devices import gpu_generators

_NEVER_DRAW = (
    *(nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm),
    *(nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
    *(nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd),
)


_Key = tuple[str, int, int]
"""Unit, call and segment."""


@dataclass
class _Frame:
    """A unit that has been entered and not been left."""

    unit: str
    call: int = 0
    draws_itself: bool = True
    after: _Key | None = None
    """The key that is planted when the unit is left, for the draws of the one around it."""
    segment: int = 0
    untold: Sequence[torch.Tensor] = ()
    """The states of the generators before a call that backward repeats, where it may be any of several."""


class KeyedRandomness:
    """Seeds torch's generator of one device at the border of every unit of a model.

    Args:
        model: the model; hooks are added to its units and taken away by ``remove``.
        device: whose generator the model draws from; the CPU's is always seeded too.
        others: further devices that parts of the model draw on.
        units_only: True where parts of the model run in other processes, so that what is drawn outside of every unit
            has no key that all layouts share; it is then refused.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        others: Sequence[torch.device] = (),
        units_only: bool = False,
    ) -> None:
        self._model, self._seed, self._units_only = model, seed, units_only
        self._generators = [torch.default_generator]
        self.keys_global_generators = False
        """True if NumPy's and Python's global generators are seeded too."""
        self._generators += gpu_generators([device, *others])
        self._fresh = [torch.Generator(each.device) for each in self._generators]
        self._frames: list[_Frame] = []
        self._calls: dict[str, int] = {}
        self._entered: dict[tuple[str, int], _Frame] = {}
        self._begun: dict[tuple[int, int], tuple[dict[str, int], dict[tuple[str, int], _Frame]]] = {}
        self._where: tuple[int, int] | None = None
        self._handles: dict[str, tuple[RemovableHandle, RemovableHandle]] = {}
        self._surrounded: dict[str, Surrounded] = {}
        self._interrupted: list[list[torch.Tensor]] = []
        self._outermost_seed: int | None = None
        self._phase, self._replays = "forward", False
        self._drew_untold = ""
        """A unit that backward has repeated and that drew random numbers, of which call was not to be told."""
        self._units = find_units(model)
        self._look_for_hooks()

    def key_global_generators(self) -> None:
        """Seeds NumPy's and Python's global generators too from now on; every rank must call this at the same step."""
        self.keys_global_generators = True

    def remove(self) -> None:
        """Takes the hooks away from the model."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        for surrounded in self._surrounded.values():
            surrounded.remove()
        self._handles.clear()
        self._surrounded.clear()

    def _look_for_hooks(self) -> None:
        """Watches the units that may draw, and gives keys to the hooks of the user that are there by now."""
        self._draw_themselves = {name for name, module in self._units.items() if not _passes_through(module)}
        if draws_in_forward(self._model):
            for name, module in self._units.items():
                if name not in self._handles and _may_draw(module):
                    self._watch(name, module)
                elif name in self._handles:
                    put_users_first(module._forward_hooks)
        for name, module in self._model.named_modules():
            for place, hooks in enumerate(backward_hooks(module)):
                if is_hooked(hooks) and getattr(module, "_is_full_backward_hook", None) is not False:
                    self._surround(f"backward {place} of {name}", hooks)
        for name, parameter in self._model.named_parameters():
            for place, hooks in enumerate(gradient_hooks(parameter)):
                if is_hooked(hooks):
                    self._surround(f"gradient {place} of {name}", hooks)
        self._hooks_seen = RemovableHandle.next_id

    def _surround(self, name: str, hooks: Hooks) -> None:
        """Keys what some hooks draw in backward, and leaves the stream around them as it was."""

        def begin(*_: object) -> None:
            if self._where is None:
                return
            self._interrupted.append([generator.get_state() for generator in self._generators])
            call = self._calls[name] = self._calls.get(name, -1) + 1
            self._plant((name, call, 0))

        def end(*_: object) -> None:
            if self._where is not None and self._interrupted:
                for generator, state in zip(self._generators, self._interrupted.pop()):
                    generator.set_state(state)

        if name not in self._surrounded or self._surrounded[name].hooks is not hooks:
            self._surrounded[name] = Surrounded(hooks, OwnHook(begin), OwnHook(end))
        self._surrounded[name].arrange()

    def begin_micro_batch(self, step: int, k: int) -> None:
        """Keys everything that is drawn from here on by global step ``step`` and micro-batch ``k``."""
        self._begun[step, k] = {}, {}
        self.resume_micro_batch(step, k)

    def resume_micro_batch(self, step: int, k: int, phase: str = "forward") -> None:
        """Goes on with a micro-batch of this step after others: its backward pass, or further units of its forward."""
        self._require_units()
        if self._hooks_seen != RemovableHandle.next_id:
            self._look_for_hooks()
        self._where, self._phase = (step, k), phase
        self._calls, self._entered = self._begun[step, k]
        self._begin("<forward>")

    def pause(self) -> Callable[[], None]:
        """Leaves a micro-batch anywhere in its forward or backward pass; what is returned goes on exactly there.

        In between, others may be begun and gone on with.
        """
        kept = {name: vars(self)[name] for name in _OF_A_MICRO_BATCH}
        states = [generator.get_state() for generator in self._generators]
        others = (np.random.get_state(), random.getstate()) if self.keys_global_generators else None
        self._interrupted = []

        def resume() -> None:
            vars(self).update(kept)
            for generator, state in zip(self._generators, states):
                generator.set_state(state)
            if others is not None:
                np.random.set_state(others[0])
                random.setstate(others[1])

        return resume

    def end_inputs(self) -> None:
        """Goes on with the keys of the model, after a transform of the inputs may have drawn."""
        if self._units_only:
            self._plant((self._frames[0].unit, 0, 0))

    def begin_loss(self) -> None:
        """Keys what the loss function draws."""
        self._require_units()
        self._phase = "loss"
        self._begin("<loss>")

    def leave(self) -> None:
        """Ends the keys in the middle of a step, whose micro-batches may begin again."""
        self._require_units()
        self._where = None

    def interrupt(self) -> None:
        """Notes that an error ends the step, so that nothing is said of what was drawn until then."""
        self._where, self._drew_untold = None, ""

    def end_step(self, step: int) -> None:
        """Ends the keys of a step, and keys the user's own code after it."""
        self._require_units()
        self._where = None
        self._begun.clear()
        self.key_loop("loop", step)

    def key_loop(self, place: str, number: int) -> None:
        """Keys what the user's own loop draws from here on, also from NumPy and ``random``.

        Args:
            place: in the loop, such as "epoch".
            number: of the epoch or the step.
        """
        seed = derive_seed(self._seed, place, number)
        self._manual_seed(seed)
        if not self.keys_global_generators:
            _seed_global_generators(seed)

    def _begin(self, outermost: str) -> None:
        self._frames = [_Frame(outermost)]
        self._interrupted.clear()
        self._replays = False
        self._plant((outermost, 0, 0))

    def _require_units(self) -> None:
        """Raises ``ConfigError`` where something was drawn of which nothing tells the key."""
        if unit := self._drew_untold:
            self._drew_untold = ""
            raise ConfigError(
                f"{unit} draws random numbers, was called several times in one forward pass and is recomputed in "
                "backward, and the calls cannot be told apart. Checkpoint it with preserve_rng_state=True."
            )
        if not self._units_only or self._where is None or self._phase == "loss" or self._replays:
            return
        if len(self._frames) != 1 or self._outermost_seed is None:
            return
        for generator, fresh in zip(self._generators, self._fresh):
            if not torch.equal(generator.get_state(), fresh.manual_seed(self._outermost_seed).get_state()):
                self._where = None
                raise ConfigError(_UNKEYED[self._phase])

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            if self._where is None:
                return
            draws_itself = name in self._draw_themselves
            frame = self._replayed(name) if in_backward() else self._entering(name, draws_itself)
            self._frames.append(frame)
            if draws_itself and not frame.untold:
                self._plant((name, frame.call, 0))

        def leave(*_: object) -> None:
            if self._where is None or not self._frames or self._frames[-1].unit != name:
                return
            left = self._frames.pop()
            if left.after is not None:
                self._plant(left.after)
            if any(not torch.equal(g.get_state(), state) for g, state in zip(self._generators, left.untold)):
                # An error here would be lost where checkpointing stops early.
                self._drew_untold = name or "the model"

        self._handles[name] = (
            module.register_forward_pre_hook(OwnHook(enter), prepend=True),
            module.register_forward_hook(OwnHook(leave), always_call=True),
        )

    def _entering(self, name: str, draws_itself: bool) -> _Frame:
        around = self._frames[-1]
        if len(self._frames) == 1:
            self._require_units()
        around.segment += 1
        after = (around.unit, around.call, around.segment) if around.draws_itself else None
        frame = _Frame(name, self._calls.get(name, 0), draws_itself, after)
        self._calls[name] = frame.call + 1
        self._entered[name, self._generators[0].initial_seed()] = frame
        return frame

    def _replayed(self, name: str) -> _Frame:
        """The frame of the call that backward runs again. Without the seed, one of several calls must draw nothing."""
        frame = self._entered.get((name, self._generators[0].initial_seed()))
        if frame is None:
            self._replays = True
            frames = [entered for (unit, _), entered in self._entered.items() if unit == name]
            if len(frames) != 1:
                return _Frame(name, untold=[generator.get_state() for generator in self._generators])
            frame = frames[0]
        return frame

    def _plant(self, key: _Key) -> None:
        if self._where is not None:
            (step, k), (unit, call, segment) = self._where, key
            seed = unit_seed(self._seed, step, k, unit, call, segment)
            if self._frames and unit == self._frames[0].unit:
                self._outermost_seed = seed
            self._manual_seed(seed)

    def _manual_seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
        if self.keys_global_generators:
            _seed_global_generators(seed)


class Expectations(DispatchMode):  # type: ignore[no-untyped-call]  # torch's stub
    """A context in which torch draws the expectation of each random number: nothing is dropped, and no noise is added.

    So rows do not differ by what was drawn for them. It leaves a few distributions, such as gamma, as they are, and all
    after many draws: code may draw until a number is another one.
    """

    _left = 20_000

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes an operator."""
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or self._left == 0:
            return func(*args, **named)
        self._left -= 1
        given = [(each.name, each.default_value) for each in func._schema.arguments]
        values = {name: args[n] if n < len(args) else named.get(name, usual) for n, (name, usual) in enumerate(given)}
        names = [name for name, _ in given]
        for rate in {"dropout_p", "dropout"}.intersection(names):  # of attention, and of recurrent layers on a GPU
            if names.index(rate) < len(args):
                args = (*args[: names.index(rate)], 0.0, *args[names.index(rate) + 1 :])
            else:
                named[rate] = 0.0
        kind = func._schema.name.removeprefix("aten::")
        if kind == "native_dropout":
            return values["input"].clone(), torch.ones_like(values["input"], dtype=torch.bool)
        drawn = func(*args, **named)
        expectation = _EXPECTATIONS.get(kind)
        return drawn if expectation is None else drawn.copy_(expectation(drawn, values))


_EXPECTATIONS: Mapping[str, Callable[[torch.Tensor, Mapping[str, Any]], Any]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda drawn, _: torch.full_like(drawn, 0.5)),
    **dict.fromkeys(("randn", "randn_like"), lambda drawn, _: torch.zeros_like(drawn)),
    **dict.fromkeys(("randint", "randint_like"), lambda drawn, given: torch.full_like(drawn, given.get("low", 0))),
    "randperm": lambda drawn, _: torch.arange(len(drawn)).to(drawn),
    "uniform_": lambda drawn, given: torch.full_like(drawn, (given["from"] + given["to"]) / 2),
    "normal_": lambda drawn, given: torch.full_like(drawn, given["mean"]),
    "normal": lambda drawn, given: torch.zeros_like(drawn) + given["mean"],
    "exponential_": lambda drawn, given: torch.full_like(drawn, 1 / given["lambd"]),
    "bernoulli": lambda _, given: (given["self"] >= given.get("p", given["self"]).new_tensor(0.5)).to(given["self"]),
    "bernoulli_": lambda drawn, given: torch.zeros_like(drawn) + (torch.as_tensor(given["p"]) >= 0.5).to(drawn),
}
"""The expectation, or the likelier value, for operators of torch that draw: of what was drawn and the arguments."""


def _seed_global_generators(seed: int) -> None:
    np.random.seed(seed >> 31)  # other bits than torch's: both are Mersenne Twisters
    random.seed(seed)


_OF_A_MICRO_BATCH = (
    *("_frames", "_calls", "_entered", "_where", "_interrupted"),
    *("_outermost_seed", "_phase", "_replays"),
)
"""The attributes in which ``KeyedRandomness`` notes the micro-batch that is under way."""


class OwnHook:
    """A hook of Lockstep, which is forgotten where a model is pickled, as ``torch.save(model, path)`` does.

    Args:
        call: what it does, of the arguments of the hook.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: object) -> Any:
        """Does it."""
        return self._call(*given)

    def __deepcopy__(self, memo: dict[int, object]) -> OwnHook:
        """The hook itself: a copy of a model draws as the model does."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        """Pickles a hook that does nothing."""
        return OwnHook, (_nothing,)


def _nothing(*_: object) -> None:
    """Does what a hook of a model does that has no run any more."""


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units of a model by name (see the module's description); the model itself is ``""``.

    In a compiled module randomness runs on as one stream, so that its graph contains no hooks.
    """
    compiled = compiled_around(model)
    units: dict[str, nn.Module] = {"": model}
    for name, module in model.named_modules():
        if any(isinstance(inner, CONTAINERS) for inner in module.modules()):
            units.setdefault(name, module)
        if isinstance(module, CONTAINERS):
            for child, inner in module.named_children():
                units.setdefault(f"{name}.{child}" if name else child, inner)
    first_names: dict[nn.Module, str] = {}
    return {
        name: module
        for name, module in units.items()
        if first_names.setdefault(module, name) == name and compiled.get(module, module) is module
    }


_UNKEYED = {
    "forward": (
        "The forward pass draws random numbers outside of every child of a Sequential or ModuleList, where no "
        "process of a pipeline knows how many were drawn before. Put the layers that draw, such as Dropout, into an "
        "nn.Sequential, or use strategy 'ddp' or 'fsdp'."
    ),
    "backward": (
        "The backward pass draws random numbers, as a torch.autograd.Function of your own or a hook on an activation "
        "does, and no process of a pipeline knows how many were drawn before. Draw them in forward, or in a hook on a "
        "parameter or module (register_hook, register_full_backward_hook), or use strategy 'ddp' or 'fsdp'."
    ),
}


def draws_in_forward(model: nn.Module) -> bool:
    """Returns whether a forward pass of the model may draw random numbers; code that is not known might."""
    if hooked_globally() or first_hooked(model) is not None:
        return True
    own = [m for m in model.modules() if not _passes_through(m) and not _draws_through_children(m)]
    return any(_may_draw(module) for module in own)


def _draws_through_children(module: nn.Module) -> bool:
    """Returns whether a module is one of the built-in models' own, which draw nothing themselves."""
    return type(module).__module__.startswith("lockstep.models.")


def in_backward() -> bool:
    """Returns whether autograd is running a backward pass in this thread, as activation checkpointing asks too."""
    return bool(torch._C._current_graph_task_id() != -1)


def _may_draw(module: nn.Module) -> bool:
    """Returns whether a forward of the module could draw random numbers; unknown code might."""
    if hooked_globally() or any(map(is_hooked, forward_hooks(module))):
        return True
    if _passes_through(module):
        return any(_may_draw(child) for child in module.children())
    return not (isinstance(module, _NEVER_DRAW) and type(module).__module__.startswith("torch.nn."))


def _passes_through(module: nn.Module) -> bool:
    """Returns whether the module only calls its children one after the other and draws nothing itself."""
    return type(module) in CONTAINERS and not any(map(is_hooked, forward_hooks(module)))
