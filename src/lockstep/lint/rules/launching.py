"""Rules on how the processes are started, how they meet, and how they end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.script import Script, argument, constant
from lockstep.lint.wrappers import is_managed, starts_group

_ADDRESS = re.compile(r"tcp://[^{}]*:([1-9]\d*)$")


@rule(
    "LS015",
    "hard-coded-port",
    "The port of the rendezvous is a number in the script: two runs on a host collide.",
)
def hard_coded_port(script: Script) -> Iterator[Hit]:
    """MASTER_PORT assigned without a look at what the launcher has set, or a literal init_method."""
    ports = [n for n in script.nodes if isinstance(n, ast.Assign) and _is_port(script, n.targets[0])]
    for node in ports:
        if str(_text(node.value)).isdigit() and not _is_fallback(script, node):
            yield Hit(
                node,
                "a second run on this host fails with 'address already in use', and a launcher's own "
                "choice is overwritten.",
                "delete the line and start with: lockstep run SCRIPT (or torchrun --standalone)",
            )
    for call in starts_group(script):
        method = argument(call, "init_method", 1)
        if method is not None and _ADDRESS.search(str(constant(method))):
            yield Hit(
                method,
                "a second run on this host fails with 'address already in use'.",
                'init_method="env://"  # the launcher chooses the port',
            )


@rule(
    "LS016",
    "local-rank-option-only",
    "The local rank is read only from --local_rank, which torchrun does not pass: every process takes the default.",
)
def local_rank_option_only(script: Script) -> Iterator[Hit]:
    """Needs the process group in the same file, where LOCAL_RANK could have been read."""
    if not starts_group(script) or is_managed(script):
        return
    found = (
        node for node in script.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    overwritten = any(".local_rank" in script.text(target) for node in found for target in node.targets)
    if overwritten or any("LOCAL_RANK" in word for word in script.words):
        return
    for call in script.method_calls("add_argument"):
        if any(constant(item) in ("--local_rank", "--local-rank") for item in call.args):
            yield Hit(
                call,
                "torchrun sets LOCAL_RANK and passes no such option, so every process gets the default.",
                'local_rank = int(os.environ["LOCAL_RANK"])',
            )


@rule(
    "LS017",
    "spawn-without-main-guard",
    "Processes are spawned outside of if __name__ == '__main__': each child imports the file and spawns again.",
)
def spawn_without_main_guard(script: Script) -> Iterator[Hit]:
    """Only torch.multiprocessing's spawn on the module's own lines."""
    for call in script.calls:
        if script.name(call) not in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
            continue
        ways = [ancestor for ancestor, _ in script.ancestors(call)]
        inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)
        if not any(isinstance(way, inside) for way in ways):
            yield Hit(
                call,
                "each child imports this file and comes past this line again: RuntimeError in every child.",
                'if __name__ == "__main__":  # above this line',
            )


@rule(
    "LS018",
    "group-not-destroyed",
    "The process group is started and never destroyed: threads and sockets are left to the end of the process.",
)
def group_not_destroyed(script: Script) -> Iterator[Hit]:
    """Only in a file that is a program of its own, not in a module of helpers."""
    calls = starts_group(script)
    if not calls or script.mentions("destroy_process_group") or is_managed(script):
        return
    program = any(constant(node) == "__main__" for node in script.nodes)
    if program or isinstance(script.scope(calls[0]), ast.Module):
        yield Hit(
            calls[0],
            "this group is never destroyed: torch warns of leaked resources, and a rank that fails can leave "
            "the others waiting.",
            "torch.distributed.destroy_process_group()  # last line, in a finally",
        )


def _is_port(script: Script, target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Subscript)
        and constant(target.slice) == "MASTER_PORT"
        and script.name(target.value) == "os.environ"
    )


def _text(value: ast.expr) -> object:
    """The literal, also within ``str(...)``."""
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    return constant(value)


def _is_fallback(script: Script, node: ast.Assign) -> bool:
    """Whether the line runs only where nothing else has set the port, or where there is one process."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.ExceptHandler):
            return True
        if isinstance(ancestor, ast.If) and child is not ancestor.test:
            words = script.text(ancestor.test)
            if any(
                word in words for word in ("MASTER_", "environ", "RANK", "SLURM", "debug", "is None", "WORLD")
            ):
                return True
    return False
