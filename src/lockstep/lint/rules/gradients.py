"""Rules on gradients: exchanged between ranks, clipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.rules.accumulation import divisors
from lockstep.lint.rules.scaling import CLIPPERS
from lockstep.lint.script import Script, receiver
from lockstep.lint.wrappers import DDP, FSDP, is_managed, wraps


@rule(
    "LS034", "gradients-reduced-twice", "Gradients are reduced by hand although DDP has reduced them already."
)
def gradients_reduced_twice(script: Script) -> Iterator[Hit]:
    """Where the model is wrapped for certain and no_sync is not used."""
    if script.mentions("no_sync", "require_backward_grad_sync") or not any(
        w.certain for w in wraps(script, DDP)
    ):
        return
    for call in _gradient_reductions(script):
        yield Hit(
            call,
            "DDP has averaged these gradients in backward(); this changes them a second time.",
            "delete this line and the division that belongs to it",
        )


@rule(
    "LS035",
    "gradients-summed",
    "Gradients are summed over the ranks by hand and never divided by their number.",
)
def gradients_summed(script: Script) -> Iterator[Hit]:
    """Where nothing in the file divides by anything that could be the number of ranks."""
    texts = [script.text(part).lower() for part in divisors(script)]
    counted = any(
        word in text for text in texts for word in ("world", "size", "rank", "num", "n_", "gpu", "count")
    )
    called = {last_name(call.func) for call in script.calls}
    by_function = any(word in name.lower() for name in called for word in ("div", "mul_", "mean", "average"))
    if counted or by_function or script.mentions("avg", "average") or is_managed(script):
        return
    for call in _gradient_reductions(script):
        yield Hit(
            call,
            "the gradients of all ranks are added and never divided: the step grows with the number of ranks.",
            f"{script.text(call.args[0])} /= torch.distributed.get_world_size()  # below this line",
        )


@rule(
    "LS036",
    "forward-around-wrapper",
    "The training pass calls model.module(...), around DDP: the ranks' gradients are never exchanged.",
)
def forward_around_wrapper(script: Script) -> Iterator[Hit]:
    """Where a loss of that call is given to backward() in the same function."""
    targets = {wrap.target for wrap in wraps(script, DDP)} - {""}
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "module":
            continue
        model = script.text(call.func.value)
        backwards = [b for b in script.method_calls("backward") if script.follows(b, call)]
        if model in targets and backwards and not _without_gradients(script, call):
            yield Hit(
                call,
                f"{model}.module is the model without DDP: its gradients stay on this rank.",
                f"{model}({', '.join(script.text(item) for item in call.args)})",
            )


@rule(
    "LS039",
    "clip-of-shards",
    "An FSDP model is clipped with torch's function for whole gradients: each rank takes the norm of its shard.",
)
def clip_of_shards(script: Script) -> Iterator[Hit]:
    """FSDP1 only; parameters of fully_shard are DTensors, and torch's function knows them."""
    own = {script.text(receiver(call)) for call in script.method_calls("clip_grad_norm_")}
    targets = {wrap.target for wrap in wraps(script, FSDP)} - {""} - own
    for call in script.torch_calls(*CLIPPERS):
        model = script.text(call.args[0]).removesuffix(".parameters()") if call.args else ""
        if model in targets:
            norm = f"{script.text(call.args[1])}" if len(call.args) > 1 else "1.0"
            yield Hit(
                call,
                f"each rank holds a shard of {model}'s gradients, so each clips by another norm.",
                f"{model}.clip_grad_norm_({norm})",
            )


def _gradient_reductions(script: Script) -> list[ast.Call]:
    calls = [c for c in script.torch_calls("all_reduce") if script.name(c).startswith("torch.distributed.")]
    return [c for c in calls if c.args and ".grad" in script.text(c.args[0])]


def _without_gradients(script: Script, node: ast.AST) -> bool:
    for ancestor, _ in script.ancestors(node):
        if isinstance(ancestor, ast.With) and any(
            "no_grad" in script.text(i.context_expr) for i in ancestor.items
        ):
            return True
    return False
