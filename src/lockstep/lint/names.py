"""Names as Python would resolve them: ``dist.barrier`` is ``torch.distributed.barrier``."""

from __future__ import annotations

import ast


def imported_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, at any depth of the file; relative imports keep their dots."""
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


def words_of(tree: ast.Module) -> frozenset[str]:
    """Every identifier, attribute, keyword and string of a file."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
        elif isinstance(node, ast.alias):
            words.update(node.name.split("."))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            words.add(node.name)
        elif isinstance(node, (ast.arg, ast.keyword)):
            words.add(node.arg or "")
    return frozenset(words)
