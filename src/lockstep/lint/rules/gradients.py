"""Rules on gradients: accumulation over batches, GradScaler, exchange and clipping over ranks.

Accumulation: LS031 to LS033. GradScaler: LS030, LS037, LS038. Exchange and clipping: LS034 to LS036, LS039.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.script import Script, argument, constant, last_name, method, names_in, receiver
from lockstep.lint.wrappers import DDP, FSDP, counts_of, is_managed, wraps

_LOSS = re.compile(r"torch\.nn\..*(Loss|_loss|cross_entropy|cross_entropy_with_logits)$")
_COUNT = re.compile("world|size|rank|num|n_|gpu|count")
_AVERAGE = re.compile("div|mul_|mean|average")
CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


@rule(
    "LS031",
    "no_sync() covers only the backward pass: DDP decides in the forward pass, so gradients are exchanged anyway.",
)
def no_sync_backward_only(script: Script) -> Iterator[Hit]:
    """Only where the block calls backward on a loss that was computed outside of it."""
    for node in script.find(ast.With) if not is_managed(script) else ():
        call = node.items[0].context_expr
        if not isinstance(call, ast.Call) or method(call) != "no_sync":
            continue
        backwards = [c for c in script.method_calls("backward") if script.holds(node, c)]
        model = script.owner(call)
        inside = [item for statement in node.body for item in ast.walk(statement)]
        made = {name.id for name in inside if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        read = {name for first in backwards[:1] for name in names_in(first)}
        calls = [item for item in inside if isinstance(item, ast.Call)]
        passes = any(model in map(script.text, (item.func, *item.args)) for item in calls)
        if backwards and not made & read and not passes:
            yield Hit(
                node,
                f"the forward pass of {model} is outside of this block, and it is there that DDP decides to "
                "exchange gradients.",
                f"with {model}.no_sync():  # around forward and backward",
            )


@rule("LS032", "Gradients of several batches are added up and the loss is not divided by their number.")
def unscaled_accumulation(script: Script) -> Iterator[Hit]:
    """Only where the optimizer steps every n-th batch, nothing is divided by n, and the loss is torch's own mean."""
    losses = [call for call in script.calls if _LOSS.match(script.name(call))]
    means = all(constant(argument(call, "reduction")) in (None, "mean") for call in losses)
    if is_managed(script) or not losses or not means:
        return
    divided = {script.text(part) for part in divisors(script)}
    for call in filter(_is_optimizer, script.method_calls("step")):
        calls = [each for each in script.method_calls("backward") if script.in_loop_with(call, [each])]
        for number in counts_of(script, call)[:1] if all(script.same_function(call, each) for each in calls) else ():
            if script.text(number) not in divided and constant(number) not in (0, 1):
                yield Hit(
                    next(script.around(number, ast.If)),
                    f"the gradients of {script.text(number)} batches are added up and the loss is not divided by "
                    "that number: the step is as many times too long.",
                    f"loss = loss / {script.text(number)}  # before backward()",
                )


@rule("LS033", "The optimizer steps in a loop and the gradients are never set to zero.")
def gradients_never_cleared(script: Script) -> Iterator[Hit]:
    """Only where the optimizer is made in the same file and nothing in it clears a gradient."""
    targets = [target for node in script.find(ast.Assign) for target in node.targets]
    cleared = any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets)
    if cleared or script.mentions("zero_grad", "zero_", "deepspeed") or not optimizers(script):
        return
    backwards = [b for b in script.method_calls("backward") if not script.text(b).startswith("super")]
    for call in filter(_is_optimizer, script.method_calls("step")):
        if script.in_loop_with(call, backwards):
            yield Hit(
                call,
                "the gradients of all earlier steps stay in the sum.",
                f"{script.owner(call)}.zero_grad()  # below this line",
            )
            return


def divisors(script: Script) -> Iterator[ast.expr]:
    """Everything that anything in the file is divided by."""
    for node in script.nodes:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.right if isinstance(node, ast.BinOp) else node.value
            yield from (part for part in ast.walk(divisor) if isinstance(part, ast.expr))
        elif isinstance(node, ast.Call) and "div" in method(node):
            yield from node.args


def _is_optimizer(call: ast.Call) -> bool:
    name = last_name(receiver(call)).lower()
    scaler = "scaler" in name and bool(call.args)
    return scaler or (("optim" in name or name == "opt") and "sched" not in name)


def scaled_backwards(script: Script) -> list[tuple[ast.Call, str]]:
    """(call, scaler) of every ``scaler.scale(loss).backward()``."""
    backwards = script.method_calls("backward") if "torch" in script.imported_roots else []
    return [
        (call, script.owner(loss))
        for call in backwards
        if isinstance(loss := receiver(call), ast.Call) and method(loss) == "scale"
    ]


@rule(
    "LS030",
    "Gradients are clipped while GradScaler's factor is still in them: nearly every one is cut to nothing.",
)
def clip_without_unscale(script: Script) -> Iterator[Hit]:
    """Needs the scaled backward pass, the clipping and scaler.step in one function, and no unscale_ in it."""
    for clip in script.torch_calls(*CLIPPERS):
        for backward, scaler in scaled_backwards(script):
            if not script.follows(clip, backward) or _calls(script, clip, scaler, "unscale_"):
                continue
            steps = [c for c in _calls(script, clip, scaler, "step") if not script.exclusive(c, clip)]
            if steps:
                optimizer = script.text(steps[0].args[0]) if steps[0].args else "optimizer"
                yield Hit(
                    clip,
                    f"the gradients are still multiplied by the scale of {scaler} (65536 at the start) when "
                    "they are clipped.",
                    f"{scaler}.unscale_({optimizer})  # above this line",
                )
                break


@rule(
    "LS037",
    "The loss is scaled and the optimizer steps without GradScaler: the update is 65536 times too large.",
)
def step_past_scaler(script: Script) -> Iterator[Hit]:
    """Only where no scaler in the file ever steps or unscales."""
    backwards = scaled_backwards(script)
    scalers = {scaler for _, scaler in backwards}
    if any(script.owner(call) in scalers for call in script.method_calls("step", "unscale_")):
        return
    for call in script.method_calls("step"):
        scaler = next((scaler for backward, scaler in backwards if script.follows(call, backward)), "")
        if "optim" in last_name(receiver(call)).lower() and "scaler" in scaler.lower():
            yield Hit(
                call,
                f"the gradients still carry the scale of {scaler}, and no overflow is noticed.",
                f"{scaler}.step({script.owner(call)}); {scaler}.update()",
            )


@rule("LS038", "GradScaler steps and is never updated: its scale does not adapt and the second step raises.")
def scaler_without_update(script: Script) -> Iterator[Hit]:
    """Only where the file has the scaled backward pass and no update at all of that scaler."""
    for scaler in sorted({scaler for _, scaler in scaled_backwards(script)}):
        steps = [call for call in script.method_calls("step") if script.owner(call) == scaler]
        updaters = {script.owner(call) for call in script.method_calls("update")}
        if steps and not any(name == scaler or "scaler" in name.lower() for name in updaters):
            yield Hit(
                steps[0],
                f"{scaler} is never updated: RuntimeError 'step() has already been called since the last update()'.",
                f"{scaler}.update()  # below this line",
            )


def _calls(script: Script, near: ast.AST, scaler: str, method: str) -> list[ast.Call]:
    """The calls of a scaler's method in the function of a node."""
    calls = script.method_calls(method)
    return [c for c in calls if script.owner(c) == scaler and script.same_function(c, near)]


@rule("LS034", "Gradients are reduced by hand although DDP has reduced them already.")
def gradients_reduced_twice(script: Script) -> Iterator[Hit]:
    """Only where the model is wrapped for certain and no_sync is not used."""
    unsynced = script.mentions("no_sync", "require_backward_grad_sync")
    if unsynced or not any(wrap.certain for wrap in wraps(script, DDP)):
        return
    for call in gradient_reductions(script):
        yield Hit(
            call,
            "DDP has averaged these gradients in backward(); this changes them a second time.",
            "delete this line and the division that belongs to it",
        )


@rule("LS035", "Gradients are summed over the ranks by hand and never divided by their number.")
def gradients_summed(script: Script) -> Iterator[Hit]:
    """Only where nothing in the file divides by anything that could be the number of ranks."""
    counted = any(_COUNT.search(script.text(part).lower()) for part in divisors(script))
    averages = any(_AVERAGE.search(last_name(call.func).lower()) for call in script.calls)
    if counted or averages or script.mentions("avg", "average") or is_managed(script):
        return
    for call in gradient_reductions(script):
        yield Hit(
            call,
            "the gradients of all ranks are added and never divided: the step grows with the number of ranks.",
            f"{script.text(call.args[0])} /= torch.distributed.get_world_size()  # below this line",
        )


@rule(
    "LS036",
    "The training pass calls model.module(...), around DDP: the ranks' gradients are never exchanged.",
)
def forward_around_wrapper(script: Script) -> Iterator[Hit]:
    """Only where a loss of that call is given to backward() in the same function."""
    targets = {wrap.target for wrap in wraps(script, DDP)} - {""}
    for call in script.method_calls("module"):
        model = script.owner(call)
        backwards = [b for b in script.method_calls("backward") if script.follows(b, call)]
        managers = [item for statement in script.around(call, ast.With) for item in statement.items]
        without = any("no_grad" in script.text(item.context_expr) for item in managers)
        if model in targets and backwards and not without:
            yield Hit(
                call,
                f"{model}.module is the model without DDP: its gradients stay on this rank.",
                f"{model}({', '.join(script.text(item) for item in call.args)})",
            )


@rule(
    "LS039",
    "An FSDP model is clipped with torch's function for whole gradients: each rank takes the norm of its shard.",
)
def clip_of_shards(script: Script) -> Iterator[Hit]:
    """FSDP1 only; parameters of fully_shard are DTensors, and torch's function knows them."""
    own = {script.owner(call) for call in script.method_calls("clip_grad_norm_")}
    targets = {wrap.target for wrap in wraps(script, FSDP)} - {""} - own
    for call in script.torch_calls(*CLIPPERS):
        model = script.text(call.args[0]).removesuffix(".parameters()") if call.args else ""
        if model in targets:
            norm = script.text(call.args[1]) if len(call.args) > 1 else "1.0"
            yield Hit(
                call,
                f"each rank holds a shard of {model}'s gradients, so each clips by another norm.",
                f"{model}.clip_grad_norm_({norm})",
            )


def optimizers(script: Script) -> list[ast.Call]:
    """The calls that make an optimizer of torch, or a schedule."""
    return [call for call in script.calls if script.name(call).startswith("torch.optim.")]


def gradient_reductions(script: Script) -> list[ast.Call]:
    """The calls of all_reduce with a gradient."""
    calls = script.torch_calls("all_reduce", within="torch.distributed.")
    return [call for call in calls if call.args and ".grad" in script.text(call.args[0])]
