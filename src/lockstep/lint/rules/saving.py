"""Rules on what one rank should do for all (logs, downloads, folders) and on saving and loading checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import (
    FIRST,
    conditions,
    is_used_here,
    mentions_rank,
    on_one_rank,
    runs_on_ranks,
    tests_local_only,
)
from lockstep.lint.script import Script, argument, arguments, constant, is_open, last_name, method, receiver
from lockstep.lint.wrappers import (
    DDP,
    DP,
    Wrap,
    is_distributed,
    is_managed,
    leaves_files,
    reduces,
    runs_of,
    wraps,
)

_LOGS = ("add_scalar", "add_scalars", "log_metric", "log_metrics")
_MAKERS = ("os.makedirs", "os.mkdir")
_CHECKPOINT = re.compile(r"check|ckpt|resume|pretrain|weight|state|model|snapshot|\bcp\b", re.IGNORECASE)
# fmt: off
_HANDLES_MODULE = (
    "module.", "without_ddp", "unwrap", "de_parallel", "consume_prefix", "raw_model", "get_model",
)
# fmt: on


@rule("LS054", "The loss of one rank's samples is logged as if it were that of all.")
def loss_of_one_rank_logged(script: Script) -> Iterator[Hit]:
    """TensorBoard, wandb and mlflow, where nothing in the file brings the ranks' values together; once a file."""
    if not wraps(script, DDP) or is_managed(script) or reduces(script):
        return
    for call in script.calls:
        if method(call) not in _LOGS and script.name(call) not in ("wandb.log", "mlflow.log_metric"):
            continue
        if _logs_trained_loss(script, call):
            yield Hit(
                call,
                "this is the loss of one rank's samples, and nothing in the file reduces it over the ranks.",
                "torch.distributed.all_reduce(loss_sum); torch.distributed.all_reduce(count)  # log loss_sum / count",
            )
            return


@rule("LS055", "Every rank opens a log of its own: N runs in wandb, N writers in one folder.")
def tracker_on_every_rank(script: Script) -> Iterator[Hit]:
    """Not where the rank decides, or is part of the name of the log."""
    if not leaves_files(script):
        return
    for call in script.calls:
        name = script.name(call)
        if name != "wandb.init" and not (name.endswith(".SummaryWriter") and "tensorboard" in name.lower()):
            continue
        own = any(mentions_rank(script, item) for item in arguments(call))
        if not own and argument(call, "group") is None and _by_all(script, call):
            yield Hit(
                call,
                "every rank runs this line and opens a log of its own.",
                f"if {_first(script)}: {script.text(call)}",
            )


@rule("LS056", "Every rank downloads the data set into the same folder at the same time.")
def download_on_every_rank(script: Script) -> Iterator[Hit]:
    """Not under a rank test, not under a lock, not before the ranks are spawned."""
    barriers = script.torch_calls("barrier")
    for call in script.calls if leaves_files(script) else ():
        wanted = constant(argument(call, "download")) is True
        if not wanted or not script.name(call).startswith(("torchvision.", "torchaudio.")):
            continue
        above = any(each.lineno < call.lineno and script.same_function(each, call) for each in barriers)
        ordered = any(script.around(call, ast.With)) or above
        if not ordered and runs_on_ranks(script, call) and not on_one_rank(script, call):
            yield Hit(
                call,
                "all ranks download and unpack into this folder at once, and read each other's half-written files.",
                "download=False, and download it once, before the ranks start",
            )


@rule("LS057", "Every rank makes a folder that was not there a moment ago: another rank can make it in between.")
def folder_made_by_several_ranks(script: Script) -> Iterator[Hit]:
    """makedirs() without exist_ok, also below a test of exists(), reached by all ranks."""
    if not leaves_files(script):
        return
    for call in script.calls:
        if script.name(call) not in _MAKERS or argument(call, "exist_ok", 2) is not None:
            continue
        path = call.args[0] if call.args else None
        excused = script.is_tried(call) or mentions_rank(script, path) or on_one_rank(script, call)
        if not excused and runs_on_ranks(script, call):
            yield Hit(
                call,
                "another rank can have made the folder just before: FileExistsError.",
                f"os.makedirs({script.text(path) if path else 'folder'}, exist_ok=True)",
            )


def _logs_trained_loss(script: Script, call: ast.Call) -> bool:
    """Returns True where a logged value is a loss with ``backward()`` in the same function, or a meter of it."""
    losses = {
        part.id
        for backward in script.method_calls("backward")
        if script.same_function(backward, call)
        for part in ast.walk(receiver(backward))
        if isinstance(part, ast.Name) and "loss" in part.id.lower()
    }
    meters = {
        script.owner(update)
        for update in script.method_calls("update")
        for item in update.args
        for part in ast.walk(item)
        if isinstance(part, ast.Name) and part.id in losses
    }
    parts = [part for item in arguments(call) for part in script.sources(item, depth=1)]
    return any(script.text(part) in losses | meters for part in parts)


@rule("LS050", "Every rank writes the same checkpoint file at the same time.")
def save_on_every_rank(script: Script) -> Iterator[Hit]:
    """Not where a rank test stands around the call or around all calls of its function, or in the path."""
    for call in _saves(script):
        path = argument(call, "f", 1)
        calls = [part for part in script.sources(path) if isinstance(part, ast.Call)]
        in_memory = any("BytesIO" in script.text(part.func) for part in calls)
        if path is not None and not in_memory and not mentions_rank(script, path) and _by_all(script, call):
            yield Hit(
                call,
                "every rank writes this file at the same time: it can end torn, or mixed of several writers.",
                f"if {_first(script)}: {script.text(call)}",
            )


@rule(
    "LS051",
    "A checkpoint is saved where the local rank is 0: with several hosts one process of each writes the same file.",
)
def save_on_every_host(script: Script) -> Iterator[Hit]:
    """Only where no test of the global rank stands around it as well."""
    for call in _saves(script):
        tests = [s.test for s, kind, inside in conditions(script, call) if (kind == FIRST) == inside]
        named = any("host" in script.text(part) for part in script.sources(argument(call, "f", 1)))
        if tests and all(tests_local_only(script, test) for test in tests) and not named:
            yield Hit(
                call,
                f"'{script.text(tests[0])}' holds on every host, so with several hosts each writes this file.",
                f"if {_first(script)}:",
            )


@rule(
    "LS052",
    "The state of the wrapped model is saved: every key begins with module., and the plain model cannot load it.",
)
def wrapped_state_saved(script: Script) -> Iterator[Hit]:
    """Only where nothing in the file takes the wrapper off, when saving or when loading."""
    wrapped = {wrap.target: wrap for wrap in wraps(script, DDP, DP) if wrap.target}
    if script.mentions(*_HANDLES_MODULE) or "module" in script.words or is_managed(script):
        return
    for call in script.method_calls("state_dict"):
        model = script.owner(call)
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
    "A checkpoint is loaded without map_location: every rank loads it to the GPU that it was saved from.",
)
def load_without_map_location(script: Script) -> Iterator[Hit]:
    """In files that show that they run on several ranks, for what is called a checkpoint or a state."""
    if not (is_distributed(script) or wraps(script, DDP)):
        return
    loads = script.calls_of("torch.load")
    for call in loads:
        if not is_open(call) or argument(call, "map_location", 1) is not None:
            continue
        statement = script.statement(call)
        words = script.text(statement) if isinstance(statement, ast.Assign | ast.Expr) else script.text(call)
        if not _CHECKPOINT.search(words.replace("torch.load", "")) or "load_state_dict" not in script.words:
            continue
        twins = (load for load in loads if script.exclusive(call, load))
        mapped = any(argument(load, "map_location", 1) is not None for load in twins)
        if not mapped and not mentions_rank(script, argument(call, "f", 0)) and not on_one_rank(script, call):
            yield Hit(
                call,
                "every rank loads this to the GPU it was saved from, mostly the first, which runs out of memory.",
                f"{script.text(call)[:-1]}, map_location='cpu')",
            )


def _by_all(script: Script, call: ast.Call) -> bool:
    """Returns True where this file runs the call on every rank."""
    return runs_on_ranks(script, call) and is_used_here(script, call) and not on_one_rank(script, call)


def _saves(script: Script) -> list[ast.Call]:
    """torch.save in a file that starts the ranks itself."""
    return script.calls_of("torch.save") if leaves_files(script) else []


def _first(script: Script) -> str:
    """A test that holds only on the first rank."""
    return next((f"{run}.is_main" for run in runs_of(script)), "torch.distributed.get_rank() == 0")


def _is_loaded(script: Script, model: str, wrap: Wrap) -> bool:
    """Returns True where a state is loaded into the wrapped model, by itself or by a function that it is given to."""
    for call in script.calls:
        name = last_name(call.func).lower()
        parts = (part for item in arguments(call) for part in ast.walk(item))
        handed = any(word in name for word in ("load", "resume", "restart", "restore"))
        given = handed and any(script.text(part) == model for part in parts)
        taken = name == "load_state_dict" and script.owner(call) == model
        if (taken or given) and _reached(script, call, wrap.call):
            return True
    return False


def _wraps_in_every_branch(script: Script, wrap: Wrap) -> bool:
    """Returns True where every branch of the condition around the wrap wraps the model in something."""
    calls = {other.call for other in wraps(script, DDP, DP) if other.target == wrap.target}

    def covers(block: list[ast.stmt]) -> bool:
        for item in block:
            if isinstance(item, ast.Assign) and item.value in calls:
                return True
            if isinstance(item, ast.If) and item.orelse and covers(item.body) and covers(item.orelse):
                return True
        return False

    outer = list(script.around(wrap.call, ast.If))
    return bool(outer) and covers([outer[-1]])


def _is_saved(script: Script, call: ast.Call) -> bool:
    """Returns True where the state goes into a save call, or into a dictionary."""
    for ancestor, _ in script.ancestors(call):
        if isinstance(ancestor, ast.Dict):
            return any("save" in word for word in script.words)
        if isinstance(ancestor, ast.Call):
            return "save" in script.text(ancestor.func).lower()
        if isinstance(ancestor, ast.stmt):
            return False
    return False


def _reached(script: Script, call: ast.Call, wrap: ast.Call) -> bool:
    """Returns True if the saved name is the wrapped model: both in one function, and wrapped above."""
    function = script.scope(call)
    given = [] if isinstance(function, ast.Module) else [item.arg for item in function.args.args]
    at_module = isinstance(script.scope(wrap), ast.Module)
    return script.follows(call, wrap) or (at_module and "model" not in given)
