"""Random numbers drawn inside a model, keyed by where they are drawn instead of by what was drawn before.

A *unit* is a child of a Sequential, ModuleList or ModuleDict at any depth, every module on the way to one, and the
model itself. Entering a unit seeds torch's generator with ``(seed, step, micro-batch, unit, call)``; leaving it seeds
the generator anew for the unit around it:

    root         seeds (root, 0, 0)                          (root, 0, 1)
      block.0                        (block.0, 0, 0)
                 |--- root draws ---|--- block.0 draws ---|--- root draws ---|

so a unit draws the same numbers wherever the ones before it ran: on another rank, another device or another stage.
Units that cannot draw (a Linear, a ReLU) are left alone, so the usual model pays for its dropouts only, and a model in
which nothing can draw for nothing: several threads may then run replicas of it at once.

Activation checkpointing runs units again, in backward. It first puts the generator back, whose seed then tells which
call is meant: the units replay the keys they had when they were entered from that seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.core.seeding import derive_seed, unit_seed
from lockstep.errors import ConfigError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NEVER_DRAW = (
    nn.Linear,
    nn.Bilinear,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Embedding,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softmax,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
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


class KeyedRandomness:
    """Seeds torch's generator of one device at the border of every unit of a model.

    Args:
        model: the model; hooks are added to its units and taken away by ``remove``.
        seed: the run's seed.
        device: whose generator the model draws from; the CPU's is always seeded too.
        others: further devices that parts of the model draw on.
        units: the units, if not those that ``find_units`` finds (a compiled model has coarser ones).
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        units: dict[str, nn.Module] | None = None,
        others: Sequence[torch.device] = (),
    ) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        self.keys_global_generators = False
        """True if NumPy's and Python's global generators are seeded too."""
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's stub
            numbers = dict.fromkeys(each.index or 0 for each in (device, *others))
            self._generators += [torch.cuda.default_generators[number] for number in numbers]
        self._frames: list[_Frame] = []
        self._calls: dict[str, int] = {}
        self._entered: dict[tuple[str, int], _Frame] = {}
        self._begun: dict[tuple[int, int], tuple[dict[str, int], dict[tuple[str, int], _Frame]]] = {}
        self._where: tuple[int, int] | None = None
        self._handles: list[RemovableHandle] = []
        units = find_units(model) if units is None else units
        for name, module in units.items() if draws_in_forward(model) else ():
            if _may_draw(module):
                self._watch(name, module)

    def key_global_generators(self) -> None:
        """Seeds NumPy's and Python's global generators too from now on; every rank must call this at the same step."""
        self.keys_global_generators = True

    def remove(self) -> None:
        """Takes the hooks away from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_micro_batch(self, step: int, k: int) -> None:
        """Keys everything that is drawn from here on by global step ``step`` and micro-batch ``k``."""
        self._begun[step, k] = {}, {}
        self.resume_micro_batch(step, k)

    def resume_micro_batch(self, step: int, k: int) -> None:
        """Goes on with a micro-batch of this step after others: its backward pass, or further units of its forward."""
        self._where = (step, k)
        self._calls, self._entered = self._begun[step, k]
        self._begin("<forward>")

    def begin_loss(self) -> None:
        """Keys what the loss function draws."""
        self._begin("<loss>")

    def end_step(self, step: int) -> None:
        """Ends the keys, and gives the user's own code after a step the same stream on every rank."""
        self._where = None
        self._begun.clear()
        self._manual_seed(derive_seed(self._seed, "loop", step))

    def _begin(self, outermost: str) -> None:
        self._frames = [_Frame(outermost)]
        self._plant((outermost, 0, 0))

    def _watch(self, name: str, module: nn.Module) -> None:
        draws_itself = not _passes_through(module)

        def enter(*_: object) -> None:
            if self._where is None:
                return
            frame = self._replayed(name) if in_backward() else self._entering(name, draws_itself)
            self._frames.append(frame)
            if draws_itself:
                self._plant((name, frame.call, 0))

        def leave(*_: object) -> None:
            if self._where is None or not self._frames or self._frames[-1].unit != name:
                return
            after = self._frames.pop().after
            if after is not None:
                self._plant(after)

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _entering(self, name: str, draws_itself: bool) -> _Frame:
        around = self._frames[-1]
        around.segment += 1
        after = (around.unit, around.call, around.segment) if around.draws_itself else None
        frame = _Frame(name, self._calls.get(name, 0), draws_itself, after)
        self._calls[name] = frame.call + 1
        self._entered[name, self._generators[0].initial_seed()] = frame
        return frame

    def _replayed(self, name: str) -> _Frame:
        """The frame of the call that backward runs again. Without the seed, there must have been one call only."""
        frame = self._entered.get((name, self._generators[0].initial_seed()))
        if frame is None:
            frames = [entered for (unit, _), entered in self._entered.items() if unit == name]
            if len(frames) != 1:
                raise ConfigError(
                    f"{name or 'the model'} was called {len(frames)} times in one forward pass and is recomputed in "
                    "backward, and the calls cannot be told apart. Checkpoint it with preserve_rng_state=True."
                )
            frame = frames[0]
        return frame

    def _plant(self, key: _Key) -> None:
        if self._where is not None:
            (step, k), (unit, call, segment) = self._where, key
            self._manual_seed(unit_seed(self._seed, step, k, unit, call, segment))

    def _manual_seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
        if self.keys_global_generators:
            np.random.seed(seed >> 31)  # other bits than torch's: both are Mersenne Twisters
            random.seed(seed)


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units of a model by name (see the module's description); the model itself is ``""``."""
    units: dict[str, nn.Module] = {"": model}
    for name, module in model.named_modules():
        if any(isinstance(inner, CONTAINERS) for inner in module.modules()):
            units.setdefault(name, module)
        if isinstance(module, CONTAINERS):
            for child, inner in module.named_children():
                units.setdefault(f"{name}.{child}" if name else child, inner)
    first_names: dict[nn.Module, str] = {}
    return {name: module for name, module in units.items() if first_names.setdefault(module, name) == name}


def draws_in_forward(model: nn.Module) -> bool:
    """Returns whether a forward pass of the model may draw random numbers; code that is not known might."""
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
    if _passes_through(module):
        return any(_may_draw(child) for child in module.children())
    return not (isinstance(module, _NEVER_DRAW) and type(module).__module__.startswith("torch.nn."))


def _passes_through(module: nn.Module) -> bool:
    """Returns whether the module only calls its children one after the other and draws nothing itself."""
    return type(module) in CONTAINERS
