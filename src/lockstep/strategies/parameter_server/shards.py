"""The keys of a parameter server: which server holds which parameter, or which rows of a large one.

sizes       embedding 60 (6 rows)   head 25   norm 5          two servers: 45 would be fair
pieces      rows 0-2   rows 3-5     head      norm            only parameters above a fair share are split
server 0    rows 0-2 (30), head (25)
server 1    rows 3-5 (30), norm (5)

``spread`` is a pure function of the sizes; ``ParameterShards`` holds the values of one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.core.plan import share
from lockstep.core.summation_tree import fold_rows, row_squares
from lockstep.errors import ConfigError


class Size(NamedTuple):
    """The size of a parameter."""

    rows: int
    """Of dim 0; 1 for a single number."""
    bytes: int


@dataclass(frozen=True)
class Key:
    """A parameter, or some of its rows."""

    name: str
    rows: tuple[int, int] | None = None
    """The first row and the one after the last; None for the whole parameter."""

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a tensor that is shaped like the parameter; a view."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def spread(sizes: Mapping[str, Size], servers: int, whole: Collection[str] = ()) -> list[list[Key]]:
    """The keys of each server: the largest first, each to the server that has the least so far.

    A parameter that is larger than a fair share is cut into runs of rows, one for each server at most, unless it is
    one of ``whole``.

    Returns:
        Keys by server, each list in the order of the model; no server has two keys of one parameter.
    """
    loads = [0.0] * servers
    held: list[dict[str, Key]] = [{} for _ in range(servers)]
    for key, size in sorted(_pieces(sizes, servers, whole), key=lambda piece: -piece[1]):
        free = (number for number in range(servers) if key.name not in held[number])
        server = min(free, key=lambda number: (loads[number], number))
        loads[server] += size
        held[server][key.name] = key
    return [[each[name] for name in sizes if name in each] for each in held]


def _pieces(sizes: Mapping[str, Size], servers: int, whole: Collection[str]) -> list[tuple[Key, float]]:
    """Every key with its bytes."""
    fair = sum(size.bytes for size in sizes.values()) / servers
    found: list[tuple[Key, float]] = []
    for name, size in sizes.items():
        parts = min(servers, size.rows) if size.bytes > fair and name not in whole else 1
        if parts == 1:
            found.append((Key(name), size.bytes))
        else:
            runs = [share(size.rows, parts, number) for number in range(parts)]
            row = size.bytes / size.rows
            found += [(Key(name, (run.start, run.stop)), row * len(run)) for run in runs]
    return found


class ParameterShards:
    """The trained parameters of a model, spread over servers.

    Args:
        server: this rank's number among them; negative for a worker.
        whole: parameters that one server holds, however large.
        apart: True to give the server's optimizer parameters of its own, which share the memory of the model's.

    Raises:
        ConfigError: nothing is trained, or values of several number types.
    """

    def __init__(
        self, model: nn.Module, servers: int, server: int, whole: Collection[str] = (), *, apart: bool = False
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """All that are trained, whole, by name."""
        _require_storable(list(self.parameters.values()))
        sizes = {n: Size(p.shape[0] if p.dim() else 1, p.nbytes) for n, p in self.parameters.items()}
        self.keys: Sequence[Sequence[Key]] = spread(sizes, servers, whole)
        """Of each server."""
        self.server, self._apart = server, apart
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.own = {key.name: self._held(key) for key in self.own_keys}
        """The parameters of this server's optimizer, by name in the whole model; rows are views."""

    @property
    def own_keys(self) -> Sequence[Key]:
        """The keys of this server; none on a worker."""
        return self.keys[self.server] if self.server >= 0 else ()

    def follow(self) -> None:
        """Lets the server's parameters share the model's memory again, where that has got other tensors."""
        for key in self.own_keys:
            values = key.of(self.parameters[key.name].detach())
            if self.own[key.name].data_ptr() != values.data_ptr():
                self.own[key.name].data = values

    def numel(self, server: int) -> int:
        """Number of values that a server holds."""
        return sum(key.of(self.parameters[key.name]).numel() for key in self.keys[server])

    def flat(self, server: int, values: Mapping[str, Tensor]) -> Tensor:
        """A server's part of tensors that are shaped like the whole parameters, shape (numel,)."""
        parts = [key.of(values[key.name]).detach().reshape(-1) for key in self.keys[server]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """This server's flat tensor, key by key, under the parameters' names."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.own.values()])
        return {name: _stored_as(held, part) for (name, held), part in zip(self.own.items(), parts)}

    def set_values(self, server: int, flat: Tensor) -> None:
        """Copies a server's values, shape (numel,), into the model."""
        held = [key.of(self.parameters[key.name].detach()) for key in self.keys[server]]
        for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held])):
            tensor.copy_(part.view(tensor.shape))

    def holders(self, name: str) -> list[tuple[int, Key]]:
        """The servers that hold a parameter, and which rows of it."""
        return [(server, key) for server, keys in enumerate(self.keys) for key in keys if key.name == name]

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """This server's part of a tensor that is shaped like a parameter; None if it has none."""
        return next((key.of(whole) for key in self.own_keys if key.name == name), None)

    def squares(self) -> Tensor:
        """Squares of each row of this server's gradients, for ``folded``; zeros for what others hold.

        Returns:
            float64, one entry for each row of the parameters in name order.
        """
        rows = self._rows()
        found = torch.zeros(sum(rows.values()), dtype=torch.float64, device=self.device)
        parts = dict(zip(rows, torch.split(found, list(rows.values()))))
        for key in self.own_keys:
            gradient = self.own[key.name].grad
            if gradient is not None:
                start, stop = key.rows or (0, None)
                parts[key.name][start:stop] = row_squares(gradient)
        return found

    def folded(self, squares: Tensor) -> Tensor:
        """The sum of squares of each whole gradient, in name order, from the servers' squares added up."""
        return torch.stack([fold_rows(part) for part in torch.split(squares, list(self._rows().values()))])

    def _rows(self) -> dict[str, int]:
        """The rows of each parameter, in name order."""
        return {name: max(1, p.shape[0]) if p.dim() else 1 for name, p in sorted(self.parameters.items())}

    def _held(self, key: Key) -> nn.Parameter:
        parameter = self.parameters[key.name]
        if key.rows is None and not self._apart:
            return parameter
        held = nn.Parameter(key.of(parameter.detach()))
        held.__dict__ = parameter.__dict__  # optimizers read there what the user has set on a parameter
        return held


def _stored_as(held: Tensor, values: Tensor) -> Tensor:
    """Flat values in the shape of a parameter, and in its order in memory, in which some optimizers add them up."""
    shaped = values.view(held.shape)
    return shaped if held.is_contiguous() else torch.empty_like(held).copy_(shaped)


def _require_storable(parameters: Sequence[nn.Parameter]) -> None:
    if not parameters:
        raise ConfigError("Strategy 'parameter_server' needs parameters to train, but all are frozen. Unfreeze some.")
    types = {parameter.dtype for parameter in parameters}
    if len(types) > 1:
        raise ConfigError(
            f"Strategy 'parameter_server' stores values of one number type, and the model has {len(types)}: "
            f"{', '.join(sorted(map(str, types)))}. Convert the model, or use strategy 'ddp'."
        )
