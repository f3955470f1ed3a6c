"""Which names a statement sets, and to what."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """(target, value) of an assignment; a value that is unpacked or looped over is None."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _pairs(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _pairs(node.optional_vars, None)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    values: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
        values = list(value.elts)
    for item, part in zip(target.elts, values, strict=True):
        yield from _pairs(item, part)
