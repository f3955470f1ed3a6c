"""A training script as the rules see it: read from disk, parsed, never imported.

From top to bottom: reading and parsing a file (any file gives a script or a ``ConfigError``), the ``Script`` with its
parents, functions, calls and assignments, the arguments of a call, and names as Python would resolve them:
``dist.barrier`` is ``torch.distributed.barrier``.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from lockstep.config.checks import near_path
from lockstep.errors import ConfigError
from lockstep.text import grouped

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
FUNCTIONS: tuple[type[Function], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS: tuple[type[Loop], ...] = (ast.For, ast.While)
N = TypeVar("N", bound=ast.AST)
MOST_BYTES = 5_000_000
_COUNTING = ("range", "trange", "count")
_AROUND = ("enumerate", "tqdm", "iter")
_LOADER = re.compile(r"load|dl$|batches", re.IGNORECASE)
"""Names of what a loop over batches reads, through any function."""
_MOST_VALUES = 16
"""A name that is set more often is taken for one whose value cannot be seen."""


def read_text(path: str) -> str:
    """The text of a Python file. ``ConfigError`` for a folder, a notebook, a binary or an unknown encoding."""
    file = Path(path)
    if file.suffix == ".ipynb":
        raise ConfigError(
            f"{path} is a notebook. Write its cells to a script first: jupyter nbconvert --to script {path}"
        )
    try:
        if file.is_dir():
            raise ConfigError(f"{path} is a folder without Python files. Name a script.")
        if not file.is_file():
            hint = near_path(path) or " Give the path of a Python script."
            raise ConfigError(f"{path} does not exist, or is not a file.{hint}")
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes; which is too long for a script.")
    if b"\0" in data:
        raise ConfigError(f"{path} contains zero bytes, so it is not Python source. Save it as UTF-8.")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise ConfigError(f"{path} cannot be decoded: {error}. Save it as UTF-8.") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str, path: str) -> Script:
    """The script. ``ConfigError`` with the line where Python itself does not understand the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Script(text)
    except SyntaxError as error:
        where = f":{error.lineno}" if error.lineno else ""
        raise ConfigError(f"{path}{where} is not valid Python 3: {str(error.msg).rstrip('?')}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid Python source: {error}.") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is nested too deeply to parse.") from error


class Script:
    """One Python file, parsed; nothing of it is ever imported or run."""

    def __init__(self, text: str) -> None:
        """Parses the text. ``SyntaxError``, ``ValueError`` or ``RecursionError`` where Python refuses it."""
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported = imported_names(self.tree)
        self._texts: dict[ast.AST, str] = {}
        self._scopes: dict[ast.AST, Scope] = {}

    @cached_property
    def words(self) -> frozenset[str]:
        """Every identifier, attribute, keyword and string of the file, without docstrings."""
        words: set[str] = set()
        documented = {node.value for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            match node:
                case ast.Constant() if node in documented:
                    continue
                case ast.Name(id=str(word)) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                    words.add(word)
                case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
                    words.add(word)
                case ast.arg(arg=word) | ast.keyword(arg=str(word)):
                    words.add(word)
                case ast.alias(name=name):
                    words.update(name.split("."))
        return frozenset(words)

    @cached_property
    def imported_roots(self) -> frozenset[str]:
        """The packages that anything in the file is imported from."""
        return frozenset(name.partition(".")[0] for name in self._imported.values())

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call of the file, in the order of the lines."""
        return sorted(self.find(ast.Call), key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        """The calls of each last name: ``save`` for ``save(x)`` and ``self.save(x)``."""
        return grouped((last_name(call.func), call) for call in self.calls)

    @cached_property
    def names(self) -> dict[str, list[ast.Name]]:
        """All nodes of each name, read or set."""
        return grouped((node.id, node) for node in self.find(ast.Name))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method of the file."""
        return self.find(*FUNCTIONS)

    @cached_property
    def _assigned(self) -> dict[tuple[Scope | None, str], list[ast.expr | None]]:
        """Values given to a name, by function and name; by no function for attributes such as ``args.gpu``."""
        return grouped(
            ((self.scope(node) if isinstance(target, ast.Name) else None, self.text(target)), value)
            for node in self.nodes
            for target, value in bindings(node)
        )

    def find(self, *kinds: type[N]) -> list[N]:
        """The nodes of some kinds, the outer ones first."""
        return [node for node in self.nodes if isinstance(node, kinds)]

    def name(self, node: ast.AST) -> str:
        """The dotted name of an expression with imports resolved; of a call, the name of what is called."""
        return dotted(node.func if isinstance(node, ast.Call) else node, self._imported)

    def text(self, node: ast.AST) -> str:
        """The expression as one line of source."""
        if node not in self._texts:
            self._texts[node] = ast.unparse(node)
        return self._texts[node]

    def mentions(self, *parts: str) -> bool:
        """Returns True where any identifier or string of the file contains one of the parts (lower case)."""
        return any(part in word.lower() for word in self.words for part in parts)

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Calls of things with one of these full names: ``torch.load``."""
        return [call for call in self.calls if self.name(call) in names]

    def torch_calls(self, *names: str, within: str = "torch.") -> list[ast.Call]:
        """Calls of torch's own things with one of these last names: ``DataLoader``, ``all_reduce``."""
        of_torch = [call for call in self.calls if self.name(call).startswith(within)]
        return [call for call in of_torch if self.name(call).rpartition(".")[2] in names]

    def method_calls(self, *names: str) -> list[ast.Call]:
        """Calls of a method of this name on anything: ``loss.backward()``."""
        found = [call for name in names for call in self.calls_by_name.get(name, []) if method(call)]
        return found if len(names) == 1 else sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def owner(self, call: ast.Call) -> str:
        """The object of a method call, as text: ``self.loss`` for ``self.loss.backward()``."""
        return self.text(receiver(call))

    def in_loop_with(self, node: ast.AST, calls: Iterable[ast.Call]) -> bool:
        """Returns True where a loop around a node holds one of the calls."""
        return any(self.holds(loop, call) for call in calls for loop in self.around(node, LOOPS))

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node that holds this one."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(ancestor, its child on the way to the node), from the inside out."""
        child, parent = node, self._parents.get(node)
        while parent is not None:
            yield parent, child
            child, parent = parent, self._parents.get(parent)

    def around(self, node: ast.AST, kinds: type[N] | tuple[type[N], ...], within_function: bool = False) -> Iterator[N]:
        """The ancestors of some kinds, from the inside out; ``within_function`` ends at the first function."""
        for ancestor, _ in self.ancestors(node):
            if within_function and isinstance(ancestor, Function):
                return
            if isinstance(ancestor, kinds):
                yield ancestor

    def tests_around(self, node: ast.AST) -> Iterator[ast.expr]:
        """The tests of the conditions in whose branches a node stands, from the inside out."""
        for ancestor, child in self.ancestors(node):
            if isinstance(ancestor, ast.If | ast.IfExp) and child is not ancestor.test:
                yield ancestor.test

    def is_tried(self, node: ast.AST) -> bool:
        """Returns True where a ``try`` around a node catches what it raises."""
        return any(isinstance(each, ast.Try) and child in each.body for each, child in self.ancestors(node))

    def scope(self, node: ast.AST) -> Scope:
        """The function whose body holds the node; the module where there is none."""
        if node not in self._scopes:
            self._scopes[node] = next(self.around(node, FUNCTIONS), self.tree)
        return self._scopes[node]

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that a node stands in."""
        return next(self.around(node, ast.ClassDef), None)

    def statement(self, node: ast.expr) -> ast.stmt | None:
        """The statement that an expression is part of."""
        return next(self.around(node, ast.stmt), None)

    def holds(self, outer: ast.AST, node: ast.AST) -> bool:
        """Returns True where one node stands anywhere inside another."""
        return any(ancestor is outer for ancestor, _ in self.ancestors(node))

    def same_function(self, one: ast.AST, other: ast.AST) -> bool:
        """Returns True where both nodes belong to one function (or both to the module)."""
        return self.scope(one) is self.scope(other)

    def exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Returns True where the nodes stand in different branches of one ``if`` or ``try``, so that never both run."""
        way = {id(ancestor): child for ancestor, child in self.ancestors(one)}
        for ancestor, child in self.ancestors(other):
            if id(ancestor) in way:
                return _apart(ancestor, way[id(ancestor)], child)
        return False

    def follows(self, late: ast.expr | ast.stmt, early: ast.expr | ast.stmt) -> bool:
        """Returns True where ``late`` stands below ``early`` in one function, and one run can pass both."""
        below = (late.lineno, late.col_offset) > (early.lineno, early.col_offset)
        return below and self.same_function(late, early) and not self.exclusive(late, early)

    def values(self, node: ast.expr) -> list[ast.expr | None]:
        """All that a name or attribute is ever set to; None for a value that cannot be seen (a loop, a tuple)."""
        found: list[ast.expr | None] | None = None
        if isinstance(node, ast.Attribute):
            found = self._assigned.get((None, self.text(node)))
        elif isinstance(node, ast.Name):
            for scope in (*self.around(node, FUNCTIONS), self.tree):
                found = self._assigned.get((scope, node.id))
                if found is not None or (isinstance(scope, Function) and node.id in parameters(scope)):
                    break
        return [None] if found and len(found) > _MOST_VALUES else found or []

    def sources(self, node: ast.expr | None, depth: int = 4, seen: set[ast.AST] | None = None) -> Iterator[ast.expr]:
        """The expression, its parts, and the parts of what its names were set to, ``depth`` steps back."""
        seen = set() if seen is None else seen
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.expr) and part not in seen:
                seen.add(part)
                yield part
                for value in self.values(part) if depth else ():
                    yield from self.sources(value, depth - 1, seen)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument of a call by its name, else by its position; None where it is not given in the open."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and len(call.args) > position:
        found = call.args[position]
        return None if isinstance(found, ast.Starred) else found
    return None


def arguments(call: ast.Call) -> list[ast.expr]:
    """All that a call is given, by position and by name."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def is_open(call: ast.Call) -> bool:
    """Returns True where all arguments of a call can be seen: no ``*args`` and no ``**settings``."""
    hidden = any(keyword.arg is None for keyword in call.keywords)
    return not hidden and not any(isinstance(item, ast.Starred) for item in call.args)


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None for anything else (and for None)."""
    return node.value if isinstance(node, ast.Constant) else None


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, in order."""
    spec = function.args
    return [item.arg for item in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]


def receiver(call: ast.Call) -> ast.expr:
    """The object of a method call; of a plain call, the called expression."""
    return call.func.value if isinstance(call.func, ast.Attribute) else call.func


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Returns the full name of each imported name, at any depth of the file; relative imports keep their dots."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                names[alias.asname or alias.name] = f"{module}.{alias.name}"
    return names


def dotted(node: ast.AST, imported: dict[str, str]) -> str:
    """The dotted name of a chain of attributes, imports resolved; empty where the chain holds a call."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(imported.get(node.id, node.id))
    return ".".join(reversed(parts))


def last_name(node: ast.AST) -> str:
    """The last name of a chain: ``rank`` of ``args.rank`` and of ``rank``; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    """The names that an expression reads or sets."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def renamed(text: str, names: dict[str, str]) -> str:
    """The text of an expression with other names, but for those of attributes and keywords."""
    old = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w.])({old})(?![\w=])", lambda found: names[found[0]], text)


def bar_of(script: Script, node: ast.AST) -> ast.Call | None:
    """The call that a name stands for in a loop: ``tqdm(loader)`` of ``bar = tqdm(loader)``."""
    line, values = getattr(node, "lineno", 0), script.values(node) if isinstance(node, ast.Name) else []
    match [each for each in values if each and each.lineno <= line and not script.holds(each, node)]:
        case [*_, ast.Call(func=function) as call] if last_name(function) in (*_AROUND, *_COUNTING):
            return call
    return None


def read_by(script: Script, node: ast.expr) -> list[ast.expr]:
    """The data that a loop reads, out of ``enumerate``, ``tqdm``, ``zip`` and what else is given a loader first."""
    node = bar_of(script, node) or node
    if isinstance(node, ast.Call) and node.args and last_name(node.func) not in _COUNTING:
        if last_name(node.func) == "zip":
            return [each for part in node.args for each in read_by(script, part)]
        loaders = [each for each in node.args if _LOADER.search(last_name(each))]
        if read := node.args if last_name(node.func) in _AROUND else loaders:
            return read_by(script, read[0])
    return [node]


def range_of(script: Script, loop: Loop) -> ast.Call | None:
    """The ``range(...)``, or the sampler, whose numbers a loop goes over; None for other loops."""
    match read_by(script, loop.iter) if isinstance(loop, ast.For) else []:
        case [ast.Call(func=f) as call, *_] if last_name(f) in _COUNTING or last_name(f).endswith("Sampler"):
            return call
    return None


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """(target, value) of an assignment; a value that is unpacked or looped over is None."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.AugAssign(target=target, op=op, value=value):
            yield target, ast.copy_location(ast.BinOp(target, op, value), node)
        case ast.For(target=target) | ast.AsyncFor(target=target) | ast.comprehension(target=target):
            yield from _pairs(target, None)
        case ast.withitem(ast.Call(func=f) as value, optional_vars=ast.expr() as target):
            yield from _pairs(target, value if last_name(f) in (*_AROUND, *_COUNTING) else None)
        case ast.withitem(optional_vars=ast.expr() as target):
            yield from _pairs(target, None)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    values: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
        values = list(value.elts)
    for item, part in zip(target.elts, values, strict=True):
        yield from _pairs(item, part)


def method(call: ast.Call) -> str:
    """The name of the method that a call is of; empty for a plain call."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _apart(ancestor: ast.AST, one: ast.AST, other: ast.AST) -> bool:
    """Returns True where two children of a statement are in branches of which only one runs."""
    fields = {_field(ancestor, one), _field(ancestor, other)}
    if isinstance(ancestor, ast.Try):
        return "handlers" in fields and "finalbody" not in fields and len(fields) == 2
    return isinstance(ancestor, ast.If | ast.IfExp) and fields == {"body", "orelse"}


def _field(ancestor: ast.AST, child: ast.AST) -> str:
    """The part of a statement that holds the child: ``test``, ``body``, ``orelse``."""
    for field, value in ast.iter_fields(ancestor):
        if value is child or (isinstance(value, list) and any(item is child for item in value)):
            return field
    return ""
