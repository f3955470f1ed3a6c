"""Which ranks reach a line: rank tests around it, early returns, and the callers of its function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from lockstep.lint.names import last_name
from lockstep.lint.ranks import FIRST, OTHERS, rank_test
from lockstep.lint.script import Function, Script, argument, arguments

_ENTRIES = ("main", "train", "run", "main_worker", "worker")
_LEAVES = (ast.Return, ast.Continue, ast.Raise)


def conditions(script: Script, node: ast.AST) -> Iterator[tuple[ast.If | ast.IfExp, str, bool]]:
    """The rank tests around a node in its function: (statement, first or others, whether in its body)."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            return
        if isinstance(ancestor, ast.If | ast.IfExp) and child is not ancestor.test:
            kind = rank_test(script, ancestor.test)
            if kind:
                body = ancestor.body if isinstance(ancestor.body, list) else [ancestor.body]
                yield ancestor, kind, any(item is child for item in body)


def on_one_rank(script: Script, node: ast.AST, depth: int = 4) -> bool:
    """Whether only one rank can reach a node: by a test, an early return, a decorator, or by every caller."""
    for _, kind, inside in conditions(script, node):
        if (kind == FIRST) == inside:
            return True
    if _after_return_of_others(script, node) or _after_and(script, node):
        return True
    function = script.scope(node)
    return not isinstance(function, ast.Module) and depth > 0 and _called_on_one_rank(script, function, depth)


@lru_cache(maxsize=10_000)
def _called_on_one_rank(script: Script, function: Function, depth: int) -> bool:
    if any(_says_one_rank(script, decorator) for decorator in function.decorator_list):
        return True
    callers = callers_of(script, function)
    return bool(callers) and all(on_one_rank(script, caller, depth - 1) for caller in callers)


def callers_of(script: Script, function: Function) -> list[ast.Call]:
    """The calls in this file of a function or method, taken by its name, but for calls of itself."""
    found = script.calls_by_name.get(_called_as(script, function), [])
    return [call for call in found if script.scope(call) is not function]


def runs_on_ranks(script: Script, node: ast.AST) -> bool:
    """Whether a node runs in the ranks, not only in a parent that spawns them; True where nothing is spawned."""
    reached = _functions_of_ranks(script)
    return reached is None or any(ancestor in reached for ancestor, _ in script.ancestors(node))


def is_used_here(script: Script, node: ast.AST) -> bool:
    """Whether this file itself runs a node: on its own lines, in a function it calls or hands on, or in ``main``."""
    function = script.scope(node)
    if isinstance(function, ast.Module) or function.name in _ENTRIES or callers_of(script, function):
        return True
    given = (item for call in script.calls for item in arguments(call))
    return any(isinstance(item, ast.Name) and item.id == _called_as(script, function) for item in given)


@lru_cache(maxsize=4)
def _functions_of_ranks(script: Script) -> frozenset[Function] | None:
    """What the targets of spawn call, step by step; None where nothing is spawned."""
    pending = [last_name(target) for target in _spawned(script)]
    if not pending:
        return None
    named: dict[str, list[Function]] = {}
    for function in script.functions:
        named.setdefault(_called_as(script, function), []).append(function)
    called: dict[Function, set[str]] = {}
    for call in script.calls:
        for ancestor, _ in script.ancestors(call):
            if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef):
                called.setdefault(ancestor, set()).add(last_name(call.func))
    reached: set[Function] = set()
    while pending:
        new = [function for function in named.get(pending.pop(), []) if function not in reached]
        reached.update(new)
        pending += [name for function in new for name in called.get(function, set())]
    return frozenset(reached)


def _called_as(script: Script, function: Function) -> str:
    """The name that a call runs the function by: that of the class for ``__init__``."""
    parent = script.parent(function)
    return parent.name if function.name == "__init__" and isinstance(parent, ast.ClassDef) else function.name


def _spawned(script: Script) -> Iterator[ast.expr]:
    for call in script.calls:
        name = script.name(call).rpartition(".")[2]
        if name in ("spawn", "start_processes") or name == "Process":
            target = argument(call, "target" if name == "Process" else "fn", None if name == "Process" else 0)
            if target is not None:
                yield target


def _after_return_of_others(script: Script, node: ast.AST) -> bool:
    """Whether ``if rank != 0: return`` (or ``continue``, or ``raise``) stands before the node in a block around it."""
    for ancestor, child in script.ancestors(node):
        for block in _blocks(ancestor):
            if not any(item is child for item in block):
                continue
            for item in block[: next(i for i, entry in enumerate(block) if entry is child)]:
                if (
                    isinstance(item, ast.If)
                    and isinstance(item.body[-1], _LEAVES)
                    and _stops_others(script, item)
                ):
                    return True
        if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
    return False


def _stops_others(script: Script, statement: ast.If) -> bool:
    """Whether only one rank comes past: the others leave here, or every run of several ranks does."""
    text = script.text(statement.test)
    alone = "world_size" in text and any(text.endswith(end) for end in ("!= 1", "> 1", ">= 2"))
    return alone or rank_test(script, statement.test) == OTHERS


def _after_and(script: Script, node: ast.AST) -> bool:
    """Whether the node is what ``rank == 0 and ...`` goes on to."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.BoolOp) and isinstance(ancestor.op, ast.And):
            for part in ancestor.values:
                if part is child:
                    break
                if rank_test(script, part) == FIRST:
                    return True
        if isinstance(ancestor, ast.stmt):
            return False
    return False


def _says_one_rank(script: Script, decorator: ast.expr) -> bool:
    words = script.text(decorator).lower()
    return any(word in words for word in ("rank_zero", "rank0", "main_process", "master_only", "on_main"))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
