"""Rules on what one process should do for all: logging, downloads, folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import mentions_rank
from lockstep.lint.reach import is_used_here, on_one_rank, runs_on_ranks
from lockstep.lint.script import Script, argument, arguments, constant, receiver
from lockstep.lint.wrappers import DDP, is_distributed, is_managed, reduces, starts_group, wraps

_LOGS = ("add_scalar", "add_scalars", "log_metric", "log_metrics")
_CHECKS = ("os.path.exists", "os.path.isdir", "os.path.lexists")
_MAKERS = ("os.makedirs", "os.mkdir")


@rule(
    "LS054",
    "loss-of-one-rank-logged",
    "The loss of one rank's samples is logged as if it were that of all.",
)
def loss_of_one_rank_logged(script: Script) -> Iterator[Hit]:
    """TensorBoard, wandb and mlflow, where nothing in the file brings the ranks' values together; once a file."""
    if not wraps(script, DDP) or not is_distributed(script) or reduces(script):
        return
    for call in script.calls:
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method not in _LOGS and script.name(call) not in ("wandb.log", "mlflow.log_metric"):
            continue
        if _logs_trained_loss(script, call):
            yield Hit(
                call,
                "this is the loss of one rank's samples, and nothing in the file reduces it over the ranks.",
                "torch.distributed.all_reduce(loss_sum); torch.distributed.all_reduce(count)  # log loss_sum / count",
            )
            return


@rule(
    "LS055",
    "tracker-on-every-rank",
    "Every rank opens a log of its own: N runs in wandb, N writers in one folder.",
)
def tracker_on_every_rank(script: Script) -> Iterator[Hit]:
    """Not where the rank decides, or is part of the name of the log."""
    if not starts_group(script) or is_managed(script):
        return
    for call in script.calls:
        name = script.name(call)
        if name != "wandb.init" and not (name.endswith(".SummaryWriter") and "tensorboard" in name.lower()):
            continue
        given = arguments(call)
        if any(mentions_rank(script, item) for item in given) or argument(call, "group") is not None:
            continue
        if runs_on_ranks(script, call) and is_used_here(script, call) and not on_one_rank(script, call):
            yield Hit(
                call,
                "every rank comes past this line and opens a log of its own.",
                f"if torch.distributed.get_rank() == 0: {script.text(call)}",
            )


@rule(
    "LS056",
    "download-on-every-rank",
    "Every rank downloads the data set into the same folder at the same time.",
)
def download_on_every_rank(script: Script) -> Iterator[Hit]:
    """Not under a rank test, not under a lock, not before the ranks are spawned."""
    if not starts_group(script) or is_managed(script):
        return
    for call in script.calls:
        wanted = argument(call, "download")
        if constant(wanted) is not True or not script.name(call).startswith(("torchvision.", "torchaudio.")):
            continue
        locked = any(isinstance(ancestor, ast.With) for ancestor, _ in script.ancestors(call))
        waits = any(
            c.lineno < call.lineno for c in script.torch_calls("barrier") if script.same_function(c, call)
        )
        if runs_on_ranks(script, call) and not (locked or waits or on_one_rank(script, call)):
            yield Hit(
                call,
                "all ranks download and unpack into this folder at once, and read each other's half-written files.",
                "download=local_rank == 0  # and torch.distributed.barrier() before the others open it",
            )


@rule(
    "LS057",
    "folder-made-by-several-ranks",
    "A folder is made where it was not there a moment ago: another rank can make it in between.",
)
def folder_made_by_several_ranks(script: Script) -> Iterator[Hit]:
    """exists() and makedirs() without exist_ok, reached by all ranks."""
    if not starts_group(script) or is_managed(script):
        return
    for call in script.calls:
        if script.name(call) not in _MAKERS or argument(call, "exist_ok", 2) is not None:
            continue
        tests = [
            a.test for a, child in script.ancestors(call) if isinstance(a, ast.If) and child is not a.test
        ]
        asked = any(
            script.name(part) in _CHECKS for t in tests for part in ast.walk(t) if isinstance(part, ast.Call)
        )
        caught = any(isinstance(a, ast.Try) and child in a.body for a, child in script.ancestors(call))
        path = call.args[0] if call.args else None
        own = path is not None and mentions_rank(script, path)
        if asked and not caught and not own and runs_on_ranks(script, call) and not on_one_rank(script, call):
            yield Hit(
                call,
                "between the test and this line another rank can make the folder: FileExistsError.",
                f"os.makedirs({script.text(path) if path else 'folder'}, exist_ok=True)",
            )


def _logs_trained_loss(script: Script, call: ast.Call) -> bool:
    """Whether a logged value is a loss that ``backward()`` is called on in the same function, or a meter of it."""
    losses = {
        part.id
        for backward in script.method_calls("backward")
        if script.same_function(backward, call)
        for part in ast.walk(receiver(backward))
        if isinstance(part, ast.Name) and "loss" in part.id.lower()
    }
    meters = {
        script.text(receiver(update))
        for update in script.method_calls("update")
        if any(
            isinstance(part, ast.Name) and part.id in losses
            for item in update.args
            for part in ast.walk(item)
        )
    }
    given = arguments(call)
    parts = [part for item in given for part in script.sources(item, depth=1)]
    return any(script.text(part) in losses | meters for part in parts)
