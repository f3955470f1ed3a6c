"""Makes objects from import paths; every argument is checked against the signature before the call.

    {target = "torch.optim:SGD", lr = 0.1}  ->  import torch.optim, find SGD, check lr, SGD(weights, lr=0.1)

What cannot be found or does not fit is a ``ConfigError`` that names the part at fault and the nearest name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.config.checks import KeyPath, absent_module, nearest_name, refuse, spell
from lockstep.config.components import Component, argument_problems, given_to_functions, is_called_later
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime.error_record import is_transient, users_lines

_TRANSFORM_ARGUMENTS = ("transform", "target_transform")


@dataclass(frozen=True)
class Composed:
    """Applies transforms one after the other, to one value or to several (an image and its label)."""

    transforms: tuple[Any, ...]

    def __call__(self, *values: Any) -> Any:
        """The value after the last transform; a tuple where several were given."""
        for transform in self.transforms:
            values = (transform(*values),) if len(values) == 1 else tuple(transform(*values))
        return values[0] if len(values) == 1 else values


def instantiate(component: Component, *positional: Any, name: str = "", **values: Any) -> Any:
    """Calls what the component names and returns the result.

    Args:
        component: import path and arguments; tables among the arguments are made first. A list of tables
            given for an argument ``transform`` or ``target_transform`` becomes one that applies them in turn.
        positional: arguments that the job file does not give, such as the parameters for an optimizer.
        name: the component's place in the job file, for messages.
        values: further arguments by name, under those that the job file gives.
    """
    where = name or component.target
    function = find_object(component.target, where)
    if not callable(function):
        kind = "a module" if inspect.ismodule(function) else f"a value of type {type(function).__name__}"
        raise ConfigError(f"{where}: '{component.target}' is {kind} and cannot be called.")
    arguments = {
        **values,
        **{key: build(value, f"{where}.{key}", key) for key, value in component.args.items()},
    }
    _check_arguments(function, component.target, len(positional), arguments, where)
    shown = ", ".join(f"{key}={value!r:.60}" for key, value in arguments.items())
    with _explained(f"{where}: {component.target}({shown})"):
        return function(*positional, **arguments)


def instantiate_function(component: Component, path: KeyPath) -> Any:
    """Returns what is called later, such as a loss: the named function with its arguments, or what a call makes.

    Args:
        component: import path and arguments.
        path: the component's place in the job file.
    """
    where, given = spell(path), given_to_functions(path)
    function = find_object(component.target, where)
    if not inspect.isroutine(function):
        return instantiate(component, name=where)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return instantiate(component, name=where)
    if not is_called_later(signature, given, component.args):
        return instantiate(component, name=where)
    refuse(argument_problems(signature, component.target, given, component.args, path))
    arguments = {key: build(value, f"{where}.{key}", key) for key, value in component.args.items()}
    return functools.partial(function, **arguments) if arguments else function


def build(value: Any, where: str, argument: str = "") -> Any:
    """The value of one argument: tables with a ``target`` or ``object`` become what they stand for."""
    if isinstance(value, Mapping) and "target" in value:
        inner = {key: item for key, item in value.items() if key != "target"}
        return instantiate(Component(target=value["target"], args=inner), name=where)
    if isinstance(value, Mapping) and "object" in value:
        if len(value) > 1:
            raise ConfigError(f"{where}: a table with 'object' stands for the object itself and has no other key.")
        return find_object(value["object"], where)
    if isinstance(value, Mapping):
        return {key: build(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [build(item, f"{where}.{number}") for number, item in enumerate(value)]
        made = items and all(isinstance(item, Mapping) and {"target", "object"} & item.keys() for item in value)
        if made and argument in _TRANSFORM_ARGUMENTS:
            alone = [type(item).__name__ for item in items if not callable(item)]
            if len(items) > 1 and alone:
                raise ConfigError(f"{where}: give {alone[0]} alone; it is not a function of samples.")
            return items[0] if len(items) == 1 else Composed(tuple(items))
        return items
    return value


def find_object(path: str, where: str = "") -> Any:
    """The object at ``package.module:name``; the error names the part of the path that failed."""
    where = where or "import path"
    module_name, _, names = path.partition(":")
    found: Any = _import_module(module_name, path, where)
    for depth, name in enumerate(names.split(".")):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            holder = ".".join([module_name, *names.split(".")[:depth]])
            raise ConfigError(
                f"{where}: '{path}': {holder} has no {name!r}.{nearest_name(name, dir(found))}"
            ) from error
    return found


def _check_arguments(function: Any, path: str, given: int, arguments: Mapping[str, Any], where: str) -> None:
    """Refuses arguments that the call would refuse, before the call (``ConfigError``)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    refuse(argument_problems(signature, path, given, arguments, (where,)))


def importable_from(folders: Iterable[str]) -> None:
    """Puts the folders of a job's own modules at the head of the import path, once, in the order given."""
    for folder in reversed(dict.fromkeys(folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _import_module(module_name: str, path: str, where: str) -> Any:
    with _explained(f"{where}: '{path}': importing {module_name}"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            absent = error.name or module_name
            if module_name != absent and not module_name.startswith(absent + "."):
                raise ConfigError(f"{where}: '{path}' needs the module {absent!r}, which is not installed.") from error
            parent, _, last = absent.rpartition(".")
            folders = getattr(sys.modules.get(parent), "__path__", []) if parent else None
            known = [module.name for module in pkgutil.iter_modules(folders)]
            reason = absent_module(last, known)
            if parent:
                reason = f"{parent} has no module {last!r}.{nearest_name(last, known)}"
            raise ConfigError(f"{where}: '{path}': {reason}") from error


@contextmanager
def _explained(attempt: str) -> Iterator[None]:
    """A context in which an exception of the user's code becomes a sentence and the lines that it came through.

    One of a disk, a network or a device stays itself, so that the run may be restarted, and is told the attempt.

    Args:
        attempt: what was done, for whom, as the beginning of the sentence.
    """
    try:
        yield
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, SystemExit) and type(error) is not SystemExit:  # the run was asked to stop
            raise
        if is_transient(kind, message):
            error.add_note(f"{attempt} raised this.")
            raise
        ending = f"failed with {kind}{message and f': {message}'}"
        if isinstance(error, SystemExit):
            ending = f"ended the program with sys.exit({message}). It must return."
        raise ConfigError(f"{attempt} {ending}{users_lines(error)}") from error
