"""What in a script is a rank, and what a test of it lets through.

A value is *proved* to be a rank where it comes from ``get_rank()`` or the launcher's environment; elsewhere it may
be *called* one. Rules that object to a value want proof; conditions are taken by their name.
"""

from __future__ import annotations

import ast

from lockstep.lint.names import last_name
from lockstep.lint.script import Script, constant

GLOBAL, LOCAL = "global", "local"
FIRST, OTHERS = "first", "others"
_ENVIRONMENT = {
    "RANK": GLOBAL,
    "SLURM_PROCID": GLOBAL,
    "OMPI_COMM_WORLD_RANK": GLOBAL,
    "LOCAL_RANK": LOCAL,
    "SLURM_LOCALID": LOCAL,
    "OMPI_COMM_WORLD_LOCAL_RANK": LOCAL,
}
_RANK_NAMES = {"rank": GLOBAL, "global_rank": GLOBAL, "world_rank": GLOBAL, "ddp_rank": GLOBAL}
_LOCAL_NAMES = {"local_rank": LOCAL, "ddp_local_rank": LOCAL, "localrank": LOCAL}
_NAMES = _RANK_NAMES | _LOCAL_NAMES
_NUMBERS = frozenset(
    {"gpu", "gpu_id", "device_id", "proc_id", "process_id", "process_index", "ngpu_id", "dist_id"}
)
_FIRST_NAMES = frozenset(
    {
        "is_main_process",
        "is_main",
        "main_process",
        "is_master",
        "is_master_process",
        "master_process",
        "is_primary",
        "is_rank_0",
        "is_rank0",
        "is_rank_zero",
        "is_local_main_process",
        "is_chief",
        "is_root",
    }
)
_WRAPPERS = frozenset({"int", "str", "bool", "float"})


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
        values = [value for value in script.values(node) if not _is_default(value)]
        kinds = {proved_rank(script, value, depth - 1) for value in values}
        return kinds.pop() if len(kinds) == 1 else ""
    return ""


def rank_kind(script: Script, node: ast.expr | None) -> str:
    """``global`` or ``local`` where the value is proved to be a rank, or called one; empty otherwise."""
    if node is None:
        return ""
    proved = proved_rank(script, node)
    if proved:
        return proved
    if isinstance(node, ast.Call):
        called = script.name(node).rpartition(".")[2] or last_name(node.func)
        return {"get_rank": GLOBAL, "get_global_rank": GLOBAL, "get_local_rank": LOCAL}.get(called, "")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return LOCAL if rank_kind(script, node.left) else ""
    return _NAMES.get(_called(node), "")


def mentions_rank(script: Script, node: ast.expr) -> bool:
    """Whether a rank is anywhere in the expression or in what its names were set to."""
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
    """Whether the ranks that a test compares are all local ones: one process of each host passes."""
    kinds = {rank_kind(script, part) for part in ast.walk(test) if isinstance(part, ast.expr)} - {""}
    return kinds == {LOCAL}


def _compare(script: Script, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
    if not _numbers_processes(script, left):
        left, right = right, left
    if not _numbers_processes(script, left):
        return ""
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple | ast.Set):
        held = {_number(item) for item in right.elts}
        return "" if 0 not in held or len(held - {-1}) > 1 else FIRST if isinstance(op, ast.In) else OTHERS
    number = _number(right)
    if isinstance(op, ast.Gt) and number == 0:
        return OTHERS
    if isinstance(op, ast.LtE | ast.Lt) and number == (1 if isinstance(op, ast.Lt) else 0):
        return FIRST
    known = number is not None and number >= 0
    return (
        "" if not known else FIRST if isinstance(op, ast.Eq) else OTHERS if isinstance(op, ast.NotEq) else ""
    )


def _numbers_processes(script: Script, node: ast.expr) -> bool:
    """Whether a value is a rank, or is called as a number is that processes are told apart by."""
    called = _called(node)
    return bool(rank_kind(script, node)) or called in _NUMBERS or "rank" in called


def _called(node: ast.expr) -> str:
    """What a value is called, in lower case: ``rank`` of ``rank``, ``args.rank`` and ``config["rank"]``."""
    if isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
        return str(constant(node.slice)).lower()
    return last_name(node).lower()


def _named(script: Script, test: ast.expr, depth: int) -> str:
    """What a name such as ``is_main`` or a call such as ``is_main_process()`` tests."""
    if isinstance(test, ast.Call):
        called = last_name(test.func)
        return FIRST if called in _FIRST_NAMES else ""
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


def _is_default(value: ast.expr | None) -> bool:
    """Whether a value is a plain number or None, which says 'one process'."""
    return isinstance(value, ast.Constant | ast.UnaryOp) and _number(value) in (None, 0, -1)
