"""Where a chain of modules is cut into stages: at named modules, or so that the stages weigh about the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lockstep.checks import nearest_name
from lockstep.errors import ConfigError
from lockstep.models.differences import shorten
from lockstep.strategies.pipeline.chain import Link


def split(
    links: Sequence[Link], stages: int, points: Sequence[str] = (), strategy: str = "pipeline"
) -> list[list[Link]]:
    """Cuts a chain into stages.

    Args:
        links: the chain of the whole model.
        stages: how many.
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
    edges = [0, *starts, len(links)]
    return [list(links[start:stop]) for start, stop in pairwise(edges)]


def balanced(weights: Sequence[float], stages: int, joints: frozenset[int] = frozenset()) -> list[int]:
    """Where each stage after the first starts so that the heaviest stage is as light as possible.

    Of those cuts the most even one is taken, and of equal ones the latest, so that an activation stays with the layer
    before it.

    Args:
        weights: of each link.
        stages: how many.
        joints: numbers of links that cannot begin a stage.

    Returns:
        The numbers of the first links, ascending; none if there are too few links.
    """
    best: dict[tuple[int, int], tuple[tuple[float, float], list[int]]] = {(0, 0): ((0.0, 0.0), [])}
    totals = [0.0]
    for weight in weights:
        totals.append(totals[-1] + weight)
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


def _named(links: Sequence[Link], stages: int, points: Sequence[str], option: str) -> list[int]:
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
                f"{option} names {point!r}, where the model cannot be cut.{nearest_name(point, names)} It can be cut "
                f"before: {shorten(names, 40)}."
            )
        starts.append(found[0])
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigError(
            f"{option}={list(points)} is not in the order of the model, or leaves a stage empty. Name modules in "
            f"their order, none twice and not the first: {shorten((link.name for link in links[1:]), 40)}."
        )
    return starts


def inseparable(links: Sequence[Link]) -> frozenset[int]:
    """The links that cannot begin a stage, since something is used both before and from there on."""
    return frozenset(number for first, last, _ in _ties(links) for number in range(first + 1, last + 1))


def _ties(links: Sequence[Link]) -> list[tuple[int, int, str]]:
    """What several links share: the first and the last of them, and its name in the last."""
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
    """Whether a module may draw random numbers, which are keyed by how often it was called in a micro-batch."""
    known = type(module).__module__.startswith("torch.nn.")
    return isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) or not known


def _refuse_ties(links: Sequence[Link], starts: list[int], stages: int, option: str) -> None:
    stage_of = [sum(start <= number for start in starts) for number in range(len(links))]
    for first, last, name in _ties(links):
        if stage_of[first] == stage_of[last]:
            continue
        working = balanced([_bytes(link.module) for link in links], stages, inseparable(links))
        offer = (
            f"Split at {[links[start].name for start in working]}"
            if working
            else "Untie it, use fewer stages"
        )
        raise ConfigError(
            f"{name!r} is also used in {links[first].name!r}, and {option} puts them in the stages "
            f"{stage_of[first]} and {stage_of[last]}. {offer}, or use strategy 'ddp'."
        )


def too_few(links: Sequence[Link], stages: int, strategy: str = "pipeline") -> str:
    """Says why a chain cannot be cut into so many parts, and what would work."""
    ties = _ties(links)
    if len(links) >= stages and ties:
        first, _, name = max(ties, key=lambda tie: tie[1] - tie[0])
        parts = len(links) - len(inseparable(links))
        return (
            f"strategy {strategy!r} needs {stages} stages, and the model has {parts} parts that can be separated: "
            f"{name!r} is also used in {links[first].name!r}, so all from one to the other stays together. Untie "
            f"it (tied=False){f', use {parts} stages' if parts > 1 else ''}, or use strategy 'ddp'."
        )
    found = (
        f"a chain of {len(links)} modules: {shorten((link.name for link in links), 20)}"
        if len(links) > 1
        else "not a chain of modules"
    )
    return (
        f"strategy {strategy!r} needs {stages} stages, and the model is {found}. A Sequential is opened, and a forward "
        "that only calls its children one after the other without drawing random numbers itself. Make the model such a "
        f"chain{', use fewer stages' if len(links) > 1 else ''}, or use strategy 'ddp'."
    )
