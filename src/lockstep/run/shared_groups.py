"""The groups and the state of an optimizer as the user sees them, where each process steps a part of the parameters.

The user's optimizer holds this process's parts. What the wrapped one shows are the parameters of the prepared model, so
that ``for p in group["params"]`` means the same as ``for p in model.parameters()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.strategies.optimizer_trial import Unit, refused_optimizer, try_optimizer


class SharedGroups:
    """What the wrapper of an optimizer shows and takes.

    Args:
        optimizer: the user's, which holds parts.
        members: the names of the parameters in each group; gets those of groups that are added.
        parameters: of the prepared model, by name.
        strategy: whose parts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: list[list[str]],
        parameters: Mapping[str, Tensor],
        strategy: Strategy,
    ) -> None:
        self._optimizer, self._members, self._parameters = optimizer, members, parameters
        self._strategy = strategy
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.is_whole = strategy.replicated
        """True if the optimizer holds the very parameters that the user sees."""
        self.has_values = all(type(each) is nn.Parameter for each in parameters.values())
        """True if every process has the values of all parameters between steps."""

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        members: list[list[str]],
        parameters: Mapping[str, Tensor],
        strategy: Strategy,
    ) -> SharedGroups | None:
        """The groups of an optimizer; None where processes are independent, which see their own parts."""
        return (
            None
            if isinstance(strategy, IndependentStrategy)
            else cls(optimizer, members, parameters, strategy)
        )

    def groups(self) -> list[Any]:
        """The groups, with the prepared model's parameters."""
        if self.is_whole:
            return self._optimizer.param_groups
        return FixedList(
            ParameterGroup(own, FixedList(self._parameters[name] for name in names))
            for own, names in zip(self._optimizer.param_groups, self._members)
        )

    def state(self) -> Any:
        """The state, by the prepared model's parameters."""
        if self.is_whole:
            return self._optimizer.state
        held = self._strategy.trainable()
        return SharedState(self._optimizer, {self._parameters[name]: held[name] for name in held})

    def forget_gradients(self) -> None:
        """Clears what parameters show as their gradients, where the optimizer holds others."""
        for name in {name for names in self._members for name in names}:
            if type(self._parameters[name]) is nn.Parameter:  # others show the gradient of what is held
                self._parameters[name].grad = None

    def add(self, group: Mapping[str, Any]) -> None:
        """Adds a group; see ``PreparedOptimizer.add_param_group``."""
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        names = [self._name(each[1] if isinstance(each, tuple) else each) for each in given]
        known = {name for names in self._members for name in names}
        held = self._parameters if self.is_whole else self._strategy.trainable()
        for name in names:
            if name in known:
                raise ConfigError(f"{name!r} is in a group of the optimizer already.")
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        here = [name for name in names if name in held]
        has_names = any("param_names" in each for each in self._optimizer.param_groups)
        parts = [(name, held[name]) if has_names else held[name] for name in here]
        self._optimizer.add_param_group({**own, "params": parts})
        self._members.append(names)
        self._require_parts(names)

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"add_param_group was given a tensor of shape {list(parameter.shape)} that was no parameter of the "
                "model when it was prepared, so nobody would sum its gradient over the ranks. Put the module into the "
                "model before run.prepare, and give add_param_group parameters of the model that it returned."
            )
        return name

    def _require_parts(self, names: list[str]) -> None:
        """Raises ``ConfigError`` where the optimizer, with its new group, must see more than processes hold."""
        if self._strategy.steps == Unit.MODEL or not set(names) - self._strategy.whole_parameters:
            return
        seen = [group["params"] for group in self.groups()]
        trial = try_optimizer(self._optimizer, self._strategy.device, seen)
        if trial.unit > self._strategy.steps:
            raise refused_optimizer(self._optimizer, trial, self._strategy.name)


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
    """The state of an optimizer by the prepared model's parameters; of each this process's part."""

    def __init__(self, optimizer: Optimizer, held: Mapping[Tensor, Tensor]) -> None:
        self._own, self._held = optimizer.state, held

    def __getitem__(self, parameter: Tensor) -> Any:
        held = self._held.get(parameter)
        return {} if held is None else self._own[held]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        if parameter in self._held:
            self._own[self._held[parameter]] = value

    def __delitem__(self, parameter: Tensor) -> None:
        if parameter in self._held:
            del self._own[self._held[parameter]]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter, held in self._held.items() if held in self._own)

    def __len__(self) -> int:
        return len(list(iter(self)))
