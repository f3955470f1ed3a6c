"""The start of a run: all ranks hold the same recipe, software and model, or it does not begin."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.collectives import broadcast_tensors, gather_json
from lockstep.errors import ConfigError, ReplicaError
from lockstep.fingerprint import Context, combine, differing, digest_tensors
from lockstep.run.optimizer import hyperparameters
from lockstep.run.parts import Parts

logger = logging.getLogger(__name__)
_MOST_NAMES = 5


def agree(
    parts: Parts,
    context: Context,
    group_of_ranks: dist.ProcessGroup,
    device: torch.device,
    values_from_main: bool,
) -> None:
    """Compares settings, structure and values over the ranks, and gives all of them rank 0's values. Collective."""
    settings = {**context.as_dict(), **hyperparameters(parts.optimizers)}
    require_equal_settings(settings, group_of_ranks, device)
    for module in (parts.model, *parts.modules):
        require_equal_structure(module, group_of_ranks, device)
        share_start(module, group_of_ranks, device, expected=values_from_main)


def require_equal_settings(
    settings: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises ``ConfigError`` on every rank where ranks were told different things. Collective."""
    everyone = gather_json(dict(settings), group, device)
    lines = []
    for key in sorted({key for each in everyone for key in each}):
        values = [each.get(key) for each in everyone]
        if any(value != values[0] for value in values):
            lines.append(f"  {key}: {_by_rank(values)}")
    if lines:
        raise ConfigError("The ranks were started with different settings:\n" + "\n".join(lines))


def require_equal_structure(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ``ConfigError`` on every rank where the models differ in a name, shape or type. Collective."""
    mine = {
        name: f"{tuple(tensor.shape)} {tensor.dtype}{'' if tensor.requires_grad else ' fixed'}"
        for name, tensor in _named_tensors(model).items()
    }
    everyone = gather_json(mine, group, device)
    for name in dict.fromkeys(name for each in everyone for name in each):
        shapes = [each.get(name, "absent") for each in everyone]
        if any(shape != shapes[0] for shape in shapes):
            raise ConfigError(
                f"The ranks hold different models. The first difference is {name!r}: {_by_rank(shapes)}. "
                "Build the model alike on every rank."
            )


def share_start(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, *, expected: bool = False
) -> list[str]:
    """Gives every rank the parameters and buffers of rank 0; returns the names of those that differed. Collective.

    A difference is warned about unless it is ``expected``, as where rank 0 alone has read a file of weights.
    """
    tensors = _named_tensors(model)
    mine = digest_tensors(tensors)
    everyone = gather_json(mine, group, device)
    different = sorted({name for each in everyone for name in differing(each, everyone[0])})
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
            _shorten(different),
        )
    return different


def require_equal_replicas(
    digests: Mapping[str, str], step: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises ``ReplicaError`` naming tensors and ranks where digests differ. Collective."""
    totals = gather_json(combine(digests), group, device)
    if all(total == totals[0] for total in totals):
        return
    everyone = gather_json(dict(digests), group, device)
    found = {name for each in everyone for name in differing(each, everyone[0])}
    names = sorted(found, key=lambda name: (not name.startswith("<"), name))  # a setting explains the tensors
    values = [each.get(names[0], "absent")[:8] for each in everyone]
    raise ReplicaError(
        f"After step {step} the ranks hold different bits in {len(names)} of {len(digests)} tensors "
        f"({_shorten(names)}). {names[0]!r} is {_by_rank(values)}. Something changed it on some ranks only: code under "
        "a rank condition, an update outside of optimizer.step(), or a fault of the memory."
    )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _by_rank(values: list[Any]) -> str:
    groups: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(str(value), []).append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        for value, ranks in groups.items()
    )


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown}, ... {len(names) - _MOST_NAMES} more"
