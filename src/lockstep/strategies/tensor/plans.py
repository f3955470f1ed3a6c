"""Plans of tensor parallelism: found in built-in models and chains, or given by the user and then checked.

A plan that splits an activation which some module needs whole (a softmax over features, a dropout that was not named)
would silently train another model. So in the first step ``check_plan`` runs the split and the whole model on the same
micro-batches, with the same random numbers. Plans that were found are tested and need no check, but for blocks that
only have the names of a ResNet's. Where the loop changes later what a forward may look at, the functions that are given
split activations are compared with those of the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.data.batch import MicroBatch, tensors_in
from lockstep.errors import ConfigError, nearest
from lockstep.models.transformer import SelfAttention
from lockstep.numerics.hidden_state import evaluating
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.pipeline.chain import what_it_reads
from lockstep.strategies.strategy import Compute
from lockstep.strategies.tensor.layers import COLUMNS, DROPOUTS, NORMS, ROWS, Exchange

_CLOSE, _CLOSE_IN_HALF = 1e-3, 0.05


def check_plan(
    whole: nn.Module,
    split: nn.Module,
    exchange: Exchange,
    buffers: RunningBuffers,
    micro_batches: Sequence[MicroBatch],
    compute: Compute,
) -> None:
    """Runs the whole and the split model as in training and as in evaluation; leaves buffers as they were. Collective.

    All micro-batches of a step are better than one: with few samples, a dropout that each rank draws for itself may by
    chance drop what is zero anyway.

    Raises:
        ConfigError: their outputs differ by more than rounding, or the split model does not run.
    """
    whole.eval()
    with evaluating(split):  # first, since training changes the running statistics of the whole model
        _compare(whole, split, exchange, buffers, micro_batches, compute, " in an evaluation")
    modes = {name: module.training for name, module in split.named_modules()}
    for name, module in whole.named_modules():
        module.training = modes.get(name, False)
    _compare(whole, split, exchange, buffers, micro_batches, compute)


def _compare(
    whole: nn.Module,
    split: nn.Module,
    exchange: Exchange,
    buffers: RunningBuffers,
    micro_batches: Sequence[MicroBatch],
    compute: Compute,
    when: str = "",
) -> None:
    differences, close = [0.0], _CLOSE
    for micro_batch in micro_batches:
        inputs, named, _ = compute.inputs(micro_batch)
        with compute.autocast():
            compute.begin(micro_batch)
            try:
                expected = _numbers(whole(*inputs, **named))
            except Exception:
                if when:
                    return  # it cannot be evaluated on what it is trained on
                raise
            if torch.is_autocast_enabled(expected[0].device.type):
                close = _CLOSE_IN_HALF
            compute.begin(micro_batch)
            buffers.begin_step()
            try:
                found = _numbers(split(*inputs, **named))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"The model split by tensor.plan fails, while the whole model runs{when}: {error}. {_ADVICE}"
                ) from error
            buffers.begin_micro_batch()
        differences += map(_difference, expected, found)
    worst = torch.tensor([max(differences)], dtype=torch.float64, device=expected[0].device)
    largest = float(exchange.largest(worst))
    if largest > close:
        raise ConfigError(
            f"The model split by tensor.plan returns another output than the whole model{when} (relative difference "
            f"{largest:.2g}). {_ADVICE}"
        )


_ADVICE = (
    "Between 'column' and 'row' every BatchNorm and dropout must be in the plan too ('channels' or 'features'), and "
    "nothing else may need all features. Name those modules, or leave these layers whole."
)


def _numbers(output: object) -> list[Tensor]:
    """The tensors of an output, in float64."""
    return [tensor.detach().double() for tensor in tensors_in(output)]


def _difference(expected: Tensor, found: Tensor) -> float:
    """Relative to the norm of what is expected; a number above every bound where shapes differ."""
    if expected.shape != found.shape:
        return float("inf")
    both = expected.isfinite() & found.isfinite()
    gap = torch.where(both, expected - found, 0.0).norm()
    return float(gap / torch.where(both, expected, 0.0).norm().clamp(min=1e-12))


_ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU),
    *(nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Mish, nn.Softplus),
)
_POOLS = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
_BLOCKS = {
    "BasicBlock": {"conv1": "column", "bn1": "channels", "conv2": "row"},
    "Bottleneck": {"conv2": "column", "bn2": "channels", "conv3": "row"},
}
"""Residual blocks, ours and torchvision's, whose names are the same."""


_ONE_BY_ONE = (
    *("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "mish", "softplus", "hardswish"),
    *("sigmoid", "tanh", "log"),
    *("exp", "abs", "neg", "sqrt", "square", "pow", "clamp", "add", "radd", "iadd", "sub", "rsub", "isub"),
    *("mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv"),
    *("gt", "ge", "lt", "le", "eq", "ne", "where", "masked_fill", "minimum", "maximum", "sign", "round"),
    *("to", "float", "half", "bfloat16", "type_as", "clone", "contiguous", "detach"),
)
"""Functions of single elements, which give the same on a part of an activation."""
_BY_SIZES = (
    *("view", "reshape", "expand", "repeat", "tile", "unflatten", "getitem", "narrow", "split"),
    *("split_with_sizes", "index_select", "interpolate", "pad", "broadcast_to", "repeat_interleave"),
)
"""Functions whose arguments may be sizes, which another batch changes."""


class SplitWays(TorchFunctionMode):
    """Notes the functions that split activations are given to, one after the other, in the forwards within it.

        fc1 -> relu -> softmax -> fc2      "softmax" after "fc1"

    Args:
        modules: those that are split, by name.
        plan: the kind of each.
    """

    def __init__(self, modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> None:
        super().__init__()
        self.found: dict[object, tuple[str, str]] = {}
        """For each way the name of its last function, and of the split layer where it begins."""
        self._modules, self._plan = modules, plan
        self._ways, self._inside = WeakIdKeyDictionary(), 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> SplitWays:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(partial(self._end, name)))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()
        self._handles, self._ways, self._inside = [], WeakIdKeyDictionary(), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Notes a function that gives a tensor made from a split activation."""
        ways = self._of((args, kwargs))
        result = func(*args, **(kwargs or {}))
        results = tensors_in(result)
        if not ways or not results or self._inside:
            return result
        name = str(getattr(func, "__name__", func)).strip("_")
        way = next(iter(ways))
        if name not in _ONE_BY_ONE or len(ways) > 1:
            layer = self.found[way][1]
            kinds = object if "dropout" in name else () if name in _BY_SIZES else (int, str)
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
            way = frozenset(ways), name, str([leaf for leaf in leaves if isinstance(leaf, kinds)])
            self.found[way] = name, layer
        for each in results:
            self._ways[each] = way
        return result

    def require_in(self, compared: SplitWays) -> None:
        """Raises ``ConfigError`` for a way that the forwards within another have not taken."""
        for way, (name, layer) in self.found.items():
            if way not in compared.found:
                raise ConfigError(
                    f"The forward pass gives the split outputs of {layer!r} to {name!r} now, and it did not in the "
                    "first step, or with other arguments. There the model split by tensor.plan was compared with the "
                    "whole model. Set what decides this before run.prepare, leave these layers whole with tensor.plan, "
                    "or use strategy 'ddp' or 'fsdp'."
                )

    def _of(self, values: Any) -> set[object]:
        """The ways of the split activations among some values."""
        return {self._ways[tensor] for tensor in tensors_in(values) if tensor in self._ways}

    def _begin(self, *_: Any) -> None:
        self._inside += 1

    def _end(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        self._inside -= 1
        if self._inside or self._plan[name] in ("row", "heads"):
            return
        way: object = next(iter(self._of(given)), name)
        self.found.setdefault(way, (name, name))
        for tensor in tensors_in(output):
            self._ways[tensor] = way


def deciding(model: nn.Module, plan: Mapping[str, str]) -> dict[str, object]:
    """The attributes and hooks that decide what the forwards around split layers do, by the names of their modules."""
    parents = {name.rpartition(".")[0] for name in plan}
    children = [
        f"{parent}.{child}".lstrip(".")
        for parent in parents
        for child, _ in model.get_submodule(parent).named_children()
    ]
    around = {name: model.get_submodule(name) for name in (*parents, *children) if name not in plan}
    return {
        name: (what_it_reads(module), [*module._forward_pre_hooks], [*module._forward_hooks])
        for name, module in around.items()
    }


def plan_of(model: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """The kind of split of each module that has one: the user's, or what is found in the model.

    Args:
        model: whole.
        patterns: ``"name pattern=kind"``, later ones win; none for the plan that is found.

    Raises:
        ConfigError: nothing can be split, a pattern matches nothing, or a plan leaves an activation split.
    """
    plan = given_plan(model, patterns) if patterns else found_plan(model)
    if not plan:
        raise ConfigError(
            f"Strategy 'tensor' found nothing to split in {type(model).__name__}: it knows pairs of Linear or of Conv "
            "layers in a Sequential, the blocks of ResNets, and the built-in transformer's attention. Name your layers "
            "in tensor.plan, such as ['*.fc1=column', '*.fc2=row'], or use strategy 'fsdp' or 'ddp'."
        )
    return plan


def found_plan(model: nn.Module) -> dict[str, str]:
    """The plan for the parts of a model that are known; empty if none is."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        kinds: Mapping[str, str] = {}
        if type(module) is SelfAttention:
            plan[path] = "heads"
        elif isinstance(module, nn.Sequential) and _computes_as_torch(module):
            kinds = _pairs(module)
        elif type(module).__name__ in _BLOCKS:
            kinds = _block(module)
        plan |= {f"{path}.{child}" if path else child: kind for child, kind in kinds.items()}
    return plan


def given_plan(model: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """The plan of a user, completed: BatchNorm and dropout between two split layers of a Sequential are split too."""
    names = [name for name, _ in model.named_modules()]
    plan: dict[str, str] = {}
    for entry in patterns:
        pattern, _, kind = entry.rpartition("=")
        top = pattern.removeprefix("*.")  # "*.fc1" is fc1 in any module, and so in the model itself
        matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, top)]
        if not matched:
            raise ConfigError(f"tensor.plan: no module matches {pattern!r}.{nearest(pattern, names[1:])}")
        plan |= dict.fromkeys(matched, kind)
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            _complete(f"{path}." if path else "", module, plan)
    columns = [name for name, kind in plan.items() if kind == "column"]
    if columns and "row" not in plan.values():
        raise ConfigError(
            f"tensor.plan splits the outputs of {columns[0]!r} with 'column', but no layer combines them with "
            "'row'. Give that kind to the layer that uses them."
        )
    return plan


def _complete(prefix: str, chain: nn.Sequential, plan: dict[str, str]) -> None:
    """Adds to a plan what stands between two split layers of a chain; refuses what needs the whole activation."""
    opened = ""
    for child, module in chain.named_children():
        name = prefix + child
        kind = plan.get(name, "")
        if kind in ("column", "row"):
            opened = child if kind == "column" else ""
        elif opened and not kind:
            passing = _passing(module, chain.get_submodule(opened))
            if passing is None:
                raise ConfigError(
                    f"tensor.plan splits the outputs of {prefix + opened!r}, and {name!r}, a {type(module).__name__}, "
                    "needs all of them. Give a layer before it the kind 'row', or leave the first one whole."
                )
            if passing:
                plan[name] = passing


def _pairs(chain: nn.Sequential) -> dict[str, str]:
    """Pairs of layers with nothing but per-channel modules between, each of them in one pair at most."""
    plan: dict[str, str] = {}
    first, between = "", dict[str, str]()
    for child, module in chain.named_children():
        if _splittable(module):
            if first and isinstance(module, nn.Linear) == isinstance(chain.get_submodule(first), nn.Linear):
                plan |= {first: "column", **between, child: "row"}
                first = ""
            else:
                first, between = child, {}
        elif first:
            plain = _computes_as_torch(module)
            kind = _passing(module, chain.get_submodule(first)) if plain else None
            if kind is None:
                first = ""
            elif kind:
                between[child] = kind
    return plan


def _computes_as_torch(module: nn.Module) -> bool:
    """True if a module of torch, or of a class made from one, computes what torch's does."""
    cls: Any = type(module)
    is_set = "forward" in vars(module) or cls.__call__ is not nn.Module.__call__
    return not is_set and cls.forward.__module__.startswith("torch.nn.")


def between(model: nn.Module, plan: Mapping[str, str]) -> dict[str, nn.Module]:
    """The modules without parameters that are given split activations, in chains and known blocks, by name."""
    found = {}
    for path, parent in model.named_modules():
        opened = type(parent).__name__ in _BLOCKS and f"{path}.conv2".lstrip(".") in plan
        for child, module in parent.named_children():
            name = f"{path}.{child}".lstrip(".")
            if isinstance(parent, nn.Sequential):
                opened = plan.get(name) == "column" or (opened and plan.get(name) != "row")
            if opened and name not in plan and not any(True for _ in module.parameters()):
                found[name] = module
    return found


def is_to_be_checked(model: nn.Module, plan: Mapping[str, str]) -> bool:
    """True if a plan that was found splits blocks of another source, which only have the names of a ResNet's."""
    blocks = {
        path
        for path, module in model.named_modules()
        if type(module).__name__ in _BLOCKS
        and type(module).__module__.partition(".")[0] not in ("lockstep", "torchvision")
    }
    return any(name.rpartition(".")[0] in blocks for name in plan)


def _passing(module: nn.Module, first: nn.Module) -> str | None:
    """Returns how to split a module after the split layer ``first``: "" for not at all, None if it needs the whole."""
    linear = isinstance(first, nn.Linear)
    if type(module) in NORMS:
        size = getattr(first, "out_features" if linear else "out_channels", 0)
        return "channels" if module.num_features == size else None
    if type(module) in DROPOUTS:
        return "features" if linear else "channels"
    if isinstance(module, _ELEMENTWISE) or (not linear and isinstance(module, _POOLS)):
        return ""
    return None


def _block(block: nn.Module) -> dict[str, str]:
    """The plan of a residual block, if its layers are the usual ones."""
    kinds = _BLOCKS[type(block).__name__]
    children = dict(block.named_children())
    usual = all(name in children for name in kinds) and all(
        _splittable(children[name]) if name.startswith("conv") else type(children[name]) in NORMS for name in kinds
    )
    return kinds if usual else {}


def _splittable(module: nn.Module) -> bool:
    return type(module) in COLUMNS and type(module) in ROWS and getattr(module, "groups", 1) == 1
