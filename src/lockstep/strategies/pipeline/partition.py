"""Cuts a model into stages, at named modules, by bytes or by measured times, or says why it cannot be cut."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from itertools import chain as flattened
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.config.checks import nearest_name
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import is_compiled
from lockstep.numerics.hidden_state import evaluating
from lockstep.runtime.devices import is_gpu, wait_for
from lockstep.strategies.pipeline.chain import ChainLink, chain, draws_without_key, is_watched
from lockstep.text import plural, shorten

logger = logging.getLogger(__name__)


def split(
    links: Sequence[ChainLink], stages: int, points: Sequence[str] = (), strategy: str = "pipeline"
) -> list[list[ChainLink]]:
    """Partition a chain into stages.

    Args:
        links: the chain of the whole model.
        points: the module with which each stage after the first begins; without, the parameters' bytes are balanced.
        strategy: whose option ``split`` the points are.

    Raises:
        ConfigError: the chain has too few links, a point is not on it, or a tensor would belong to two stages.
    """
    if points:
        starts = _named(links, stages, points, f"{strategy}.split")
        _refuse_ties(links, starts, stages, f"{strategy}.split")
    else:
        starts = balanced([_bytes(link.module) for link in links], stages, inseparable(links))
        if not starts:
            raise ConfigError(too_few(links, stages, strategy))
    return [list(links[start:stop]) for start, stop in pairwise([0, *starts, len(links)])]


def balanced(weights: Sequence[float], stages: int, joints: frozenset[int] = frozenset()) -> list[int]:
    """Returns the starts of the stages after the first that make the heaviest stage as light as possible.

    Of those cuts the most even one is taken, and of equal ones the latest, so that an activation stays with the layer
    before it.

    Args:
        joints: numbers of links that cannot begin a stage.

    Returns:
        The numbers of the first links, ascending; none if there are too few links.
    """
    best: dict[tuple[int, int], tuple[tuple[float, float], list[int]]] = {(0, 0): ((0.0, 0.0), [])}
    totals = [*accumulate(weights, initial=0.0)]
    for stage in range(1, stages + 1):
        for stop in range(stage, len(weights) + 1):
            for start in range(stop - 1, stage - 2, -1):
                if start in joints or (stage - 1, start) not in best:
                    continue
                (heaviest, squares), cuts = best[stage - 1, start]
                weight = totals[stop] - totals[start]
                cost = max(heaviest, weight), squares + weight * weight
                if (stage, stop) not in best or cost < best[stage, stop][0]:
                    best[stage, stop] = cost, [*cuts, start]
    return best[stages, len(weights)][1][1:] if (stages, len(weights)) in best else []


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _named(links: Sequence[ChainLink], stages: int, points: Sequence[str], option: str) -> list[int]:
    if len(points) != stages - 1:
        raise ConfigError(
            f"{option} names {len(points)} modules, and {stages} stages need {stages - 1}: the first module of "
            "each stage after the first."
        )
    starts = []
    for point in points:
        found = [number for number, link in enumerate(links) if f"{link.name}.".startswith(f"{point}.")]
        if not found:
            names = [link.name for link in links[1:]]
            raise ConfigError(
                f"{option} names {point!r}, and the model cannot be cut there.{nearest_name(point, names)} It can be "
                f"cut before: {shorten(names, 40)}."
            )
        starts.append(found[0])
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigError(
            f"{option}={list(points)} is not in the order of the model, or leaves a stage empty. Name modules in "
            f"their order, none twice and not the first: {shorten((link.name for link in links[1:]), 40)}."
        )
    return starts


def inseparable(links: Sequence[ChainLink]) -> frozenset[int]:
    """The links that cannot begin a stage, since something is used both before and from there on."""
    return frozenset(number for first, last, _ in _ties(links) for number in range(first + 1, last + 1))


def _ties(links: Sequence[ChainLink]) -> list[tuple[int, int, str]]:
    """Returns what several links share: the first and the last of them, and its name in the last."""
    first: dict[object, int] = {}
    ties = []
    for number, link in enumerate(links):
        prefix = f"{link.name}." if link.name else ""
        tensors = (*link.module.named_parameters(), *link.module.named_buffers())
        modules = [(name, each) for name, each in link.module.named_modules() if draws(each)]
        for name, each in (*tensors, *modules):
            if first.setdefault(each, number) != number:
                ties.append((first[each], number, f"{prefix}{name}".rstrip(".")))
    return ties


def draws(module: nn.Module) -> bool:
    """Returns whether a module may draw random numbers, which are keyed by how often it was called in a micro-batch."""
    known = type(module).__module__.startswith("torch.nn.")
    return isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) or not known


def _refuse_ties(links: Sequence[ChainLink], starts: list[int], stages: int, option: str) -> None:
    stage_of = [sum(start <= number for start in starts) for number in range(len(links))]
    for first, last, name in _ties(links):
        if stage_of[first] == stage_of[last]:
            continue
        working = balanced([_bytes(link.module) for link in links], stages, inseparable(links))
        offer = "Untie it, use fewer stages"
        if working:
            offer = f"Split at {[links[start].name for start in working]}"
        raise ConfigError(
            f"{name!r} is also used in {links[first].name!r}, and {option} puts them in the stages "
            f"{stage_of[first]} and {stage_of[last]}. {offer}, or use strategy 'ddp'."
        )


def too_few(links: Sequence[ChainLink], stages: int, strategy: str = "pipeline") -> str:
    """Returns why a chain cannot be cut into this many parts, and what would work."""
    if is_compiled(links[0].module) and not links[0].name:
        return (
            f"strategy {strategy!r} needs {stages} stages, and the model is compiled as one. compile=True compiles "
            "each block for itself, where there are some: children of a Sequential or ModuleList that have layers of "
            "their own. Put the layers of each block into a module, leave compile out, or use strategy 'ddp'."
        )
    ties = _ties(links)
    if len(links) >= stages and ties:
        first, _, name = max(ties, key=lambda tie: tie[1] - tie[0])
        parts = len(links) - len(inseparable(links))
        return (
            f"strategy {strategy!r} needs {stages} stages, and the model has {plural(parts, 'separable part')}: "
            f"{name!r} is also used in {links[first].name!r}, so everything between the two stays together. Untie it "
            "(a parameter of its own for one of the two; in lockstep.models tied=False)"
            f"{f', use {parts} stages' if parts > 1 else ''}, or use strategy 'ddp'."
        )
    found = "not a chain of modules"
    if len(links) > 1:
        found = f"a chain of {len(links)} modules: {shorten((link.name for link in links), 20)}"
    hooked = next((link.name or "the model" for link in links if is_watched(link.module)), None)
    if hooked is not None and any(True for link in links for _ in link.module.children()):
        found += f" ({hooked!r} has a hook, which keeps it whole)"
    drawing = next(((link.name, child) for link in links if (child := draws_without_key(link.module))), None)
    if drawing is not None:
        found += (
            f" ({drawing[0] or 'the model'!r} stays whole, since {drawing[1]!r} in it draws random numbers and is no "
            "child of an nn.Sequential)"
        )
    return (
        f"strategy {strategy!r} needs {stages} stages, and the model is {found}. It can be cut between the children of "
        "an nn.Sequential, or of a module whose forward only calls them one after the other, without drawing random "
        f"numbers itself. Make the model such a chain{', use fewer stages' if len(links) > 1 else ''}, or use strategy "
        f"'ddp'.{_chain_of_blocks(links)}"
    )


def _chain_of_blocks(links: Sequence[ChainLink]) -> str:
    """Lines that make a chain of a model whose blocks are in a ModuleList; empty where there is none."""
    lists = [
        (link, name, module)
        for link in links
        for name, module in link.module.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    if not lists:
        return ""
    link, name, blocks = max(lists, key=lambda each: _bytes(each[2]))
    block = type(blocks[0]).__name__
    before, after = _around(link.module, name)
    takes = f"what the first {block} takes"
    called = f"self.block(x)  # with what else a {block} takes"
    if type(blocks[0]).forward is nn.Module.forward:  # a ModuleList, as of attention and perceptron
        called = f"...  # calls what is in self.block, a {block}, as the model's forward does"
    returned = "x"
    for each in after:
        returned = f"self.{_attribute(each)}({returned})"
    holder = _reached(link.name)
    calls = [f"Begin({holder})"] * bool(before) + [f"*map(Layer, {_reached(name, holder)})"]
    lines = [
        *_class_of_parts(
            "Begin",
            before,
            f"self.{_attribute(before[0])}(x)  # or {takes}" if len(before) == 1 else f"...  # {takes}",
        ),
        "    class Layer(nn.Module):",
        "        def __init__(self, block):",
        "            super().__init__()",
        "            self.block = block",
        "        def forward(self, x):",
        f"            x = {called}",
        "            return x[0] if isinstance(x, tuple) else x",
        *_class_of_parts("End", after, returned),
        f"    {holder} = nn.Sequential({', '.join([*calls, *[f'End({holder})'] * bool(after)])})",
    ]
    where = f"{link.name}.{name}".strip(".")
    return (
        f" Its {len(blocks)} blocks ({block}) are in {where!r}. These lines make a chain, if the forward does no more "
        "than this before, between and after them; each module takes what the one before it returns. A weight that "
        "Begin and End share has to be untied.\n" + "\n".join(lines)
    )


def _around(model: nn.Module, name: str) -> tuple[list[str], list[str]]:
    """The names of the modules that a model has before a list of blocks, and after it, as they were registered."""
    before: list[str] = []
    after: list[str] = []
    path = name.split(".") if name else []
    while path:
        *outer, key = path
        holder = ".".join(outer)
        inner = dict(model.get_submodule(holder).named_children())
        names = list(inner)
        place = names.index(key)
        before[:0] = [f"{holder}.{each}".lstrip(".") for each in names[:place]]
        for each in names[place + 1 :]:
            module = inner[each]
            # A table of positions, which the blocks take, is often made last.
            table = any(True for _ in module.buffers()) and not any(True for _ in module.parameters())
            (before if table else after).append(f"{holder}.{each}".lstrip("."))
        path = outer
    return before, after


def _reached(name: str, model: str = "model") -> str:
    """The expression for a module of a model by its name."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".") if part)
    return model + "".join(parts)


def _attribute(name: str) -> str:
    """The name of a module where it is taken over."""
    last = name.rpartition(".")[2]
    return f"part{last}" if last.isdigit() else last


def _class_of_parts(kind: str, names: list[str], returned: str) -> list[str]:
    """Lines of a class that takes modules of the model over; none where there are none."""
    if not names:
        return []
    targets = ", ".join(f"self.{_attribute(each)}" for each in names)
    return [
        f"    class {kind}(nn.Module):",
        "        def __init__(self, model):",
        "            super().__init__()",
        f"            {targets} = {', '.join(map(_reached, names))}",
        "        def forward(self, x):",
        f"            return {returned}",
    ]


def measured_split(
    model: nn.Module, stages: int, *inputs: Any, repeats: int = 5, strategy: str = "pipeline"
) -> tuple[str, ...]:
    """Split points that balance the time of a forward pass, measured here; to be given as ``pipeline.split``.

    They are to be written down, or given to all processes, rather than measured in every one, since all ranks must
    agree. The layers go to the device of ``inputs`` one after the other and come back, so the model need not fit there.
    Values, buffers, modes and the random numbers of the process are left as they were.

    Args:
        model: anywhere.
        stages: how many.
        inputs: of a typical micro-batch, on the device where it is measured.
        repeats: the fastest of so many runs counts.
        strategy: whose option ``split`` the points are; for messages.

    Raises:
        ConfigError: the model has too few parts.
    """
    links = chain(model)
    starts = balanced([1.0] * len(links), stages, inseparable(links))
    if not starts and stages > 1:
        raise ConfigError(too_few(links, stages, strategy))
    devices = {value.device for value in inputs if isinstance(value, Tensor)}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    with _left_as_it_was(model, device):
        weights = [min(times) for times in zip(*(_times(links, inputs, device) for _ in range(repeats)))]
    starts = balanced(weights, stages, inseparable(links))
    parts = [1000 * sum(weights[a:b]) for a, b in pairwise([0, *starts, len(links)])]
    points = tuple(links[start].name for start in starts)
    shown = ", ".join(f"{part:.2g}" for part in parts)
    logger.info("Cut by measured time: %s.split = %s; forward passes of %s ms.", strategy, list(points), shown)
    return points


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode inside, without gradients; afterwards modes, buffers and random numbers are what they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with evaluating(model), torch.random.fork_rng([device] if is_gpu(device) else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _times(links: Sequence[ChainLink], inputs: tuple[Any, ...], device: torch.device) -> list[float]:
    """Seconds of each link's forward pass."""
    found, values = [], tree_map_only(Tensor, torch.clone, inputs)  # a layer may change its input in place
    for link in links:
        tensors = flattened(link.module.parameters(), link.module.buffers())
        home = next((tensor.device for tensor in tensors), device)
        link.module.to(device)
        wait_for(device)
        start = time.perf_counter()
        values = (link.module(*values),)
        wait_for(device)
        found.append(time.perf_counter() - start)
        link.module.to(home)
    return found


@dataclass
class Partition:
    """The parts of a model that its devices or stages hold."""

    option: str
    """The table of options that ``balance`` and ``split`` belong to: layers or pipeline."""
    parts: int
    points: Sequence[str] = ()
    """The module with which each part after the first begins; none: the parts are balanced."""
    by_time: bool = False
    """True if the time of a forward pass decides."""

    @property
    def missing(self) -> bool:
        """True if somebody has to call ``measure`` before the model can be cut."""
        return self.by_time and self.parts > 1 and not self.points

    def measure(self, model: nn.Module, inputs: Sequence[Any]) -> list[str]:
        """Split points that balance the time that a forward pass takes here, for ``points``, on all ranks alike.

        Raises:
            ConfigError: the model has too few parts.
        """
        return list(measured_split(model, self.parts, *inputs, strategy=self.option))

    def of(self, model: nn.Module) -> list[list[ChainLink]]:
        """The model's parts in order.

        Raises:
            ConfigError: the model cannot be cut so, or nobody has measured.
        """
        if self.missing:
            raise ConfigError(
                f"{self.option}.balance='time' is measured by lockstep train. In a loop of your own measure once, with "
                "lockstep.strategies.pipeline.measured_split(model, parts, input), and give what it returns as "
                f"{self.option}.split."
            )
        return split(chain(model), self.parts, self.points, self.option)
