"""Rules on gradients that are added up over several batches: scaled, exchanged once, cleared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.script import Script, argument, constant, receiver
from lockstep.lint.wrappers import is_managed

_LOSS = re.compile(r"(Loss|_loss|cross_entropy|cross_entropy_with_logits)$")


@rule(
    "LS031",
    "no-sync-backward-only",
    "no_sync() covers only the backward pass: DDP decides in the forward pass, so gradients are exchanged anyway.",
)
def no_sync_backward_only(script: Script) -> Iterator[Hit]:
    """Where the block calls backward on a loss that was computed outside of it."""
    for node in script.nodes:
        if not isinstance(node, ast.With):
            continue
        call = node.items[0].context_expr
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Attribute)
            or call.func.attr != "no_sync"
        ):
            continue
        model = script.text(call.func.value)
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


@rule(
    "LS032",
    "unscaled-accumulation",
    "Gradients of several batches are added up and the loss is not divided by their number.",
)
def unscaled_accumulation(script: Script) -> Iterator[Hit]:
    """Where the optimizer steps every n-th batch, n divides nothing in the file, and the loss is torch's own mean."""
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


@rule(
    "LS033",
    "gradients-never-cleared",
    "The optimizer steps in a loop and the gradients are never set to zero.",
)
def gradients_never_cleared(script: Script) -> Iterator[Hit]:
    """Only where the optimizer is made in the same file and nothing in it clears a gradient."""
    if script.mentions("zero_grad", "zero_", "deepspeed") or _clears(script):
        return
    makers = [call for call in script.calls if script.name(call).startswith("torch.optim.")]
    backwards = [
        call for call in script.method_calls("backward") if not script.text(call).startswith("super")
    ]
    for call in script.method_calls("step"):
        loops = [
            ancestor for ancestor, _ in script.ancestors(call) if isinstance(ancestor, ast.For | ast.While)
        ]
        near = [b for b in backwards if any(script.holds(loop, b) for loop in loops)]
        if makers and near and _is_optimizer(call):
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
            yield from (
                p
                for p in ast.walk(node.right if isinstance(node, ast.BinOp) else node.value)
                if isinstance(p, ast.expr)
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "div" in node.func.attr:
            yield from node.args


def _passes(script: Script, node: ast.AST, model: str) -> bool:
    """Whether a node calls the model, or gives it to a function."""
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
    """Whether a backward pass stands in the same loop and outside of the condition, and n divides nothing."""
    if script.text(number) in divided:
        return False
    if isinstance(number, ast.Constant) and number.value in (0, 1):
        return False
    loop = next((a for a, _ in script.ancestors(statement) if isinstance(a, ast.For | ast.While)), None)
    backwards = [b for b in script.method_calls("backward") if loop is not None and script.holds(loop, b)]
    return bool(backwards) and all(
        not script.holds(statement, b) and script.same_function(b, statement) for b in backwards
    )


def _has_mean_loss(script: Script) -> bool:
    """Whether one of torch's losses is used, and none that is told to sum or not to reduce."""
    made = [
        c for c in script.calls if script.name(c).startswith("torch.nn.") and _LOSS.search(script.name(c))
    ]
    return bool(made) and all(constant(argument(call, "reduction")) in (None, "mean") for call in made)


def _clears(script: Script) -> bool:
    """Whether ``p.grad = None`` stands anywhere."""
    targets = [t for node in script.nodes if isinstance(node, ast.Assign) for t in node.targets]
    return any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets)
