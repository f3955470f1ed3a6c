"""Splits the layers of a model as a plan says, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from math import gcd

from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.models.transformer import SelfAttention
from lockstep.strategies.tensor.cut import Cut
from lockstep.strategies.tensor.exchange import Exchange
from lockstep.strategies.tensor.layers import COLUMNS, DROPOUTS, NORMS, ROWS


class Splitter:
    """Splits modules over the ranks of an exchange.

    Args:
        model: whole; it is changed.
        exchange: the ranks.
    """

    def __init__(self, model: nn.Module, exchange: Exchange) -> None:
        self._model, self._exchange = model, exchange
        self._cut: dict[int, tuple[Tensor, Cut]] = {}
        first = {p: name for name, p in model.named_parameters()}
        self._tied = {p for name, p in model.named_parameters(remove_duplicate=False) if first[p] != name}

    def split(self, plan: Mapping[str, str]) -> dict[str, Cut]:
        """Splits every module of the plan. Gives the cut of each split entry of the model's state, by name.

        Raises:
            ConfigError: a module cannot be split in this way, or not over so many ranks.
        """
        modules = {name: self._model.get_submodule(name) for name in plan}
        sizes = {name: _extent(name, modules[name], kind) for name, kind in plan.items()}
        self._check_sizes({name: size for name, size in sizes.items() if size})
        for name, kind in plan.items():
            self._name = name
            _KINDS[kind](self, modules[name])
        entries = self._model.state_dict(keep_vars=True).items()
        return {name: self._cut[id(value)][1] for name, value in entries if id(value) in self._cut}

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        ranks = self._exchange.ranks
        wrong = next((name for name, size in sizes.items() if size % ranks), None)
        if wrong is None:
            return
        common = reduce(gcd, sizes.values())
        working = [number for number in range(2, common + 1) if common % number == 0]
        advice = (
            f"Use {' or '.join(map(str, working[:8]))} ranks"
            if working
            else "No number of ranks divides all layers: leave some out with tensor.plan"
        )
        raise ConfigError(
            f"Strategy 'tensor' cannot split the {sizes[wrong]} heads, features or channels of {wrong!r} over {ranks} "
            f"ranks. {advice}, or use strategy 'fsdp' or 'ddp'."
        )

    def column(self, module: nn.Module, blocks: int = 1) -> None:
        """Keeps some of the outputs of a Linear or a convolution."""
        self._become(module, COLUMNS)
        self._keep(module, "weight", 0, blocks)
        self._keep(module, "bias", 0, blocks)
        self._shrink(module, "out_features", "out_channels")

    def row(self, module: nn.Module) -> None:
        """Keeps some of the inputs of a Linear or a convolution; the bias stays whole."""
        self._become(module, ROWS)
        self._keep(module, "weight", 1)
        self._shrink(module, "in_features", "in_channels")

    def heads(self, module: nn.Module) -> None:
        """Keeps some of the heads of the built-in attention."""
        assert isinstance(module, SelfAttention)
        self.column(module.inputs, blocks=3)
        self.row(module.output)
        module.heads //= self._exchange.ranks

    def channels(self, module: nn.Module, dim: int = 1) -> None:
        """Keeps some of the channels of a BatchNorm; of a dropout, the part of the mask."""
        if type(module) in DROPOUTS:
            self._become(module, DROPOUTS)
            module.split_dim = dim  # type: ignore[assignment]  # an attribute of PartDropout
            return
        for name in ("weight", "bias", "running_mean", "running_var"):
            self._keep(module, name, 0)
        self._shrink(module, "num_features")

    def features(self, module: nn.Module) -> None:
        """As ``channels``, where the activation is split along its last dim."""
        self.channels(module, dim=-1)

    def _become(self, module: nn.Module, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> None:
        module.__class__ = kinds[type(module)]
        module.exchange = self._exchange  # type: ignore[assignment]  # an attribute of the split classes

    def _keep(self, module: nn.Module, key: str, dim: int, blocks: int = 1) -> None:
        whole = getattr(module, key)
        if whole is None:
            return
        if whole in self._tied:
            raise ConfigError(
                f"Strategy 'tensor' cannot split {self._name!r}, whose {key} is tied to another layer. Untie it, or "
                "name the layers to be split in tensor.plan, such as ['*.fc1=column', '*.fc2=row'], and this one not."
            )
        cut = Cut(dim, self._exchange.ranks, self._exchange.rank, blocks)
        part = cut.part(whole.detach())
        if isinstance(whole, nn.Parameter):
            part = nn.Parameter(part, requires_grad=whole.requires_grad)
        setattr(module, key, part)
        self._cut[id(part)] = part, cut

    def _shrink(self, module: nn.Module, *names: str) -> None:
        for name in names:
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // self._exchange.ranks)


def _extent(name: str, module: nn.Module, kind: str) -> int:
    """How many heads, features or channels of a module are split; 0 where another module's decide."""
    if kind == "heads" and type(module) is SelfAttention:
        return module.heads
    layer = type(module) in COLUMNS and getattr(module, "groups", 1) == 1
    if kind == "column" and layer:
        return int(module.weight.shape[0])  # type: ignore[index]  # a Linear or a convolution
    if kind == "row" and layer:
        return int(module.weight.shape[1])  # type: ignore[index]  # a Linear or a convolution
    if kind in ("channels", "features") and type(module) in NORMS:
        return int(module.num_features)  # type: ignore[arg-type]  # a BatchNorm
    if kind in ("channels", "features") and type(module) in DROPOUTS:
        return 0
    takes = {"heads": "the built-in SelfAttention", "channels": "BatchNorm and dropout"}
    takes |= dict.fromkeys(("column", "row"), "Linear and Conv layers without groups")
    raise ConfigError(
        f"tensor.plan gives {name or 'the model'!r}, a {type(module).__name__}, the kind {kind!r}, which is for "
        f"{takes.get(kind, takes['channels'])}. Leave it out of the plan."
    )


_KINDS: dict[str, Callable[[Splitter, nn.Module], None]] = {
    "column": Splitter.column,
    "row": Splitter.row,
    "heads": Splitter.heads,
    "channels": Splitter.channels,
    "features": Splitter.features,
}
