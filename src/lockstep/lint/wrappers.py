"""The calls by which a script runs on several ranks: model wrappers, process group, libraries, reductions."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep.lint.script import Script, argument

DDP, DP, FSDP = "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"
_ROOTS = ("torch", "apex")
# fmt: off
_MANAGED = (
    "accelerate", "colossalai", "composer", "deepspeed", "fairscale", "horovod", "ignite", "lightning",
    "lightning_fabric", "lockstep", "pytorch_lightning", "ray",
)
# fmt: on


@dataclass(frozen=True)
class Wrap:
    """One call that wraps a model."""

    kind: str
    call: ast.Call
    source: str
    """The wrapped expression, as text: ``model``."""
    target: str
    """The name that the wrapped model is assigned to; empty where there is none."""
    certain: bool
    """True outside of every ``if`` and ``try`` of its function."""


def wraps(script: Script, *kinds: str) -> list[Wrap]:
    """The wraps of these kinds, in the order of the lines."""
    found = []
    for call in script.calls:
        first, _, rest = script.name(call).partition(".")
        kind = rest.rpartition(".")[2]
        module = argument(call, "module", 0)
        if first in _ROOTS and kind in kinds and module is not None:
            statement, target = script.statement(call), ""
            if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1:
                target = script.text(statement.targets[0])
            branches = script.around(call, (ast.If, ast.IfExp, ast.Try), within_function=True)
            certain = all(_is_main_guard(branch) for branch in branches)
            found.append(Wrap(kind, call, script.text(module), target, certain))
    return found


def starts_group(script: Script) -> list[ast.Call]:
    """The calls that start torch's process group."""
    return script.torch_calls("init_process_group")


def leaves_files(script: Script) -> bool:
    """Returns True where the file starts the ranks by torch alone, or by Lockstep, which leaves files to scripts."""
    return bool(runs_of(script)) or (bool(starts_group(script)) and not is_managed(script))


def runs_of(script: Script) -> list[str]:
    """The names of the runs of Lockstep that the file begins; ``run`` where it does not say."""
    begun = script.calls_of("lockstep.init")
    named = {node.value: script.text(node.targets[0]) for node in script.find(ast.Assign)}
    named |= {
        each.context_expr: script.text(each.optional_vars)
        for each in script.find(ast.withitem)
        if each.optional_vars
    }
    return [named.get(call, "run") for call in begun]


def is_managed(script: Script) -> bool:
    """Returns True where a library that takes over these duties is imported: Accelerate, DeepSpeed, Lightning, ..."""
    return not script.imported_roots.isdisjoint(_MANAGED)


def is_distributed(script: Script) -> bool:
    """Returns True where the file itself shows that it runs on several ranks, by torch alone."""
    shown = starts_group(script) or wraps(script, DDP, FSDP) or script.torch_calls("DistributedSampler")
    return bool(shown) and not is_managed(script)


def reduces(script: Script) -> bool:
    """Returns True where anything in the file could combine the values of several ranks."""
    parts = ("reduce", "gather", "synchron", "sync_", "average_across", "broadcast", "dist_mean")
    others = ("broadcast_buffers", "reducelronplateau", "sync_b", "syncb")
    words = (word.lower() for word in script.words)
    return any(part in word for word in words for part in parts if not any(other in word for other in others))


def _is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )
