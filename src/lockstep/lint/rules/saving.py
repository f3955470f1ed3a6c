"""Rules on checkpoints: who writes them, what is in them, where they are loaded to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.ranks import FIRST, mentions_rank, tests_local_only
from lockstep.lint.reach import conditions, is_used_here, on_one_rank, runs_on_ranks
from lockstep.lint.script import Script, argument, arguments, is_open, receiver
from lockstep.lint.wrappers import DDP, DP, Wrap, is_distributed, is_managed, starts_group, wraps

_CHECKPOINT = re.compile(r"check|ckpt|resume|pretrain|weight|state|model|snapshot|\bcp\b", re.IGNORECASE)
_HANDLES_MODULE = (
    "module.",
    "without_ddp",
    "unwrap",
    "de_parallel",
    "consume_prefix",
    "raw_model",
    "get_model",
)


@rule("LS050", "save-on-every-rank", "Every rank writes the same checkpoint file at the same time.")
def save_on_every_rank(script: Script) -> Iterator[Hit]:
    """Not where a rank test stands around the call or around all calls of its function, or in the path."""
    for call in _saves(script):
        path = argument(call, "f", 1)
        if path is None or mentions_rank(script, path) or on_one_rank(script, call):
            continue
        if runs_on_ranks(script, call) and is_used_here(script, call) and not _is_in_memory(script, path):
            yield Hit(
                call,
                "every rank writes this file at the same time: it can end torn, or mixed of several writers.",
                f"if torch.distributed.get_rank() == 0: {script.text(call)}",
            )


@rule(
    "LS051",
    "save-on-every-host",
    "A checkpoint is saved where the local rank is 0: with several hosts one process of each writes the same file.",
)
def save_on_every_host(script: Script) -> Iterator[Hit]:
    """Only where no test of the global rank stands around it as well."""
    for call in _saves(script):
        tests = [s.test for s, kind, inside in conditions(script, call) if (kind == FIRST) == inside]
        path = argument(call, "f", 1)
        named = path is not None and any("host" in script.text(part) for part in script.sources(path))
        if tests and all(tests_local_only(script, test) for test in tests) and not named:
            yield Hit(
                call,
                f"'{script.text(tests[0])}' holds on every host, so with several hosts each writes this file.",
                "if torch.distributed.get_rank() == 0:",
            )


@rule(
    "LS052",
    "wrapped-state-saved",
    "The state of the wrapped model is saved: every key begins with module., and the plain model cannot load it.",
)
def wrapped_state_saved(script: Script) -> Iterator[Hit]:
    """Only where nothing in the file takes the wrapper off, when saving or when loading."""
    wrapped = {wrap.target: wrap for wrap in wraps(script, DDP, DP) if wrap.target}
    if script.mentions(*_HANDLES_MODULE) or "module" in script.words or is_managed(script):
        return
    for call in script.method_calls("state_dict"):
        model = script.text(receiver(call))
        wrap = wrapped.get(model)
        if wrap is None or call.args or not _is_saved(script, call) or not _reached(script, call, wrap.call):
            continue
        always = wrap.certain or _wraps_in_every_branch(script, wrap)
        if always and _is_loaded(script, model, wrap):
            continue
        yield Hit(
            call,
            f"{model} is wrapped in {wrap.kind} in line {wrap.call.lineno}: the saved names begin with 'module.' "
            + ("and the plain model refuses them." if always else "in some runs and not in others."),
            f"getattr({model}, 'module', {model}).state_dict()",
        )


@rule(
    "LS053",
    "load-without-map-location",
    "A checkpoint is loaded without map_location: every rank loads it to the GPU that it was saved from.",
)
def load_without_map_location(script: Script) -> Iterator[Hit]:
    """In files that show that they run on several ranks, for what is called a checkpoint or a state."""
    if not (is_distributed(script) or wraps(script, DDP)):
        return
    for call in script.calls:
        if (
            script.name(call) != "torch.load"
            or not is_open(call)
            or argument(call, "map_location", 1) is not None
        ):
            continue
        statement = script.statement(call)
        words = script.text(statement) if isinstance(statement, ast.Assign | ast.Expr) else script.text(call)
        if not _CHECKPOINT.search(words.replace("torch.load", "")) or "load_state_dict" not in script.words:
            continue
        path = argument(call, "f", 0)
        own = path is not None and mentions_rank(script, path)
        if not own and not _has_mapped_twin(script, call) and not on_one_rank(script, call):
            yield Hit(
                call,
                "every rank loads this to the GPU it was saved from, mostly the first, which runs out of memory.",
                f"{script.text(call)[:-1]}, map_location='cpu')",
            )


def _has_mapped_twin(script: Script, call: ast.Call) -> bool:
    """Whether the other branch of a condition around the call loads with map_location."""
    loads = [other for other in script.calls if script.name(other) == "torch.load"]
    return any(script.exclusive(call, o) and argument(o, "map_location", 1) is not None for o in loads)


def _saves(script: Script) -> list[ast.Call]:
    """torch.save in a file that starts the process group itself."""
    if not starts_group(script) or is_managed(script):
        return []
    return [call for call in script.calls if script.name(call) == "torch.save"]


def _is_in_memory(script: Script, path: ast.expr) -> bool:
    """Whether what is written to is no file but a buffer."""
    return any(
        isinstance(part, ast.Call) and "BytesIO" in script.text(part.func) for part in script.sources(path)
    )


def _is_loaded(script: Script, model: str, wrap: Wrap) -> bool:
    """Whether a state is loaded into the wrapped model, by itself or by a function that it is given to."""
    for call in script.calls:
        name = last_name(call.func).lower()
        taken = name == "load_state_dict" and script.text(receiver(call)) == model
        handed = any(word in name for word in ("load", "resume", "restart", "restore"))
        given = handed and any(
            script.text(part) == model for item in arguments(call) for part in ast.walk(item)
        )
        if (taken or given) and _reached(script, call, wrap.call):
            return True
    return False


def _wraps_in_every_branch(script: Script, wrap: Wrap) -> bool:
    """Whether every branch of the condition around the wrap wraps the model in something."""
    calls = {other.call for other in wraps(script, DDP, DP) if other.target == wrap.target}

    def covers(block: list[ast.stmt]) -> bool:
        for item in block:
            if isinstance(item, ast.Assign) and item.value in calls:
                return True
            if isinstance(item, ast.If) and item.orelse and covers(item.body) and covers(item.orelse):
                return True
        return False

    outer = [ancestor for ancestor, _ in script.ancestors(wrap.call) if isinstance(ancestor, ast.If)]
    return bool(outer) and covers([outer[-1]])


def _is_saved(script: Script, call: ast.Call) -> bool:
    """Whether the state goes into a save call, or into a dictionary."""
    for ancestor, _ in script.ancestors(call):
        if isinstance(ancestor, ast.Dict):
            return any("save" in word for word in script.words)
        if isinstance(ancestor, ast.Call):
            return "save" in script.text(ancestor.func).lower()
        if isinstance(ancestor, ast.stmt):
            return False
    return False


def _reached(script: Script, call: ast.Call, wrap: ast.Call) -> bool:
    """Whether the name that is saved is the one that was wrapped: one function, wrapped above."""
    return script.follows(call, wrap) or (
        isinstance(script.scope(wrap), ast.Module) and "model" not in _parameters(script, call)
    )


def _parameters(script: Script, node: ast.AST) -> list[str]:
    function = script.scope(node)
    return [] if isinstance(function, ast.Module) else [item.arg for item in function.args.args]
