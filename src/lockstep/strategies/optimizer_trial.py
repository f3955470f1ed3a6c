"""Finds out by trying what an optimizer needs to see at once: single elements, whole parameters, or all of them.

A copy of the optimizer, as it is configured, steps small parameters of the same number types: whole, one at a time, and
cut into parts as for 2, 3 and 16 ranks. What gives the same bits decides. Its class would say less: ``fused=True`` on a
CPU, and SGD on bf16, round an element otherwise where it lies in the last few of a tensor.
"""

from __future__ import annotations

import copy
import enum
import inspect
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.fingerprint import octets
from lockstep.core.generators import encoded_states, generators_kept
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot
from lockstep.runtime.devices import open_gpus
from lockstep.strategies.absent import users_attributes
from lockstep.strategies.sharding import rows_of

if TYPE_CHECKING:
    from lockstep.strategies.strategy import Strategy

_MOST_MARKS = 4
"""Values of an attribute of parameters, such as a kind or a rate, each of which is tried."""
_ROWS = (1, 8, 37)
"""Rows of the small parameters; of one row some ranks get none."""
_LARGE = 8192
"""Numbers in one more, where the user's largest has as many: some optimizers store large parameters in blocks."""
_WIDE = 136
"""Its sizes may be cut to this: some optimizers factor a parameter whose second largest size is at least 16, or 128."""
_NUMBERS = 300
"""The most numbers in a row of each, about; fewer if the rows of the parameter itself are shorter."""
_STEPS = 12
"""Some begin with a few steps of another kind."""
_RATE = 0.01
"""The least learning rate: nothing is seen of a step at 0, where a schedule may begin."""
_RANKS = (2, 3, 16)


class Unit(enum.IntEnum):
    """The smallest part of a model that an optimizer steps with the bits of a step on the whole."""

    ELEMENT = 0
    """Every element is updated only from that element, wherever it lies."""
    PLACE = 1
    """The same, but for the last bits, which depend on where in the tensor an element lies."""
    PARAMETER = 2
    """Whole parameters: matrices are factored, or norms taken."""
    MODEL = 3
    """All parameters together, or a stream of random numbers that runs over them."""


@dataclass(frozen=True)
class Trial:
    """The result of trying an optimizer."""

    unit: Unit
    reason: str
    """The use of more than single elements by the optimizer, as the end of a sentence; empty for elements."""
    draws: bool = False
    """True if its step draws random numbers."""


def try_optimizer(
    optimizer: Optimizer,
    device: torch.device,
    members: Sequence[Sequence[Tensor]] | None = None,
    *,
    dimensions: int = 1,
    also: Callable[[Optimizer], object] | None = None,
) -> Trial:
    """Finds out what an optimizer needs to see at once, on a few small parameters.

    Args:
        optimizer: as the user made it; neither it nor its parameters, nor any generator, is changed.
        members: the parameters of each group, if the optimizer holds parts of them.
        dimensions: along which a process may hold a part of a parameter: of 1 rows, of 2 rows or columns.
        also: called with the copies before each of their steps, for the trial of another method.
    """
    inner = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    if inner is not None:  # as Lookahead does
        return Trial(Unit.MODEL, f"wraps another one ({type(inner).__name__}), whose parameters are the whole ones")
    given = members if members is not None else [group["params"] for group in optimizer.param_groups]
    groups = [list(_examples(parameters, device)) for parameters in given]
    with _own_randomness() as draws:
        whole = _Copy(optimizer, groups, also)
        failed = whole.step()
        if failed or draws():
            return Trial(Unit.MODEL, failed or "draws random numbers in its step", draws=not failed)
        for number, examples in enumerate(groups):
            for place, example in enumerate(examples):
                alone = _Copy(optimizer, [[example] if n == number else [] for n in range(len(groups))], also)
                if alone.step() or not _agree([alone.found[number][0]], whole.found[number][place]):
                    return Trial(Unit.MODEL, "updates a parameter by what it finds in others")
                if alone.returned != whole.returned:
                    return Trial(Unit.MODEL, "returns what it has computed from all parameters together")
        splits = itertools.product(range(dimensions), _RANKS)
        found = [_in_parts(optimizer, groups, whole, ranks, dim, also) for dim, ranks in splits]
    return max(found, key=lambda trial: trial.unit)


def knows_parameters(optimizer: Optimizer) -> bool:
    """True if an optimizer does something else with the user's parameters than with others that are like them.

    It finds them by ``id(p)``, in a dict or list of its own, or in the model. Meanwhile the user's own parameters have
    small values in place of theirs, and in one of two trials they are those that are stepped.
    """
    if type(optimizer).__module__.startswith("torch."):
        return False
    generator = torch.Generator().manual_seed(1)
    groups: list[list[_Example]] = []
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad and p.numel() and not p.is_meta]
        groups.append([])
        for p in trained:
            shape = [min(size, 2) for size in p.shape]
            values = [torch.randn(shape, generator=generator).to(p.device, p.dtype) for _ in range(_STEPS + 1)]
            groups[-1].append(_Example(p, p.shape, values[0], values[1:]))
    known = {id(p): p for group in optimizer.param_groups for p in group["params"]}

    def outcome(is_original: bool) -> tuple[str, list[list[Tensor]]]:
        examples = [[replace(each, is_original=is_original) for each in members] for members in groups]
        before = [(each, each.original.data, dict(vars(each.original))) for members in groups for each in members]
        try:
            for each, _, _ in before:
                each.original.data = each.values.clone()
            with _own_randomness():
                tried = _Copy(optimizer, examples, knows=dict(known))
                return tried.step(), [list(map(torch.clone, each)) for members in tried.found for each in members]
        finally:
            for each, values, attributes in before:
                each.original.data, each.original.grad = values, None
                vars(each.original).clear()
                vars(each.original).update(attributes)

    failed, others = outcome(False)
    failed_too, originals = outcome(True)
    return failed != failed_too or not all(_agree([one], other) for one, other in zip(others, originals))


def require_gradients_only(optimizer: Optimizer, device: torch.device, strategy: str) -> None:
    """Raises ``ConfigError`` where the optimizer would change frozen parameters, which no process gives it."""
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    if not frozen:
        return
    groups = [list(_examples(group["params"], device)) for group in optimizer.param_groups]
    with _own_randomness() as draws:
        idle = _Copy(optimizer, groups)
        failed = idle.step(with_gradients=False)
        found = [values[0] for members in idle.found for values in members]
        before = [each.values for members in groups for each in members]
        if failed or draws() or not all(map(torch.equal, found, before)):
            raise ConfigError(
                f"{type(optimizer).__name__} changes parameters that have no gradient, and holds {len(frozen)} frozen "
                f"ones, which strategy {strategy!r} leaves as they are. Give it only those that are trained: "
                "[p for p in model.parameters() if p.requires_grad]."
            )


def needs_closure(optimizer: Optimizer) -> bool:
    """True for an optimizer that cannot step from gradients alone, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def require_whole(optimizer: Optimizer, strategy: Strategy) -> None:
    """Raises ``ConfigError`` for an optimizer that evaluates the loss, where no process holds the whole model."""
    if not strategy.replicated:
        raise ConfigError(
            f"{type(optimizer).__name__} may evaluate the loss several times per step, looking at all parameters "
            f"together, and strategy {strategy.name!r} holds no whole model in one process. Use strategy 'ddp', or an "
            "optimizer that steps from gradients, such as SGD or AdamW."
        )


def refused_optimizer(optimizer: Optimizer, trial: Trial, strategy: str, method: str = "") -> ConfigError:
    """The error of an optimizer, or of a method of it, that has to see more than a process of the strategy holds."""
    parts = "some of the parameters" if trial.unit is Unit.MODEL else "parts of parameters"
    remedy = "Use an optimizer that updates each element from that element alone, such as SGD or AdamW"
    if trial.unit is Unit.PLACE:
        remedy = "Keep the parameters in float32 and train with precision='bf16'"
        if any(group.get("fused") for group in optimizer.param_groups):
            remedy = "Use fused=False"
    elif trial.unit is Unit.MODEL:
        remedy = "Use an optimizer that updates each parameter by itself and draws nothing"
        if trial.reason.startswith("wraps"):
            remedy = "Use the one that it wraps"
    without = " without tensor.shards" if strategy == "tensor" else ""  # for which 'ddp' is split, too
    return ConfigError(
        f"Strategy {strategy!r} steps the optimizer on {parts}, and {type(optimizer).__name__}{method} "
        f"{trial.reason}, so the result would not have the bits of one device. {remedy}, or strategy 'ddp'{without}."
    )


def _in_parts(
    optimizer: Optimizer, groups: Sequence[Sequence[_Example]], whole: _Copy, ranks: int, dim: int, also: Any
) -> Trial:
    """The outcome of the same steps on parts along a dimension, as ``ranks`` processes have them."""
    cut = [[each.cut(ranks, rank, dim) for each in members for rank in range(ranks)] for members in groups]
    parts = _Copy(optimizer, cut, also)  # all in one copy: that it steps each parameter alone is known by now
    failed = parts.step()
    if failed:
        return Trial(Unit.PARAMETER, failed.replace("small", "parts of"))
    worst = Trial(Unit.ELEMENT, "")
    for number, members in enumerate(groups):
        for place, example in enumerate(members):
            pieces = parts.found[number][place * ranks : (place + 1) * ranks]
            expected = whole.found[number][place]
            along = example.along(dim)
            if not _agree(pieces, expected, along, nearly=True):
                return Trial(Unit.PARAMETER, "updates an element by others of its parameter")
            if not _agree(pieces, expected, along):
                is_fused = optimizer.param_groups[number].get("fused")
                how = "with fused=True" if is_fused else f"of {example.values.dtype}"
                worst = Trial(Unit.PLACE, f"rounds an element {how} by its place in the tensor")
    return worst


@dataclass(frozen=True, eq=False)
class _Example:
    """A small parameter with the gradients of a few steps, standing for one of the user's."""

    original: Tensor
    shape: torch.Size
    """Of the original, which may have other values for a time."""
    values: Tensor
    gradients: list[Tensor]
    part: tuple[slice, ...] | None = None
    is_original: bool = False
    """True to step the user's own parameter, which has other values for that time."""

    def parameter(self) -> Any:
        """The parameter to step, with these values."""
        return self.original if self.is_original else nn.Parameter(self.values.clone())

    def along(self, dim: int) -> int:
        """The dimension that is cut: its last one, where it has no ``dim``."""
        return min(dim, self.values.dim() - 1)

    def cut(self, ranks: int, rank: int, dim: int) -> _Example:
        dim = self.along(dim)
        part = (*[slice(None)] * dim, rows_of(self.values.shape[dim], ranks, rank))
        gradients = [gradient[part] for gradient in self.gradients]
        return replace(self, values=self.values[part], gradients=gradients, part=part)

    def state(self, value: Any) -> Any:
        """The state that the optimizer holds of the user's parameter before its first step, for this one."""
        if not isinstance(value, Tensor) or value.shape != self.shape or not value.dim():
            return copy.deepcopy(value)
        whole = self.values if self.part is None else self.whole
        flat = value.detach().flatten()[: whole.numel()].to(self.values.device)
        found = flat.repeat(-(-whole.numel() // flat.numel()))[: whole.numel()].view(whole.shape)
        return found.clone() if self.part is None else found[self.part].clone()

    def attribute(self, value: Any) -> Any:
        """A value that the user has set on the parameter, for this one; a part has that of the whole, as rows do."""
        return self.state(value) if self.part is None else replace(self, values=self.whole, part=None).state(value)

    @property
    def whole(self) -> Tensor:
        assert self.values._base is not None, "a part is a view of the whole"
        return self.values._base


def _examples(parameters: Sequence[Tensor], device: torch.device) -> Iterator[_Example]:
    """Small parameters in a few sizes for each number type, number of dimensions and set of the user's attributes."""
    kinds, values = defaultdict[Any, list[Tensor]](list), defaultdict[str, set[Any]](set)
    marks = {p: [m for m in users_attributes(p).items() if isinstance(m[1], int | float | str)] for p in parameters}
    for name, value in itertools.chain.from_iterable(marks.values()):
        values[name].add(value)
    for p in parameters:
        if p.dim() and p.numel() and (p.is_floating_point() or p.is_complex()):
            told = {(name, value if len(values[name]) <= _MOST_MARKS else None) for name, value in marks[p]}
            kinds[p.dtype, p.dim(), frozenset(told), frozenset(users_attributes(p))].append(p)
    generator = torch.Generator().manual_seed(1)

    def draw(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(device, dtype)

    for (dtype, dims, *_), originals in kinds.items():
        original = originals[0]
        most = max(1, round(_NUMBERS ** (1 / max(1, dims - 1))))
        inner = [max(1, min(size, most - place)) for place, size in enumerate(original.shape[1:])]
        shapes = [[rows, *inner] if inner else [11 * rows] for rows in _ROWS]
        for order in (Tensor.numel, lambda each: sorted(each.shape)[-2:]):
            first, *others = max(originals, key=order).shape
            own = [min(size, _WIDE) for size in others]
            rows = max(_WIDE, -(-_LARGE // math.prod(own)))
            shapes += [shape] if (shape := [min(first, rows), *own]) not in shapes else []
        for shape in shapes:
            yield _Example(original, original.shape, draw(shape, dtype), [draw(shape, dtype) for _ in range(_STEPS)])


class _Copy:
    """An optimizer like the user's, with small parameters of its own.

    Args:
        also: see ``try_optimizer``.
        knows: what stands in the copy for the user's parameters beside its groups, by ``id``; None for its own.

    Raises:
        ConfigError: the optimizer cannot be copied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[_Example]],
        also: Any = None,
        *,
        knows: dict[int, Any] | None = None,
    ) -> None:
        self.returned: list[str] = []
        """By ``also``, as text."""
        self._also = also
        self.found: list[list[list[Tensor]]] = []
        """For each group and parameter: its values, then the tensors of its state."""
        self._groups = [[(each, each.parameter()) for each in members] for members in groups]
        for each, p in (pair for members in self._groups for pair in members):
            vars(p).update({name: each.attribute(value) for name, value in users_attributes(each.original).items()})
        own = {id(each.original): p for members in self._groups for each, p in reversed(members)}
        nothing = nn.Parameter(torch.empty(0))
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        memo: dict[int, Any] = {id(p): own.get(id(p), nothing) for p in originals} if knows is None else knows
        self._optimizer = made = object.__new__(type(optimizer))
        try:
            for name, value in vars(optimizer).items():
                if name not in ("param_groups", "state", "step"):  # a scheduler wraps the step of the object
                    vars(made)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
            made.param_groups = [_group(group, members) for group, members in zip(optimizer.param_groups, self._groups)]
            made.state = defaultdict(dict)
            made.state.update({k: copy.deepcopy(v) for k, v in optimizer.state.items() if isinstance(k, str)})
            for each, parameter in (pair for members in self._groups for pair in members):
                state = optimizer.state.get(each.original)
                if state:
                    made.state[parameter] = {key: each.state(value) for key, value in state.items()}
        except Exception as error:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be copied to find out whether it can step parts of parameters: "
                f"{type(error).__name__}: {error}. Make it copyable by copy.deepcopy, or use strategy 'ddp'."
            ) from error

    def step(self, with_gradients: bool = True) -> str:
        """Takes a few steps, and notes what they led to; gives what is wrong where they fail."""
        step: Any = type(self._optimizer).step
        before = Snapshot({"": type(self._optimizer)})
        try:
            if callable(begin := getattr(self._optimizer, "train", None)):
                begin()  # as a loop calls it that evaluates other weights than it trains
            for number in range(_STEPS):
                for each, parameter in (pair for members in self._groups for pair in members):
                    parameter.grad = each.gradients[number].clone() if with_gradients else None
                if self._also is not None:
                    with redirect_stdout(None):
                        self.returned.append(repr(self._also(self._optimizer)))
                step(self._optimizer)
        except Exception as error:  # an optimizer of the user's may fail on small parameters in any way
            return f"fails on small parameters ({type(error).__name__}: {error})"
        finally:
            before.restore()  # what it keeps by parameter, in a global dict
        self.found = [[self._tensors(parameter) for _, parameter in members] for members in self._groups]
        return ""

    def _tensors(self, parameter: nn.Parameter) -> list[Tensor]:
        state: Mapping[Any, Any] = self._optimizer.state.get(parameter, {})
        return [parameter.detach(), *(each for each in state.values() if isinstance(each, Tensor))]


def _group(group: Mapping[str, Any], members: Sequence[tuple[_Example, nn.Parameter]]) -> dict[str, Any]:
    values = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    if isinstance(rate := values.get("lr"), float | int | Tensor):
        values["lr"] = rate.clamp(min=_RATE) if isinstance(rate, Tensor) else max(rate, _RATE)
    names = {"param_names": [str(number) for number in range(len(members))]} if "param_names" in group else {}
    return {"params": [own for _, own in members], **values, **names}


def _agree(parts: Sequence[Sequence[Tensor]], whole: Sequence[Tensor], dim: int = 0, *, nearly: bool = False) -> bool:
    """Returns whether parameters and state in parts have the bits of the whole, or nearly their values."""
    if any(len(part) != len(whole) for part in parts):
        return False
    for place, expected in enumerate(map(Tensor.to_dense, whole)):
        pieces = [part[place].detach().to_dense() for part in parts]
        if expected.shape == whole[0].shape and expected.dim():
            if any(piece.shape != part[0].shape for piece, part in zip(pieces, parts)):
                return False
            pieces = [torch.cat(pieces, dim)]
        for piece in pieces:
            if piece.shape != expected.shape or piece.dtype != expected.dtype:
                return False
            if not (_are_near(piece, expected) if nearly else torch.equal(octets(piece), octets(expected))):
                return False
    return True


def _are_near(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    bound = 64 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True)


@contextmanager
def _own_randomness() -> Iterator[Any]:
    """Keeps all generators as they are; gives a function that tells whether numbers were drawn in between."""
    devices = open_gpus()

    def states() -> list[Any]:
        return [*encoded_states(), *(torch.cuda.get_rng_state(device).tolist() for device in devices)]

    with torch.random.fork_rng(devices), generators_kept():
        start = states()
        yield lambda: states() != start
