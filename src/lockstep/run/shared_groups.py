"""The groups and the state of an optimizer as the user sees them, where each process steps a part of the parameters.

The user's optimizer holds this process's parts. What the wrapped one shows are the parameters of the prepared model, so
that ``for p in group["params"]`` means the same as ``for p in model.parameters()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.strategies import Strategy
from lockstep.strategies.absent import Absence, AbsentTensor
from lockstep.strategies.optimizer_trial import Trial, Unit, refused_optimizer, try_optimizer


class SharedGroups:
    """The groups and the state that the wrapper of an optimizer shows and takes. Creating it is collective.

    Args:
        optimizer: the user's, which holds parts.
        members: the names of the parameters in each group; gets those of groups that are added.
        parameters: those of the prepared model, by name.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: list[list[str]],
        parameters: Mapping[str, Tensor],
        strategy: Strategy,
    ) -> None:
        self.optimizer, self.strategy = optimizer, strategy
        self._members, self._parameters = members, parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._tried = set[str]()
        """Methods and properties of the optimizer's own that may see parts only."""
        self.absence = Absence(strategy.name, "no process holds it whole")
        """Counts changes of the state."""
        if not strategy.replicated:
            strategy.absences = [*strategy.absences, self.absence]
        self.is_whole = strategy.replicated
        """True if the optimizer holds the very parameters that the user sees."""
        self.has_values = all(type(each) is nn.Parameter for each in parameters.values())
        """True if every process has the values of all parameters between steps."""
        lacks = torch.tensor([int(self._trained > strategy.trainable().keys())], device=strategy.device)
        self.shares_all = not strategy.all_reduce_max(lacks).any()
        """True if every process has a part of each trained parameter, and so knows what state there is."""

    def groups(self) -> list[Any]:
        """The groups, with the prepared model's parameters."""
        return FixedList(
            ParameterGroup(own, FixedList(self._parameters[name] for name in names))
            for own, names in zip(self.optimizer.param_groups, self._members)
        )

    def state(self) -> Any:
        """The state, by the prepared model's parameters."""
        names = [name for names in self._members for name in names if name in self._trained]
        return SharedState(self, {self._parameters[name]: name for name in names})

    def forget_gradients(self) -> None:
        """Clears what parameters show as their gradients, where the optimizer holds others."""
        for name in {name for names in self._members for name in names}:
            self._parameters[name].grad = None

    def add(self, group: Mapping[str, Any]) -> None:
        """Adds a group; see ``PreparedOptimizer.add_param_group``."""
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        names = [self._name(each[1] if isinstance(each, tuple) else each) for each in given]
        known = {name for names in self._members for name in names}
        held = self._parameters if self.is_whole else self.strategy.trainable()
        for name in names:
            if name in known:
                raise ConfigError(
                    f"{name!r} is in a group of the optimizer already. A resumed run has the groups that its loop had "
                    "added before: at the start of an epoch, put add_param_group under if not run.position.done."
                )
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        here = [name for name in names if name in held]
        has_names = any("param_names" in each for each in self.optimizer.param_groups)
        parts = [(name, held[name]) if has_names else held[name] for name in here]
        self.optimizer.add_param_group({**own, "params": parts})
        self._members.append(names)
        if self.strategy.largest_unit != Unit.MODEL and set(names) - self.strategy.whole_parameters:
            seen = [group["params"] for group in self.groups()]
            trial = try_optimizer(self.optimizer, self.strategy.device, seen, dimensions=self.strategy.cut_dimensions)
            if trial.unit > self.strategy.largest_unit:  # the optimizer must now see more than processes hold
                raise refused_optimizer(self.optimizer, trial, self.strategy.name)

    def attribute(self, name: str) -> Any:
        """An attribute of the optimizer that torch's have not, where the optimizer holds parts of what the user knows.

        A method or property is tried first, and refused with ``ConfigError`` where it has to see more.
        """
        if isinstance(inspect.getattr_static(self.optimizer, name, None), property):
            self._require_in_parts(name, lambda copied: getattr(copied, name))
        value = getattr(self.optimizer, name)
        is_method = inspect.ismethod(value) and value.__self__ is self.optimizer
        return partial(self._call, name, value) if is_method else value

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        self._require_in_parts(f"{name}()", lambda copied: getattr(copied, name)(*args, **kwargs), given)
        return method(*args, **kwargs)

    def _require_in_parts(self, name: str, also: Callable[[Optimizer], object], given: Sequence[Any] = ()) -> None:
        if name in self._tried:
            return
        strategy = self.strategy
        if unknown := [type(each).__name__ for each in given if callable(each)]:
            trial = Trial(Unit.MODEL, f"is given a {unknown[0]}, with which it cannot be tried")
        else:
            has_parts = any(group["params"] for group in self.optimizer.param_groups)
            seen = None if has_parts else [group["params"] for group in self.groups()]
            trial = try_optimizer(self.optimizer, strategy.device, seen, dimensions=strategy.cut_dimensions, also=also)
        are_whole = {name for names in self._members for name in names} <= strategy.whole_parameters
        if trial.unit > (Unit.PARAMETER if are_whole else min(Unit.PARAMETER, strategy.largest_unit)):
            raise refused_optimizer(self.optimizer, trial, strategy.name, f".{name}")
        self._tried.add(name)

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"add_param_group was given a tensor of shape {list(parameter.shape)} that was not a parameter of the "
                "model when it was prepared, so its gradient would not be summed over the ranks. Put the module into "
                "the model before run.prepare, and give add_param_group parameters of the model that it returned."
            )
        return name


class FixedList(list[Any]):
    """A list that shows something else, and refuses to be changed."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(
            "The groups of the optimizer, or the parameters of a group, were changed after run.prepare, where no "
            "process steps all of them. To stop training parameters, use p.requires_grad_(False), or p.grad = None "
            "before the step; to add some, call optimizer.add_param_group; or change the groups before run.prepare."
        )

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return list, (list(self),)  # copies are the user's own

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse  # type: ignore[assignment]  # these return
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class ParameterGroup(MutableMapping[str, Any]):
    """A group of an optimizer: its hyperparameters, and the prepared model's parameters."""

    def __init__(self, own: dict[str, Any], parameters: FixedList) -> None:
        self._own, self._shown = own, parameters

    def __getitem__(self, key: str) -> Any:
        return self._shown if key == "params" else self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            self._shown.append(value)
        self._own[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __repr__(self) -> str:
        return repr(dict(self))


class SharedState(MutableMapping[Tensor, Any]):
    """The state of an optimizer by the prepared model's parameters, of which a process has parts at most."""

    def __init__(self, shared: SharedGroups, names: Mapping[Tensor, str]) -> None:
        self._shared, self._own, self._names = shared, shared.optimizer.state, names
        held = shared.strategy.trainable()
        self._held = {parameter: held.get(name) for parameter, name in names.items()}

    def __getitem__(self, parameter: Tensor) -> ParameterState:
        held = self._held[parameter]
        own = None if held is None else self._own[held]
        return ParameterState(self._shared, own, self._names[parameter], parameter)

    def __setitem__(self, parameter: Tensor, value: Mapping[Any, Any]) -> None:
        state = self[parameter]
        state.clear()
        state.update(value)

    def __delitem__(self, parameter: Tensor) -> None:
        held = self._held[parameter]
        self._shared.absence.note_change(f"the state of {self._names[parameter]}")
        if held is not None:
            del self._own[held]

    def clear(self) -> None:
        """Forgets the state of all parameters."""
        self._shared.absence.note_change("the state of the optimizer")
        self._own.clear()

    def __contains__(self, parameter: object) -> bool:
        self._require_known()
        held = self._held.get(parameter) if isinstance(parameter, Tensor) else None
        return held is not None and held in self._own

    def __iter__(self) -> Iterator[Tensor]:
        """Those that have state here, and those of which only other processes know."""
        return (each for each, held in self._held.items() if held is None or held in self._own)

    def __len__(self) -> int:
        self._require_known()
        return len(list(iter(self)))

    def _require_known(self) -> None:
        if not self._shared.shares_all:
            raise _state_refused("", self._shared.strategy.name)


class ParameterState(MutableMapping[Any, Any]):
    """The state of an optimizer for one parameter: tensors can be scaled and cleared, and not read.

    ``own`` is that of this process's part; None where others have all of it.
    """

    def __init__(
        self, shared: SharedGroups, own: MutableMapping[Any, Any] | None, name: str, parameter: Tensor
    ) -> None:
        self._shared, self._absence = shared, shared.absence
        self._own, self._name, self._parameter = own, name, parameter

    def __getitem__(self, key: Any) -> Any:
        value = None if self._own is None else self._own[key]
        if value is not None and self._shared.shares_all and not (isinstance(value, Tensor) and value.dim()):
            return value  # a count of steps, the same for every part
        part = value if isinstance(value, Tensor) else None
        return AbsentState(self._parameter, part, self._words(key), self._absence)

    def __setitem__(self, key: Any, value: Any) -> None:
        held = None if self._own is None else self._own.get(key)
        if isinstance(value, AbsentState) and value.held_part is held:
            return  # as state["momentum_buffer"] *= 0.5 does
        self._absence.note_change(self._words(key))
        if self._own is None:
            return
        if isinstance(value, Tensor) and value.shape == self._parameter.shape and value.dim():
            value = self._shared.strategy.local_shard(self._name, value)
        self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        self._absence.note_change(self._words(key))
        if self._own is not None:
            del self._own[key]

    def clear(self) -> None:
        """Forgets all of it."""
        self._absence.note_change(f"the state of {self._name}")
        if self._own is not None:
            self._own.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, key: object) -> bool:
        return key in self._known()

    def _words(self, key: Any) -> str:
        return f"{key!r} of {self._name!r}"

    def _known(self) -> Mapping[Any, Any]:
        if self._own is None or not self._shared.shares_all:
            raise _state_refused(f"for {self._name!r}", self._shared.strategy.name)
        return self._own


class AbsentState(AbsentTensor):
    """A tensor of an optimizer's state, of which this process has a part at most."""

    _part: Tensor | None

    def __new__(cls, parameter: Tensor, part: Tensor | None, name: str, absence: Absence) -> AbsentState:
        """Makes one like ``parameter``."""
        with torch._C.DisableTorchFunctionSubclass():
            form = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        device = torch.device("cpu") if part is None else part.device
        made = cls.make(form, name, device, absence)
        made._part = part
        if isinstance(parameter, AbsentTensor):
            made.part_of = parameter.part_of
        return made

    @property
    def held_part(self) -> Tensor | None:
        """See ``AbsentTensor``."""
        return self._part

    def refusal(self, names: str) -> ConfigError:
        """See ``AbsentTensor``."""
        return _state_refused(names, self.absence.strategy)


def _state_refused(name: str, strategy: str) -> ConfigError:
    return ConfigError(
        f"The optimizer's {f'state {name}'.rstrip()} was read, and under strategy {strategy!r} no process holds the "
        "state of all parameters whole. Scale it in place by its name, as in state['momentum_buffer'].mul_(0.5), "
        "forget it with optimizer.state.clear(), read it from a checkpoint of run.save(), or use strategy 'ddp'."
    )
