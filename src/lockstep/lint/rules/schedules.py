"""Rules on learning-rate schedules: how long they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.script import Script, argument
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
