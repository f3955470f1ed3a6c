"""Objects that a job file gives by import path, and checks of them in source files, importing nothing.

What is certainly wrong is a problem; what the source does not say is left to the ranks, which look again.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from typing import Any

from lockstep.config.checks import KeyPath, Problem, absent_module, check_fields, import_path, nearest_name
from lockstep.config.static_names import Absent, Definition, StaticNames

_DEEPEST = 8
_GIVEN_BY_LOCKSTEP: dict[KeyPath, int] = {("optimizer",): 1, ("schedule",): 1}


@dataclass(frozen=True, kw_only=True)
class Component:
    """An import path and the keyword arguments of the call that makes the object.

    In a job file it is one table: ``target`` is the path and every other key an argument. An argument may be
    such a table too, which is made first; ``{object = "a.b:c"}`` stands for ``c`` as it is, not called.
    """

    target: str = field(metadata={"check": import_path})
    """Import path: ``package.module:name``."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name: texts, numbers, truth values, lists and tables."""

    def __post_init__(self) -> None:
        check_fields(self)


def preflight(components: Iterable[tuple[KeyPath, Component]], folders: Sequence[str] = ()) -> list[Problem]:
    """Everything about a job's components that their source shows to be wrong.

    Args:
        components: each with the key path of its table.
        folders: those of the user's own modules.
    """
    names = StaticNames(folders)
    return [
        problem for path, part in components for problem in _component(names, part.target, part.args, path)
    ]


def _component(names: StaticNames, target: str, args: Mapping[str, Any], path: KeyPath) -> Iterator[Problem]:
    found = _look_up(names, target)
    if isinstance(found, Absent):
        yield Problem((*path, "target"), f"is '{target}': {_absence(found)}")
    elif isinstance(found, Definition):
        signature = signature_of(names, found)
        if signature is not None:
            yield from argument_problems(signature, target, _GIVEN_BY_LOCKSTEP.get(path, 0), args, path)
    for key, value in args.items():
        yield from _nested(names, value, (*path, key))


def _nested(names: StaticNames, value: Any, path: KeyPath) -> Iterator[Problem]:
    if isinstance(value, Mapping) and "target" in value:
        args = {key: item for key, item in value.items() if key != "target"}
        yield from _component(names, value["target"], args, path)
    elif isinstance(value, Mapping) and "object" in value:
        found = _look_up(names, value["object"])
        if isinstance(found, Absent):
            yield Problem((*path, "object"), f"is '{value['object']}': {_absence(found)}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(names, item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _nested(names, item, (*path, number))


def _look_up(names: StaticNames, target: str) -> Definition | Absent | None:
    module, _, name = target.partition(":")
    if "." in name:
        spec = names.module(module)
        return None if isinstance(spec, ModuleSpec) else spec
    return names.definition(module, name)


def signature_of(names: StaticNames, found: Definition) -> Signature | None:
    """The signature of a plain function, or of a class through its ``__init__``; None where not certain."""
    node = found.node
    if node.decorator_list:
        return None
    if isinstance(node, ast.FunctionDef):
        return _read(node.args, skip=0)
    if _is_called_its_own_way(names, found):
        return None
    constructors = _methods(node, "__init__")
    if constructors:
        plain = [method for method in constructors if not method.decorator_list]
        return _read(plain[-1].args, skip=1) if len(plain) == 1 else None
    bases = _bases(names, found)
    return signature_of(names, bases[0]) if len(node.bases) == len(bases) == 1 else None


def _is_called_its_own_way(names: StaticNames, found: Definition, depth: int = 0) -> bool:
    """True where a class, or a base that is found, has a ``__new__`` or a metaclass other than the harmless ABCMeta."""
    node = found.node
    if not isinstance(node, ast.ClassDef) or depth > _DEEPEST:
        return True
    if _methods(node, "__new__") or any(
        not ast.unparse(item.value).endswith("ABCMeta") for item in node.keywords
    ):
        return True
    return any(_is_called_its_own_way(names, base, depth + 1) for base in _bases(names, found))


def _methods(node: ast.ClassDef, name: str) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name]


def _bases(names: StaticNames, found: Definition) -> list[Definition]:
    """The base classes that the source leads to."""
    assert isinstance(found.node, ast.ClassDef)
    given = [base.id for base in found.node.bases if isinstance(base, ast.Name)]
    looked_up = [names.definition(found.module, name) for name in given]
    return [base for base in looked_up if isinstance(base, Definition) and base.node is not found.node]


def _read(arguments: ast.arguments, skip: int) -> Signature:
    def parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
        return Parameter(argument.arg, kind, default=Parameter.empty if default is None else default)

    first = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(first) - len(arguments.defaults)), *arguments.defaults]
    by_position = (
        parameter(argument, Parameter.POSITIONAL_OR_KEYWORD, default)
        for argument, default in list(zip(first, defaults, strict=True))[skip:]
    )
    by_keyword = (
        parameter(argument, Parameter.KEYWORD_ONLY, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    others = [Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)] if arguments.kwarg else []
    return Signature([*by_position, *by_keyword, *others])


def argument_problems(
    signature: Signature, target: str, given: int, args: Mapping[str, Any], path: KeyPath
) -> Iterator[Problem]:
    """Arguments by name that a call would refuse, where Lockstep gives the first ``given`` by position."""
    parameters = list(signature.parameters.values())
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = by_position[:given]
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in by_name if p.name not in taken]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in args:
        if key in taken:
            yield Problem((*path, key), f"is given to {target} by Lockstep; leave it out.")
        elif key not in names and not takes_any:
            yield Problem((*path, key), f"is not an argument of {target}.{nearest_name(key, names)}")
    for each in by_name:
        if each.default is each.empty and each.name in names and each.name not in args:
            yield Problem((*path, each.name), f"is missing: {target} needs it.")


def _absence(absent: Absent) -> str:
    if not absent.holder:
        return absent_module(absent.name, (module.name for module in pkgutil.iter_modules()))
    return f"{absent.holder} has no {absent.name!r}.{nearest_name(absent.name, absent.known)}"
