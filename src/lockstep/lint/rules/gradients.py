"""Rules on gradients: added up over batches (LS031 to LS033), scaled by GradScaler (LS030, LS037, LS038), and
exchanged and clipped over ranks (LS034 to LS036, LS039).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.script import LOOPS, Script, argument, constant, last_name, method, receiver
from lockstep.lint.wrappers import DDP, FSDP, is_managed, wraps

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
    for node in script.nodes:
        if not isinstance(node, ast.With):
            continue
        call = node.items[0].context_expr
        if not isinstance(call, ast.Call) or method(call) != "no_sync":
            continue
        model = script.text(receiver(call))
        backwards = [c for c in script.method_calls("backward") if script.holds(node, c)]
        if not backwards or is_managed(script):
            continue
        inside = [item for statement in node.body for item in ast.walk(statement)]
        made = {name.id for name in inside if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        read = {name.id for name in ast.walk(backwards[0]) if isinstance(name, ast.Name)}
        if not made & read and not any(_passes(script, item, model) for item in inside):
            yield Hit(
                node,
                f"the forward pass of {model} is outside of this block, and it is there that DDP decides to "
                "exchange gradients.",
                f"with {model}.no_sync():  # around forward and backward",
            )


@rule("LS032", "Gradients of several batches are added up and the loss is not divided by their number.")
def unscaled_accumulation(script: Script) -> Iterator[Hit]:
    """Only where the optimizer steps every n-th batch, nothing is divided by n, and the loss is torch's own mean."""
    if is_managed(script) or not _has_mean_loss(script):
        return
    divided = {script.text(part) for part in divisors(script)}
    for call in script.method_calls("step"):
        if not _is_optimizer(call):
            continue
        for ancestor, _ in script.ancestors(call):
            if isinstance(ancestor, ast.For | ast.While | ast.FunctionDef):
                break
            number = _every(ancestor.test) if isinstance(ancestor, ast.If) else None
            if number is None or not _accumulates(script, ancestor, number, divided):
                continue
            yield Hit(
                ancestor if isinstance(ancestor, ast.If) else call,
                f"the gradients of {script.text(number)} batches are added up and the loss is not divided by "
                "that number: the step is as many times too long.",
                f"loss = loss / {script.text(number)}  # before backward()",
            )
            break


@rule("LS033", "The optimizer steps in a loop and the gradients are never set to zero.")
def gradients_never_cleared(script: Script) -> Iterator[Hit]:
    """Only where the optimizer is made in the same file and nothing in it clears a gradient."""
    if script.mentions("zero_grad", "zero_", "deepspeed") or _clears(script):
        return
    makers = [call for call in script.calls if script.name(call).startswith("torch.optim.")]
    backwards = [b for b in script.method_calls("backward") if not script.text(b).startswith("super")]
    for call in script.method_calls("step"):
        in_loop = any(script.holds(loop, b) for loop in script.around(call, LOOPS) for b in backwards)
        if makers and in_loop and _is_optimizer(call):
            yield Hit(
                call,
                "the gradients of all earlier steps stay in the sum.",
                f"{script.text(receiver(call))}.zero_grad()  # below this line",
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


def _passes(script: Script, node: ast.AST, model: str) -> bool:
    """Returns True where a node calls the model, or gives it to a function."""
    if not isinstance(node, ast.Call):
        return False
    return script.text(node.func) == model or any(script.text(item) == model for item in node.args)


def _is_optimizer(call: ast.Call) -> bool:
    name = last_name(receiver(call)).lower()
    scaler = "scaler" in name and bool(call.args)
    return scaler or (("optim" in name or name == "opt") and "sched" not in name)


def _every(test: ast.expr) -> ast.expr | None:
    """The n of ``(i + 1) % n == 0``, the only condition or one of several joined by ``or``."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return next((found for part in test.values if (found := _every(part)) is not None), None)
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.BinOp)
        and isinstance(test.left.op, ast.Mod)
    ):
        return test.left.right
    return None


def _accumulates(script: Script, statement: ast.AST, number: ast.expr, divided: set[str]) -> bool:
    """Returns True where a backward pass is in the same loop and outside of the condition, and n divides nothing."""
    if script.text(number) in divided:
        return False
    if isinstance(number, ast.Constant) and number.value in (0, 1):
        return False
    loop = next(script.around(statement, LOOPS), None)
    backwards = [b for b in script.method_calls("backward") if loop is not None and script.holds(loop, b)]
    return bool(backwards) and all(
        not script.holds(statement, b) and script.same_function(b, statement) for b in backwards
    )


def _has_mean_loss(script: Script) -> bool:
    """Returns True where one of torch's losses is used, and none that is told to sum or not to reduce."""
    made = [call for call in script.calls if _LOSS.match(script.name(call))]
    return bool(made) and all(constant(argument(call, "reduction")) in (None, "mean") for call in made)


def _clears(script: Script) -> bool:
    """Returns True where ``p.grad = None`` stands anywhere."""
    targets = [t for node in script.nodes if isinstance(node, ast.Assign) for t in node.targets]
    return any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets)


def scaled_backwards(script: Script) -> list[tuple[ast.Call, str]]:
    """(call, scaler) of every ``scaler.scale(loss).backward()``."""
    backwards = script.method_calls("backward") if "torch" in script.imported_roots else []
    scaled = [(call, receiver(call)) for call in backwards]
    return [
        (call, script.text(receiver(loss)))
        for call, loss in scaled
        if isinstance(loss, ast.Call) and method(loss) == "scale"
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
    if any(script.text(receiver(call)) in scalers for call in script.method_calls("step", "unscale_")):
        return
    for call in script.method_calls("step"):
        if "optim" not in last_name(receiver(call)).lower():
            continue
        early = [item for item in backwards if script.follows(call, item[0])]
        if early and "scaler" in early[0][1].lower():
            yield Hit(
                call,
                f"the gradients still carry the scale of {early[0][1]}, and no overflow is noticed.",
                f"{early[0][1]}.step({script.text(receiver(call))}); {early[0][1]}.update()",
            )


@rule("LS038", "GradScaler steps and is never updated: its scale does not adapt and the second step raises.")
def scaler_without_update(script: Script) -> Iterator[Hit]:
    """Only where the file has the scaled backward pass and no update at all of that scaler."""
    for scaler in sorted({scaler for _, scaler in scaled_backwards(script)}):
        steps = [call for call in script.method_calls("step") if script.text(receiver(call)) == scaler]
        updated = any(_is_scaler(script, call, scaler) for call in script.method_calls("update"))
        if steps and not updated:
            yield Hit(
                steps[0],
                f"{scaler} is never updated: RuntimeError 'step() has already been called since the last update()'.",
                f"{scaler}.update()  # below this line",
            )


def _is_scaler(script: Script, call: ast.Call, scaler: str) -> bool:
    """Returns True for a method of this scaler, also under another name (``self.scaler`` and ``scaler``)."""
    name = script.text(receiver(call))
    return name == scaler or "scaler" in name.lower()


def _calls(script: Script, near: ast.AST, scaler: str, method: str) -> list[ast.Call]:
    """The calls of a scaler's method in the function of a node."""
    calls = script.method_calls(method)
    return [c for c in calls if script.text(receiver(c)) == scaler and script.same_function(c, near)]


@rule("LS034", "Gradients are reduced by hand although DDP has reduced them already.")
def gradients_reduced_twice(script: Script) -> Iterator[Hit]:
    """Only where the model is wrapped for certain and no_sync is not used."""
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


@rule("LS035", "Gradients are summed over the ranks by hand and never divided by their number.")
def gradients_summed(script: Script) -> Iterator[Hit]:
    """Only where nothing in the file divides by anything that could be the number of ranks."""
    counted = any(_COUNT.search(script.text(part).lower()) for part in divisors(script))
    averages = any(_AVERAGE.search(last_name(call.func).lower()) for call in script.calls)
    if counted or averages or script.mentions("avg", "average") or is_managed(script):
        return
    for call in _gradient_reductions(script):
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
        model = script.text(receiver(call))
        backwards = [b for b in script.method_calls("backward") if script.follows(b, call)]
        if model in targets and backwards and not _without_gradients(script, call):
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
    own = {script.text(receiver(call)) for call in script.method_calls("clip_grad_norm_")}
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


def _gradient_reductions(script: Script) -> list[ast.Call]:
    calls = [c for c in script.torch_calls("all_reduce") if script.name(c).startswith("torch.distributed.")]
    return [c for c in calls if c.args and ".grad" in script.text(c.args[0])]


def _without_gradients(script: Script, node: ast.AST) -> bool:
    managers = [item for statement in script.around(node, ast.With) for item in statement.items]
    return any("no_grad" in script.text(item.context_expr) for item in managers)
