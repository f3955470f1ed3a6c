"""Rules on learning-rate schedules: how long they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.rules.sampling import assigned_name
from lockstep.lint.script import Script, argument, arguments
from lockstep.lint.wrappers import is_managed

_LENGTHS = {"CosineAnnealingLR": ("T_max", 1), "OneCycleLR": ("total_steps", 2)}
_WORLD = (
    "world",
    "replica",
    "gpu",
    "rank",
    "process",
    "device_count",
    "nproc",
    "sampler",
    "loader",
    "global",
)


@rule(
    "LS058",
    "schedule-of-one-process",
    "The length of the learning-rate schedule counts the steps of one process, and several share them.",
)
def schedule_of_one_process(script: Script) -> Iterator[Hit]:
    """The length is len(data) by the batch size, the loader splits the same data by a DistributedSampler."""
    if not script.torch_calls("DistributedSampler") or is_managed(script):
        return
    split = {
        script.text(data)
        for call in script.torch_calls("DistributedSampler")
        if (data := argument(call, "dataset", 0)) is not None
    }
    for call in script.torch_calls(*_LENGTHS):
        keyword, position = _LENGTHS[script.name(call).rpartition(".")[2]]
        length = argument(call, keyword, position)
        if length is None:
            continue
        parts = list(script.sources(length))
        texts = {script.text(part) for part in parts}
        counted = [data for data in split if f"len({data})" in texts]
        divided = any(isinstance(p, ast.BinOp) and isinstance(p.op, ast.FloorDiv | ast.Div) for p in parts)
        if counted and divided and not any(word in text.lower() for text in texts for word in _WORLD):
            yield Hit(
                length,
                f"{script.text(length)} counts the steps of one process over all of {counted[0]}; each of N ranks "
                "takes an N-th of them, so the schedule stops at an N-th of its way.",
                f"{keyword}=len(loader) * epochs",
            )


@rule(
    "LS060",
    "schedule-divided-twice",
    "Accelerate steps a prepared schedule once for every process, and its length counts the steps of one already.",
)
def schedule_divided_twice(script: Script) -> Iterator[Hit]:
    """The length is len() of a loader that was prepared above, and the schedule itself is prepared as well."""
    if "accelerate" not in script.imported_roots or script.mentions(
        "num_processes", "split_batches", "step_scheduler"
    ):
        return
    prepares = [call for call in script.method_calls("prepare") if "accelerator" in script.text(call.func)]
    makers = [call for call in script.calls if _makes_schedule(script, call)]
    for maker in makers:
        name = assigned_name(script, maker)
        parts = {script.text(part) for item in arguments(maker) for part in script.sources(item)}
        early = [
            script.text(item)
            for prepare in prepares
            if script.follows(maker, prepare)
            for item in arguments(prepare)
            if f"len({script.text(item)})" in parts
        ]
        late = [p for p in prepares if script.follows(p, maker) and name in map(script.text, arguments(p))]
        if early and late:
            yield Hit(
                maker,
                f"len({early[0]}) is that of one process after prepare(), and the prepared {name} is stepped "
                "num_processes times a step: it runs that much too fast.",
                f"len({early[0]}) * accelerator.num_processes  # as its length",
            )


def _makes_schedule(script: Script, call: ast.Call) -> bool:
    name = script.name(call)
    return name.startswith("torch.optim.lr_scheduler.") or bool(
        re.match(r"transformers\.(\w+\.)*get_(\w+_)?schedule\w*$|transformers\.(\w+\.)*get_scheduler$", name)
    )
