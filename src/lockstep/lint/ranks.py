"""Ranks in a script: which values are ranks, which conditions test a rank, and which ranks reach a line.

A value is *proved* to be a rank where it comes from ``get_rank()`` or the launcher's environment; elsewhere it may
be *called* one. Rules that object to a value want proof; conditions are taken by their name. A line is reached by the
ranks that the conditions around it, early returns before it, and the callers of its function let through.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from lockstep.lint.script import (
    FUNCTIONS,
    LOOPS,
    Function,
    Loop,
    Script,
    argument,
    arguments,
    constant,
    last_name,
    method,
)
from lockstep.text import grouped

GLOBAL, LOCAL = "global", "local"
FIRST, OTHERS = "first", "others"
_GLOBAL_NAMES = ("rank", "global_rank", "world_rank", "ddp_rank")
_LOCAL_NAMES = ("local_rank", "ddp_local_rank", "localrank")
_NAMES = dict.fromkeys(_GLOBAL_NAMES, GLOBAL) | dict.fromkeys(_LOCAL_NAMES, LOCAL)
_GLOBAL_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_ENVIRONMENT = dict.fromkeys(_GLOBAL_VARIABLES, GLOBAL) | dict.fromkeys(_LOCAL_VARIABLES, LOCAL)
_NUMBERS = ("gpu", "gpu_id", "device_id", "proc_id", "process_id", "process_index", "ngpu_id", "dist_id")
# fmt: off
_FIRST_NAMES = (
    "is_main_process", "is_main", "main_process", "is_master", "is_master_process", "master_process",
    "is_primary", "is_rank_0", "is_rank0", "is_rank_zero", "is_local_main_process", "is_chief", "is_root",
)
# fmt: on
_WRAPPERS = ("int", "str", "bool", "float")


def proved_rank(script: Script, node: ast.expr | None, depth: int = 4) -> str:
    """``global`` or ``local`` where the value surely is that rank; empty otherwise."""
    if isinstance(node, ast.Call):
        name = script.name(node)
        if name == "torch.distributed.get_rank" and not node.args and not node.keywords:
            return GLOBAL
        if name in _WRAPPERS and len(node.args) == 1:
            return proved_rank(script, node.args[0], depth)
        if name in ("os.getenv", "os.environ.get") and node.args:
            return _ENVIRONMENT.get(str(constant(node.args[0])), "")
    if isinstance(node, ast.Subscript) and script.name(node.value) == "os.environ":
        return _ENVIRONMENT.get(str(constant(node.slice)), "")
    if isinstance(node, ast.Name | ast.Attribute) and depth:
        # A plain number or None says 'one process'.
        plain = ast.Constant | ast.UnaryOp
        values = [v for v in script.values(node) if not isinstance(v, plain) or _number(v) not in (None, 0, -1)]
        kinds = {proved_rank(script, value, depth - 1) for value in values}
        return kinds.pop() if len(kinds) == 1 else ""
    return ""


def rank_kind(script: Script, node: ast.expr) -> str:
    """``global`` or ``local`` where the value is proved to be a rank, or called one; empty otherwise."""
    if proved := proved_rank(script, node):
        return proved
    if isinstance(node, ast.Call):
        called = script.name(node).rpartition(".")[2] or last_name(node.func)
        return {"get_rank": GLOBAL, "get_global_rank": GLOBAL, "get_local_rank": LOCAL}.get(called, "")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return LOCAL if rank_kind(script, node.left) else ""
    return _NAMES.get(lower_name(node), "")


def mentions_rank(script: Script, node: ast.expr | None) -> bool:
    """Returns True where a rank is anywhere in the expression or in what its names were set to."""
    return any(rank_kind(script, part) for part in script.sources(node))


def rank_test(script: Script, test: ast.expr, depth: int = 3) -> str:
    """``first`` where only one rank (of the world or of a host) passes a test, ``others`` where only it does not."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        flipped = {FIRST: OTHERS, OTHERS: FIRST, "": ""}
        return FIRST if rank_kind(script, test.operand) else flipped[rank_test(script, test.operand, depth)]
    if isinstance(test, ast.BoolOp):
        kinds = {rank_test(script, part, depth) for part in test.values}
        if FIRST in kinds:
            return FIRST
        return OTHERS if OTHERS in kinds and isinstance(test.op, ast.And) else ""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compare(script, test.left, test.ops[0], test.comparators[0])
    return _named(script, test, depth)


def tests_local_only(script: Script, test: ast.expr) -> bool:
    """Returns True where the ranks that a test compares are all local ones: one process of each host passes."""
    kinds = {rank_kind(script, part) for part in ast.walk(test) if isinstance(part, ast.expr)} - {""}
    return kinds == {LOCAL}


def _compare(script: Script, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
    if not numbers_processes(script, left):
        left, right = right, left
    if not numbers_processes(script, left):
        return ""
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple | ast.Set):
        held = {_number(item) for item in right.elts}
        return "" if 0 not in held or len(held - {-1}) > 1 else FIRST if isinstance(op, ast.In) else OTHERS
    number = _number(right)
    if isinstance(op, ast.Gt) and number == 0:
        return OTHERS
    if isinstance(op, ast.LtE | ast.Lt) and number == (1 if isinstance(op, ast.Lt) else 0):
        return FIRST
    known = {ast.Eq: FIRST, ast.NotEq: OTHERS} if number is not None and number >= 0 else {}
    return known.get(type(op), "")


def numbers_processes(script: Script, node: ast.expr) -> bool:
    """Returns True where a value is a rank, or is called as a number is that processes are told apart by."""
    called = lower_name(node)
    return bool(rank_kind(script, node)) or called in _NUMBERS or "rank" in called


def lower_name(node: ast.expr) -> str:
    """The last name of a value, in lower case: ``rank`` of ``rank``, ``args.rank`` and ``config["rank"]``."""
    if isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
        return str(constant(node.slice)).lower()
    return last_name(node).lower()


def _named(script: Script, test: ast.expr, depth: int) -> str:
    """Returns what a name such as ``is_main`` or a call such as ``is_main_process()`` tests."""
    if isinstance(test, ast.Call):
        return FIRST if last_name(test.func) in _FIRST_NAMES else ""
    if isinstance(test, ast.Name | ast.Attribute) and depth:
        values = [value for value in script.values(test) if not isinstance(value, ast.Constant)]
        kinds = {rank_test(script, value, depth - 1) if value is not None else "" for value in values}
        if len(kinds) == 1:
            return kinds.pop()
        if last_name(test).lower() in _FIRST_NAMES:
            return FIRST
        return OTHERS if rank_kind(script, test) else ""
    return ""


def _number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return value if isinstance(value, int) else int(value) if value in ("0", "1", "-1") else None


_ENTRIES = ("main", "train", "run", "main_worker", "worker")
_LEAVES = (ast.Return, ast.Continue, ast.Raise)
_ONE_RANK_DECORATORS = ("rank_zero", "rank0", "main_process", "master_only", "on_main")


def conditions(script: Script, node: ast.AST) -> Iterator[tuple[ast.If | ast.IfExp, str, bool]]:
    """The rank tests around a node in its function: (statement, first or others, whether in its body)."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, Function | ast.ClassDef | ast.Lambda):
            return
        if isinstance(ancestor, ast.If | ast.IfExp) and child is not ancestor.test:
            kind = rank_test(script, ancestor.test)
            if kind:
                body = ancestor.body if isinstance(ancestor.body, list) else [ancestor.body]
                yield ancestor, kind, any(item is child for item in body)


def on_one_rank(script: Script, node: ast.AST, depth: int = 4) -> bool:
    """Returns True where only one rank can reach a node: by a test, an early return, a decorator or every caller."""
    is_tested = any((kind == FIRST) == inside for _, kind, inside in conditions(script, node))
    if is_tested or _after_return_of_others(script, node) or _after_and(script, node):
        return True
    function = script.scope(node)
    return not isinstance(function, ast.Module) and depth > 0 and _called_on_one_rank(script, function, depth)


@lru_cache(maxsize=10_000)
def _called_on_one_rank(script: Script, function: Function, depth: int) -> bool:
    words = [script.text(decorator).lower() for decorator in function.decorator_list]
    if any(mark in word for word in words for mark in _ONE_RANK_DECORATORS):
        return True
    callers = callers_of(script, function)
    return bool(callers) and all(on_one_rank(script, caller, depth - 1) for caller in callers)


def callers_of(script: Script, function: Function) -> list[ast.Call]:
    """The calls in this file of a function or method, taken by its name, but for calls of itself.

    Those of a method are no calls of a function: ``model.train()`` is none of ``def train(model)``.
    """
    found = script.calls_by_name.get(_called_as(script, function), [])
    found = found if script.class_of(function) else [call for call in found if not method(call)]
    return [call for call in found if script.scope(call) is not function]


def places_of(script: Script, node: ast.expr | ast.stmt) -> list[ast.expr | ast.stmt]:
    """A node, and the calls in this file of the function that it stands in."""
    function = next(script.around(node, FUNCTIONS), None)
    return [node, *(callers_of(script, function) if function is not None else ())]


def loops_around(script: Script, node: ast.AST, depth: int = 3) -> list[Loop]:
    """The loops that a node runs in, from the inside out, through the calls of its function in this file."""
    found = list(script.around(node, LOOPS))
    function = next(script.around(node, FUNCTIONS), None)
    for caller in callers_of(script, function) if function is not None and depth else ():
        if outer := loops_around(script, caller, depth - 1):
            return list(dict.fromkeys([*found, *outer]))
    return found


def runs_on_ranks(script: Script, node: ast.AST) -> bool:
    """Returns False where a node runs only in a parent process that spawns the ranks."""
    reached = _functions_of_ranks(script)
    return reached is None or any(ancestor in reached for ancestor, _ in script.ancestors(node))


def is_used_here(script: Script, node: ast.AST) -> bool:
    """Returns True where this file runs a node: in the module, in a function it calls or passes on, or in ``main``."""
    function = script.scope(node)
    if isinstance(function, ast.Module) or function.name in _ENTRIES or callers_of(script, function):
        return True
    given = (item for call in script.calls for item in arguments(call))
    return any(isinstance(item, ast.Name) and item.id == _called_as(script, function) for item in given)


@lru_cache(maxsize=4)
def _functions_of_ranks(script: Script) -> frozenset[Function] | None:
    """Returns all functions that the targets of spawn reach; None where nothing is spawned."""
    pending = [last_name(target) for target in _spawned(script)]
    if not pending:
        return None
    named = grouped((_called_as(script, function), function) for function in script.functions)
    called: dict[Function, set[str]] = {}
    for call in script.calls:
        for function in script.around(call, FUNCTIONS):
            called.setdefault(function, set()).add(last_name(call.func))
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
        target = argument(call, "target") if name == "Process" else argument(call, "fn", 0)
        if name in ("spawn", "start_processes", "Process") and target is not None:
            yield target


def _after_return_of_others(script: Script, node: ast.AST) -> bool:
    """Returns True below ``if rank != 0: return`` (or ``continue``, or ``raise``) in a block around the node."""
    for ancestor, child in script.ancestors(node):
        before = [item for item in _statements_before(ancestor, child) if isinstance(item, ast.If)]
        if any(isinstance(item.body[-1], _LEAVES) and _stops_others(script, item) for item in before):
            return True
        if isinstance(ancestor, Function):
            return False
    return False


def _statements_before(parent: ast.AST, child: ast.AST) -> list[ast.stmt]:
    """The statements that stand before a child in its block."""
    for _, block in ast.iter_fields(parent):
        if isinstance(block, list):
            for index, entry in enumerate(block):
                if entry is child:
                    return block[:index] if isinstance(child, ast.stmt) else []
    return []


def _stops_others(script: Script, statement: ast.If) -> bool:
    """Returns True where only one rank comes past: the others leave here, or every run of several ranks does."""
    text = script.text(statement.test)
    alone = "world_size" in text and any(text.endswith(end) for end in ("!= 1", "> 1", ">= 2"))
    return alone or rank_test(script, statement.test) == OTHERS


def _after_and(script: Script, node: ast.AST) -> bool:
    """Returns True where the node is what ``rank == 0 and ...`` goes on to."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.BoolOp) and isinstance(ancestor.op, ast.And):
            before = ancestor.values[: next(i for i, part in enumerate(ancestor.values) if part is child)]
            if any(rank_test(script, part) == FIRST for part in before):
                return True
        if isinstance(ancestor, ast.stmt):
            return False
    return False
