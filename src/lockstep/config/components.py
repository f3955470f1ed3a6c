"""Objects that a job file gives by import path, and checks of them in source files, importing nothing.

Importing ``torch.optim`` takes a second and may do anything; reading ``torch/optim/__init__.py`` and then following
``from torch.optim.sgd import SGD`` takes milliseconds. What is certainly wrong is a problem. Where the source does not
settle a question (a C extension, a decorator, a name that is made at run time) the answer is None, never a guess: the
ranks look again.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature, formatannotation
from pathlib import Path
from typing import Any

from lockstep.config.checks import (
    CheckedOptions,
    KeyPath,
    Problem,
    absent_module,
    import_path,
    nearest_name,
    spell,
)
from lockstep.core.users_code import LIBRARIES
from lockstep.errors import nearest

_DEEPEST = 8
_GIVEN_BY_LOCKSTEP: dict[KeyPath, int] = {("optimizer",): 1, ("schedule",): 1}
_GIVEN_TO_FUNCTIONS = {"loss": 2, "metrics": 2, "data.collate": 1}
"""By the place in a job: what a function is called with, which is then the part itself; see ``is_called_later``."""


@dataclass(frozen=True, kw_only=True)
class Component(CheckedOptions):
    """An import path and the keyword arguments of the call that makes the object.

    In a job file it is one table: ``target`` is the path and every other key an argument. An argument may be
    such a table too, which is made first; ``{object = "a.b:c"}`` stands for ``c`` as it is, not called.
    """

    target: str = field(metadata={"check": import_path})
    """Import path: ``package.module:name``."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name: strings, numbers, booleans, lists and tables."""


def origins(components: Iterable[tuple[KeyPath, Component]], folders: Sequence[str] = ()) -> list[str]:
    """The files that a job's components are imported from, as in ``my_model from /home/u/my_model.py``; imports none.

    Installed packages, Python's modules and Lockstep are left out; ``folders`` are searched first.
    """
    names, lines = StaticNames(folders), []
    for top in sorted({part.target.partition(":")[0].partition(".")[0] for _, part in components}):
        spec = names.module(top)
        place = (spec.origin or "a folder") if isinstance(spec, ModuleSpec) else "a place that is not found"
        if top != __package__.partition(".")[0] and not place.startswith(LIBRARIES):
            lines.append(f"{top} from {place}")
    return lines


def preflight(components: Iterable[tuple[KeyPath, Component]], folders: Sequence[str] = ()) -> list[Problem]:
    """Everything about a job's components that their source shows to be wrong.

    Args:
        components: each with the key path of its table.
        folders: those of the user's own modules.
    """
    names = StaticNames(folders)
    return [problem for path, part in components for problem in _component(names, part.target, part.args, path)]


def _component(names: StaticNames, target: str, args: Mapping[str, Any], path: KeyPath) -> Iterator[Problem]:
    found = _look_up(names, target)
    if isinstance(found, Absent):
        yield Problem((*path, "target"), f"is '{target}': {_absence(found)}")
    elif isinstance(found, Definition):
        signature = signature_of(names, found)
        if signature is not None:
            given, later = _GIVEN_BY_LOCKSTEP.get(path, 0), given_to_functions(path)
            if isinstance(found.node, ast.FunctionDef) and is_called_later(signature, later, args):
                given = later
            yield from argument_problems(signature, target, given, args, path)
    for key, value in args.items():
        yield from _nested(names, value, (*path, key))


def is_called_later(signature: Signature, given: int, args: Mapping[str, Any]) -> bool:
    """True for a function that needs what Lockstep calls it with, as ``cross_entropy(input, target)`` does.

    Any other one, and every class, makes the part when it is called with the arguments of the job.
    """
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty and p.name not in args]) >= given > 0


def given_to_functions(path: KeyPath) -> int:
    """How many values a function at this place of a job is called with; 0 where it is called to make the part."""
    return next((n for key, n in _GIVEN_TO_FUNCTIONS.items() if spell(path).startswith(key)), 0)


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
    if _methods(node, "__new__") or any(not ast.unparse(item.value).endswith("ABCMeta") for item in node.keywords):
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
        annotation = Parameter.empty if argument.annotation is None else ast.unparse(argument.annotation)
        value = Parameter.empty if default is None else default
        return Parameter(argument.arg, kind, default=value, annotation=annotation)

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
        else:
            parameter = next((p for p in by_name if p.name == key), Parameter(key, Parameter.KEYWORD_ONLY))
            if problem := _value_problem(parameter, args[key], target, of_optimizer=path == ("optimizer",)):
                yield Problem((*path, key), problem)
    for each in by_name:
        if each.default is each.empty and each.name in names and each.name not in args:
            yield Problem((*path, each.name), f"is missing: {target} needs it.")


def _value_problem(parameter: Parameter, value: Any, target: str, *, of_optimizer: bool) -> str | None:
    """The words for a value of another kind than its parameter takes, as far as annotation and default tell that."""
    default = parameter.default
    default = default.value if isinstance(default, ast.Constant) else default
    if problem := _boolean_as_text(value, default):
        return problem
    is_number = _is_number(parameter) or (of_optimizer and type(default) in (int, float))
    is_other = _is_plain_text(value) or isinstance(value, bool)
    if is_number and is_other and not isinstance(default, str | bool):
        found = f"the text {value!r}" if isinstance(value, str) else str(value).lower()
        example = "1" if "int" in _annotation(parameter) else "0.1"
        return f"is {found}, and {target} takes a number, such as {example}."
    known = _literals(parameter)
    if known and _is_plain_text(value) and value not in known:
        return f"is {value!r}, which {target} does not know.{nearest(value, known)}"
    return None


def _is_number(parameter: Parameter) -> bool:
    """True where the annotation of a parameter names numbers and None only, as ``int | None`` does."""
    found = set(re.findall(r"\w+", _annotation(parameter))) - {"typing", "Optional", "Union", "None"}
    return bool(found) and found <= {"int", "float"}


def _literals(parameter: Parameter) -> list[str]:
    """The texts that a parameter takes where its annotation lists them, as ``Literal["auto", "seed"]`` does."""
    found = re.fullmatch(r"(?:typing\.)?Literal\[([^][]*)\]", _annotation(parameter))
    try:
        values = ast.literal_eval(f"({found[1]},)") if found else ()
    except (ValueError, SyntaxError):
        return []
    return list(values) if all(isinstance(value, str) for value in values) else []


def _annotation(parameter: Parameter) -> str:
    """The annotation of a parameter as it is written; empty where it has none."""
    given = parameter.annotation
    return "" if given is parameter.empty else given if isinstance(given, str) else formatannotation(given)


def _is_plain_text(value: Any) -> bool:
    """True for a text that stands for nothing else, as ``{steps}`` does."""
    return isinstance(value, str) and not (value.startswith("{") and value.endswith("}"))


def _boolean_as_text(value: Any, default: Any) -> str | None:
    """The problem with a text that stands for true or false: Python takes every text but the empty one as true.

    Args:
        value: an argument of a component.
        default: that of its parameter.
    """
    if not isinstance(value, str):
        return None
    is_flag = isinstance(default, bool)
    spelled = ("true", "false", "yes", "no", "on", "off")
    if value not in ("True", "False") and not (is_flag and value.lower() in spelled):
        return None
    meant = "true" if value.lower() in ("true", "yes", "on") else "false"
    return f"is the text {value!r}, which Python takes as true. Write {meant}, in lower case and without quotes."


def _absence(absent: Absent) -> str:
    if not absent.holder:
        return absent_module(absent.name, (module.name for module in pkgutil.iter_modules()))
    return f"{absent.holder} has no {absent.name!r}.{nearest_name(absent.name, absent.known)}"


@dataclass(frozen=True)
class Absent:
    """The source says that it is not there."""

    holder: str
    """The package or module in which it was looked for; empty: among all top-level modules."""
    name: str
    """The name that was looked up."""
    known: tuple[str, ...]
    """The names that exist."""


@dataclass(frozen=True)
class Definition:
    """A function or class, and the module that it is written in."""

    module: str
    node: ast.FunctionDef | ast.ClassDef


@dataclass
class _Bindings:
    """The names that a module binds at its top level."""

    nodes: dict[str, list[ast.AST]] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)
    dynamic: bool = False


class StaticNames:
    """Looks names up in source files.

    Args:
        folders: searched before ``sys.path`` for top-level modules.
    """

    def __init__(self, folders: Sequence[str] = ()) -> None:
        self._folders = list(folders)
        self._parsed: dict[str, _Bindings | None] = {}

    def module(self, name: str) -> ModuleSpec | Absent | None:
        """The spec of a module; Python's own finders look up its top-level package only."""
        top, *rest = name.split(".")
        try:
            spec = PathFinder.find_spec(top, self._folders) or importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return Absent("", top, ())
        holder = top
        for part in rest:
            places = spec.submodule_search_locations
            # By the last part of its name: Python looks for the parents of a folder without __init__.py among those
            # that are imported.
            inner = PathFinder.find_spec(part, list(places)) if places is not None else None
            if inner is None:
                bindings = self._bindings(holder, spec)
                if bindings is None or bindings.dynamic or {part, "__path__"} & bindings.nodes.keys():
                    return None
                # Of a single file, its path, for example where that hides a package of the same name.
                place = holder if places is not None else str(spec.origin)
                return Absent(place, part, tuple(_modules_in(spec)))
            spec, holder = inner, f"{holder}.{part}"
        return spec

    def definition(self, module: str, name: str, depth: int = 0) -> Definition | Absent | None:
        """The definition of a module's name, followed through imports from other modules."""
        spec = self.module(module)
        if not isinstance(spec, ModuleSpec):
            return spec
        bindings = self._bindings(module, spec)
        if bindings is None or depth > _DEEPEST:
            return None
        nodes = bindings.nodes.get(name, [])
        if nodes:
            return self._bound(nodes, module, spec, name, depth)
        known = set(bindings.nodes)
        for star in bindings.stars:
            found = self.definition(_source_of(star, module, spec), name, depth + 1)
            if not isinstance(found, Absent):
                return found
            known.update(found.known)
        is_module = spec.submodule_search_locations and name in _modules_in(spec)
        if bindings.dynamic or is_module:
            return None
        return Absent(module, name, tuple(sorted(known)))

    def _bound(self, nodes: list[ast.AST], module: str, spec: ModuleSpec, name: str, depth: int) -> Definition | None:
        node = nodes[0]
        if len(nodes) > 1:
            return None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            found = self.definition(_source_of(node, module, spec), original, depth + 1)
            return None if isinstance(found, Absent) else found
        return None

    def _bindings(self, module: str, spec: ModuleSpec) -> _Bindings | None:
        if module not in self._parsed:
            self._parsed[module] = _read_bindings(spec)
        return self._parsed[module]


def _read_bindings(spec: ModuleSpec) -> _Bindings | None:
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        text = Path(spec.origin).read_bytes()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    marks = b"globals()", b"sys.modules", b"exec(", b"vars()"
    bindings = _Bindings(dynamic=any(mark in text for mark in marks))
    for node in _top_level_statements(tree.body):
        _note(node, bindings)
    bindings.dynamic = bindings.dynamic or "__getattr__" in bindings.nodes
    return bindings


def _top_level_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those inside its ``if``, ``try``, ``with`` and loops."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for part in getattr(node, inner, []):
                    yield from _top_level_statements([part] if isinstance(part, ast.stmt) else part.body)


def _note(node: ast.stmt, bindings: _Bindings) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        bindings.nodes.setdefault(node.name, []).append(node)
    elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        bindings.stars.append(node)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            bindings.nodes.setdefault(alias.asname or alias.name.split(".")[0], []).append(node)
    else:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                bindings.nodes.setdefault(part.id, []).append(node)


def _source_of(node: ast.ImportFrom, module: str, spec: ModuleSpec) -> str:
    """The absolute name of the module that a ``from ... import`` reads."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if spec.submodule_search_locations is not None else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _modules_in(spec: ModuleSpec) -> list[str]:
    found = set()
    for place in spec.submodule_search_locations or ():
        if Path(place).is_dir():
            for path in Path(place).iterdir():
                if path.suffix == ".py" or (path.is_dir() and path.name.isidentifier()):
                    found.add(path.stem)
    return sorted(found - {"__init__", "__pycache__"})
