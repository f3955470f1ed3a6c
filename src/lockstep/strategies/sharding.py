"""Helpers for parameters that ranks hold in parts: rows, elementwise optimizers, and loading.

Tensors are sharded by rows (dim 0), as in FSDP2: ceil(rows / ranks) consecutive rows each, fewer on the last ranks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lockstep.checkpoint.state import tensor_state
from lockstep.config.strategy_options import ELEMENTWISE
from lockstep.core.fingerprint import sum_of_bits
from lockstep.core.summation_tree import fold_rows, row_squares
from lockstep.distributed.collectives import all_gather_rows
from lockstep.errors import ConfigError


def users_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, with its name there."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((module, key))
    return users


def rows_of(rows: int, ranks: int, rank: int) -> slice:
    """The rows of a rank."""
    size = -(-rows // ranks)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


def gather_rows(part: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor from every rank's rows. Collective."""
    ranks = dist.get_world_size(group)
    most = -(-shape[0] // ranks)
    padded = part.new_zeros(most, *shape[1:])
    padded[: part.shape[0]] = part
    return all_gather_rows(padded.view(-1), group).view(ranks * most, *shape[1:])[: shape[0]]


def squares_of_rows(
    gradients: Sequence[Tensor | None], rows: Sequence[int], device: torch.device, group: dist.ProcessGroup
) -> list[Tensor]:
    """The sum of squares of each whole gradient, float64, 0-dim: as ``sums.sum_of_squares`` gives it. Collective.

    Args:
        gradients: this rank's rows of each; None counts as zeros.
        rows: of each whole gradient.
        device: where the sums are.
        group: the ranks that hold rows.
    """
    ranks = dist.get_world_size(group)
    sizes = [-(-count // ranks) for count in rows]
    mine = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    for gradient, part in zip(gradients, torch.split(mine, sizes)):
        if gradient is not None and gradient.numel():
            part[: gradient.shape[0]] = row_squares(gradient)
    parts = torch.split(all_gather_rows(mine, group), sizes, dim=1)
    return [fold_rows(part.reshape(-1)[:count]) if count else part.sum() for part, count in zip(parts, rows)]


def require_rows(model: nn.Module, strategy: str, *, permuted: bool = False) -> None:
    """Raises ``ConfigError`` naming a parameter of a model that cannot be shared out by rows.

    Args:
        model: with whole parameters.
        strategy: for the message.
        permuted: whether a parameter may have its dimensions in another order in memory.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"Strategy {strategy!r} shards parameters by rows, and {name!r} is a scalar. Give it the shape (1,), "
                "or use strategy 'ddp'."
            )
        if not parameter.is_contiguous() and not (permuted and _has_no_gaps(parameter)):
            channels_last = parameter.dim() == 4 and parameter.is_contiguous(
                memory_format=torch.channels_last
            )
            found = "in channels-last order" if channels_last else f"with strides {parameter.stride()}"
            remedy = (
                "Use channels_last=False"
                if channels_last
                else "Make it of a contiguous copy, nn.Parameter(tensor.contiguous()), before the optimizer"
            )
            raise ConfigError(
                f"Strategy {strategy!r} shards contiguous parameters, and {name!r} of shape {tuple(parameter.shape)} "
                f"is stored {found}. {remedy}, or use strategy 'ddp'."
            )


def require_separate_memory(model: nn.Module, strategy: str) -> None:
    """Raises ``ConfigError`` where a parameter shares memory with another, or with a buffer, so that one moves both."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: each for name, each in named.items() if each.layout is torch.strided and each.numel()}
    extents = sorted((*_extent(each), name) for name, each in kept.items())
    for (memory, _, end, name), (other_memory, start, _, other) in itertools.pairwise(extents):
        is_parameter = any(isinstance(kept[each], nn.Parameter) for each in (name, other))
        if memory == other_memory and start < end and is_parameter:
            raise ConfigError(
                f"{name!r} and {other!r} share memory, so that an update of one changes the other, and strategy "
                f"{strategy!r} keeps each parameter by itself. Make one of a copy (tensor.clone()), tie them as one "
                "parameter, or use strategy 'ddp'."
            )


def require_plain_state(model: nn.Module, strategy: str) -> None:
    """Raises ``ConfigError`` where a model's state has names that are none of its parameters and buffers."""
    known = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    for name, tensor in tensor_state(model).items():
        if id(tensor) not in known:
            raise ConfigError(
                f"The model's state_dict has {name!r}, which is none of its parameters and buffers: a hook adds or "
                f"changes it. Strategy {strategy!r} gathers the state from those. Use get_extra_state and "
                "set_extra_state instead of the hook, or strategy 'ddp'."
            )


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Where a tensor lies: its memory, which has an identity even without values, its first byte and its end."""
    storage = tensor.untyped_storage()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return storage.data_ptr() or storage._cdata, start, start + (steps + 1) * tensor.element_size()


def _has_no_gaps(tensor: Tensor) -> bool:
    """Returns whether a tensor has its elements in consecutive memory, with the dimensions in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Returns whether an optimizer's state is a number, or one for each element, as far as is known."""
    known = [getattr(optim, name) for name in ELEMENTWISE]
    return type(optimizer) in known or bool(getattr(optimizer, "elementwise", False))


def value_of(parameter: Tensor) -> tuple[int, int]:
    """How often a parameter was written to, and a sum of its bits: writes to ``.data`` are not counted."""
    return parameter._version, int(sum_of_bits(parameter))


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies the values into the model's own tensors."""
    given = OrderedDict(state)
    # Without the version metadata, torch would take every module's state for one of its oldest format.
    given._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]  # torch's
    model.load_state_dict(given, strict=False)  # names were compared; extra state is the run's to load
