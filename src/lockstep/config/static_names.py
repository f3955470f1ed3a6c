"""Finds a module's file and a name's definition in its source, without importing either.

Importing ``torch.optim`` takes a second and may do anything; reading ``torch/optim/__init__.py`` and then
following ``from torch.optim.sgd import SGD`` takes milliseconds. Where the source does not settle a question
(a C extension, a decorator, a name that is made at run time) the answer is None, never a guess.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_DEEPEST = 8


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
        spec = self._top_level(top)
        if not isinstance(spec, ModuleSpec):
            return spec
        holder = top
        for part in rest:
            places = spec.submodule_search_locations
            inner = PathFinder.find_spec(f"{holder}.{part}", list(places)) if places is not None else None
            if inner is None:
                bindings = self._bindings(holder, spec)
                if bindings is None or bindings.dynamic or {part, "__path__"} & bindings.nodes.keys():
                    return None
                return Absent(holder, part, tuple(_modules_in(spec)))
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

    def _bound(
        self, nodes: list[ast.AST], module: str, spec: ModuleSpec, name: str, depth: int
    ) -> Definition | None:
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

    def _top_level(self, name: str) -> ModuleSpec | Absent | None:
        try:
            spec = PathFinder.find_spec(name, self._folders) or importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        return spec or Absent("", name, ())

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
    bindings = _Bindings(
        dynamic=any(mark in text for mark in (b"globals()", b"sys.modules", b"exec(", b"vars()"))
    )
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
